"""Models with gates open at random, and the calls of their layers."""

from __future__ import annotations

import torch

import tgfx
from tests.support.budget_models import BUDGET_MODELS, data


def gated_model(name: str = "plain", seed: int = 0, **options) -> tgfx.GatedModule:
    """Gates with random latent weights, about half of them open."""
    build, shape = BUDGET_MODELS[name]
    torch.manual_seed(seed)
    gated = tgfx.transform(build(), data(shape)[0][:1], **options)
    with torch.no_grad():
        for gate in gated.gates.values():
            gate.weight.copy_(torch.randn_like(gate.weight))
            gate.weight[0].abs_()
    return gated.eval()


def counts(gated: tgfx.GatedModule) -> dict[str, int]:
    return {name: int(gate.is_open().sum()) for name, gate in gated.gates.items()}


def calls(gated: tgfx.GatedModule):
    return gated.facts.channels.layers
