"""Smaller graphs for the same function: onnxsim first, onnxslim where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tgfx.onnx_export.attention_leftovers import drop_attention_leftovers
from tgfx.onnx_export.channel_chains import has_subgraphs
from tgfx.onnx_export.look_ups import fold_look_ups
from tgfx.onnx_export.quietly import quietly
from tgfx.onnx_export.routes import straighten_routes
from tgfx.optional_packages import needed


def candidates(raw: Any, wanted: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name of the simplifier, how to make it), the best first; the raw graph is last and named ""."""
    if wanted:
        yield "onnxsim", lambda: _onnxsim(raw)
        yield "onnxslim", lambda: _onnxslim(raw)
    yield "", lambda: raw


def _onnxsim(raw: Any) -> Any:
    onnxsim = needed("onnxsim", purpose="simplifying")
    with quietly():
        model, agrees = onnxsim.simplify(_copy(raw))
    if not agrees:
        raise ValueError("onnxsim's own comparison failed")
    return _without_leftovers(model)


def _onnxslim(raw: Any) -> Any:
    onnxslim = needed("onnxslim", purpose="simplifying")
    with quietly():
        model = onnxslim.slim(_copy(raw))
    if model is None:
        raise ValueError("onnxslim gave nothing back")
    return _without_leftovers(model)


def _without_leftovers(model: Any) -> Any:
    """What general simplifiers leave behind, and runtimes stumble over: in place."""
    if has_subgraphs(model):
        return stripped(model)
    return drop_attention_leftovers(fold_look_ups(straighten_routes(stripped(model))))


def stripped(model: Any) -> Any:
    """Without the notes that tools leave about themselves: in place."""
    del model.metadata_props[:]
    model.doc_string = ""
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer, *graph.value_info):
        part.doc_string = ""
        if hasattr(part, "metadata_props"):
            del part.metadata_props[:]
    return model


def _copy(model: Any) -> Any:
    twin = type(model)()
    twin.CopyFrom(model)
    return twin
