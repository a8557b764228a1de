"""Gates over whole branches: what of the graph each of them switches off."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tgfx.ir.refusal import Refusal


@dataclass(frozen=True, order=True)
class Edge:
    """One operand of an addition: closed, it counts as zero and the sum is its other operand."""

    node: str
    position: int


@dataclass(frozen=True)
class Branch:
    """What one gate switches.

    edges: where its value is added, in the eval graph (and in the train-mode graph, where there is one); parameters:
    those that only this branch uses; place: the addition, for people.
    """

    edges: tuple[Edge, ...]
    parameters: tuple[str, ...]
    place: Refusal
    training_edges: tuple[Edge, ...] = ()


@dataclass(frozen=True)
class SwitchGroup:
    """Branches under one gate vector: a single residual one ("layer"), or the alternatives of a Choice ("choice")."""

    name: str
    kind: str
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Switches:
    """Which slot of the gate bank switches which operand; `one_of`: slots of which exactly one is open."""

    edges: dict[Edge, int] = field(default_factory=dict)
    training_edges: dict[Edge, int] = field(default_factory=dict)
    one_of: tuple[tuple[int, ...], ...] = ()

    def closed(self, opened: np.ndarray) -> frozenset[Edge]:
        """Operands that count as zero when only these slots are open."""
        return frozenset(edge for edge, slot in self.edges.items() if not opened[slot])
