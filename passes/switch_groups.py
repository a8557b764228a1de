"""Analysis: gates over branches take their places in the gate bank, behind those of channels.

channels | residual branches | alternatives of choices | constant 1
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tgfx.ir.facts import WHOLE, Axis
from tgfx.ir.refusal import Refusal
from tgfx.ir.switches import Edge, Switches, SwitchGroup
from tgfx.passes.couple import Coupling, Group


def add_switches(coupling: Coupling, found: Iterable[SwitchGroup]) -> tuple[Coupling, Switches]:
    """The coupling with groups for these branches, and which slot switches what."""
    groups, slots = list(coupling.groups), coupling.slots
    edges: dict[Edge, int] = {}
    training: dict[Edge, int] = {}
    one_of = []
    names = {group.name for group in coupling.groups}
    for switch in found:
        group = _group(switch, _free(switch, names), slots)
        groups.append(group)
        for slot, branch in enumerate(switch.branches, start=slots):
            edges.update(dict.fromkeys(branch.edges, slot))
            training.update(dict.fromkeys(branch.training_edges, slot))
        if switch.kind == "choice":
            one_of.append(tuple(range(slots, slots + group.size)))
        slots += group.size
    slot_of_id = np.where(coupling.slot_of_id == coupling.slots, slots, coupling.slot_of_id)
    whole = replace(coupling, groups=tuple(groups), slots=slots, slot_of_id=slot_of_id)
    return whole, Switches(edges, training, tuple(one_of))


def without_channels(coupling: Coupling) -> Coupling:
    """No gates over channels: all of them stay, as nobody asked."""
    reason = Refusal("is not gated: the granularity asked for does not include channels")
    kept = tuple(replace(group, frozen=reason, start=-1) for group in coupling.groups)
    slot_of_id = np.zeros_like(coupling.slot_of_id)
    return replace(coupling, groups=(), frozen=(*kept, *coupling.frozen), slots=0, slot_of_id=slot_of_id)


def _group(switch: SwitchGroup, name: str, start: int) -> Group:
    parameters = dict.fromkeys(name for branch in switch.branches for name in branch.parameters)
    members = tuple(Axis("param", parameter, WHOLE) for parameter in parameters)
    ties = tuple(dict.fromkeys(branch.place for branch in switch.branches))
    return Group(name, len(switch.branches), members, ties, None, np.zeros(0, np.int64), start, switch.kind)


def _free(switch: SwitchGroup, taken: set[str]) -> str:
    """A layer that makes channels of its own may be all there is in a branch: the branch is named apart then."""
    name = switch.name if switch.name not in taken else f"{switch.name}#{switch.kind}"
    taken.add(name)
    return name
