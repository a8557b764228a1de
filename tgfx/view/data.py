"""Everything a page knows, as one JSON value. The page only draws it.

{
  "format": 1, "name", "front_end", "tgfx", "weights": whether single weights are gated and not channels,
  "nodes":  [{name, path, module, op, kind, detail, line, inputs, shape, flops, params, uncounted, groups, closed_box}],
  "modules": {path: class name},
  "groups": [{name, kind, size, op, members: [{name, axis, nodes}], ties: [{reason, at, op, line, node}], frozen}],
  "totals": {kind: all gates open}, "budget": {kind: share}, "cost": {kind: {terms, left_out}},
  "now":    {step, totals: {kind: number}, groups: [{open, mask | shares, latent, marginal}],
             nodes: {shape: [], flops: [], params: [], uncounted: [], gone: [indices]}},
  "history": {columns, phase, groups, kept: {step, open}} or null, "comparison": {...} or null, "live": false
}

Indices are positions in "nodes" and "groups"; the groups with gates come first. "now" is what changes in training: the
live view replaces it, and the history, by newer ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from tgfx._version import __version__
from tgfx.budget import Budget
from tgfx.training.fit import FitResult
from tgfx.training.history import History
from tgfx.view.comparison import comparison
from tgfx.view.groups import groups_now, reason, static_groups
from tgfx.view.history import history_data
from tgfx.view.nodes import static_nodes
from tgfx.view.places import module_types
from tgfx.view.polynomial import polynomial
from tgfx.view.prices import prices
from tgfx.view.shapes import Shape, shapes_before, shapes_now
from tgfx.view.subject import Subject, subject_of

FORMAT = 1


def page_data(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    compact: nn.Module | None = None,
    history: FitResult | History | None = None,
    budget: Mapping[str, float] | None = None,
    live: bool = False,
) -> dict[str, Any]:
    """The JSON value of a page about a model, gated or not."""
    subject = subject_of(model, example_inputs)
    shapes = shapes_before(subject)
    past = history_data(history)
    return {
        "format": FORMAT,
        "name": subject.name,
        "tgfx": __version__,
        "front_end": subject.source.front_end,
        "weights": subject.coupling is None,
        "nodes": static_nodes(subject, shapes),
        "modules": module_types(subject.nodes, subject.source.module),
        "groups": static_groups(subject),
        "refusals": [reason(refusal) for refusal in subject.source.refusals],
        "totals": {kind: subject.cost.total(kind) for kind in subject.kinds},
        "budget": _budget(subject, budget, past),
        "cost": {kind: polynomial(subject, kind) for kind in ("flops", "params")},
        "now": now_data(subject, shapes),
        "history": past,
        "comparison": comparison(subject, compact, shapes),
        "live": live,
    }


@torch.no_grad()
def now_data(subject: Subject, shapes: list[Shape], step: int | None = None) -> dict[str, Any]:
    """What the gates decide at this moment, at values of exactly 0 or 1."""
    opened = subject.open_slots() if subject.coupling is not None else np.zeros(0, dtype=bool)
    gone = subject.gone(opened)
    now = prices(subject, opened, gone)
    gates_gone = [i for i, node in enumerate(subject.nodes) if node.name in gone]
    return {
        "step": step,
        "totals": _totals(subject, opened, gone),
        "groups": groups_now(subject, opened),
        "nodes": {"shape": shapes_now(subject, shapes, subject.survivors(opened)), **now, "gone": gates_gone},
    }


def _totals(subject: Subject, opened: np.ndarray, gone: frozenset[str]) -> dict[str, float]:
    if subject.coupling is None:
        assert subject.gated is not None
        return {kind: float(subject.gated.cost(kind)) for kind in subject.kinds}
    bank = subject.bank(opened)
    return {kind: float(subject.cost.evaluate(kind, bank, gone)) for kind in subject.kinds}  # type: ignore[union-attr]


def _budget(subject: Subject, budget: Mapping[str, float] | None, past: dict[str, Any] | None) -> dict[str, float]:
    """As given, or of the controller at work, or what the history was aiming at in the end."""
    if budget is not None:
        return dict(Budget.of(budget))
    controller = subject.gated.controller if subject.gated is not None else None
    if controller is not None:
        return dict(controller.budget)
    aims = {name.removeprefix("target_"): c for name, c in (past or {"columns": {}})["columns"].items()}
    return {kind: column[-1] for kind, column in aims.items() if kind in subject.kinds and column and column[-1]}
