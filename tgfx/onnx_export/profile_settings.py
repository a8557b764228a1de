"""Settings of operators that a runtime does not take, as its own documentation or source lists them.

NNAPI and Core ML: the notes in ONNX Runtime 1.31's onnxruntime/tools/mobile_helpers/*.md, and the checks that its
providers make before they take a node (onnxruntime/core/providers/{nnapi,coreml}); what these refuse runs on the CPU,
with a copy there and back. ncnn: what pnnx 20261020 was seen to convert wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tgfx.onnx_export.node_facts import NodeFacts, setting

Rule = Callable[[Any, NodeFacts], Iterator[str]]
NNAPI_AXES, COREML_AXES = 4, 5
POOLS = ("AveragePool", "MaxPool", "GlobalAveragePool", "GlobalMaxPool")


def complaints(profile: str, node: Any, facts: NodeFacts) -> list[str]:
    """What the runtime does not like about a node whose operator it knows."""
    found: list[str] = []
    for rule in (_EVERY.get(profile), _RULES.get(profile, {}).get(node.op_type)):
        if rule is not None:
            found += rule(node, facts)
    return found


def _nnapi_any(node: Any, facts: NodeFacts) -> Iterator[str]:
    yield from _fixed(node, facts, NNAPI_AXES)
    for name in node.input:
        kind = facts.type_of(name) if name and not facts.is_constant(name) else "unknown"
        if kind in ("int64", "float64", "bool"):
            yield f"{kind} values; NNAPI has float32 and int32"
            return


def _coreml_any(node: Any, facts: NodeFacts) -> Iterator[str]:
    yield from _fixed(node, facts, COREML_AXES)


def _fixed(node: Any, facts: NodeFacts, axes: int) -> Iterator[str]:
    for name in filter(None, node.input):
        if facts.is_external(name):
            yield f"{name} is in a second file"
        shape = facts.shape(name)
        if shape is None or None in shape:
            yield f"the size of {name} is not fixed"
        elif len(shape) > axes:
            yield f"{name} has {len(shape)} axes, at most {axes} are taken"


def _two_dimensional(node: Any, facts: NodeFacts) -> Iterator[str]:
    rank = facts.rank(node.input[0])
    if rank is not None and rank != 4:
        yield f"{rank - 2}-d; only 2-d is taken"


def _nnapi_pool(node: Any, facts: NodeFacts) -> Iterator[str]:
    yield from _two_dimensional(node, facts)
    if setting(node, "count_include_pad", 0) and any(setting(node, "pads", [0])):
        yield "padding counts in the average (count_include_pad)"
    if setting(node, "ceil_mode", 0):
        yield "ceil_mode"
    if any(step != 1 for step in setting(node, "dilations", [1])):
        yield "dilation"
    if len(node.output) > 1:
        yield "indices are asked for"


def _one_or_two_dimensional(node: Any, facts: NodeFacts) -> Iterator[str]:
    rank = facts.rank(node.input[0])
    if rank is not None and rank not in (3, 4):
        yield f"{rank - 2}-d; only 1-d and 2-d are taken"


def _constant_weights(node: Any, facts: NodeFacts) -> Iterator[str]:
    if any(facts.given(node, place) and not facts.known(node, place) for place in (1, 2)):
        yield "weights are computed, not constant"


def _nnapi_convolution(node: Any, facts: NodeFacts) -> Iterator[str]:
    yield from _two_dimensional(node, facts)
    yield from _constant_weights(node, facts)


def _coreml_convolution(node: Any, facts: NodeFacts) -> Iterator[str]:
    yield from _one_or_two_dimensional(node, facts)
    if facts.given(node, 2) and not facts.known(node, 2):
        yield "the bias is computed, not constant"


def _coreml_transposed(node: Any, facts: NodeFacts) -> Iterator[str]:
    yield from _one_or_two_dimensional(node, facts)
    yield from _constant_weights(node, facts)
    if any(setting(node, "output_padding", [0])):
        yield "output_padding"
    if setting(node, "output_shape", []):
        yield "output_shape"
    if setting(node, "auto_pad", "NOTSET").startswith("SAME"):
        yield "auto_pad"


def _nnapi_pixels(node: Any, _: NodeFacts) -> Iterator[str]:
    if setting(node, "mode", "DCR") != "DCR":
        yield "mode CRD (PixelShuffle); only DCR is taken"


def _nnapi_look_up(node: Any, facts: NodeFacts) -> Iterator[str]:
    if not facts.known(node, 1) and facts.type_of(node.input[1]) != "int32":
        yield "indices are neither constant nor int32"


def _nnapi_product(node: Any, facts: NodeFacts) -> Iterator[str]:
    if not facts.known(node, 1) and not setting(node, "transB", 0):
        yield "a product of two computed matrices wants transB"


def _constant_matrix(node: Any, facts: NodeFacts) -> Iterator[str]:
    if not facts.known(node, 1):
        yield "the matrix is computed, not constant"


def _nnapi_pad(node: Any, facts: NodeFacts) -> Iterator[str]:
    if setting(node, "mode", "constant") != "constant":
        yield f"mode {setting(node, 'mode', 'constant')}; only constant is taken"
    widths = facts.array(node, 1)
    if widths is None or (facts.given(node, 2) and not facts.known(node, 2)):
        yield "widths or the value are computed, not constant"
    elif (widths < 0).any():
        yield "it cuts (widths below zero)"


def _nnapi_resize(node: Any, facts: NodeFacts) -> Iterator[str]:
    yield from _two_dimensional(node, facts)
    mode = setting(node, "mode", "nearest")
    grid = setting(node, "coordinate_transformation_mode", "half_pixel")
    rounding = setting(node, "nearest_mode", "round_prefer_floor")
    if mode == "nearest" and (grid, rounding) != ("asymmetric", "floor"):
        yield f"nearest with {grid} and {rounding}; only asymmetric and floor are taken"
    if mode == "linear" and grid not in ("half_pixel", "align_corners", "asymmetric"):
        yield f"linear with {grid}"
    if mode not in ("nearest", "linear"):
        yield f"mode {mode}"
    if setting(node, "antialias", 0) or setting(node, "exclude_outside", 0) or setting(node, "axes", []):
        yield "antialias, exclude_outside or axes"
    if not any(facts.known(node, place) for place in (2, 3)):
        yield "scales and sizes are computed, not constant"


def _nnapi_softmax(node: Any, facts: NodeFacts) -> Iterator[str]:
    rank = facts.rank(node.input[0])
    if rank is not None and rank not in (2, 4):
        yield f"over a tensor of {rank} axes; only 2 and 4 are taken"


def _nnapi_split(node: Any, facts: NodeFacts) -> Iterator[str]:
    sizes = facts.array(node, 1)
    if facts.given(node, 1) and sizes is None:
        yield "sizes are computed, not constant"
    elif sizes is not None and len(set(sizes.tolist())) > 1:
        yield f"uneven parts {sizes.tolist()}"


def _constant_parts(node: Any, facts: NodeFacts) -> Iterator[str]:
    if any(facts.given(node, place) and not facts.known(node, place) for place in range(1, len(node.input))):
        yield "axes or bounds are computed, not constant"


def _coreml_look_up(node: Any, _: NodeFacts) -> Iterator[str]:
    if setting(node, "batch_dims", 0):
        yield "batch_dims"


def _coreml_where(node: Any, facts: NodeFacts) -> Iterator[str]:
    if any(facts.type_of(name) not in ("float32", "float16", "unknown") for name in node.input[1:]):
        yield "of whole numbers; only of floating-point ones"


def _ncnn_look_up(node: Any, facts: NodeFacts) -> Iterator[str]:
    indices = facts.array(node, 1)
    if indices is None or indices.ndim:
        yield "several channels are looked up, or a computed one: pnnx takes the first for all"


_EVERY: dict[str, Rule] = {"nnapi": _nnapi_any, "coreml": _coreml_any}
_RULES: dict[str, dict[str, Rule]] = {
    "nnapi": {
        **dict.fromkeys(POOLS, _nnapi_pool),
        "Conv": _nnapi_convolution,
        "DepthToSpace": _nnapi_pixels,
        "Gather": _nnapi_look_up,
        "Gemm": _nnapi_product,
        "Pad": _nnapi_pad,
        "Resize": _nnapi_resize,
        "Softmax": _nnapi_softmax,
        "Split": _nnapi_split,
        "Squeeze": _constant_parts,
        "Unsqueeze": _constant_parts,
    },
    "coreml": {
        **dict.fromkeys(POOLS, _two_dimensional),
        "Conv": _coreml_convolution,
        "ConvTranspose": _coreml_transposed,
        "GatherND": _coreml_look_up,
        "Gemm": _constant_matrix,
        "Slice": _constant_parts,
        "Split": _constant_parts,
        "Where": _coreml_where,
    },
    "ncnn": {"Gather": _ncnn_look_up},
}
