"""granularity="weight": G5, G7 and training."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import tgfx
from tests.support.weight_models import (
    close_at_random,
    each_model,
    made,
)
from tgfx.errors import InputError

# -- G5, G7, training -----------------------------------------------------------------------------------------


def test_the_input_is_untouched() -> None:
    model, _, x = made("convolutions")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    gated = tgfx.transform(model, x, granularity="weight", gate=tgfx.GateSpec(init="random"))
    close_at_random(gated, 0.5)
    latents = {n: g.weight.clone() for n, g in gated.gates.items()}
    sparse = tgfx.shrink(gated)
    with torch.no_grad():
        for parameter in sparse.parameters():
            parameter.add_(1)
    assert all(torch.equal(g.weight, latents[n]) for n, g in gated.gates.items())
    with torch.no_grad():
        for parameter in gated.parameters():
            parameter.add_(1)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@each_model
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(name: str, clone) -> None:
    _, gated, x = made(name)
    close_at_random(gated, 0.5)
    (gated.train()(x).sum() + gated.budget_loss(params=0.5)).backward()  # a copy may be taken in the middle of training
    twin = clone(gated)
    assert isinstance(twin, tgfx.GatedModule) and type(twin).__mro__[1] is type(gated).__mro__[1]
    with torch.no_grad():
        assert torch.equal(twin.eval()(x), gated.eval()(x))
    assert list(twin.state_dict()) == list(gated.state_dict())
    assert float(twin.cost("flops")) == float(gated.cost("flops"))
    assert str(twin.report()) == str(gated.report())
    sparse = clone(tgfx.shrink(twin))
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), gated(x), rtol=1e-13, atol=1e-14)
        next(iter(twin.gates.values())).weight.fill_(-1)
        assert not torch.equal(twin(x), gated(x))
    other = made(name)[1].eval()
    other.load_state_dict(gated.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x), gated(x))


@pytest.mark.parametrize("kind", ["params", "flops"])
def test_a_budget_is_met(kind: str) -> None:
    _, gated, x = made("convolutions", gate=tgfx.GateSpec(init="magnitude"))
    gated.train()
    optimizer = torch.optim.Adam([gate.weight for gate in gated.gates.values()], lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        (0.01 * gated(x).square().mean() + gated.budget_loss(steps=150, **{kind: 0.4})).backward()
        optimizer.step()
    assert abs(float(gated.eval().ratio(kind)) - 0.4) < 0.01


def test_budget_and_loss_may_be_differentiated_apart() -> None:
    _, gated, x = made("convolutions", gate=tgfx.GateSpec(shape="tanh"))
    close_at_random(gated.train(), 0.5)
    latents = [gate.weight for gate in gated.gates.values()]
    together = torch.autograd.grad(
        gated(x).square().sum() + gated.budget_loss(params=0.3, flops=0.2, weight=1.0), latents
    )
    loss = gated(x).square().sum()
    budget = gated.budget_loss(params=0.3, flops=0.2, weight=1.0)
    loss.backward()
    budget.backward()
    for found, wanted in zip(latents, together, strict=True):
        torch.testing.assert_close(found.grad, wanted, rtol=1e-10, atol=1e-12)
    alone = made("convolutions", gate=tgfx.GateSpec(shape="tanh"))[1].train()
    alone.load_state_dict(gated.state_dict())
    without_forward = alone.budget_loss(params=0.3, flops=0.2, weight=1.0)
    assert float(without_forward.detach()) == float(gated.budget_loss(params=0.3, flops=0.2, weight=1.0).detach())


def test_magnitudes_order_the_gates() -> None:
    model, gated, x = made("convolutions", gate=tgfx.GateSpec(init="magnitude", init_value=2.0))
    for n, p in model.named_parameters():
        if n in gated.gates:
            latent = gated.gates[n].weight
            assert torch.equal(latent.reshape(-1).argsort(stable=True), p.abs().reshape(-1).argsort(stable=True))
            assert bool((latent > 0).all()) and latent.mean().item() == pytest.approx(2.0, rel=1e-2)
    with torch.no_grad():
        torch.testing.assert_close(gated.eval()(x), model(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match="magnitude"):
        tgfx.transform(model, x, gate=tgfx.GateSpec(init="magnitude"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_precisions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype).eval(),
        torch.randn(2, 8, dtype=dtype),
    )
    gated = tgfx.transform(model, x, granularity="weight")
    assert all(gate.weight.dtype == torch.float32 for gate in gated.gates.values())
    with torch.no_grad():
        assert torch.equal(gated.eval()(x), model(x))
    (gated.train()(x).float().square().mean() + gated.budget_loss(params=0.5, weight=1.0)).backward()
    assert all(bool(p.grad.any()) for p in gated.parameters())
    close_at_random(gated.eval(), 0.5)
    with torch.no_grad():
        assert torch.equal(tgfx.shrink(gated)(x), gated(x))
