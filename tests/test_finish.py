"""finish: lands within the budget, in multiples where asked, and leaves gates alone on an error."""

import numpy as np
import pytest
import torch
from torch import nn

import tgfx
from tests.support.budget_models import BUDGET_MODELS, data
from tgfx.errors import BudgetError, InputError, VerificationError
from tgfx.training import finish as finishing


def gated_model(name: str, seed: int = 0) -> tgfx.GatedModule:
    build, shape = BUDGET_MODELS[name]
    torch.manual_seed(seed)
    gated = tgfx.transform(build(), data(shape)[0][:2])
    with torch.no_grad():
        for gate in gated.gates.values():
            gate.weight.copy_(torch.randn_like(gate.weight))
            gate.weight[0].abs_()
    return gated


def gate_state(gated: tgfx.GatedModule) -> dict[str, torch.Tensor]:
    return {name: gate.weight.detach().clone() for name, gate in gated.gates.items()}


@pytest.mark.parametrize("model", ["plain", "dense", "transformer"])
@pytest.mark.parametrize("budget", [{"flops": 0.3}, {"params": 0.8}, {"flops": 0.5, "params": 0.45}], ids=str)
def test_lands_within_the_budget(model: str, budget: dict[str, float]) -> None:
    """From about half of the gates, at random: some budgets close, others open many."""
    gated = gated_model(model)
    finished = tgfx.finish(gated, budget)
    assert all(finished.ratio(kind) <= share for kind, share in budget.items())
    assert any(finished.ratio(kind) >= share - 0.01 for kind, share in budget.items()), finished
    assert finished.moved > 0
    assert finished.after["params"] == sum(p.numel() for p in finished.model.parameters())
    assert finished.after == {kind: float(gated.eval().cost(kind)) for kind in finished.after}
    assert "moved to land on the budget" in str(finished)


def test_prices_are_whole_in_train_mode_too() -> None:
    finished = tgfx.finish(gated_model("plain").train(), flops=0.5)
    assert all(value == int(value) for value in finished.after.values())


def test_order_is_that_of_the_latent_weights() -> None:
    gated = gated_model("plain")
    before = gated.open_slots()
    weights = torch.cat(list(gate_state(gated).values())).numpy()
    tgfx.finish(gated, channels=0.3)
    closed = before & ~gated.open_slots()
    assert closed.any() and weights[closed].max() < weights[gated.open_slots()].min()


@pytest.mark.parametrize("multiple", [3, 8, 12])
def test_multiples(multiple: int) -> None:
    """Groups of 64 and 80: with 12 both have a rest, which may stay only in a whole group."""
    for seed in range(3):
        gated = gated_model("plain", seed)
        for share in (0.3, 0.55, 0.9):
            finished = tgfx.finish(gated, flops=share, round_to=multiple)
            assert finished.ratio("flops") <= share
            for group in gated.facts.coupling.groups:
                count = gated.gates[group.name].open_count()
                assert count % multiple == 0 or count == group.size, (group.name, count)


def test_errors_leave_the_gates_as_they_were(monkeypatch) -> None:
    gated = gated_model("plain")
    before = gate_state(gated)

    def fails(*args, **kwargs) -> nn.Module:
        raise VerificationError("no", expected="a", found="b")

    calls = [
        (BudgetError, lambda: tgfx.finish(gated, flops=1e-5)),
        (BudgetError, lambda: tgfx.finish(gated)),
        (BudgetError, lambda: tgfx.finish(gated, flops=0.3, round_to=64)),
        (InputError, lambda: tgfx.finish(gated, flops=0.3, round_to=0)),
    ]
    for kind, call in calls:
        with pytest.raises(kind):
            call()
    monkeypatch.setattr(finishing, "shrink", fails)
    with pytest.raises(VerificationError):
        tgfx.finish(gated, flops=0.3)
    after = gate_state(gated)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_cut_is_the_gated_model() -> None:
    gated = gated_model("residual")
    model = tgfx.finish(gated, flops=0.4).model.eval()
    x = data(BUDGET_MODELS["residual"][1])[0][:8]
    with torch.no_grad():
        np.testing.assert_allclose(model(x).numpy(), gated.eval()(x).numpy(), rtol=0, atol=1e-5)
