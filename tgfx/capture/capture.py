"""Choosing a front end.

Plain fx first: fast, and sizes stay free. Where the code asks for sizes, fx with the answers of the example, which are
checked in every call. Where that cannot follow the model, torch.export. Where that fails too, fx again with the
submodules that cannot be traced kept closed (opaque), each with its reason.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from tgfx.capture.arguments import put_by_position
from tgfx.capture.autocast_off import write_switches
from tgfx.capture.exported import export_graph, has_batch_of_one
from tgfx.capture.layer_calls import mark_layer_calls
from tgfx.capture.modes import FOLLOWING_LAYERS, has_detached_layer, merge_modes, mode_readers
from tgfx.capture.not_in_graph import CannotRunError, NotInGraphError, state_watched
from tgfx.capture.out_arguments import write_out_arguments
from tgfx.capture.quiet import quiet
from tgfx.capture.raising import raise_layers
from tgfx.capture.reference import Reference, run_kept
from tgfx.capture.sizes import ExampleSizes
from tgfx.capture.small_sizes import refuse_small_sizes
from tgfx.capture.tracer import TracingFailed, trace
from tgfx.capture.without_gradients import write_detaches
from tgfx.errors import CaptureError
from tgfx.ir.buffers import buffers_restored
from tgfx.ir.compare import all_close
from tgfx.ir.draws import same_draws
from tgfx.ir.lazy_module import LazyGraphModule
from tgfx.ir.plain_attributes import plain_attributes_restored
from tgfx.ir.refusal import Refusal
from tgfx.ir.remembered import Remembered
from tgfx.ir.source import Source, tensors_in
from tgfx.ir.tree import named_modules, named_tensors, put_in_order, put_tensor
from tgfx.ops.modules import has_hooks


def capture(reference: Reference) -> Source:
    """A graph over the reference's model (which belongs to us: a copy of the user's)."""
    opaque: set[str] = set()
    refusals: list[Refusal] = []
    while True:
        try:
            source = _captured(reference, opaque, "; ".join(map(str, refusals)))
        except TracingFailed as failure:
            if not failure.is_followed or not failure.where or failure.where in opaque:
                raise _more_than_a_graph(reference.model, failure) from failure.cause
            opaque = opaque | {failure.where}
            refusals.append(Refusal(f"{failure.cause}, which a graph does not", failure.where, "opaque", limit=True))
        else:
            source.refusals[:0] = refusals
            return source


def _captured(reference: Reference, opaque: set[str], why: str) -> Source:
    """By the first front end that can; TracingFailed if a module does what no graph does. `why`: some are opaque."""
    model, args, kwargs = reference.model, reference.args, reference.kwargs
    left_out = _left_out(model, args, kwargs)

    def take(sizes: ExampleSizes | None = None, closed: set[str] = opaque, *, open_wrapped: bool = True) -> Any:
        with plain_attributes_restored(model):
            module = trace(model, left_out, closed, open_wrapped=open_wrapped, sizes=sizes)
        try:
            write_switches(module, args, kwargs)
            write_detaches(module, args, kwargs)
        except NotInGraphError as error:
            raise TracingFailed(error.where or "", error) from error
        return module

    try:
        return _with_closed(_in_both_modes(model, args, kwargs, "fx", take), opaque)
    except TracingFailed as failure:
        if failure.is_followed:
            raise
        first = failure
    reference.compute()  # the other front ends need not make the same calls, or go another way for other numbers
    by_sizes = _traced_by_sizes(model, args, kwargs, lambda: take(ExampleSizes(model, args, kwargs)), reference.outputs)
    if by_sizes is not None:
        return _with_closed(by_sizes, opaque)
    second: Exception = RuntimeError(f"not tried, as it would look into a module that {why}")
    try:
        if not opaque:
            return _exported(reference)
    except TracingFailed:
        raise
    except Exception as error:
        second = error
    return _partial(model, args, kwargs, take, opaque, first, second)


def _export_watched(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, widen: bool) -> fx.GraphModule:
    """TracingFailed where the model does what no graph does."""
    try:
        with buffers_restored(model), plain_attributes_restored(model), state_watched(model):
            model(*copy.deepcopy(args), **copy.deepcopy(kwargs))  # torch.export itself puts attributes back
        module = export_graph(model, args, kwargs, widen=widen)
        write_switches(module, args, kwargs)
        write_detaches(module, args, kwargs)
        return module
    except NotInGraphError as error:
        raise TracingFailed(error.where or "", error) from error


def _with_closed(source: Source, opaque: set[str]) -> Source:
    for one in (source, source.training):
        if one is not None:
            one.opaque = set(opaque)
    return source


def _more_than_a_graph(model: nn.Module, failure: TracingFailed) -> CaptureError:
    return CaptureError(
        f"{type(model).__name__} does what a graph cannot hold",
        expected="a forward that changes nothing but tensors in place, and draws random numbers with torch only",
        found=f"it {failure.cause}",
        where=failure.where or "the model's own forward",
        fix="move that part into a submodule: tgfx keeps that one as it is and gates the rest",
    )


def _traced_by_sizes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    take: Callable[[], fx.GraphModule],
    reference: list[torch.Tensor],
) -> Source | None:
    """fx once more, where the code asks for sizes; None if that does not do what the model does."""
    try:
        source = _in_both_modes(model, args, kwargs, "fx", take)
        if any(str(node.target).startswith("*") and node.users for node in source.module.graph.nodes):
            return None  # how many arguments there are is not a matter of sizes
        with same_draws():
            found = tensors_in(source.module(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    except TracingFailed as failure:
        if failure.is_followed and not isinstance(failure.cause, CannotRunError):
            raise
        return None
    except Exception:
        return None
    return source if all_close(reference, found) else None


def _exported(reference: Reference) -> Source:
    """By torch.export with a batch that is free, or where that is not what the model does, with the example's own."""
    model, args, kwargs = reference.model, reference.args, reference.kwargs
    source = _exported_once(model, args, kwargs, widen=True)
    if has_batch_of_one(args, kwargs) and not _gives(source.module, args, kwargs, reference.outputs):
        source = _exported_once(model, args, kwargs, widen=False)
    return source


def _exported_once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, widen: bool) -> Source:
    source = _in_both_modes(model, args, kwargs, "export", lambda: _export_watched(model, args, kwargs, widen=widen))
    with plain_attributes_restored(model):
        refuse_small_sizes(model, source.module, args, kwargs)
    if source.training is not None:
        with _train_mode(model), plain_attributes_restored(model):
            refuse_small_sizes(model, source.training.module, args, kwargs)
    return source


def _gives(graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[torch.Tensor]) -> bool:
    try:
        with quiet(), same_draws():
            return all_close(expected, run_kept(graph, *copy.deepcopy((args, kwargs)), Remembered()))
    except Exception:
        return False


def _in_both_modes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    front_end: str,
    take: Callable[[], fx.GraphModule],
) -> Source:
    """Captured in eval mode, and in train mode too where the code asks for the mode."""
    with mode_readers() as readers:
        module = take()
    if front_end == "fx":
        return (
            _captured_again(model, args, kwargs, front_end, module, take)
            if readers
            else _source(model, module, args, kwargs)
        )
    follows = not _hooked_followers(model) and not has_detached_layer(module.graph)
    if follows and not readers.difference(FOLLOWING_LAYERS):
        return _source(model, module, args, kwargs, front_end)
    # A second export is slow. Often the layers alone make the difference between the modes: then one graph does.
    untouched = _copied(module, model)
    source = _source(model, module, args, kwargs, front_end)
    if behaves_alike(model, source.module, args, kwargs):
        return source
    return _captured_again(model, args, kwargs, front_end, untouched, take)


def _hooked_followers(model: nn.Module) -> bool:
    """Layers with hooks stay written out by torch.export, with the mode baked in."""
    return any(isinstance(module, FOLLOWING_LAYERS) and has_hooks(module) for module in model.modules())


def _source(
    model: nn.Module, module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], front_end: str = "fx"
) -> Source:
    return _finished(model, Source(module, args, kwargs, front_end))


def _copied(module: fx.GraphModule, model: nn.Module) -> fx.GraphModule:
    graph = fx.Graph()
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    graph._codegen = module.graph._codegen
    return LazyGraphModule(model, graph, class_name=type(model).__name__)


def _captured_again(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    front_end: str,
    module: fx.GraphModule,
    take: Callable[[], fx.GraphModule],
) -> Source:
    """Capture in train mode as well, and make one graph of both, or keep two."""
    source = Source(module, args, kwargs, front_end)
    training = None
    try:
        with _train_mode(model):
            training = take()
    except Exception as error:
        followed = isinstance(error, TracingFailed) and error.is_followed
        if followed and (front_end == "fx" or error.where):  # type: ignore[attr-defined]
            raise
        what = f"it {error.__cause__}" if followed else type(error).__name__
        reason = f"could not be captured in train mode ({what}); the eval path is kept in both"
        source.refusals.append(Refusal(reason, "forward", "training", limit=True))
    if training is not None:
        mark_layer_calls(model, module.graph, training.graph)
    apart = front_end == "export" and _hooked_followers(model)
    if training is not None and (apart or not merge_modes(module, training)):
        source.training = _finished(model, Source(training, args, kwargs, front_end))
    return _finished(model, source)


def behaves_alike(model: nn.Module, graph: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether model and graph do the same in train mode: outputs, gradients, statistics and random numbers drawn."""
    seen, forms = [], []
    for one in (model, graph):
        try:
            with _train_mode(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
                graph.train()
                torch.manual_seed(0)
                result = one(*copy.deepcopy(args), **copy.deepcopy(kwargs))
                outputs = tensors_in(result)
                gradients = _gradients(outputs, list(model.parameters()))
                buffers = [buffer.detach().clone() for buffer in model.buffers()]
                seen.append([*(output.detach() for output in outputs), *gradients, *buffers, torch.get_rng_state()])
                forms.append(torch.utils._pytree.tree_structure(result))
        except Exception:
            return False
        finally:
            graph.eval()
    return forms[0] == forms[1] and all_close(*seen)


def _gradients(outputs: list[torch.Tensor], parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Of the sum of all outputs, as one tensor: some are nothing but rounding. Zero where there is none."""
    total = [y.sum() for y in outputs if y.requires_grad]
    trained = [p for p in parameters if p.requires_grad]
    if not total or not trained:
        return []
    found = torch.autograd.grad(total, trained, allow_unused=True)
    both = zip(trained, found, strict=True)
    return [torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in both])]


@contextmanager
def _train_mode(model: nn.Module) -> Iterator[None]:
    """Train mode for a while; flags and buffers as before afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    with buffers_restored(model):
        model.train()
        try:
            yield
        finally:
            for module, was in modes:
                module.training = was


def _left_out(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Optional arguments that the example leaves out, and plain values that it gives: fixed in the graph."""
    signature = inspect.signature(model.forward)
    fixed = {}
    for index, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if index < len(args):
            value = args[index]
        elif name in kwargs:
            value = kwargs[name]
        elif parameter.default is not parameter.empty:
            value = parameter.default
        else:
            continue
        if value is None or isinstance(value, bool | int | float | str):
            fixed[name] = value
    return fixed


def _partial(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    take: Callable[..., fx.GraphModule],
    closed: set[str],
    first: TracingFailed,
    second: Exception,
) -> Source:
    opaque = set(closed)
    refusals: list[Refusal] = []
    failure = first
    while True:
        if not failure.where or failure.where in opaque:
            raise CaptureError(
                f"{type(model).__name__} could not be captured as a graph",
                expected="a forward that torch.fx or torch.export can follow",
                found=f"fx: {first}; torch.export: {type(second).__name__}: {str(second).splitlines()[0]}",
                where=first.where or "the model's own forward",
                fix="move the data-dependent part into a submodule: tgfx keeps that one as it is and gates the rest",
            ) from failure.cause
        opaque.add(failure.where)
        refusals.append(Refusal(f"could not be traced: {failure}".splitlines()[0], failure.where, "opaque"))
        try:
            source = _in_both_modes(model, args, kwargs, "fx", lambda: take(None, opaque, open_wrapped=False))
        except TracingFailed as error:
            if error.is_followed and error.where not in opaque:
                raise
            failure = error
        else:
            break
    source.refusals[:0] = refusals
    return _with_closed(source, opaque)


def _finished(model: nn.Module, source: Source) -> Source:
    """Everything the model holds is there under its old name, also what the graph does not use."""
    module = source.module
    module.train(model.training)
    write_out_arguments(module)
    put_by_position(module)
    raise_layers(module, model)
    have = dict(named_modules(module, repeat=True))
    for name, child in named_modules(model, repeat=True):
        if name and name not in have and _leaf(child):
            module.add_submodule(name, child)
    named = {name for name, _ in named_tensors(module)}
    for name, tensor in named_tensors(model):
        if name not in named:
            put_tensor(module, name, tensor, model)
    have = dict(named_modules(module, repeat=True))
    for name, child in named_modules(model, repeat=True):
        if name in have:
            have[name].training = child.training
            have[name]._non_persistent_buffers_set |= child._non_persistent_buffers_set
    put_in_order(module, model)
    return source


def _leaf(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not list(module.children())
