"""Train and eval: one graph for both.

A captured graph has the mode baked in wherever the code asked for it outside of a layer. The model is captured in both
modes and the graphs are compared node by node:

    F.dropout(x, p, False | True)          ->  nn.Dropout(p)(x), which follows train() and eval()
    sdpa(q, k, v, dropout_p=0.0 | p)       ->  nn.Dropout(p)(softmax(q k^T)) v
    another structure in train mode        ->  two graphs (see Source.training)
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from tgfx.ops.naming import op_name

# torch layers that ask for the mode and are called as layers again in the end (see raising.py)
FOLLOWING_LAYERS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU,
)  # fmt: skip
# functions with a training flag -> the layer that is the same function and follows the mode by itself
_FOLLOWERS: dict[str, Callable[..., nn.Module]] = {
    "dropout": lambda p=0.5: nn.Dropout(p),
    "dropout1d": lambda p=0.5: nn.Dropout1d(p),
    "dropout2d": lambda p=0.5: nn.Dropout2d(p),
    "dropout3d": lambda p=0.5: nn.Dropout3d(p),
    "alpha_dropout": lambda p=0.5: nn.AlphaDropout(p),
    "feature_alpha_dropout": lambda p=0.5: nn.FeatureAlphaDropout(p),
    "rrelu": lambda lower=1.0 / 8, upper=1.0 / 3: nn.RReLU(lower, upper),
}


@contextmanager
def mode_readers() -> Iterator[set[type]]:
    """While this is open, collects the classes whose `.training` is read."""
    readers: set[type] = set()

    def read(module: nn.Module) -> bool:
        if not sys._getframe(1).f_code.co_filename.endswith("graph_module.py"):  # fx copies the flag of the root
            readers.add(type(module))
        return module.__dict__["training"]

    def write(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    nn.Module.training = property(read, write)  # type: ignore[assignment, misc]
    try:
        yield readers
    finally:
        del nn.Module.training


def merge_modes(module: fx.GraphModule, training: fx.GraphModule) -> bool:
    """Make `module` (captured in eval mode) right in train mode too; False if that takes two graphs."""
    pairs = _paired(module, training)
    if pairs is None:
        return False
    different = [(node, other) for node, other in pairs if _constants(node) != _constants(other)]
    if not all(_can_follow(node, other) for node, other in different):
        return False
    for node, other in different:
        name = op_name(node)
        if name == "scaled_dot_product_attention":
            _write_out_attention(module, node, float(_dropout_p(other)))
        elif name in _FOLLOWERS:
            _follow_mode(module, node)
    module.graph.lint()
    module.recompile()
    return True


def _constants(node: fx.Node) -> str:
    """All that is not another node's value, in a form that can be compared."""
    return repr(fx.node.map_arg((node.args, node.kwargs), lambda arg: None))


def _can_follow(node: fx.Node, other: fx.Node) -> bool:
    name = op_name(node)
    if node.op not in ("call_function", "call_method"):
        return False
    if name == "scaled_dot_product_attention":
        return not _dropout_p(node) and bool(_dropout_p(other))
    if name in ("batch_norm", "instance_norm", "feature_dropout", "alpha_dropout", "rrelu") and owner_of(node):
        return True  # becomes a call of its layer again
    if name in ("batch_norm", "instance_norm"):
        return any(arg.op == "get_attr" and str(arg.target).endswith(".running_mean") for arg in node.all_input_nodes)
    return name in _FOLLOWERS and not _flag(node) and bool(_flag(other))


def owner_of(node: fx.Node) -> str | None:
    """Path of the torch layer whose forward made this node, if torch.export noted one that follows the mode."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path, kind = next(reversed(stack.values()))[:2]
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    known = {f"{k.__module__}.{k.__qualname__}" for k in FOLLOWING_LAYERS}
    return path if path and name in known else None


def _dropout_p(node: fx.Node) -> Any:
    return node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)


def _paired(module: fx.GraphModule, other: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]] | None:
    left, right = _essential(module.graph), _essential(other.graph)
    if len(left) != len(right):
        return None
    partner: dict[fx.Node, fx.Node] = {}
    for a, b in zip(left, right, strict=True):
        same = str(a.target) == str(b.target) or _same_tensor(module, a, other, b)
        if a.op != b.op or not same or not _same_inputs(a, b, partner):
            return None
        partner[a] = b
    return list(partner.items())


def _same_tensor(module: fx.GraphModule, a: fx.Node, other: fx.GraphModule, b: fx.Node) -> bool:
    """Constants made while tracing get a new name each time."""
    if a.op != "get_attr" or b.op != "get_attr":
        return False
    left, right = operator.attrgetter(str(a.target))(module), operator.attrgetter(str(b.target))(other)
    tensors = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return tensors and left.shape == right.shape and bool(torch.equal(left, right))


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
    position = 3 if op_name(node) == "rrelu" else 2
    default = op_name(node) not in ("rrelu", "alpha_dropout", "feature_alpha_dropout")
    return node.args[position] if len(node.args) > position else default


def _follow_mode(module: fx.GraphModule, node: fx.Node) -> None:
    options = {k: v for k, v in node.kwargs.items() if k in ("p", "lower", "upper")}
    names = ("lower", "upper") if op_name(node) == "rrelu" else ("p",)
    options.update(zip(names, node.args[1:], strict=False))
    layer = _FOLLOWERS[op_name(node)](**options)
    x = node.args[0] if node.args else node.kwargs["input"]
    with module.graph.inserting_before(node):
        call = module.graph.call_module(new_layer(module, layer), (x,))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call, propagate_meta=False)
    module.graph.erase_node(node)


def new_layer(module: fx.GraphModule, layer: nn.Module) -> str:
    """Path of a layer that stands for a function with a training flag."""
    stem = f"functional_{type(layer).__name__.lower()}"
    index = 0
    while hasattr(module, f"{stem}_{index}"):
        index += 1
    layer.train(module.training)
    module.add_submodule(f"{stem}_{index}", layer)
    return f"{stem}_{index}"


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
        dropped = graph.call_module(new_layer(module, nn.Dropout(probability)), (weights,))
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
