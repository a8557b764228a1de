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

from tgfx.capture.exported import export_graph
from tgfx.capture.modes import FOLLOWING_LAYERS, merge_modes, mode_readers
from tgfx.capture.raising import raise_layers
from tgfx.capture.reference import Reference
from tgfx.capture.sizes import ExampleSizes
from tgfx.capture.tracer import TracingFailed, trace
from tgfx.errors import CaptureError
from tgfx.ir.buffers import buffers_restored
from tgfx.ir.compare import all_close
from tgfx.ir.lazy_module import LazyGraphModule
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source, tensors_in
from tgfx.ir.tree import named_modules, named_tensors, put_in_order, put_tensor
from tgfx.ops.modules import has_hooks


def capture(reference: Reference) -> Source:
    """A graph over the reference's model (which belongs to us: a copy of the user's)."""
    model, args, kwargs = reference.model, reference.args, reference.kwargs
    left_out = _left_out(model, args, kwargs)
    try:
        return _in_both_modes(model, args, kwargs, "fx", lambda: trace(model, left_out, set(), open_wrapped=True))
    except TracingFailed as failure:
        first = failure
    reference.compute()  # the other front ends need not make the same calls, or go another way for other numbers
    by_sizes = _traced_by_sizes(model, args, kwargs, left_out, reference.outputs)
    if by_sizes is not None:
        return by_sizes
    try:
        return _in_both_modes(model, args, kwargs, "export", lambda: export_graph(model, args, kwargs))
    except Exception as error:
        second = error
    return _partial(model, args, kwargs, left_out, first, second)


def _traced_by_sizes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    left_out: dict[str, Any],
    reference: list[torch.Tensor],
) -> Source | None:
    """fx once more, where the code asks for sizes; None if that does not do what the model does."""

    def take() -> fx.GraphModule:
        return trace(model, left_out, set(), open_wrapped=True, sizes=ExampleSizes(model, args, kwargs))

    try:
        source = _in_both_modes(model, args, kwargs, "fx", take)
        if any(str(node.target).startswith("*") and node.users for node in source.module.graph.nodes):
            return None  # how many arguments there are is not a matter of sizes
        found = tensors_in(source.module(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    except Exception:
        return None
    return source if all_close(reference, found) else None


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
    if not readers.difference(FOLLOWING_LAYERS) and not _hooked_followers(model):
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
        reason = f"could not be captured in train mode ({type(error).__name__}); the eval path is kept in both"
        source.refusals.append(Refusal(reason, "forward", "training", limit=True))
    apart = front_end == "export" and _hooked_followers(model)
    if training is not None and (apart or not merge_modes(module, training)):
        source.training = _finished(model, Source(training, args, kwargs, front_end))
    return _finished(model, source)


def behaves_alike(model: nn.Module, graph: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether model and graph do the same in train mode: outputs, statistics and the random numbers they drew."""
    seen = []
    for one in (model, graph):
        try:
            with _train_mode(model), torch.random.fork_rng(devices=[]), torch.no_grad():
                graph.train()
                torch.manual_seed(0)
                outputs = tensors_in(one(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
                buffers = [buffer.clone() for buffer in model.buffers()]
                seen.append([*outputs, *buffers, torch.get_rng_state()])
        except Exception:
            return False
        finally:
            graph.eval()
    return all_close(*seen)


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
    left_out: dict[str, Any],
    first: TracingFailed,
    second: Exception,
) -> Source:
    opaque: set[str] = set()
    refusals: list[Refusal] = []
    failure: TracingFailed | None = first
    while failure is not None:
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
            module = trace(model, left_out, opaque, open_wrapped=False)
            failure = None
        except TracingFailed as error:
            failure = error
    return _finished(model, Source(module, args, kwargs, "fx", refusals, opaque))


def _finished(model: nn.Module, source: Source) -> Source:
    """Everything the model holds is there under its old name, also what the graph does not use."""
    module = source.module
    module.train(model.training)
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
