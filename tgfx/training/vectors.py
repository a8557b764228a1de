"""All gates of a model as one vector, in the order of the bank; also where a gate is sharded over ranks (DTensor)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tgfx.sharding import like, whole

if TYPE_CHECKING:
    from tgfx.gated import GatedModule


def gate_weights(gated: GatedModule) -> Tensor:
    """Latent weights, copied."""
    return torch.cat([whole(gate.weight.detach()).reshape(-1) for gate in gated.gates.values()]).clone()


def gate_gradients(gated: GatedModule) -> Tensor | None:
    """Gradients of the latent weights; None if no gate has one. A gate without a gradient counts as 0."""
    weights = [gate.weight for gate in gated.gates.values()]
    if all(weight.grad is None for weight in weights):
        return None
    return torch.cat([whole(w.detach() * 0 if w.grad is None else w.grad).reshape(-1) for w in weights]).clone()


@torch.no_grad()
def set_gate_weights_(gated: GatedModule, values: Tensor) -> None:
    """Write latent weights back, each to its gate."""
    start = 0
    for gate in gated.gates.values():
        size = gate.weight.numel()
        own = values[start : start + size].to(gate.weight.dtype).reshape(gate.weight.shape)
        gate.weight.copy_(like(own, gate.weight))
        start += size
