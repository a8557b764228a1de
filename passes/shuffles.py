"""Analysis: data movement that, taken together, only reorders one axis (a channel shuffle).

    y = x.view(b, g, c // g, h, w).transpose(1, 2).reshape(b, c, h, w)      ==      x[:, order]

In between the channels cross two axes, and what survives a cut there need not be a rectangle. Seen as a whole the chain
is a permutation, whatever survives. Found by running the chain on numbered entries: at the size of the example and,
since a model may be called with others, at other sizes of every other axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tgfx.ir.dead_code import has_effect
from tgfx.ir.facts import NodeIds, Shuffle
from tgfx.ops.naming import op_name

_MOVES = {
    "view", "reshape", "transpose", "permute", "movedim", "contiguous", "clone", "flatten", "unflatten", "squeeze",
    "unsqueeze", "channel_shuffle", "native_channel_shuffle", "Flatten", "Unflatten", "ChannelShuffle", "Identity",
}  # fmt: skip
_REORDERS = {"transpose", "permute", "movedim", "channel_shuffle", "native_channel_shuffle", "ChannelShuffle"}
_SIZES = {"size", "getattr", "numel", "getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "int"}


def find_shuffles(module: fx.GraphModule, nodes: dict[str, NodeIds]) -> tuple[Shuffle, ...]:
    """The longest such chains, in the order of the graph. `nodes` knows the shape of every value on the example."""
    found: list[Shuffle] = []
    taken: set[str] = set()
    for node in module.graph.nodes:
        if node.name not in taken and _is_move(node, module):
            shuffle = _longest(node, module, nodes)
            if shuffle is not None:
                found.append(shuffle)
                taken.update(shuffle.nodes)
    return tuple(found)


def _longest(first: fx.Node, module: fx.GraphModule, nodes: dict[str, NodeIds]) -> Shuffle | None:
    x = first.args[0]
    run = _run_from(first, module)
    for length in range(len(run), 0, -1):
        chain = run[:length]
        if _shape(chain[-1], nodes) != _shape(x, nodes) or not any(op_name(n, module) in _REORDERS for n in chain):
            continue
        between = _between(chain)
        if not _is_closed(chain, between, module, nodes):
            continue
        permutation = _Movement(module, x, chain, nodes).permutation()
        if permutation is not None:
            names = tuple(node.name for node in chain)
            return Shuffle(x.name, names, frozenset(node.name for node in between), *permutation)
    return None


def _is_move(node: fx.Node, module: fx.GraphModule) -> bool:
    calls = node.op in ("call_function", "call_method", "call_module")
    return calls and bool(node.args) and isinstance(node.args[0], fx.Node) and op_name(node, module) in _MOVES


def _run_from(node: fx.Node, module: fx.GraphModule) -> list[fx.Node]:
    run = [node]
    while True:
        following = [user for user in run[-1].users if _is_move(user, module) and user.args[0] is run[-1]]
        if len(following) != 1:
            return run
        run.append(following[0])


def _shape(node: Any, nodes: dict[str, NodeIds]) -> tuple[int, ...] | None:
    known = nodes.get(node.name)
    return known.single.shape if known is not None and known.single is not None else None


def _between(chain: list[fx.Node]) -> list[fx.Node]:
    """What depends on the inner values of a chain: they, and sizes read from them."""
    inside, stack = [], list(chain[:-1])
    while stack:
        node = stack.pop()
        if node is not chain[-1] and node not in inside:
            inside.append(node)
            stack.extend(node.users)
    return inside


def _is_closed(chain: list[fx.Node], between: list[fx.Node], module: fx.GraphModule, nodes: dict[str, NodeIds]) -> bool:
    """Nobody else sees the inner values but for their sizes, and nothing is changed in place while the chain runs."""
    for node in between:
        is_size = node.name in nodes and not nodes[node.name].tensors
        if node not in chain and (not is_size or has_effect(node, module)):
            return False
    node = chain[0]
    while node is not chain[-1]:
        if has_effect(node, module):
            return False
        node = node.next
    return True


class _Movement:
    """A chain as a function of its input alone; sizes that it takes from elsewhere are tried both ways."""

    def __init__(self, module: fx.GraphModule, x: fx.Node, chain: list[fx.Node], nodes: dict[str, NodeIds]) -> None:
        self.module, self.x, self.chain, self.nodes = module, x, chain, nodes
        self.shape = _shape(x, nodes) or ()

    def permutation(self) -> tuple[int, tuple[int, ...]] | None:
        """(axis, order) if the chain gives x.index_select(axis, order) at any size of the other axes."""
        numbered = _numbered(self.shape)
        moved = self._moved(numbered, self.shape)
        found = _permutation(numbered, moved) if moved is not None else None
        if found is None:
            return None
        axis, order = found
        for shape in _other_shapes(self.shape, axis):
            numbered = _numbered(shape)
            expected = numbered.index_select(axis, torch.tensor(order))
            for elsewhere in (self.shape, shape):
                moved = self._moved(numbered, elsewhere)
                if moved is not None and not torch.equal(moved, expected):
                    return None
        return found

    def _moved(self, numbered: torch.Tensor, elsewhere: tuple[int, ...]) -> torch.Tensor | None:
        """What the chain makes of it, or None where it refuses this size."""
        known: dict[fx.Node, Any] = {self.x: numbered}
        try:
            for node in self.chain:
                known[node] = self._call(node, known, elsewhere)
        except Exception:  # whatever a user's sizes do to a view
            return None
        return known[self.chain[-1]]

    def _call(self, node: fx.Node, known: dict[fx.Node, Any], elsewhere: tuple[int, ...]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._value(n, known, elsewhere))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_module":
            return self.module.get_submodule(str(node.target))(*args, **kwargs)
        return node.target(*args, **kwargs)

    def _value(self, node: fx.Node, known: dict[fx.Node, Any], elsewhere: tuple[int, ...]) -> Any:
        if node not in known:
            shape = _shape(node, self.nodes)
            if shape is not None:
                known[node] = torch.empty(self._followed(shape, elsewhere), device="meta")
            elif op_name(node, self.module) in _SIZES:
                known[node] = self._call(node, known, elsewhere)
            else:
                raise LookupError(f"{node.name} is neither a tensor nor a size")
        return known[node]

    def _followed(self, shape: tuple[int, ...], elsewhere: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of another value, where its axes go along with equally long ones of the chain's input."""
        now = list(shape)
        for axis, (before, after) in enumerate(zip(self.shape, elsewhere, strict=True)):
            if axis < len(now) and now[axis] == before:
                now[axis] = after
        return tuple(now)


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


def _other_shapes(shape: tuple[int, ...], axis: int) -> Iterator[tuple[int, ...]]:
    """Every other axis one longer, or twice as long (a view may swallow that silently); then all of them."""
    others = [a for a in range(len(shape)) if a != axis]
    for changed in (*([a] for a in others), others):
        yield tuple(size + 1 if a in changed else size for a, size in enumerate(shape))
        yield tuple(size * 2 if a in changed else size for a, size in enumerate(shape))


def _permutation(before: torch.Tensor, after: torch.Tensor) -> tuple[int, tuple[int, ...]] | None:
    """(axis, order) if `after` is `before` with one axis reordered, and not the same."""
    if before.shape != after.shape or before.numel() == 0:  # an empty one has no order
        return None
    for axis, size in enumerate(before.shape):
        line = after.movedim(axis, 0).reshape(size, -1)[:, 0]
        order = (line // before.stride(axis) % size).tolist()
        in_order = list(range(size))
        if order != in_order and sorted(order) == in_order:
            same = torch.equal(before.index_select(axis, torch.tensor(order)), after)
            return (axis, tuple(order)) if same else None
    return None
