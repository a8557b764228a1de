"""A call's arguments by their names, however the user spelled the call.

    y.std(1, False)    torch.std(y, axis=1, unbiased=False)    aten.std.correction(y, [1], correction=0)
    {"self": y, "dim": 1, "unbiased": False}, or "correction": 0

By the schemas of the operator, as torch itself reads a call; not by the place of an argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tgfx.ops.naming import op_name

# torch takes numpy's names too
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "input": "self", "a": "self", "x": "self"}


def named_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Name -> what was given for it; None where that cannot be told. The first operand is always "self"."""
    found = list(_bound_to_python(node) if hasattr(node.target, "__code__") else _bound_to_schemas(node))
    return found[0] if found and all(other == found[0] for other in found) else None


def _bound_to_python(node: fx.Node) -> Iterator[dict[str, Any]]:
    """A function of torch.nn.functional."""
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    yield {"self" if name == "input" else name: value for name, value in bound.arguments.items()}


def _bound_to_schemas(node: fx.Node) -> Iterator[dict[str, Any]]:
    for schema in _schemas(node):
        bound = _bound(schema, node.args, node.kwargs)
        if bound is not None:
            yield bound


def _schemas(node: fx.Node) -> list[Any]:
    if isinstance(node.target, torch._ops.OpOverload):
        return [node.target._schema]
    packet = getattr(torch.ops.aten, op_name(node), None)
    return [getattr(packet, name)._schema for name in packet.overloads()] if packet is not None else []


def _bound(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    by_place = [argument for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(by_place):
        return None
    known = {argument.name: argument for argument in schema.arguments if not argument.is_out}
    bound = {argument.name: value for argument, value in zip(by_place, args, strict=False)}
    for given, value in kwargs.items():
        name = given if given in known else _NUMPY.get(given, given)
        if name not in known or name in bound:
            return None
        bound[name] = value
    missing = any(name not in bound and not a.has_default_value() for name, a in known.items())
    if missing or not all(_fits(value, str(known[name].type)) for name, value in bound.items()):
        return None
    return {"self" if name == "input" else name: value for name, value in bound.items()}


def _fits(value: Any, kind: str) -> bool:
    """Whether a value may stand for an argument of this type; of a value that the graph computes that is not known."""
    if isinstance(value, fx.Node):
        return True
    if value is None:
        return kind.startswith("Optional")
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional") else kind
    if kind == "Tensor":
        return False
    if kind == "bool":
        return isinstance(value, bool)
    if kind.startswith("List[str"):  # names of axes
        return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(v, str) for v in value))
    if kind.startswith("List["):
        items = value if isinstance(value, list | tuple) else [value]
        return all(isinstance(item, int | fx.Node) and not isinstance(item, bool) for item in items)
    return True
