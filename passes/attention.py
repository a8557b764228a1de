"""Analysis: which products of a graph are attention.

    scores = q @ k^T            a product of two values that depend on the input
    weights = softmax(scores)   with scales, masks and dropout in between
    mixed = weights @ v         the product whose batch axes are the heads

Only the graph is looked at; which axis is the head axis is found by the channel analysis, which knows who is who.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import fx, nn

from tgfx.ops.naming import op_name

_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_FUSED = {"scaled_dot_product_attention", "_scaled_dot_product_attention_math"}
_SOFTMAX = {"softmax", "_softmax", "_safe_softmax", "Softmax", "Softmax2d"}
# what comes out of these are new channels, not scores
_MIXING = {"linear", "Linear", "mm", "addmm", "convolution", "conv1d", "conv2d", "Conv1d", "Conv2d", "embedding"}


@dataclass(frozen=True)
class Attention:
    """Names of nodes: `products` are all products of attentions, `values` those that mix the values."""

    products: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()


@dataclass(frozen=True)
class HeadRows:
    """Attentions of a model, and ids of parameters, one row per head, that belong to the same head."""

    attention: Attention = Attention()
    in_training: Attention = Attention()  # of the graph for train mode
    rows: tuple[np.ndarray, ...] = ()


def find_attention(module: fx.GraphModule) -> Attention:
    data = _depends_on_input(module.graph)
    scores: dict[fx.Node, set[str]] = {}  # node -> the products whose scores it carries
    weights: dict[fx.Node, set[str]] = {}  # the same after a softmax
    products, values = set(), set()
    for node in module.graph.nodes:
        name = op_name(node, module)
        carried = set().union(*(scores.get(arg, ()) for arg in node.all_input_nodes))
        weighing = set().union(*(weights.get(arg, ()) for arg in node.all_input_nodes))
        if name in _FUSED:
            products.add(node.name)
            values.add(node.name)
        elif name in _PRODUCTS:
            if weighing:
                products.update(weighing, {node.name})
                values.add(node.name)
            if sum(arg in data for arg in node.all_input_nodes) > 1 or _squares(node, data):
                scores[node] = {node.name}
        elif name in _SOFTMAX:
            weights[node] = carried
        elif name not in _MIXING and not _is_container(node, module):
            scores[node], weights[node] = carried, weighing
    return Attention(frozenset(products), frozenset(values))


def _depends_on_input(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _squares(node: fx.Node, data: set[fx.Node]) -> bool:
    """x @ x: one input node, used twice."""
    return len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in data and len(node.args) > 1


def _is_container(node: fx.Node, module: fx.GraphModule) -> bool:
    """A closed layer with weights of its own: what leaves it is something else."""
    if node.op != "call_module":
        return False
    layer: nn.Module = module.get_submodule(str(node.target))
    return next(layer.parameters(), None) is not None
