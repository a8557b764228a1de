"""How large an ONNX graph is: nodes, initialisers, bytes, operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GraphSize:
    nodes: int
    initializers: int
    parameters: int  # numbers in all initialisers
    bytes: int
    ops: dict[str, int]


def graph_size(model: Any, bytes_on_disk: int | None = None) -> GraphSize:
    """Of a model in memory. Nodes of subgraphs (If, Loop) count too."""
    nodes = list(all_nodes(model.graph))
    ops = Counter(node.op_type if not node.domain else f"{node.domain}.{node.op_type}" for node in nodes)
    parameters = sum(_numel(tensor.dims) for tensor in model.graph.initializer)
    size = model.ByteSize() if bytes_on_disk is None else bytes_on_disk
    return GraphSize(len(nodes), len(model.graph.initializer), parameters, size, dict(sorted(ops.items())))


def all_nodes(graph: Any) -> list[Any]:
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                nodes += all_nodes(inner)
    return nodes


def _numel(dims: Any) -> int:
    count = 1
    for size in dims:
        count *= size
    return count
