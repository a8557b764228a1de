"""Weights frozen: evidence from both states of a gate, closed gates that come back, and what that is good for."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import tgfx
from tests.support.digits import Digits, batches, load, resumed_exactly, trained_
from tgfx.training.controller import BudgetController, latent
from tgfx.training.evidence import Evidence
from tgfx.training.two_states import TwoStates
from tgfx.training.vectors import gate_gradients, gate_weights, set_gate_weights_

QUIET = {"progress": False, "seed": 0}


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load()


@pytest.fixture(scope="module")
def trained(digits: Digits) -> nn.Module:
    return trained_from(0, digits)


def trained_from(seed: int, digits: Digits) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(),
        nn.Linear(48, 10),
    )  # fmt: skip
    return trained_(model, digits)


def matching(original: nn.Module):
    """Squared distance to what the model said before."""
    original = copy.deepcopy(original).eval()

    def step(gated: nn.Module, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = original(batch[0])
        return (gated(batch[0]) - wanted).square().sum(1).mean() / 2

    return step


def loader(digits: Digits) -> DataLoader:
    return batches(digits, 64)


# -- evidence ----------------------------------------------------------------------------------------------


def watched(evidence: Evidence | TwoStates, *, steps: int = 300, samples: int = 16) -> tuple[Tensor, Tensor]:
    """Gradients of ½·h·(gate − best)², with noise so large that their mean square is ten times the curvature h.

    A tenth of the gates moves every ten steps. Gives the true rise when closed, and the last state.
    """
    generator = torch.Generator().manual_seed(0)
    size = len(evidence.mean)
    h = torch.rand(size, generator=generator, dtype=torch.float64) + 0.1
    best = torch.rand(size, generator=generator, dtype=torch.float64)
    opened = torch.ones(size, dtype=torch.bool)
    for step in range(steps):
        if step % 10 == 9:
            moved = torch.rand(size, generator=generator) < 0.1
            opened = opened ^ moved
        noise = (10 * h / samples).sqrt() * torch.randn(size, generator=generator, dtype=torch.float64)
        if isinstance(evidence, TwoStates):
            evidence.moved(opened)
        assert evidence.update(h * (opened.double() - best) + noise, samples)
    return h * (best - 0.5), opened


def test_the_size_of_the_curvature_is_learned_from_gates_that_move() -> None:
    evidence = TwoStates(400)
    watched(evidence)
    found = float(evidence.curvature().mean())
    assert 0.5 < found < 0.7  # 0.6 in truth; the mean square of the gradient is 6.1
    evidence.variance *= 9  # a larger loss has larger gradients, but need not be more curved
    evidence.mean *= 3
    assert float(evidence.curvature().mean()) == pytest.approx(found, rel=1e-4)  # what was believed is nearly forgotten


def test_gates_that_hardly_matter_tell_nothing_of_the_curvature() -> None:
    """They move first. Their gradients are nothing but noise, and so is what that says of all others."""
    torch.manual_seed(0)
    evidence, opened = TwoStates(60), torch.ones(60, dtype=torch.bool)
    scale = torch.where(torch.arange(60) < 20, 1e-7, 1.0).double()
    for step in range(60):
        if step == 30:
            opened[:20] = False
        evidence.moved(opened)
        evidence.update(scale * torch.randn(60, dtype=torch.float64), 16)
    squares = 16 * evidence.variance + evidence.mean.square()
    assert torch.allclose(evidence.curvature(), squares, rtol=1e-3)


def test_both_states_of_a_gate_tell_the_same() -> None:
    """Where the mean square overrates the curvature tenfold, it alone says of each gate: stay as you are."""
    new, old = TwoStates(400), Evidence(400, memory=15)
    for evidence, least, most in ((new, 0.6, 1.0), (old, -1.0, 0.4)):
        truth, opened = watched(evidence)
        correlation = float(torch.corrcoef(torch.stack([evidence.rise(opened), truth]))[0, 1])
        assert least < correlation < most, correlation


def test_a_moved_gate_goes_on_from_what_is_foretold() -> None:
    evidence = TwoStates(2)
    opened = torch.ones(2, dtype=torch.bool)
    for value in (1.0, 3.0, 1.0, 3.0):
        evidence.moved(opened)
        evidence.update(torch.tensor([value, 2.0]), 4)
    curvature, mean = evidence.curvature(), evidence.mean.clone()
    evidence.moved(torch.tensor([False, True]))
    torch.testing.assert_close(evidence.mean, mean - torch.stack([curvature[0], torch.tensor(0.0).double()]))
    evidence.moved(torch.tensor([True, True]))
    assert float(evidence.mean[0]) > float(mean[0]) - 1e-9  # and back: the new curvature holds the mean's square


def test_what_is_not_finite_changes_nothing() -> None:
    evidence = TwoStates(2)
    assert evidence.update(torch.tensor([1.0, 2.0]), 4)
    before = evidence.state_dict()
    assert not evidence.update(torch.tensor([1.0, math.nan]), 4)
    after = evidence.state_dict()
    assert all(torch.equal(v, after[k]) if isinstance(v, Tensor) else v == after[k] for k, v in before.items())


# -- gates -------------------------------------------------------------------------------------------------


def test_every_closed_gate_gets_a_gradient_through_a_relu(trained: nn.Module, digits: Digits) -> None:
    gated = tgfx.transform(copy.deepcopy(trained), digits[0][:2])
    gated.eval()
    gated.bank.train()
    size = gated.facts.coupling.slots
    scores = torch.logspace(-6, 6, size, dtype=torch.float64)
    opened = scores > scores[size // 3]
    set_gate_weights_(gated, latent(scores, opened))
    assert torch.equal(gate_weights(gated) > 0, opened)
    F.cross_entropy(gated(digits[0]), digits[1]).backward()
    gradient = gate_gradients(gated)
    assert gradient is not None
    assert int((gradient[~opened] == 0).sum()) == 0


def test_frozen_weights_are_noticed(trained: nn.Module, digits: Digits) -> None:
    gated = tgfx.transform(copy.deepcopy(trained), digits[0][:2])
    with_weights = BudgetController(gated, {"flops": 0.5}, steps=10)
    assert isinstance(with_weights.evidence, Evidence)
    with_weights.close()
    for gate_or_weight in gated.parameters():
        gate_or_weight.requires_grad_(False)
    for gate in gated.gates.values():
        gate.weight.requires_grad_(True)
    gates_only = BudgetController(gated, {"flops": 0.5}, steps=10)
    assert isinstance(gates_only.evidence, TwoStates)
    gates_only.close()


def chosen_by(frozen: bool, trained: nn.Module, digits: Digits, steps: int) -> tuple[float, int]:
    """Distance to the model's own answers at half the FLOPs, and how often a closed gate came back."""
    gated = tgfx.transform(copy.deepcopy(trained), digits[0][:2])
    step = matching(trained)
    gated.eval()
    gated.bank.train()
    schedule = tgfx.Schedule.for_gates(steps)
    controller = BudgetController(gated, {"flops": 0.5}, schedule=schedule, weights_frozen=frozen)
    optimizer = torch.optim.SGD([gate.weight for gate in gated.gates.values()], lr=1e-3)
    back, before = 0, gate_weights(gated) > 0
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader(digits))), steps):
        optimizer.zero_grad()
        step(gated, batch).backward()
        optimizer.step()
        now = gate_weights(gated) > 0
        back, before = back + int((now & ~before).sum()), now
    controller.close()
    assert 0.49 <= gated.ratio("flops").item() <= 0.5
    gated.eval()
    with torch.no_grad():
        return float(step(gated, [digits[0]])), back


def test_closed_gates_come_back_and_the_loss_falls_by_it(digits: Digits) -> None:
    """Against the rule for joint training, over three models: single ones differ by a tenth from run to run."""
    models = [trained_from(seed, digits) for seed in range(3)]
    new = [chosen_by(True, model, digits, 300) for model in models]
    old = [chosen_by(False, model, digits, 300) for model in models]
    assert all(back >= 10 for _, back in new)
    assert sum(loss for loss, _ in new) < 0.95 * sum(loss for loss, _ in old), (new, old)


@pytest.mark.parametrize("recalibrate", [0, 4])
def test_gates_only_resumes_exactly(recalibrate: int, trained: nn.Module, digits: Digits, tmp_path: Path) -> None:
    resumed = resumed_exactly(
        lambda: tgfx.transform(copy.deepcopy(trained), digits[0][:2]), lambda: loader(digits), matching(trained),
        53, tmp_path / "run.pt", budget={"flops": 0.5}, steps=80, train="gates", recalibrate=recalibrate, **QUIET,
    )  # fmt: skip
    for name, value in trained.named_parameters():
        assert torch.equal(value, dict(resumed.named_parameters())[name]), name
