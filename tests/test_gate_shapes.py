"""The gradient shape of a gate is how its latent weight moves by descent; which gates close does not depend on it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from tests.support.budget_models import BUDGET_MODELS, data
from tgfx.training.controller import latent
from tgfx.training.vectors import gate_gradients


def trained(model: nn.Module, x: torch.Tensor, y: torch.Tensor, shape: object, train: str) -> tgfx.GatedModule:
    torch.manual_seed(0)
    gated = tgfx.transform(copy.deepcopy(model), x[:2], gate=tgfx.GateSpec(M=1e8, shape=shape))  # type: ignore[arg-type]
    loader = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 160, 16)]
    options = {"budget": {"flops": 0.4}, "steps": 60, "lr": 0.02, "progress": False, "seed": 0}
    tgfx.fit(gated, loader, F.cross_entropy, train=train, **options)  # type: ignore[arg-type]
    return gated


@pytest.mark.parametrize("train", ["joint", "gates"])
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_all_shapes_close_the_same_gates(name: str, train: str) -> None:
    build, size = BUDGET_MODELS[name]
    torch.manual_seed(0)
    model = build().double()
    x, y = data(size)
    x = x.double()
    wanted = trained(model, x, y, "constant", train).open_slots()
    assert 0 < wanted.sum() < len(wanted)
    for shape in ("sigmoid", "tanh", lambda w: 1 / (1 + w.square())):
        found = trained(model, x, y, shape, train).open_slots()
        assert (found != wanted).mean() <= 0.02  # s(w)·g(w), at most 1e-8, differs


@pytest.mark.parametrize("shape", ["constant", "sigmoid", "tanh"])
def test_evidence_is_of_what_gates_give(shape: str) -> None:
    build, size = BUDGET_MODELS["mlp"]
    torch.manual_seed(0)
    model = build().double()
    x, y = data(size)
    found = {}
    for own in ("constant", shape):
        gated = tgfx.transform(copy.deepcopy(model), x[:2].double(), gate=tgfx.GateSpec(shape=own)).train()
        with torch.no_grad():
            for gate in gated.gates.values():
                gate.weight.copy_(torch.linspace(0.1, 2, gate.weight.numel()))
        F.cross_entropy(gated(x[:16].double()), y[:16]).backward()
        found[own] = gate_gradients(gated)
    torch.testing.assert_close(found[shape], found["constant"], rtol=1e-3, atol=1e-6)


def test_latent_weights_stay_where_slopes_are() -> None:
    scores = torch.logspace(-6, 6, 101)
    opened = torch.arange(101) >= 40
    weights = latent(scores, opened, near=True)
    assert weights.abs().max() <= 2
    assert torch.equal(weights > 0, opened)
    assert torch.equal(weights[opened].sort().values, weights[opened])
