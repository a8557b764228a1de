"""Train and eval: one graph for both.

A captured graph has the mode baked in wherever the code asked for it outside of a layer. The model is captured in both
modes and the graphs are compared node by node:

    F.dropout(x, p, False | True)          ->  nn.Dropout(p)(x), which follows train() and eval()
    sdpa(q, k, v, dropout_p=0.0 | p)       ->  nn.Dropout(p)(softmax(q k^T)) v
    another structure in train mode        ->  two graphs (see Source.training)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from tgfx.capture.tracer import _mentions_training
from tgfx.ops.naming import op_name

_ASKING = {"dropout", "scaled_dot_product_attention", "alpha_dropout", "feature_dropout"}


def may_depend_on_mode(model: nn.Module, graph: fx.Graph) -> bool:
    """Whether it is worth capturing the model in train mode too."""
    if any(n.op == "call_function" and op_name(n) in _ASKING for n in graph.nodes) and _has_dropout(model):
        return True
    kinds = {type(m) for m in model.modules() if not type(m).__module__.startswith("torch.nn")}
    return any(_mentions_training(kind) for kind in kinds)


def _has_dropout(model: nn.Module) -> bool:
    """Some attribute that speaks of dropping and is not zero."""
    holders: list[Any] = [*model.modules()]
    config = getattr(model, "config", None)
    if config is not None:
        holders.append(config)
    for holder in holders:
        if isinstance(holder, nn.modules.dropout._DropoutNd) and holder.p > 0:
            return True
        for name, value in vars(holder).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
    return False


def merge_modes(module: fx.GraphModule, training: fx.GraphModule) -> bool:
    """Make `module` (captured in eval mode) right in train mode too; False if the structures differ."""
    pairs = _paired(module.graph, training.graph)
    if pairs is None:
        return False
    for node, other in pairs:
        if op_name(node) == "dropout" and node.op == "call_function":
            _follow_mode(module, node, other)
        elif op_name(node) == "scaled_dot_product_attention":
            probability = other.kwargs.get("dropout_p", other.args[4] if len(other.args) > 4 else 0.0)
            own = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
            if probability and not own:
                _write_out_attention(module, node, float(probability))
    module.graph.lint()
    module.recompile()
    return True


def _paired(graph: fx.Graph, other: fx.Graph) -> list[tuple[fx.Node, fx.Node]] | None:
    left, right = _essential(graph), _essential(other)
    if len(left) != len(right):
        return None
    partner: dict[fx.Node, fx.Node] = {}
    for a, b in zip(left, right, strict=True):
        if a.op != b.op or str(a.target) != str(b.target) or not _same_inputs(a, b, partner):
            return None
        partner[a] = b
    return list(partner.items())


def _essential(graph: fx.Graph) -> list[fx.Node]:
    """Nodes in order, without the batch counters that only train mode moves."""
    counters = {n for n in graph.nodes if n.op == "get_attr" and str(n.target).endswith("num_batches_tracked")}
    skipped = set(counters)
    for node in graph.nodes:
        if any(arg in counters for arg in node.all_input_nodes):
            skipped.add(node)
    return [n for n in graph.nodes if n not in skipped and not _only_lays_out(n)]


def _only_lays_out(node: fx.Node) -> bool:
    """Memory layout only, which may differ between kernels of the two modes."""
    return node.op in ("call_function", "call_method") and op_name(node) == "contiguous"


def _values(node: fx.Node) -> list[fx.Node]:
    found = []
    for arg in node.all_input_nodes:
        while _only_lays_out(arg):
            arg = arg.all_input_nodes[0]
        if arg not in found:
            found.append(arg)
    return found


def _same_inputs(a: fx.Node, b: fx.Node, partner: dict[fx.Node, fx.Node]) -> bool:
    mine, theirs = _values(a), _values(b)
    return len(mine) == len(theirs) and all(partner.get(m) is t for m, t in zip(mine, theirs, strict=True))


def _flag(node: fx.Node) -> Any:
    for name in ("training", "train"):
        if name in node.kwargs:
            return node.kwargs[name]
    return node.args[2] if len(node.args) > 2 else True


def _follow_mode(module: fx.GraphModule, node: fx.Node, other: fx.Node) -> None:
    if _flag(node) or not _flag(other):
        return  # always on, or never: as it is
    probability = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5)
    with module.graph.inserting_before(node):
        call = module.graph.call_module(new_dropout(module, float(probability)), (node.args[0],))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call, propagate_meta=False)
    module.graph.erase_node(node)


def new_dropout(module: fx.GraphModule, probability: float) -> str:
    """Path of a fresh dropout layer."""
    index = 0
    while hasattr(module, f"functional_dropout_{index}"):
        index += 1
    layer = nn.Dropout(probability)
    layer.train(module.training)
    module.add_submodule(f"functional_dropout_{index}", layer)
    return f"functional_dropout_{index}"


def _write_out_attention(module: fx.GraphModule, node: fx.Node, probability: float) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("enable_gqa") or given.get("is_causal"):
        with module.graph.inserting_before(node):
            given = _plain_mask(module.graph, given)
    graph = module.graph
    with graph.inserting_before(node):
        turned = graph.call_method("transpose", (given["key"], -2, -1))
        scores = graph.call_function(torch.matmul, (given["query"], turned))
        if given.get("scale") is not None:
            scores = graph.call_function(torch.mul, (scores, given["scale"]))
        else:
            size = graph.call_method("size", (given["query"], -1))
            scores = graph.call_function(torch.mul, (scores, graph.call_function(pow, (size, -0.5))))
        if given.get("attn_mask") is not None:
            scores = graph.call_function(torch.add, (scores, _additive(graph, given["attn_mask"])))
        weights = graph.call_function(torch.softmax, (scores, -1))
        dropped = graph.call_module(new_dropout(module, probability), (weights,))
        out = graph.call_function(torch.matmul, (dropped, given["value"]))
    out.meta = dict(node.meta)
    node.replace_all_uses_with(out, propagate_meta=False)
    graph.erase_node(node)


def _plain_mask(graph: fx.Graph, given: dict[str, Any]) -> dict[str, Any]:
    """Grouped queries repeat their keys; a causal flag becomes a mask."""
    if given.get("enable_gqa"):
        heads = graph.call_method("size", (given["query"], -3))
        for name in ("key", "value"):
            own = graph.call_method("size", (given[name], -3))
            ratio = graph.call_function(operator.floordiv, (heads, own))
            given[name] = graph.call_method("repeat_interleave", (given[name], ratio, -3))
    if given.get("is_causal"):
        rows = graph.call_method("size", (given["query"], -2))
        columns = graph.call_method("size", (given["key"], -2))
        ones = graph.call_function(torch.ones, (rows, columns), {"dtype": torch.bool})
        given["attn_mask"] = graph.call_function(torch.tril, (ones,))
    return given


def _additive(graph: fx.Graph, mask: Any) -> fx.Node:
    """Boolean masks say where to look: elsewhere minus infinity. Float masks are added as they are."""
    if isinstance(mask, fx.Node) and mask.meta.get("val") is not None and mask.meta["val"].dtype != torch.bool:
        return mask
    if (
        isinstance(mask, fx.Node)
        and mask.meta.get("val") is None
        and op_name(mask) not in ("tril", "ne", "eq", "le", "ge", "lt", "gt")
    ):
        return mask
    off = graph.call_function(torch.logical_not, (mask,))
    zeros = graph.call_function(torch.zeros_like, (mask,), {"dtype": torch.get_default_dtype()})
    return graph.call_method("masked_fill", (zeros, off, float("-inf")))
