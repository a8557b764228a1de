"""One name per operator, however the user spelled it: `x.view`, `torch.reshape`, `aten.view.default`, `nn.Flatten`."""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

import torch
from torch import fx, nn

_ALIASES = {
    "concat": "cat", "concatenate": "cat", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
    "_unsafe_view": "view", "clamp_": "clamp", "sym_size": "size", "sym_numel": "numel", "absolute": "abs",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention", "broadcast_to": "expand",
    "view_copy": "view", "slice_copy": "slice",
}  # fmt: skip


def op_name(node: fx.Node, root: nn.Module | None = None) -> str:
    """The canonical operator name of a node; for modules the class name, e.g. "Conv2d"."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target)) if root is not None else None
        return type(module).__name__
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = function_name(node.target)
    else:
        return node.op
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return _ALIASES.get(name, name)


def function_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.split("::")[-1]
    if target is getattr:
        return "getattr"
    return getattr(target, "__name__", str(target))


def is_torch_function(node: fx.Node) -> bool:
    """Whether the callee is torch's (or an arithmetic operator), not a Python function of the user's."""
    if node.op == "call_method":
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket) or target is getattr:
        return True
    module = getattr(target, "__module__", None) or ""
    return module.split(".")[0] in ("torch", "_operator", "operator", "math", "builtins") or target in (
        operator.getitem,
    )


def tapped_weight(node: fx.Node, taps: Container[str]) -> str | None:
    """The weight of the layer that this node calls, if its taps are gated (`taps`: names of such weights)."""
    name = f"{node.target}.weight"
    return name if node.op == "call_module" and name in taps else None
