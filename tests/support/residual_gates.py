"""Gates of residual nets set at random, and every promise of a cut looked at."""

from __future__ import annotations

import torch
from torch import nn

import tgfx
from tests.support import promises
from tests.support.residual_models import ResidualCase


def set_gates(gated: tgfx.GatedModule, seed: int, density: float = 0.5) -> None:
    """Branches and channels at random; one channel of every group stays."""
    generator = torch.Generator().manual_seed(seed)
    for group in gated.facts.coupling.groups:
        gate = gated.gates[group.name]
        mask = torch.rand(gate.weight.shape, generator=generator) < density
        if group.kind == "channel":
            mask[int(torch.randint(group.size, (), generator=generator))] = True
        gate.set_open_(mask)


def check_cut(case: ResidualCase, gated: tgfx.GatedModule) -> nn.Module:
    compact = tgfx.shrink(gated.eval()).eval()
    promises.exact_cut(case, gated, compact)
    promises.exact_price(case, gated, compact)
    promises.price_as_polynomial(gated)
    promises.only_torch_modules(compact)
    return compact
