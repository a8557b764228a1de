"""Dead code, told apart from code that only looks dead: `y.relu_()` changes y though nobody reads its result."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tgfx.ir.autocast_switch import is_switch


def eliminate_dead_code(module: fx.GraphModule) -> None:
    """Drop nodes without users, but for those that act in place."""
    # fx asks of every node, but removes only those without users
    module.graph.eliminate_dead_code(is_impure_node=lambda node: bool(node.users) or has_effect(node, module))
    module.recompile()


def has_effect(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a node does more than give a value: acts in place, checks something, or is an input or output."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_method":
        name = str(node.target)
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return bool(getattr(layer, "inplace", False)) or not type(layer).__module__.startswith("torch.nn")
    if node.op == "call_function":
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return bool(target._schema.is_mutable)
        in_place = node.kwargs.get("inplace") is True or (len(node.args) > 1 and node.args[-1] is True)
        name = getattr(target, "__name__", "")
        return (
            in_place
            or node.kwargs.get("out") is not None
            or target in (operator.setitem, torch._assert)
            or is_switch(node)
            or (name.startswith("i") and hasattr(operator, name))
            or (name.endswith("_") and not name.endswith("__"))
        )
    return False
