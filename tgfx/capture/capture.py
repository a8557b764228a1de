"""Choosing a front end.

Plain fx first: fast, and sizes stay free. Where the code asks for sizes, fx with the answers of the example, which are
checked in every call. Where that cannot follow the model, torch.export. Where that fails too, fx again with the
submodules that cannot be traced kept closed (opaque), each with its reason.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from tgfx.capture.asked_of_export import sizes_watched
from tgfx.capture.autocast_off import write_switches
from tgfx.capture.both_modes import Other, in_both_modes
from tgfx.capture.exported import WRITTEN_OUT, export_graph, has_batch_of_one
from tgfx.capture.not_in_graph import CannotRunError, NotInGraphError, state_watched
from tgfx.capture.quiet import quiet
from tgfx.capture.reference import Reference, run_kept
from tgfx.capture.sizes import ExampleSizes
from tgfx.capture.small_sizes import refuse_small_sizes
from tgfx.capture.tracer import TracingFailed, told, trace
from tgfx.capture.train_mode import (
    behaves_alike,
    leaves_channels,
    lost_train_mode,
    tell_lost_mode,
    train_mode,
)
from tgfx.capture.without_gradients import write_detaches
from tgfx.errors import CaptureError
from tgfx.ir.buffers import buffers_restored
from tgfx.ir.compare import all_close
from tgfx.ir.draws import same_draws
from tgfx.ir.plain_attributes import plain_attributes_restored
from tgfx.ir.refusal import Refusal
from tgfx.ir.remembered import Remembered
from tgfx.ir.source import Source, tensors_in


def capture(reference: Reference, without: Collection[str] = ()) -> Source:
    """A graph over the reference's model (which belongs to us: a copy of the user's), right in both modes.

    without: ways through fx that led to another program ("plain", "by sizes"; see attempts.py).

    Where no front end follows train mode, the submodule that it failed in is kept closed in both modes. What cannot
    be helped so, since it is the model's own forward, takes the eval path in both, with a warning.
    """
    source = best = _followed(reference, [], without)
    closed: list[Refusal] = []
    while (lost := lost_train_mode(source)) is not None and lost.where and lost.where not in {c.node for c in closed}:
        closed.append(Refusal(f"could not be traced in train mode: {lost.cause}", lost.where, "opaque", limit=True))
        try:
            source = _followed(reference, closed, without)
        except CaptureError:
            break  # now it is another module that cannot be traced, and that one cannot be closed
        if _is_better(reference, source, best):
            best = source
    tell_lost_mode(reference.model, best)
    return best


def _is_better(reference: Reference, source: Source, best: Source) -> bool:
    """Whether train mode is right in `source`, where it was not in `best`, or not for every batch."""
    lost, before = lost_train_mode(source), lost_train_mode(best)
    if lost is not None and (not lost.has_graph or before is None or before.has_graph):
        return False
    if before is not None and before.has_graph and not leaves_channels(source):
        return False
    graph = (source.training or source).module
    return behaves_alike(reference.model, graph, reference.args, reference.kwargs)


def _followed(reference: Reference, closed: Sequence[Refusal], without: Collection[str]) -> Source:
    """With these modules closed, and those that do what no graph does."""
    refusals = list(closed)
    while True:
        opaque = {refusal.node for refusal in refusals}
        try:
            source = _captured(reference, opaque, "; ".join(map(str, refusals)), without)
        except TracingFailed as failure:
            if not failure.is_followed or not failure.where or failure.where in opaque:
                raise _more_than_a_graph(reference.model, failure) from failure.cause
            refusals.append(Refusal(f"{failure.cause}, which a graph does not", failure.where, "opaque", limit=True))
        else:
            source.refusals[:0] = refusals
            return source


def _captured(reference: Reference, opaque: set[str], why: str, without: Collection[str]) -> Source:
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

    export: list[Other] = [] if opaque else [("export", lambda: _export_watched(model, args, kwargs, widen=True))]
    by_size: Other = ("fx", lambda: take(ExampleSizes(model, args, kwargs)))
    try:
        if "plain" in without:
            raise TracingFailed("", ValueError("what it followed is not what the model does"))
        return _with_closed(in_both_modes(model, args, kwargs, "fx", take, [by_size, *export]), opaque)
    except TracingFailed as failure:
        if failure.is_followed:
            raise
        first = failure
    reference.compute()  # the other front ends need not make the same calls, or go another way for other numbers
    if "by sizes" not in without:
        by_sizes = _traced_by_sizes(model, args, kwargs, by_size[1], export, reference.outputs)
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
        with sizes_watched():
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
    others: Sequence[Other],
    reference: list[torch.Tensor],
) -> Source | None:
    """fx once more, where the code asks for sizes; None if that does not do what the model does."""
    try:
        source = in_both_modes(model, args, kwargs, "fx", take, others)
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
    taken: list[fx.GraphModule] = []

    def take() -> fx.GraphModule:
        taken.append(_export_watched(model, args, kwargs, widen=widen))
        return taken[-1]

    source = in_both_modes(model, args, kwargs, "export", take)
    written_out = any(one.meta.get(WRITTEN_OUT) for one in taken) and lost_train_mode(source) is None
    if written_out and not behaves_alike(model, (source.training or source).module, args, kwargs):
        raise RuntimeError("a transform of torch.func, written out, does not do the same")
    with plain_attributes_restored(model):
        refuse_small_sizes(model, source.module, args, kwargs)
    if source.training is not None:
        with train_mode(model), plain_attributes_restored(model):
            refuse_small_sizes(model, source.training.module, args, kwargs)
    return source


def _gives(graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[torch.Tensor]) -> bool:
    try:
        with quiet(), same_draws():
            return all_close(expected, run_kept(graph, *copy.deepcopy((args, kwargs)), Remembered()))
    except Exception:
        return False


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
                found=f"fx: {first}; torch.export: {told(second)}",
                where=first.where or "the model's own forward",
                fix="move what they cannot follow (decisions on numbers, torch.func.grad) into a submodule: tgfx keeps "
                "that one as it is and gates the rest",
            ) from failure.cause
        opaque.add(failure.where)
        refusals.append(Refusal(f"could not be traced: {failure}".splitlines()[0], failure.where, "opaque"))
        by_size: Other = ("fx", lambda: take(ExampleSizes(model, args, kwargs), opaque, open_wrapped=False))
        take_all = partial(take, None, opaque, open_wrapped=False)
        try:
            source = in_both_modes(model, args, kwargs, "fx", take_all, [by_size])
        except TracingFailed as error:
            if error.is_followed and error.where not in opaque:
                raise
            failure = error
        else:
            break
    source.refusals[:0] = refusals
    return _with_closed(source, opaque)
