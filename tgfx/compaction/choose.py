"""Which channels go: those that have been closed for long enough, but never what the model cannot do without."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tgfx.bank import GONE
from tgfx.gated import GatedModule
from tgfx.passes.couple import Group
from tgfx.passes.dead_branches import DeadBranches, dead_branches
from tgfx.passes.survivors import Survivors


@dataclass(frozen=True)
class Choice:
    """record: the bank's new record; going: slots to remove now; survivors and dead: what a cut needs to know."""

    record: np.ndarray
    going: np.ndarray
    survivors: Survivors
    dead: DeadBranches


def choose(gated: GatedModule, patience: int) -> Choice:
    """A slot goes if it is closed now and was so at the last `patience` compactions."""
    facts = gated.facts
    before = gated.bank.recorded()
    if before is None:
        before = np.zeros(facts.coupling.slots, dtype=np.int64)
    present = before != GONE
    # a closed branch, or an alternative that is not chosen, stays until shrink: its gate may still open. So do taps:
    # weights with holes in their windows would train no faster
    stays = gated.open_slots() | _lasting(gated)
    record = np.where(present, np.where(stays, 0, before + 1), GONE)
    alive = present & ((record <= patience) | _spares(gated))
    dead = _keep_what_must_stay(gated, present, alive)
    record[~alive] = GONE
    return Choice(record, present & ~alive, _survivors(gated, alive), dead)


def _spares(gated: GatedModule) -> np.ndarray:
    """Closed slots that whoever moves the gates may still need to land on its budget."""
    controller = gated.controller
    if controller is None or controller.closed:
        return np.zeros(gated.facts.coupling.slots, dtype=bool)
    return controller.spares().numpy()


def choice_of(gated: GatedModule, record: np.ndarray) -> Choice:
    """The compaction that led to this record."""
    before = gated.bank.recorded()
    present = np.ones(len(record), dtype=bool) if before is None else before != GONE
    alive = record != GONE
    return Choice(record, present & ~alive, _survivors(gated, alive), _dead(gated, alive))


def _keep_what_must_stay(gated: GatedModule, present: np.ndarray, alive: np.ndarray) -> DeadBranches:
    """Groups that would lose their last channel keep the best one (in `alive`), unless their branch can go whole."""
    emptied = [g for g in gated.facts.coupling.groups if _own(present, g).any() and not _own(alive, g).any()]
    if emptied and not alive.any():
        _revive_best(gated, emptied.pop(0), alive)  # a gated model has a gate
    dead = _dead(gated, alive)
    if dead.stuck is None:
        return dead
    candidates = emptied
    for group in emptied:
        _revive_best(gated, group, alive)
    while True:  # a branch may be able to go only after another one went
        accepted = []
        for group in candidates:
            trial = alive.copy()
            _own(trial, group)[:] = False
            if trial.any() and _dead(gated, trial).stuck is None:
                alive[:] = trial
                accepted.append(group)
        if not accepted:
            return _dead(gated, alive)
        candidates = [group for group in candidates if group not in accepted]


def _revive_best(gated: GatedModule, group: Group, alive: np.ndarray) -> None:
    weight = gated.gates[group.name].weight.detach().cpu()
    alive[gated.gate_slots(group.name)[int(weight.argmax())]] = True


def _dead(gated: GatedModule, alive: np.ndarray) -> DeadBranches:
    facts = gated.facts
    if all(_own(alive, group).any() for group in facts.coupling.groups):
        return DeadBranches()
    return dead_branches(facts.source, facts.channels, _survivors(gated, alive))


def _lasting(gated: GatedModule) -> np.ndarray:
    """Slots that no compaction removes."""
    slots = np.zeros(gated.facts.coupling.slots, dtype=bool)
    for group in gated.facts.coupling.groups:
        if group.can_be_empty:
            _own(slots, group)[:] = True
    return slots


def _survivors(gated: GatedModule, alive: np.ndarray) -> Survivors:
    return Survivors(gated.facts.channels, gated.facts.coupling, alive)


def _own(slots: np.ndarray, group: Group) -> np.ndarray:
    return slots[group.start : group.start + group.size]
