"""Calls of F.batch_norm and F.instance_norm that are, in both modes, what a layer of the model would do.

    F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, self.training, bn.momentum, bn.eps)  ->  bn
    F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, False)      frozen statistics: not bn

A layer follows train() and eval() by itself, so one graph can serve both modes; only calls that follow them in the very
same way may become one.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn

from tgfx.ir.tree import find
from tgfx.ops.naming import op_name

_NORMS = ("batch_norm", "instance_norm")
_FUNCTIONAL = {
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "instance_norm": ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
}
_ATEN = {
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
    "instance_norm": ("input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps"),
}
_DEFAULTS = {
    "batch_norm": {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5},
    "instance_norm": {
        "running_mean": None, "running_var": None, "weight": None, "bias": None, "use_input_stats": True,
        "momentum": 0.1, "eps": 1e-5,
    },
}  # fmt: skip
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # and what is built on them
_INSTANCE_NORM = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_LAYER, _COUNTER = "tgfx_layer", "tgfx_counter"


def mark_layer_calls(model: nn.Module, evaluated: fx.Graph, trained: fx.Graph) -> None:
    """Note in the graphs of the two modes which calls are those of a layer, and which nodes count its batches."""
    in_eval, in_training = _calls(model, evaluated), _calls(model, trained)
    for path in {*in_eval, *in_training}:
        layer = model.get_submodule(path)
        counters = [_counters(layer, path, graph) for graph in (evaluated, trained)]
        if (
            None not in counters
            and not counters[0]
            and _counts_each(layer, counters[1] or [], in_training[path])
            and all(_is_layer_in(layer, path, call, training=False) for call in in_eval[path])
            and all(_is_layer_in(layer, path, call, training=True) for call in in_training[path])
        ):
            for call in (*in_eval[path], *in_training[path]):
                call.meta[_LAYER] = path
            for count in counters[1] or ():
                count.meta[_COUNTER] = True


def layer_called(node: fx.Node) -> str | None:
    """The path of the layer that this call was found to be."""
    return node.meta.get(_LAYER)


def counts_batches(node: fx.Node) -> bool:
    """Whether this is num_batches_tracked += 1 of such a layer: the layer's own business."""
    return bool(node.meta.get(_COUNTER))


def _calls(model: nn.Module, graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """By the path of the layer whose running mean they use."""
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and op_name(node) in _NORMS:
            mean = bound_norm(node)["running_mean"]
            path, _, name = str(mean.target if isinstance(mean, fx.Node) else "").rpartition(".")
            layer = find(model, path) if path and name == "running_mean" else None
            if isinstance(layer, BATCH_NORM) or type(layer) in _INSTANCE_NORM:
                found[path].append(node)
    return found


def bound_norm(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name."""
    name, target = op_name(node), node.target
    in_aten_order = isinstance(target, torch._ops.OpOverload) or target in (torch.batch_norm, torch.instance_norm)
    names = (_ATEN if in_aten_order else _FUNCTIONAL)[name]
    return {**_DEFAULTS[name], **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_layer_in(layer: Any, path: str, call: fx.Node, *, training: bool) -> bool:
    bound = bound_norm(call)
    normalises = bound["training"] if op_name(call) == "batch_norm" else bound["use_input_stats"]
    tensors = all(
        is_tensor_of(layer, path, name, bound[name]) for name in ("running_mean", "running_var", "weight", "bias")
    )
    same_average = not training or (layer.momentum is not None and bound["momentum"] == layer.momentum)
    return tensors and normalises is training and bound["eps"] == layer.eps and same_average


def is_tensor_of(layer: nn.Module, path: str, name: str, argument: Any) -> bool:
    """Whether an argument is the tensor that the layer has under this name (or None, as there)."""
    if getattr(layer, name) is None:
        return argument is None
    return isinstance(argument, fx.Node) and argument.op == "get_attr" and str(argument.target) == f"{path}.{name}"


def _counters(layer: Any, path: str, graph: fx.Graph) -> list[fx.Node] | None:
    """The nodes that count a batch of this layer; None if its counter is used for anything else."""
    found = []
    for node in graph.nodes:
        if node.op == "get_attr" and _is_counter(layer, path, node):
            for user in node.users:
                if not _adds_one(user, node):
                    return None
                found.append(user)
    return found


def _is_counter(layer: Any, path: str, node: fx.Node) -> bool:
    return layer.num_batches_tracked is not None and str(node.target) == f"{path}.num_batches_tracked"


def _adds_one(user: fx.Node, counter: fx.Node) -> bool:
    named = str(user.target) if user.op == "call_method" else getattr(user.target, "__name__", "")
    in_place = named in ("add_", "add_.Tensor", "add_.Scalar") or user.target is operator.iadd
    return in_place and not user.users and user.args == (counter, 1) and not user.kwargs


def _counts_each(layer: Any, counters: list[fx.Node], calls: list[fx.Node]) -> bool:
    if layer.num_batches_tracked is None or type(layer) in _INSTANCE_NORM:
        return not counters
    return len(counters) == len(calls)
