"""A graph as text in Graphviz's language."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx


@dataclass
class DotNode:
    """Lines of the label, and attributes such as fillcolor."""

    lines: list[str]
    attributes: dict[str, str] = field(default_factory=dict)


def quoted(text: str) -> str:
    """A string literal: whatever the name of a module is, it stays inside of it."""
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "") + '"'


def dot_text(
    title: str,
    nodes: Mapping[str, DotNode],
    edges: Iterable[tuple[str, str]],
    clusters: Mapping[str, Sequence[str]] = {},
) -> str:
    """clusters: label -> nodes that are drawn in one box."""
    out = [f"digraph {quoted(title)} {{", "  node [shape=box, style=filled, fillcolor=white, fontname=Helvetica];"]
    for name, node in nodes.items():
        label = "\\n".join(quoted(line)[1:-1] for line in node.lines)
        extra = "".join(f", {key}={quoted(value)}" for key, value in node.attributes.items())
        out.append(f'  {quoted(name)} [label="{label}"{extra}];')
    for number, (label, inside) in enumerate((clusters or {}).items()):
        members = " ".join(f"{quoted(name)};" for name in inside)
        out.append(f"  subgraph cluster_{number} {{ label={quoted(label)}; {members} }}")
    out.extend(f"  {quoted(source)} -> {quoted(target)};" for source, target in edges)
    return "\n".join([*out, "}"]) + "\n"


def edges_of(graph: fx.Graph) -> list[tuple[str, str]]:
    return [(source.name, node.name) for node in graph.nodes for source in node.all_input_nodes]
