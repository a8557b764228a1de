"""Gates of residual nets set at random, and every promise of a cut looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tests.support.residual_models import ResidualCase, trained_once


def open_gates_change_nothing(case: ResidualCase, granularity: Any) -> tuple[tgfx.GatedModule, dict[str, Tensor]]:
    """The same answers, loss and gradients; gives the gated model and its gradients."""
    model = case.build().eval()
    gated = tgfx.transform(model, case.example(), granularity=granularity)
    promises.identical_in_eval(case, model, gated)
    loss, gradients = trained_once(model, case.example(3))
    found, own = trained_once(gated, case.example(3))
    promises.assert_close(found, loss, promises.TRAINED, "loss")
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert float((own[name] - gradient).abs().max()) <= promises.TRAINED * scale, name
    return gated, own


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
