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
from torch.fx.graph import _PyTreeCodeGen

from tgfx.capture.layer_calls import counts_batches, layer_called
from tgfx.ops.naming import op_name

# torch layers that ask for the mode and are called as layers again in the end (see raising.py)
FOLLOWING_LAYERS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU,
)  # fmt: skip
# functions with a training flag -> the layer that is the same function and follows the mode by itself
_FOLLOWERS: dict[str, Callable[..., nn.Module]] = {
    "dropout": nn.Dropout,
    "dropout1d": nn.Dropout1d,
    "dropout2d": nn.Dropout2d,
    "dropout3d": nn.Dropout3d,
    "alpha_dropout": nn.AlphaDropout,
    "feature_alpha_dropout": nn.FeatureAlphaDropout,
    "rrelu": nn.RReLU,
}
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


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
    if pairs is None or _result_form(module) != _result_form(training):
        return False
    different = [(node, other) for node, other in pairs if _constants(node) != _constants(other)]
    if not all(_can_follow(node, other) for node, other in different):
        return False
    for node, other in different:
        name = op_name(node)
        if name == "scaled_dot_product_attention":
            _write_out_attention(module, node, float(_dropout_p(other)))
        elif name in _FOLLOWERS and not owner_of(node):
            _follow_mode(module, node, other)
    module.graph.lint()
    module.recompile()
    return True


def _result_form(module: fx.GraphModule) -> Any:
    """What torch.export puts the values of the output together to."""
    codegen = module.graph._codegen
    return codegen.pytree_info.out_spec if isinstance(codegen, _PyTreeCodeGen) else None


def _constants(node: fx.Node) -> str:
    """All that is not another node's value, in a form that can be compared."""
    return repr(fx.node.map_arg((node.args, node.kwargs), lambda arg: None))


def _can_follow(node: fx.Node, other: fx.Node) -> bool:
    name = op_name(node)
    if node.op not in ("call_function", "call_method"):
        return False
    if name == "scaled_dot_product_attention":
        p = _dropout_p(other)
        same = _attention_settings(node) == _attention_settings(other)
        return same and not _dropout_p(node) and isinstance(p, int | float) and bool(p)
    if name in ("batch_norm", "instance_norm"):
        return not _is_detached(node) and (
            owner_of(node) is not None or layer_called(node) is not None
        )  # becomes its layer again
    if name in ("feature_dropout", "alpha_dropout", "rrelu", "dropout") and owner_of(node):
        return True
    return (
        name in _FOLLOWERS and _flag(node) is False and _flag(other) is True and _layer_options(node, other) is not None
    )


def has_detached_layer(graph: fx.Graph) -> bool:
    """Whether a norm of torch's is called without gradients, and so cannot become a call of its layer again."""
    norms = (n for n in graph.nodes if n.op == "call_function" and op_name(n) in ("batch_norm", "instance_norm"))
    return any(owner_of(node) is not None and _is_detached(node) for node in norms)


def _is_detached(node: fx.Node) -> bool:
    return any(arg.op != "get_attr" for arg in node.all_input_nodes[1:])


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


def _attention_settings(node: fx.Node) -> str:
    """All but how much is dropped."""
    given = dict(zip(_ATTENTION, node.args, strict=False)) | dict(node.kwargs)
    return repr({name: fx.node.map_arg(value, str) for name, value in given.items() if name in _ATTENTION[5:]})


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
    """Nodes in order, without batch counters of layers (only train mode moves them), and what nobody reads.

    That is tensors of the model, and random numbers that were drawn for a question with one answer (uniform_draws.py).
    """
    counts = {node for node in graph.nodes if counts_batches(node) or (op_name(node) == "rand" and not node.users)}
    unread = {node for node in graph.nodes if node.op == "get_attr" and counts.issuperset(node.users)}
    return [n for n in graph.nodes if n not in counts and n not in unread and not _only_lays_out(n)]


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


def _follow_mode(module: fx.GraphModule, node: fx.Node, other: fx.Node) -> None:
    layer = _FOLLOWERS[op_name(node)](**(_layer_options(node, other) or {}))
    x = node.args[0] if node.args else node.kwargs["input"]
    with module.graph.inserting_before(node):
        call = module.graph.call_module(new_layer(module, layer), (x,))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call, propagate_meta=False)
    module.graph.erase_node(node)


def _layer_options(node: fx.Node, other: fx.Node) -> dict[str, Any] | None:
    """What the layer has to be made with to be `node` in eval mode and `other` in train mode; None if none is both."""
    in_eval, in_training = _function_options(node), _function_options(other)
    values = [*in_eval.values(), *in_training.values()]
    if not all(isinstance(value, int | float) for value in values):
        return None
    if in_eval["inplace"] != in_training["inplace"] or (op_name(node) == "rrelu" and in_eval != in_training):
        return None
    return in_training  # what would be dropped in eval mode does not matter


def _function_options(node: fx.Node) -> dict[str, Any]:
    own = {"lower": 1.0 / 8, "upper": 1.0 / 3} if op_name(node) == "rrelu" else {"p": 0.5}
    names = ("input", *own, "training", "inplace")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    written = getattr(node.target, "__name__", "").split(".")[0].endswith("_")  # dropout_(x) acts in place
    return {name: given.get(name, default) for name, default in own.items()} | {
        "inplace": bool(given.get("inplace", False)) or written
    }


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
    given = dict(zip(_ATTENTION, node.args, strict=False)) | dict(node.kwargs)
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
