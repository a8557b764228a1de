"""Nodes and edges of the graph for the page."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from tgfx.ops.naming import op_name
from tgfx.view.places import module_path, shown_line
from tgfx.view.prices import prices
from tgfx.view.shapes import Shape
from tgfx.view.subject import Subject

_WORDS = {"placeholder": "input", "get_attr": "constant", "iadd": "add", "imul": "mul", "isub": "sub"}


def static_nodes(subject: Subject, shapes: list[Shape]) -> list[dict[str, Any]]:
    """What does not change while gates are trained; edges are in "inputs"."""
    index = {node.name: i for i, node in enumerate(subject.nodes)}
    whole = prices(subject, None, frozenset())
    carried = channels_in(subject)
    refused = {refusal.node: refusal for refusal in subject.source.refusals}
    found = []
    for i, (node, shape) in enumerate(zip(subject.nodes, shapes, strict=True)):
        refusal = refused.get(str(node.target)) or refused.get(node.name)
        found.append(
            {
                "name": node.name,
                "path": _own_path(node),
                "module": module_path(node, subject.source.module),
                "op": label(node, subject),
                "kind": node.op,
                "detail": _detail(node, subject),
                "line": shown_line(node),
                "inputs": [index[source.name] for source in node.all_input_nodes],
                "shape": shape,
                "flops": whole["flops"][i],
                "params": whole["params"][i],
                "uncounted": whole["uncounted"][i],
                "groups": carried[i],
                "closed_box": None if refusal is None else str(refusal.reason),
            }
        )
    return found


def _own_path(node: fx.Node) -> str:
    return str(node.target) if node.op in ("call_module", "get_attr") else node.name


def label(node: fx.Node, subject: Subject) -> str:
    """The operator in a word: Conv2d, add, cat, input."""
    if node.op == "get_attr":
        parameters = dict(subject.source.module.named_parameters(remove_duplicate=False))
        return "parameter" if str(node.target) in parameters else "constant"
    name = op_name(node, subject.source.module)
    return _WORDS.get(name, name)


def _detail(node: fx.Node, subject: Subject) -> str:
    if node.op == "call_module":
        return subject.source.module.get_submodule(str(node.target)).extra_repr()[:300]
    if node.op in ("call_function", "call_method"):
        return ", ".join([*map(_argument, node.args), *(f"{k}={_argument(v)}" for k, v in node.kwargs.items())])[:300]
    return ""


def _argument(value: Any) -> str:
    return value.name if isinstance(value, fx.Node) else repr(value)


def channels_in(subject: Subject) -> list[list[int]]:
    """Per node the gated groups whose channels are in its value, in the order of their first channel."""
    if subject.channels is None or subject.coupling is None:
        return [[] for _ in subject.nodes]
    gated = subject.coupling.groups  # they come first in subject.groups, in this order
    starts = np.array([group.start for group in gated] or [0])
    found: list[list[int]] = []
    for node in subject.nodes:
        known = subject.channels.nodes.get(node.name)
        own: dict[int, None] = {}
        for ids in known.tensors if known is not None else ():
            for layer in ids.layers if ids is not None else ():
                slots = subject.coupling.slots_of(layer.numpy().reshape(-1))
                slots = slots[slots < subject.coupling.slots]
                if len(slots) and gated:
                    order = np.searchsorted(starts, slots, side="right") - 1
                    _, first = np.unique(order, return_index=True)
                    own.update(dict.fromkeys(int(order[i]) for i in np.sort(first)))
        found.append(list(own))
    return found
