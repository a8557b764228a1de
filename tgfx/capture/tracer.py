"""The fx front end: torch.fx's tracer with attention written out and untraceable submodules kept closed."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.fx import _symbolic_trace

from tgfx.capture.asked_types import types_watched
from tgfx.capture.attention import is_plain_attention, multihead_attention
from tgfx.capture.autocast_off import OFF
from tgfx.capture.not_in_graph import (
    NotInGraphError,
    Surroundings,
    drawn_from,
    python_watched,
    random_states,
    surroundings,
)
from tgfx.capture.own_tensors_mode import OwnTensorsTraced
from tgfx.capture.sizes import PLAIN, ExampleSizes, Unknown
from tgfx.capture.traced_value import InPlaceProxy
from tgfx.capture.without_gradients import MARK
from tgfx.capture.wrapped_forward import called_by_name, named_parameters, takes_more
from tgfx.choice import Choice
from tgfx.ir.containers import building, is_container_type
from tgfx.ir.lazy_module import LazyGraphModule
from tgfx.ir.plain_attributes import changed_attribute, plain_attributes
from tgfx.ir.source import is_machinery, source_line
from tgfx.ir.tree import named_tensors
from tgfx.ops.modules import has_state

_TRANSFORMER = (
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


class GateTracer(fx.Tracer):
    """Traces a model; records where it fails so that the caller may keep that submodule closed."""

    def __init__(self, opaque: set[str], *, open_wrapped: bool, sizes: ExampleSizes | None = None) -> None:
        super().__init__(autowrap_modules=())
        self.opaque, self.open_wrapped, self.sizes = opaque, open_wrapped, sizes
        self.trace_asserts = True
        self.path: list[str] = []
        self._began: list[Surroundings] = []  # of the root, and of each module on the path
        self.autocast_regions: list[torch.autocast] = []  # that the code is in just now
        self.failed_at: str | None = None
        self.has_ended = False
        self._unanswered: tuple[Exception, list[str]] | None = None  # the first question, and where it was asked

    def trace(self, root: nn.Module, concrete_args: dict[str, Any] | None = None) -> fx.Graph:  # type: ignore[override]
        self.fixed = dict(concrete_args or {})
        self._names = {id(tensor): name for name, tensor in reversed(named_tensors(root))}  # tied: the first name
        wrapped = dict(_symbolic_trace._wrapped_fns_to_patch)
        if self.open_wrapped:
            _symbolic_trace._wrapped_fns_to_patch.clear()
        try:
            with torch.enable_grad(), python_watched(self), types_watched(self), OwnTensorsTraced(self):
                self._began = [surroundings()]
                with self._noticed(root, ""):
                    graph = super().trace(root)
                self._refuse_unanswered()
                return graph
        finally:
            self.has_ended = True
            _symbolic_trace._wrapped_fns_to_patch.update(wrapped)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Arguments that are fixed keep their place in the signature; giving another value is an error."""
        if inspect.unwrap(root_fn) is root_fn:
            fn, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        else:  # the wrapper itself takes (*args, **kwargs)
            if self.sizes is not None and not self.opaque and takes_more(root_fn):
                raise fx.proxy.TraceError("how many arguments there are is not a matter of sizes")
            told = named_parameters(root_fn)
            signature, inside = inspect.signature(root_fn), inspect.unwrap(root_fn)
            args = [self.root, *(self._proxy_placeholder(name, None, signature, inside) for name in told)]
            fn = called_by_name(root_fn, told)
        for index, arg in enumerate(args):
            if not isinstance(arg, fx.Proxy) or str(arg.node.target) not in self.fixed:
                continue
            name = str(arg.node.target)
            value = self.fixed[name]
            same = operator.eq  # works on traced values too, also for None
            message = f"{name} was {value!r} when this model was captured, and is fixed: transform it anew to change it"
            check = self.graph.call_function(same, (arg.node, value))
            self.graph.call_function(torch._assert, (check, message))
            if not arg.node.args:
                arg.node.args = (value,)
            args[index] = value
        return fn, args

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InPlaceProxy(node, self)

    # -- what Python asks of a traced value: answered from the example's sizes, and checked again in every call -------

    def to_bool(self, obj: fx.Proxy) -> bool:
        answer = bool(self._plain(obj, lambda: super(GateTracer, self).to_bool(obj)))
        self._check(obj, operator.truth if answer else operator.not_, (obj,), answer)
        return answer

    def to_length(self, obj: fx.Proxy) -> int:
        answer = len(self._known(obj, _unknown_length))
        self._check(obj, operator.eq, (self.create_proxy("call_function", len, (obj,), {}), answer), answer)
        return answer

    def iter(self, obj: fx.Proxy) -> Iterator:
        if self.sizes is None:
            return super().iter(obj)
        return iter([obj[index] for index in range(self.to_length(obj))])

    def to_hashed(self, obj: fx.Proxy) -> tuple[bool, Any]:
        """(True, the value), or where it is a tensor, which has its identity only, (False, None)."""
        value = self._known(obj, _unhashed)
        if isinstance(value, torch.Tensor):
            return False, None
        return True, self._pinned(obj, value, _unhashed)

    def to_printed(self, obj: fx.Proxy) -> Any:
        return self._pinned(obj, self._known(obj, _unprinted), _unprinted)

    def is_kind(self, obj: fx.Proxy, kinds: Any) -> bool:
        return isinstance(self._known(obj, _untyped), kinds)

    def lacks(self, obj: fx.Proxy, name: str, *, asked: bool) -> bool:
        """Whether the value has no such attribute; where that is not known, it may be used, but not `asked` for."""
        if self.sizes is None and not asked:
            return False
        value = self._known(obj, _untyped if asked else lambda: None)
        return value is not None and not hasattr(value, name)

    def _pinned(self, obj: fx.Proxy, value: Any, otherwise: Callable[[], Any]) -> Any:
        """A value that the model's own code is told as it is: in other calls it has to be the same."""
        if not _is_plain(value):
            return self._other(otherwise)
        same = tuple(value) if isinstance(value, tuple) else value
        self._check(obj, operator.eq, (obj, same), value)
        return value

    def _known(self, obj: fx.Proxy, otherwise: Callable[[], Any]) -> Any:
        try:
            if self.sizes is not None:
                return self.sizes.value(obj.node)
        except Unknown:
            pass
        return self._other(otherwise)

    def _plain(self, obj: fx.Proxy, otherwise: Callable[[], Any]) -> Any:
        answer = self._known(obj, otherwise)
        return answer if isinstance(answer, PLAIN) else self._other(otherwise)

    def _other(self, otherwise: Callable[[], Any]) -> Any:
        try:
            return otherwise()
        except Exception as error:
            self._unanswered = self._unanswered or (error, list(self.path))
            raise

    def _refuse_unanswered(self) -> None:
        """`try: k = table[x.shape[1]]; except Exception: k = 1` goes on, but as if the answer were no."""
        if self._unanswered is not None:
            error, self.path = self._unanswered
            raise error

    def _check(self, obj: fx.Proxy, function: Callable, args: tuple, answer: Any) -> None:
        if self.sizes is None or self.sizes.is_about_device(obj.node):
            return  # a gated model may be moved
        held = self.create_proxy("call_function", function, args, {})
        line = source_line(obj.node)
        message = (
            f"the model asks for a fact about sizes at {line}, which was {answer!r} when it was captured; "
            "for sizes with another answer, transform it anew with an example of these"
        )
        self.create_proxy("call_function", torch._assert, (held, message), {})

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Note the user's line: far cheaper than a whole stack trace per node."""
        node = super().create_node(*args, **kwargs)
        self._note_surroundings(node)
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not _ENTRY and is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and frame.f_code is not _ENTRY:  # nn.Sequential alone has no line of the user's
            node.meta["tgfx_source"] = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return node

    # -- what Python does without leaving a node ---------------------------------------------------------------------

    @property
    def is_computing(self) -> bool:
        """Whether layers are run on the example's sizes just now, and not traced."""
        return self.sizes is not None and self.sizes.computing

    def _note_surroundings(self, node: fx.Node) -> None:
        if self.autocast_regions:
            node.meta[OFF] = (self.path or [""])[-1]  # one that switches it on is noticed below
        now = surroundings()
        if now == self._began[0]:
            return
        inside = next(i for i in reversed(range(len(self._began))) if self._began[i] == self._began[0])
        where = self.path[inside - 1] if inside else ""
        if now.autocast != self._began[0].autocast:
            raise NotInGraphError("runs in an autocast region of its own", where)
        node.meta[MARK] = where

    @contextmanager
    def _noticed(self, m: nn.Module, name: str) -> Iterator[None]:
        """Counters that the forward of `m` moves, and random numbers that it draws on the way."""
        if type(m).__module__.startswith("torch.nn.") and not m._modules:
            yield  # called as it is
            return
        before, states = plain_attributes(m), random_states()
        yield
        changed = changed_attribute(m, before)
        if changed is not None:
            raise NotInGraphError(f"changes its attribute {changed!r} in every call", name)
        drawn = drawn_from(states, random_states())
        if drawn is not None:
            raise NotInGraphError(f"draws random numbers from {drawn}", name)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter or buffer of the model."""
        return id(tensor) in self._names

    def named(self, tensor: torch.Tensor) -> fx.Proxy:
        """A parameter or buffer of the model, as the graph names it."""
        return self.proxy(self.create_node("get_attr", self._names[id(tensor)], (), {}))

    def is_own(self, value: fx.Proxy, tensor: Any) -> bool:
        """Whether a traced value is this tensor of the model itself, if changed in place."""
        node = value.node
        while node.op == "call_function" and node.target in _IN_PLACE:
            node = node.args[0]  # type: ignore[assignment]
        return node.op == "get_attr" and str(node.target) == self._names.get(id(tensor))

    def create_arg(self, a: Any) -> Any:
        """A value in a class of the model's own keeps its type (see tgfx.ir.containers)."""
        if not is_container_type(type(a)):
            return super().create_arg(a)
        kind, args, kwargs = building(a)
        node = self.create_node("call_function", kind, self.create_arg(args), self.create_arg(kwargs))
        node.meta["is_wrapped"] = True
        return node

    def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
        if qualified_name in self.opaque or acts_on_mode(m):
            return True
        if isinstance(m, _TRANSFORMER) or is_plain_attention(m):
            return False
        return super().is_leaf_module(m, qualified_name)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if self.sizes is not None and self.sizes.computing:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        self.path.append(name)
        self._began.append(surroundings())
        with self._noticed(m, name):
            result = self._call(m, name, forward, args, kwargs)
        self.path.pop()  # on an error the path stays: its end is where tracing failed
        self._began.pop()
        return result

    def _call(self, m: nn.Module, name: str, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if is_plain_attention(m) and name not in self.opaque:
            return multihead_attention(m, self._dropout(m, name), *args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers are asked for in every call: what is loaded into them later has to count."""
        if self.sizes is not None and self.sizes.computing:
            return attr_val
        name = self._names.get(id(attr_val)) if isinstance(attr_val, torch.Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def _dropout(self, m: nn.Module, name: str) -> Callable:
        if not m.dropout:
            return lambda x: x
        if not hasattr(m, "attention_dropout"):  # a layer, so that it follows train() and eval()
            m.attention_dropout = nn.Dropout(m.dropout)
            m.attention_dropout.train(m.training)
        self.submodule_paths = None  # type: ignore[assignment]
        self._refresh_paths()
        return lambda x: m.attention_dropout(x)

    def _refresh_paths(self) -> None:
        self.submodule_paths = {module: path for path, module in self.root.named_modules()}


_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_ENTRY = GateTracer.trace.__code__  # frames above it called tgfx


@cache
def _mentions_training(kind: type) -> bool:
    try:
        return "training" in inspect.getsource(kind.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return False


def acts_on_mode(module: nn.Module) -> bool:
    """A layer without tensors whose code asks for the mode (drop path, own dropouts) is called as it is."""
    kind = type(module)
    own = not kind.__module__.startswith("torch.nn") and not issubclass(kind, Choice)  # a choice is always looked into
    return own and _mentions_training(kind) and not has_state(module)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (type(value) in (tuple, torch.Size) and all(map(_is_plain, value)))


def _unhashed() -> NoReturn:
    raise fx.proxy.TraceError("the model hashes a traced value")


def _untyped() -> NoReturn:
    raise fx.proxy.TraceError("the model asks a traced value for its type")


def _unprinted() -> NoReturn:
    raise fx.proxy.TraceError("the model makes a text of a traced value")


def _unknown_length() -> NoReturn:
    raise fx.proxy.TraceError("the model asks a traced value for its length, which sizes do not tell")


def trace(
    root: nn.Module,
    concrete: dict[str, Any],
    opaque: set[str],
    *,
    open_wrapped: bool,
    sizes: ExampleSizes | None = None,
) -> fx.GraphModule:
    """One attempt; a failure carries the name of the submodule it happened in."""
    tracer = GateTracer(opaque, open_wrapped=open_wrapped, sizes=sizes)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        graph = tracer.trace(root, concrete or None)
    except Exception as error:
        where = error.where if isinstance(error, NotInGraphError) else None
        raise TracingFailed(where if where is not None else (tracer.path or [""])[-1], error) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
    return LazyGraphModule(root, graph, class_name=type(root).__name__)


class TracingFailed(Exception):
    """Plain fx could not follow the model; `where` is the innermost submodule it was in."""

    def __init__(self, where: str, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.where, self.cause = where, cause

    @property
    def is_followed(self) -> bool:
        """Whether fx did follow the code, which does more than a graph can."""
        return isinstance(self.cause, NotInGraphError)


def told(error: BaseException) -> str:
    """In one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
