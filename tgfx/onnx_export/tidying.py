"""A raw export made presentable: names of inputs and of free sizes, and nothing about the machine it was made on."""

from __future__ import annotations

import re
from typing import Any

from tgfx.onnx_export.examples import BATCH
from tgfx.onnx_export.source_lines import user_line

_LISTED = re.compile(r"'([^']*)'")  # name_scopes is a list of strings, written as text


def tidy(model: Any, inputs: tuple[str, ...], batched: frozenset[str]) -> dict[tuple[str, int], str]:
    """Rename and strip an onnx_ir.Model in place. Returns (input, axis) -> name of the size that is free there."""
    for value, name in zip(model.graph.inputs, inputs, strict=True):
        value.name = name  # torch calls an input that is also an output x_orig
    renamed: dict[str, str] = {}
    free: dict[tuple[str, int], str] = {}
    for value in model.graph.inputs:
        for axis, size in enumerate(_sizes(value)):
            if isinstance(size, int):
                continue
            is_batch = axis == 0 and value.name in batched
            named = renamed.setdefault(size, BATCH if is_batch else f"{value.name}_size{axis}")
            if named != BATCH:
                free[value.name, axis] = named
    for value in _values(model):
        _rename_sizes(value, renamed)
        value.metadata_props.clear()
        value.doc_string = None
    for part in (model, model.graph, *model.graph.all_nodes()):
        part.metadata_props.clear()
        part.doc_string = None
    return free


def sources_of(model: Any) -> dict[str, str]:
    """Where torch says that each value was made; to be asked before tidying."""
    sources = {}
    for node in model.graph.all_nodes():
        line = user_line(node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
        scopes = _LISTED.findall(node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
        layer = next((scope for scope in reversed(scopes[:-1]) if scope), "")
        place = " in ".join(part for part in (line, f"layer {layer}" if layer else "") if part)
        sources.update({output.name: place for output in node.outputs if output.name and place})
    return sources


def _values(model: Any) -> list[Any]:
    graph = model.graph
    return [*graph.inputs, *graph.initializers.values(), *(out for node in graph.all_nodes() for out in node.outputs)]


def _sizes(value: Any) -> list[int | str]:
    """Sizes of an axis: a number, or the name of a free one."""
    if value.shape is None:
        return []
    sizes = [size if isinstance(size, int) else size.value for size in value.shape]
    return [int(size) if str(size).isdigit() else str(size) for size in sizes]


def _rename_sizes(value: Any, renamed: dict[str, str]) -> None:
    import onnx_ir

    if value.shape is None:
        return
    sizes = [_renamed(size, renamed) if isinstance(size, str) else size for size in _sizes(value)]
    value.shape = onnx_ir.Shape([size if isinstance(size, int) else onnx_ir.SymbolicDim(size) for size in sizes])


def _renamed(size: str, renamed: dict[str, str]) -> str:
    """Also inside of what is computed from free sizes: s53 // 2."""
    return renamed.get(size) or re.sub(r"[A-Za-z_]\w*", lambda word: renamed.get(word[0], word[0]), size)
