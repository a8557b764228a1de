"""Which masked form a call has, and what it is given (see tgfx.ops.masked).

y.mean(axis=1, keepdims=True)   ->   masked_mean(y, gate, 1, True, None)
self.norm(y)                    ->   masked_layer_norm(y, gate, [8], norm.weight, norm.bias, 1e-5)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from tgfx.ops import masked
from tgfx.ops.naming import op_name
from tgfx.ops.spelling import named_arguments

_AFFINE = (("weight", None), ("bias", None), ("eps", 1e-5))
_STATISTICS = (("running_mean", None), ("running_var", None))
_UPDATE = (("training", False), ("momentum", 0.1), ("eps", 1e-5))
_SPREAD = (("dim", None), ("correction", 1), ("keepdim", False))
# operator -> its masked form, and the operator's arguments after the input with their defaults
_FORMS: dict[str, tuple[Callable, tuple[tuple[str, Any], ...]]] = {
    "mean": (masked.masked_mean, (("dim", None), ("keepdim", False), ("dtype", None))),
    "var": (masked.masked_var, _SPREAD),
    "std": (masked.masked_std, _SPREAD),
    "layer_norm": (masked.masked_layer_norm, (("normalized_shape", None), *_AFFINE)),
    "rms_norm": (masked.masked_rms_norm, (("normalized_shape", None), ("weight", None), ("eps", None))),
    "group_norm": (masked.masked_group_norm, (("num_groups", None), *_AFFINE)),
    "batch_norm": (masked.masked_batch_norm, (*_STATISTICS, *_AFFINE[:2], *_UPDATE)),
}
_IGNORED = {"cudnn_enable", "cudnn_enabled"}


@dataclass(frozen=True)
class MaskedCall:
    """form(x, gate, *values)"""

    form: Callable
    x: fx.Node
    values: tuple[Any, ...]


def masked_operand(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """What a node normalises or averages, if it has a masked form."""
    if node.op == "call_module":
        return _only_argument(node) if op_name(node, root) in masked.MASKED_MODULES else None
    call = masked_call(node)
    return None if call is None else call.x


def masked_call(node: fx.Node) -> MaskedCall | None:
    """Of a function or a method; None where there is no such form, or the spelling is not understood."""
    if op_name(node) not in _FORMS:
        return None
    given = named_arguments(node)
    if given is None or not isinstance(given.get("self"), fx.Node):
        return None
    form, signature = _FORMS[op_name(node)]
    given = {name: value for name, value in given.items() if name not in _IGNORED}
    x = given.pop("self")
    if "unbiased" in given:
        given["correction"] = given.pop("unbiased")
    if given.get("correction", 1) is None:
        del given["correction"]
    if not given.keys() <= dict(signature).keys():
        return None
    return MaskedCall(form, x, tuple(given.get(name, default) for name, default in signature))


def masked_module_call(graph: fx.Graph, node: fx.Node, root: nn.Module) -> MaskedCall:
    """Of a layer; its weights become nodes of the graph."""
    path = str(node.target)
    module, x = root.get_submodule(path), _only_argument(node)
    if x is None:
        raise AssertionError(f"{node.name}: a gate over something that is no value of the graph")
    weight = graph.get_attr(f"{path}.weight") if module.weight is not None else None
    if isinstance(module, nn.RMSNorm):
        return MaskedCall(masked.masked_rms_norm, x, (list(module.normalized_shape), weight, module.eps))
    bias = graph.get_attr(f"{path}.bias") if module.bias is not None else None
    if isinstance(module, nn.GroupNorm):
        return MaskedCall(masked.masked_group_norm, x, (module.num_groups, weight, bias, module.eps))
    return MaskedCall(masked.masked_layer_norm, x, (list(module.normalized_shape), weight, bias, module.eps))


def _only_argument(node: fx.Node) -> fx.Node | None:
    x = node.args[0] if node.args else node.kwargs.get("input")
    return x if isinstance(x, fx.Node) else None
