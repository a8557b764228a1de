"""The graph for Graphviz: nodes in the colours of their groups, what is kept dashed, boxes for modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from tgfx.ir.dot import DotNode, dot_text
from tgfx.view.colours import group_colour
from tgfx.view.data import page_data


def to_dot(model: nn.Module, example_inputs: Any = None) -> str:
    """Text for `dot`, pydot or any other reader of the DOT language; `model` may be gated or not."""
    data = page_data(model, example_inputs)
    now = data["now"]["nodes"]
    names = [node["name"] for node in data["nodes"]]
    kept = {i: g["frozen"]["reason"] for g in data["groups"] if g["frozen"] for m in g["members"] for i in m["nodes"]}
    nodes: dict[str, DotNode] = {}
    clusters: dict[str, list[str]] = {}
    for index, node in enumerate(data["nodes"]):
        lines = [node["path"], node["op"], _sizes(node["shape"], now["shape"][index])]
        attributes = {}
        if node["groups"]:
            attributes["fillcolor"] = group_colour(node["groups"][0])
        if index in kept or node["closed_box"]:
            attributes["style"] = "filled,dashed"
            lines.append("kept: " + (node["closed_box"] or kept[index]))
        nodes[node["name"]] = DotNode([line for line in lines if line], attributes)
        if node["module"]:
            clusters.setdefault(node["module"], []).append(node["name"])
    edges = [(names[source], node["name"]) for node in data["nodes"] for source in node["inputs"]]
    return dot_text(data["name"], nodes, edges, clusters)


def _sizes(before: list[int] | None, after: list[int] | None) -> str:
    if before is None:
        return ""
    text = "x".join(map(str, before))
    return text if after is None or after == before else f"{text} -> {'x'.join(map(str, after))}"
