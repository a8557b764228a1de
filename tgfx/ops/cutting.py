"""What the rules for cutting a node (tgfx.ops.resize) are given, and what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import fx


class Cut(Protocol):
    """What is known about the cut while a node is rewritten."""

    graph: fx.Graph

    def before(self, node: fx.Node, index: int = 0) -> tuple[int, ...]: ...
    def kept(self, node: fx.Node, axis: int, index: int = 0) -> list[int] | None: ...
    def repeats(self, node: fx.Node, axis: int) -> bool: ...
    def seen(self, node: fx.Node) -> tuple[tuple, dict]: ...
    def groups(self, node: fx.Node, before: int) -> int: ...
    def constant(self, indices: list[int]) -> fx.Node: ...


Rule = Callable[[Cut, fx.Node, fx.Node], Any]


def size_after(cut: Cut, node: fx.Node, axis: int, index: int = 0) -> int:
    kept = cut.kept(node, axis, index)
    return cut.before(node, index)[axis] if kept is None else len(kept)


def is_single_tensor(cut: Cut, node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    try:
        cut.before(node)
    except (IndexError, KeyError):
        return False
    return cut.is_tensor(node)  # type: ignore[attr-defined]
