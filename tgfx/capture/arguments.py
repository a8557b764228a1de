"""Operands that a call gives by name, by position: operator rules and passes look for them there.

torch.chunk(input=y, chunks=2, dim=1)   ->   torch.chunk(y, chunks=2, dim=1)
self.conv(input=y)                      ->   self.conv(y)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.operator_schemas import get_signature_for_torch_op

from tgfx.ir.tree import find
from tgfx.ops.modules import has_hooks
from tgfx.ops.naming import is_torch_function

_FIRST = ("input", "self", "tensor", "tensors", "query")  # of functions that do not tell their parameters


def put_by_position(module: fx.GraphModule) -> None:
    """In place, for calls of torch's own functions and layers; numbers and flags stay as they were given."""
    for node in module.graph.nodes:
        if node.kwargs and _is_torch(node, module):
            names = _positional(node, module)[len(node.args) :]
            moved: list[Any] = []
            for name in names:
                if name not in node.kwargs or not _is_operand(node.kwargs[name]):
                    break
                moved.append(name)
            if moved:
                node.args = (*node.args, *(node.kwargs[name] for name in moved))
                node.kwargs = {name: value for name, value in node.kwargs.items() if name not in moved}


def _is_torch(node: fx.Node, module: fx.GraphModule) -> bool:
    if node.op == "call_module":  # a hook would see the difference
        layer = _layer(node, module)
        return type(layer).__module__.startswith("torch.nn.") and not has_hooks(layer)
    return node.op == "call_function" and is_torch_function(node)


def _is_operand(value: Any) -> bool:
    return isinstance(value, fx.Node) or (isinstance(value, list | tuple) and any(map(_is_operand, value)))


def _layer(node: fx.Node, module: fx.GraphModule) -> Any:
    return find(module, str(node.target))


def _positional(node: fx.Node, module: fx.GraphModule) -> list[str]:
    """Names of the parameters that may be given by position, in order."""
    callee = _layer(node, module).forward if node.op == "call_module" else node.target
    for signature in _signatures(callee):
        try:
            signature.bind(*node.args, **node.kwargs)
        except TypeError:
            continue
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
        if len(names) > len(node.args):
            return names
    return [] if node.args else [name for name in _FIRST if name in node.kwargs][:1]


def _signatures(callee: Any) -> Iterator[inspect.Signature]:
    if isinstance(callee, torch._ops.OpOverload):
        parameter = inspect.Parameter
        yield inspect.Signature(
            [
                parameter(a.name, parameter.KEYWORD_ONLY if a.kwarg_only else parameter.POSITIONAL_OR_KEYWORD)
                for a in callee._schema.arguments
            ]
        )
        return
    yield from get_signature_for_torch_op(callee) or ()
    try:
        yield inspect.signature(callee)
    except (TypeError, ValueError):  # built in
        return
