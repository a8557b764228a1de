"""Analysis: a cost that is looked up layer by layer, as measured, instead of counted.

The cost of a layer is a surface over its numbers of living input and output channels: not a polynomial, and not even
rising everywhere (32 channels can be faster than 31). Its value is exact; its gradient is a slope along the counts that
are worth stopping at, and never negative: what a channel costs on the way from half as many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import sympy
import torch
from torch import Tensor

from tgfx.ir.facts import ChannelMap, LayerCall
from tgfx.ir.layer_shape import LayerShape
from tgfx.passes.couple import Group
from tgfx.passes.liveness import ALWAYS, NEVER, Condition

if TYPE_CHECKING:
    from tgfx.passes.cost import CostModel


class CostSurface(Protocol):
    """Cost over numbers of input and output channels, for arrays of them."""

    def value(self, channels_in: np.ndarray, channels_out: np.ndarray) -> np.ndarray: ...
    def slopes(self, channels_in: np.ndarray, channels_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


class CostTable(Protocol):
    """A surface for every layer shape."""

    @property
    def digest(self) -> str: ...
    def surface(self, shape: LayerShape) -> CostSurface: ...


@dataclass(frozen=True)
class Lookup:
    """One layer call; ins, outs, rows and condition are axes (or conditions) of the cost model."""

    surface: CostSurface
    ins: int
    outs: int
    rows: int | None
    row_count: int
    condition: int | None
    origin: str


class LookupCost:
    """Sum of all lookups times a scale, and a constant for what is no layer."""

    def __init__(
        self,
        lookups: Iterable[Lookup],
        table: CostTable,
        cost: CostModel,
        scale: float = 1.0,
        constant: float = 0.0,
    ) -> None:
        self.lookups = tuple(lookups)
        self.table = table
        self.scale, self.constant = scale, constant
        self._cost = cost

    def in_model(self, scale: float, constant: float) -> LookupCost:
        return LookupCost(self.lookups, self.table, self._cost, scale, constant)

    def evaluate(self, living: Tensor, gone: frozenset[str] = frozenset()) -> Tensor:
        """`living`: as of CostModel.living; `gone`: nodes that dead branches take along."""
        return _LookedUp.apply(living, self, gone)  # type: ignore[no-untyped-call]

    def at(self, living: np.ndarray, gone: frozenset[str], slopes: bool) -> tuple[float, np.ndarray]:
        """The cost, and its slope by each entry of `living` (zeros where nobody asks for slopes)."""
        total, slope = 0.0, np.zeros_like(living)
        for surface, members in self._by_surface:
            lookups = [one for one in members if one.origin not in gone]
            if not lookups:
                continue
            ins, outs = (np.array([getattr(one, name) for one in lookups]) for name in ("ins", "outs"))
            rows = np.array([1.0 if one.rows is None else living[one.rows] / one.row_count for one in lookups])
            there = np.array([1.0 if one.condition is None else living[one.condition] for one in lookups])
            values = surface.value(living[ins], living[outs])
            total += float((values * rows * there).sum())
            if not slopes:
                continue
            by_in, by_out = surface.slopes(living[ins], living[outs])
            np.add.at(slope, ins, by_in * rows * there)
            np.add.at(slope, outs, by_out * rows * there)
            for index, one in enumerate(lookups):
                if one.rows is not None:
                    slope[one.rows] += values[index] * there[index] / one.row_count
                if one.condition is not None:
                    slope[one.condition] += values[index] * rows[index]
        return self.scale * total + self.constant, self.scale * slope

    @cached_property
    def _by_surface(self) -> list[tuple[CostSurface, list[Lookup]]]:
        found: dict[int, tuple[CostSurface, list[Lookup]]] = {}
        for one in self.lookups:
            found.setdefault(id(one.surface), (one.surface, []))[1].append(one)
        return list(found.values())

    def along(self, group: Group) -> np.ndarray:
        """Cost of the layers that a group touches with 0, 1, ... of its gates open, all other gates open."""
        counts = np.arange(group.size + 1)
        total = np.zeros(group.size + 1)
        for one in self.lookups:
            axes = {one.ins, one.outs} | ({one.rows} if one.rows is not None else set())
            if any(self._cost.touches(axis, group) for axis in axes):
                rows = self._living(one.rows, group, counts) / one.row_count if one.rows is not None else 1.0
                ins, outs = (self._living(axis, group, counts) for axis in (one.ins, one.outs))
                total += one.surface.value(ins, outs) * rows
        return total

    def _living(self, axis: int, group: Group, counts: np.ndarray) -> np.ndarray:
        """Living positions of an axis with the first 0, 1, ... gates of the group open."""
        return np.searchsorted(self._cost.opens_at(axis, group), counts, side="right").astype(np.float64)

    def expression(self, sums: list[sympy.Expr]) -> sympy.Expr:
        parts: list[sympy.Expr] = []
        for one in self.lookups:
            part = sympy.Function(f"ms[{one.origin}]")(sums[one.ins], sums[one.outs])
            if one.rows is not None:
                part = part * sums[one.rows] / one.row_count
            parts.append(part if one.condition is None else part * sums[one.condition])
        return sympy.Float(self.scale) * sympy.Add(*parts) + sympy.Float(self.constant)


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, living: Tensor, cost: LookupCost, gone: frozenset[str]) -> Tensor:
        total, slope = cost.at(living.detach().cpu().numpy(), gone, slopes=ctx.needs_input_grad[0])
        ctx.save_for_backward(torch.from_numpy(slope).to(living))
        return torch.tensor(total, dtype=torch.float64, device=living.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return upstream * slope, None, None


def build_lookup_cost(
    cost: CostModel, channels: ChannelMap, needed: dict[str, Condition], table: CostTable
) -> LookupCost:
    """`needed`: when a node is there, as in build_cost."""
    return LookupCost([_lookup(cost, call, needed.get(call.node), table) for call in channels.layers], table, cost)


def _lookup(cost: CostModel, call: LayerCall, when: Condition | None, table: CostTable) -> Lookup:
    def axis(ids: Tensor) -> int:
        slots = cost.coupling.slots_of(ids.numpy())
        return cost.axis(np.unique(slots, axis=0) if len(slots) > 1 else slots)

    condition = None if when in (None, ALWAYS, NEVER) else cost.condition(when)  # type: ignore[arg-type]
    rows = None if call.rows is None else axis(call.rows)
    return Lookup(
        table.surface(call.shape),
        axis(call.ins),
        axis(call.outs),
        rows,
        call.shape.batch,
        condition,
        call.node,
    )


__all__ = ["CostSurface", "CostTable", "Lookup", "LookupCost", "build_lookup_cost"]
