"""All gates of a model as one vector, in the order of the bank; also where a gate is sharded over ranks (DTensor)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tgfx.choice_gate import ChoiceGate
from tgfx.sharding import like, whole

if TYPE_CHECKING:
    from tgfx.bank import Gate
    from tgfx.gated import GatedModule

FLAT = 1e-6  # slope of a gate below which its gradient tells nothing


def gate_weights(gated: GatedModule) -> Tensor:
    """Latent weights, copied, one for each slot of the bank; -1, closed, where compact_ has removed the gate."""
    return _spread(gated, {name: gate.weight.detach() for name, gate in gated.gates.items()}, -1.0)


def gate_gradients(gated: GatedModule) -> Tensor | None:
    """Derivatives of the loss by what the gates give; None if no gate has one. A slot without one counts as 0.

    The gradient of a latent weight is that times the gate's own slope, which differs from gate to gate unless its shape
    is constant. Of choices, whose slope mixes alternatives, the gradient itself.
    """
    found = {name: gate.weight.grad for name, gate in gated.gates.items() if gate.weight.grad is not None}
    return spread_gradients(gated, found) if found else None


def spread_gradients(gated: GatedModule, found: dict[str, Tensor]) -> Tensor:
    """Gradients of latent weights, by group, as derivatives by what the gates give."""
    return _spread(gated, {name: _by_value(gated.gates[name], gradient) for name, gradient in found.items()}, 0.0)


def _by_value(gate: Gate, gradient: Tensor) -> Tensor:
    gradient = whole(gradient)
    slope = None if isinstance(gate, ChoiceGate) else gate.settings.slope(whole(gate.weight))
    if slope is None:
        return gradient
    return torch.where(slope.abs() > FLAT, gradient / slope, torch.zeros_like(gradient))


@torch.no_grad()
def set_gate_weights_(gated: GatedModule, values: Tensor, *, choices: bool = False) -> None:
    """Write latent weights back, each to its gate; to those of choices only if asked, never to gates that are held."""
    for name, gate in _gates(gated, choices=choices).items():
        if gate.weight.requires_grad:
            own = (
                values[_slots(gated, name, gate.weight.numel()).to(values.device)]
                .to(gate.weight.dtype)
                .reshape(gate.weight.shape)
            )
            gate.weight.copy_(like(own, gate.weight))


def drop_gate_gradients_(gated: GatedModule, *, choices: bool = False) -> None:
    """An optimizer leaves alone what has no gradient; those of choices go only if asked."""
    for gate in _gates(gated, choices=choices).values():
        gate.weight.grad = None


def movable(gated: GatedModule) -> Tensor:
    """Slots whose gates open and close one by one: not those of choices, held ones, or what compact_ has removed."""
    free = torch.zeros(gated.facts.coupling.slots, dtype=torch.bool)
    gates = gated.gates
    for group in gated.facts.coupling.groups:
        if group.kind != "choice" and group.name in gates and gates[group.name].weight.requires_grad:
            free[_slots(gated, group.name, gates[group.name].weight.numel())] = True
    return free


def held_slots(gated: GatedModule) -> Tensor:
    """Slots of gates that stay as they are, since the user has set requires_grad_(False) on their weights."""
    held = torch.zeros(gated.facts.coupling.slots, dtype=torch.bool)
    for name, gate in gated.gates.items():
        if not gate.weight.requires_grad:
            held[_slots(gated, name, gate.weight.numel())] = True
    return held


def _gates(gated: GatedModule, *, choices: bool) -> dict[str, Gate]:
    others = set() if choices else {group.name for group in gated.facts.coupling.groups if group.kind == "choice"}
    return {name: gate for name, gate in gated.gates.items() if name not in others}


def _spread(gated: GatedModule, values: dict[str, Tensor], empty: float) -> Tensor:
    first = next(iter(gated.gates.values())).weight
    spread = torch.full((gated.facts.coupling.slots,), empty, dtype=first.dtype, device=first.device)
    for name, value in values.items():
        spread[_slots(gated, name, value.numel()).to(first.device)] = whole(value).reshape(-1)
    return spread


def _slots(gated: GatedModule, name: str, size: int) -> Tensor:
    """Looked up once: only a compaction, which changes the number of gates, moves them."""
    known = gated.__dict__.setdefault("_slots_of_gates", {})
    if name not in known or len(known[name]) != size:
        known[name] = torch.from_numpy(gated.gate_slots(name))
    return known[name]
