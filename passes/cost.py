"""Analysis: what the model costs, as a function of the gates.

Each convolution or matrix product costs factor * product of (number of living channels on its axes); a parameter
counts the product of its living axes. Numbers of living channels are linear in the gates, so the cost is a polynomial
in them: exact at 0/1, differentiable in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import sympy
import torch
from torch import Tensor

from tgfx.ir.facts import ChannelMap, Work
from tgfx.ops.contraction import with_channels
from tgfx.passes.couple import Coupling, Group
from tgfx.passes.liveness import ALWAYS, NEVER, Condition
from tgfx.passes.lookup_cost import CostTable, LookupCost, build_lookup_cost

KINDS = ("flops", "flops_all", "params", "channels", "heads")  # counted: every model has them
MEASURED = ("latency",)  # looked up in a table, where the model has been given one


@dataclass(frozen=True)
class Term:
    """factor * product of axis sums; `origin` is the node or parameter that it prices."""

    factor: float
    axes: tuple[int, ...]
    origin: str


class CostModel:
    """Evaluates costs for a bank of gate values (the last entry is the constant one); priced when first asked."""

    def __init__(
        self,
        coupling: Coupling,
        channels: ChannelMap,
        params: dict[str, tuple[int, ...]],
        needed: dict[str, Condition],
    ) -> None:
        self.coupling = coupling
        self._unpriced = (channels, params, needed)
        self._axes: list[np.ndarray] = []  # [layers, length] slots, there once `terms` are
        self._known: dict[tuple, int] = {}
        self._conditions: list[Condition] = []
        self.measured: dict[str, LookupCost] = {}

    def measure_by(self, kind: str, table: CostTable) -> LookupCost:
        """Look this kind of cost up in a table from now on."""
        channels, _, needed = self._unpriced
        self.terms  # noqa: B018  (registers its axes first, so that they are the same with and without a table)
        try:
            self.measured[kind] = build_lookup_cost(self, channels, needed, table)
        finally:
            for derived in ("_sums", "_switched"):  # there are more axes now
                self.__dict__.pop(derived, None)
        return self.measured[kind]

    @cached_property
    def terms(self) -> dict[str, list[Term]]:
        return _price(self, *self._unpriced)

    def axis(self, slots: np.ndarray) -> int:
        """Register an axis given by the slots of its positions, one row per layer."""
        if len(slots) == 1:
            slots = np.sort(slots, axis=1)
        key = (slots.shape, slots.tobytes())
        if key not in self._known:
            self._known[key] = len(self._axes)
            self._axes.append(slots)
        return self._known[key]

    def condition(self, when: Condition) -> int:
        """Register something that is there (1) or not (0), by the gates of the branches it lies in."""
        if when not in self._conditions:
            self._conditions.append(when)
        return -1 - self._conditions.index(when)  # counted from the end: behind all axes, however many there will be

    def touches(self, axis: int, group: Group) -> bool:
        slots = self._axes[axis]
        return bool(((slots >= group.start) & (slots < group.start + group.size)).any())

    def opens_at(self, axis: int, group: Group) -> np.ndarray:
        """Per position, sorted: how many gates of the group (the first ones) it needs, all others being open."""
        own = self._axes[axis] - group.start
        return np.sort(np.where((own >= 0) & (own < group.size), own + 1, 0).max(axis=0))

    @cached_property
    def _switched(self) -> Tensor:
        """[conditions, products, slots], last condition first; filled up with the constant one, or an empty sum."""
        one, nothing = self.coupling.slots, self.coupling.slots + 1
        rows = [[sorted(product) for product in sorted(when, key=sorted)] for when in reversed(self._conditions)]
        products = max((len(row) for row in rows), default=0)
        most = max((len(product) for row in rows for product in row), default=0)
        table = np.full((len(rows), products, most), one, dtype=np.int64)
        for index, row in enumerate(rows):
            for position, product in enumerate(row):
                table[index, position, : len(product)] = product
            table[index, len(row) :] = nothing
        return torch.from_numpy(table)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        rows, slots, counts = [], [], []
        several: dict[int, list[tuple[int, np.ndarray]]] = {}  # axes with that many layers
        self.terms  # noqa: B018  (registers the axes)
        for index, axis in enumerate(self._axes):
            if len(axis) == 1:
                unique, count = np.unique(axis[0], return_counts=True)
                rows.append(np.full(len(unique), index))
                slots.append(unique)
                counts.append(count)
            else:
                several.setdefault(len(axis), []).append((index, axis))
        products = [
            (
                torch.from_numpy(np.repeat([index for index, _ in own], [axis.shape[1] for _, axis in own])),
                torch.from_numpy(np.concatenate([axis for _, axis in own], axis=1)),
            )
            for own in several.values()
        ]
        if not rows:
            empty = torch.zeros(0, dtype=torch.int64)
            return empty, empty, torch.zeros(0, dtype=torch.float64), products
        return (
            torch.from_numpy(np.concatenate(rows)),
            torch.from_numpy(np.concatenate(slots)),
            torch.from_numpy(np.concatenate(counts)).double(),
            products,
        )

    @cached_property
    def _packed(self) -> dict[str, dict[int, tuple[Tensor, Tensor]]]:
        packed: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
        for kind, terms in self.terms.items():
            by_arity: dict[int, list[Term]] = {}
            for term in terms:
                by_arity.setdefault(len(term.axes), []).append(term)
            packed[kind] = {
                arity: (
                    torch.tensor([t.factor for t in own], dtype=torch.float64),
                    torch.tensor([t.axes for t in own], dtype=torch.int64).reshape(len(own), arity),
                )
                for arity, own in by_arity.items()
            }
        return packed

    def living(self, bank: Tensor) -> Tensor:
        """Number of living channels on every registered axis, then 1 or 0 for every condition."""
        rows, slots, counts, products = self._sums
        bank = bank.double()
        sums = torch.zeros(len(self._axes), dtype=torch.float64, device=bank.device)
        sums = sums.index_add(0, rows.to(bank.device), bank[slots.to(bank.device)] * counts.to(bank.device))
        for indices, layers in products:
            sums = sums.index_add(0, indices.to(bank.device), bank[layers.to(bank.device)].prod(0))
        if not self._conditions:
            return sums
        filled = torch.cat([bank, bank.new_zeros(1)])
        absent = 1 - filled[self._switched.to(bank.device)].prod(2)
        return torch.cat([sums, 1 - absent.prod(1)])

    def evaluate(self, kind: str, bank: Tensor, gone: frozenset[str] = frozenset()) -> Tensor:
        """`gone`: nodes and parameters that dead branches take along; they cost nothing."""
        living = self.living(bank)
        if kind in self.measured:
            return self.measured[kind].evaluate(living, gone)
        total = torch.zeros((), dtype=torch.float64, device=bank.device)
        for arity, (factor, axes) in self._packed[kind].items():
            if gone:
                own = [t.origin not in gone for t in self.terms[kind] if len(t.axes) == arity]
                factor = factor * torch.tensor(own, dtype=torch.float64)
            total = total + (factor.to(bank.device) * living[axes.to(bank.device)].prod(1)).sum()
        return total

    def by_origin(self, kind: str, bank: Tensor, gone: frozenset[str] = frozenset()) -> dict[str, float]:
        """The same, node by node or parameter by parameter."""
        terms, living = self.terms[kind], self.living(bank)
        found: dict[str, float] = {}
        for term in terms:
            price = term.factor * float(living[list(term.axes)].prod()) if term.axes else term.factor
            found[term.origin] = found.get(term.origin, 0.0) + (0.0 if term.origin in gone else price)
        return found

    def total(self, kind: str) -> float:
        return float(self.evaluate(kind, torch.ones(self.coupling.slots + 1, dtype=torch.float64)))

    def expression(self, kind: str) -> sympy.Expr:
        """The cost as a polynomial in the numbers of living channels n_<group>."""
        terms = [] if kind in self.measured else self.terms[kind]
        sums = [self._axis_expression(axis) for axis in self._axes]
        sums += [self._condition_expression(when) for when in reversed(self._conditions)]
        if kind in self.measured:
            return self.measured[kind].expression(sums)
        return sympy.Add(*(sympy.Mul(_number(t.factor), *(sums[a] for a in t.axes)) for t in terms))

    def _axis_expression(self, axis: np.ndarray) -> sympy.Expr:
        tap = next((g for g in self.coupling.groups if g.kind == "tap" and (axis == g.start).any()), None)
        if tap is not None:  # those that are open and whose channel lives
            return group_symbol(tap.name)
        if len(axis) > 1:
            return sympy.Symbol(f"n_axis{len(self._known)}_{abs(hash(axis.tobytes())) % 10**6}", nonnegative=True)
        counts = np.bincount(axis[0], minlength=self.coupling.slots + 1)
        parts: list[sympy.Expr] = [sympy.Integer(int(counts[-1]))]
        for group in self.coupling.groups:
            own = counts[group.start : group.start + group.size]
            if not own.any():
                continue
            if (own == own[0]).all():
                parts.append(int(own[0]) * group_symbol(group.name))
            else:  # the group's atoms are not equally wide on this axis: one symbol per atom
                parts.extend(int(c) * sympy.Symbol(f"{group.name}[{i}]") for i, c in enumerate(own) if c)
        return sympy.Add(*parts)

    def _condition_expression(self, when: Condition) -> sympy.Expr:
        products = [sympy.Mul(*(self._slot_symbol(slot) for slot in sorted(p))) for p in sorted(when, key=sorted)]
        return products[0] if len(products) == 1 else 1 - sympy.Mul(*(1 - product for product in products))

    def _slot_symbol(self, slot: int) -> sympy.Symbol:
        group = next(g for g in self.coupling.groups if g.start <= slot < g.start + g.size)
        return group_symbol(group.name) if group.size == 1 else sympy.Symbol(f"{group.name}[{slot - group.start}]")


def group_symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(f"n[{name}]", nonnegative=True)


def _number(value: float) -> sympy.Expr:
    return sympy.Integer(int(value)) if float(value).is_integer() else sympy.Float(value)


def build_cost(
    channels: ChannelMap,
    coupling: Coupling,
    params: dict[str, tuple[int, ...]],
    needed: dict[str, Condition] | None = None,
) -> CostModel:
    """`params`: shape of every parameter that counts, tied ones once; `needed`: when a node or parameter is there."""
    return CostModel(coupling, channels, params, needed or {})


def _price(
    cost: CostModel, channels: ChannelMap, params: dict[str, tuple[int, ...]], needed: dict[str, Condition]
) -> dict[str, list[Term]]:
    coupling = cost.coupling
    terms: dict[str, list[Term]] = {kind: [] for kind in KINDS}
    for work in channels.work:
        term = _while(cost, needed.get(work.node), _work_term(cost, coupling, work, channels.batch))
        terms["flops_all"].append(term)
        if work.counted:
            terms["flops"].append(term)
    for work in channels.heads:
        terms["heads"].append(_work_term(cost, coupling, work, 1))
    for name, shape in params.items():
        factor, axes = 1, []
        ids = channels.params[name]
        taps = channels.taps.get(name)
        if taps is not None:  # all axes but the first count as one
            line = next((layer for layer in ids.on_axis(1)), torch.zeros(shape[1], dtype=torch.int64))
            axes.append(cost.axis(coupling.slots_of(with_channels(taps, line).numpy())))
        for axis, size in enumerate(shape if taps is None else shape[:1]):
            layers = ids.on_axis(axis)
            if layers:
                axes.append(cost.axis(coupling.slots_of(layers[0].numpy().reshape(1, -1))))
            else:
                factor *= size
        when = needed.get(name)
        terms["params"].append(_while(cost, when, _folded(cost, Term(factor, tuple(axes), name))))
        if name in channels.channels:
            slots = coupling.slots_of(channels.channels[name].numpy().reshape(1, -1))
            terms["channels"].append(_while(cost, when, _folded(cost, Term(1, (cost.axis(slots),), name))))
    return terms


def _work_term(cost: CostModel, coupling: Coupling, work: Work, batch: int) -> Term:
    slots = [coupling.slots_of(axis.numpy()) for axis in work.axes]
    axes = tuple(cost.axis(np.unique(own, axis=0) if len(own) > 1 else own) for own in slots)
    return _folded(cost, Term(work.factor / batch, axes, work.node))


def _while(cost: CostModel, when: Condition | None, term: Term) -> Term:
    """A term that is there only while the branches that it lies in are."""
    if when in (None, ALWAYS, NEVER):
        return term
    return replace(term, axes=(*term.axes, cost.condition(when)))


def _folded(cost: CostModel, term: Term) -> Term:
    """Axes that are all constant become part of the factor."""
    factor, axes = term.factor, []
    for index in term.axes:
        slots = cost._axes[index]
        if (slots == cost.coupling.slots).all():
            factor *= slots.shape[1]
        else:
            axes.append(index)
    return Term(factor, tuple(axes), term.origin)
