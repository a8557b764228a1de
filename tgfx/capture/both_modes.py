"""A graph for eval and train mode: one of both where the layers alone make the difference, or two.

Where train mode cannot be followed by the front end that took eval mode, the others are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from tgfx.capture.exported import WRITTEN_OUT
from tgfx.capture.finishing import finished
from tgfx.capture.layer_calls import mark_layer_calls
from tgfx.capture.modes import FOLLOWING_LAYERS, has_detached_layer, merge_modes, mode_readers
from tgfx.capture.signature import take_signature
from tgfx.capture.small_sizes import refuse_small_sizes
from tgfx.capture.tracer import TracingFailed, told
from tgfx.capture.train_mode import TrainModeLost, behaves_alike, takes_other_batches, train_mode
from tgfx.ir.lazy_module import LazyGraphModule
from tgfx.ir.plain_attributes import plain_attributes_restored
from tgfx.ir.source import Source
from tgfx.ops.modules import has_hooks

# a front end that has not been tried yet, and how it takes the graph
Other = tuple[str, Callable[[], fx.GraphModule]]


def in_both_modes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    front_end: str,
    take: Callable[[], fx.GraphModule],
    others: Sequence[Other] = (),
) -> Source:
    """Captured in eval mode, and in train mode too where the code asks for the mode; `others` may do the latter."""
    with mode_readers() as readers:
        module = take()
    if front_end == "fx":
        return (
            _captured_again(model, args, kwargs, front_end, module, take, others)
            if readers
            else _source(model, module, args, kwargs)
        )
    follows = not (_hooked_followers(model) or has_detached_layer(module.graph) or module.meta.get(WRITTEN_OUT))
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
    return finished(model, Source(module, args, kwargs, front_end))


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
    others: Sequence[Other] = (),
) -> Source:
    """Capture in train mode as well, and make one graph of both, or keep two."""
    source = Source(module, args, kwargs, front_end)
    try:
        with train_mode(model):
            training = take()
    except Exception as error:
        if isinstance(error, TracingFailed) and error.is_followed and (front_end == "fx" or error.where):
            raise
        _train_by_another(model, finished(model, source), others, error)
        return source
    mark_layer_calls(model, module.graph, training.graph)
    apart = front_end == "export" and _hooked_followers(model)
    if apart or not merge_modes(module, training):
        source.training = finished(model, Source(training, args, kwargs, front_end))
    return finished(model, source)


def _train_by_another(model: nn.Module, source: Source, others: Sequence[Other], error: Exception) -> None:
    """The train-mode graph of the first front end whose graph does what the model does there, for any batch."""
    args, kwargs = source.args, source.kwargs
    for front_end, take in others:
        try:
            with train_mode(model), plain_attributes_restored(model):
                graph = take()
                mark_layer_calls(model, source.module.graph, graph.graph)
                found = _source(model, graph, args, kwargs, front_end)
                if front_end == "export":
                    refuse_small_sizes(model, found.module, args, kwargs)
                    take_signature(found.module, source.module.graph, args, kwargs)
        except Exception:
            continue
        if behaves_alike(model, found.module, args, kwargs):
            source.training = found
            if takes_other_batches(model, found.module, args, kwargs):
                return
    followed = isinstance(error, TracingFailed) and error.is_followed
    inner = error.cause if isinstance(error, TracingFailed) else error
    cause = f"it {inner}" if followed else told(inner)
    reason = f"could not be captured in train mode ({cause}); the eval path is kept in both"
    where = error.where if isinstance(error, TracingFailed) else ""
    has_graph = source.training is not None
    source.refusals.append(TrainModeLost(reason, "forward", "training", "", True, where, cause, has_graph))
