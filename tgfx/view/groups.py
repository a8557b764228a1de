"""Groups of channels for the page: who is in them, what ties them, what is open."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgfx.bank import GONE
from tgfx.ir.facts import TAPS, WHOLE
from tgfx.ir.refusal import Refusal
from tgfx.passes.couple import Group
from tgfx.view.places import describe_line
from tgfx.view.prices import calls_of_parameters
from tgfx.view.subject import Subject

BINS = 24
CELLS = 1024  # gates drawn one by one; more are drawn as shares of that many cells


def static_groups(subject: Subject) -> list[dict[str, Any]]:
    """What does not change while gates are trained."""
    index = {node.name: i for i, node in enumerate(subject.nodes)}
    calls = {name: [index[node.name] for node in own] for name, own in calls_of_parameters(subject).items()}
    return [_static(group, index, calls) for group in subject.groups]


def _static(group: Group, index: dict[str, int], calls: dict[str, list[int]]) -> dict[str, Any]:
    return {
        "name": group.name,
        "kind": group.kind,
        "size": group.size,
        "op": group.op if group.ties else "",
        "members": [
            {
                "name": m.name,
                "axis": None if m.axis == WHOLE else "taps" if m.axis == TAPS else m.axis,
                "nodes": calls.get(m.name, []),
            }
            for m in group.members
        ],
        "ties": [{**reason(tie), "node": index.get(tie.node, -1)} for tie in group.ties],
        "frozen": None if group.frozen is None else {**reason(group.frozen), "node": index.get(group.frozen.node, -1)},
    }


def reason(refusal: Refusal) -> dict[str, Any]:
    return {
        "reason": refusal.reason,
        "at": refusal.node,
        "op": refusal.op,
        "line": describe_line(refusal.source),
        "limit": refusal.limit,
    }


def groups_now(subject: Subject, opened: np.ndarray) -> list[dict[str, Any]]:
    """What is open. mask: "1" open, "0" closed, "-" removed by compact_; or shares, where there are too many gates."""
    gated = subject.gated
    gates = gated.gates if gated is not None else {}
    marginal = {kind: gated.marginal(kind) for kind in ("flops", "params")} if gated is not None else {}
    found = []
    for group in subject.groups:
        gate = gates.get(group.name)
        if group.frozen is not None or gated is None:
            found.append({"open": group.size})
            continue
        if subject.coupling is None:
            mask = gate.is_open().reshape(-1).cpu().numpy() if gate is not None else np.zeros(group.size, dtype=bool)
            state = mask.astype(np.int8)
        else:
            state = opened[group.start : group.start + group.size].astype(np.int8)
            record = gated.bank.recorded()
            if record is not None:
                state[record[group.start : group.start + group.size] == GONE] = -1
        entry: dict[str, Any] = {"open": int((state == 1).sum()), **_drawn(state)}
        if gate is not None:
            entry["latent"] = _histogram(gate.weight.detach().float().cpu().numpy().reshape(-1))
            entry["marginal"] = {kind: _spread(values[group.name]) for kind, values in marginal.items()}
        found.append(entry)
    return found


def _drawn(state: np.ndarray) -> dict[str, Any]:
    if len(state) <= CELLS:
        return {"mask": "".join("-01"[value + 1] for value in state)}
    parts = np.array_split(state == 1, CELLS)
    return {"shares": [round(float(part.mean()), 3) for part in parts]}


def _histogram(values: np.ndarray) -> dict[str, Any]:
    values = values[np.isfinite(values)]
    if not len(values):
        return {"low": 0.0, "high": 0.0, "counts": []}
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-12:
        return {"low": low, "high": high, "counts": [len(values)]}
    counts, _ = np.histogram(values, bins=BINS, range=(low, high))
    return {"low": low, "high": high, "counts": counts.tolist()}


def _spread(values: Any) -> list[float]:
    """Mean, least and most over the gates of a group."""
    numbers = values.detach().double().reshape(-1)
    if not numbers.numel():
        return [0.0, 0.0, 0.0]
    return [float(numbers.mean()), float(numbers.min()), float(numbers.max())]
