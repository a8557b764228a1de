"""Operators that a runtime lacks, written with those that it has.

HardSwish   ->  x * HardSigmoid(x), or with Min and Max: ONNX itself defines it so
uneven Split ->  a Slice for each part
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tgfx.onnx_export.channel_chains import has_subgraphs
from tgfx.onnx_export.node_facts import NodeFacts, constant_tensor, setting
from tgfx.optional_packages import needed

# Defined in the ONNX standard by other operators, with the same numbers for every input (Softplus, say, overflows).
DEFINED = ("Celu", "HardSigmoid", "HardSwish", "LogSoftmax", "Mish", "Selu", "ThresholdedRelu")


def lowered(model: Any, known: frozenset[str], complains: Callable[[Any, NodeFacts], bool]) -> tuple[Any, list[str]]:
    """(a model with fewer operators that are not `known`, what was written differently). complains: about a setting."""
    written: list[str] = []
    if has_subgraphs(model):
        return model, written
    for operator in DEFINED:
        missing = _unknown(model, known)
        if operator not in missing:
            continue
        inner = [name for name in DEFINED if name not in known]
        simpler = _inlined(model, [operator, *inner])
        left = _unknown(simpler, known)
        if left < missing:
            model = simpler
            written += sorted(missing - left)
    if "Slice" in known and _slices_for_splits(model, complains):
        written.append("Split")
    return model, [f"{name} is written with operators that the runtime has" for name in written]


def _unknown(model: Any, known: frozenset[str]) -> set[str]:
    return {node.op_type for node in model.graph.node} - known


def _inlined(model: Any, operators: list[str]) -> Any:
    inliner = needed("onnx.inliner")
    ids = [("", name) for name in dict.fromkeys(operators)]
    simpler = inliner.inline_selected_functions(model, ids, inline_schema_functions=True)
    _settle_casts(simpler)
    _constants_to_weights(simpler)
    for place, node in enumerate(simpler.graph.node):
        node.name = node.name or f"{node.op_type}_{place}"
    return simpler


def _settle_casts(model: Any) -> None:
    """CastLike(constant, x) is the constant, where x has its type."""
    facts = NodeFacts(model)
    renamed = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "CastLike"
        and facts.is_constant(node.input[0])
        and facts.type_of(node.input[0]) == facts.type_of(node.input[1])
    }
    kept = [node for node in model.graph.node if not renamed.keys() & set(node.output)]
    for node in kept:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
    _replace_nodes(model, kept)


def _constants_to_weights(model: Any) -> None:
    kept = []
    for node in model.graph.node:
        tensor = constant_tensor(node)
        if tensor is None:
            kept.append(node)
        else:
            model.graph.initializer.append(tensor)
    _replace_nodes(model, kept)


def _slices_for_splits(model: Any, complains: Callable[[Any, NodeFacts], bool]) -> bool:
    onnx = needed("onnx")
    facts = NodeFacts(model)
    nodes: list[Any] = []
    changed = False
    for node in model.graph.node:
        sizes = facts.array(node, 1) if node.op_type == "Split" else None
        if sizes is None or not complains(node, facts):
            nodes.append(node)
            continue
        changed = True
        start = 0
        for place, size in enumerate(sizes.tolist()):
            bounds = {"start": start, "end": start + size, "axis": setting(node, "axis", 0)}
            names = [f"{node.output[place]}_{name}" for name in bounds]
            for name, value in zip(names, bounds.values(), strict=True):
                model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value], np.int64), name))
            nodes.append(
                onnx.helper.make_node("Slice", [node.input[0], *names], [node.output[place]], f"{node.name}_{place}")
            )
            start += size
    _replace_nodes(model, nodes)
    return changed


def _replace_nodes(model: Any, nodes: list[Any]) -> None:
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
