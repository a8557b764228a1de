"""Losses that come with a probe of their curvature, where only gates are trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tgfx
from tests.support.digits import Digits, batches, load, resumed_exactly, trained_net
from tgfx.errors import InputError, TrainingError
from tgfx.training.controller import BudgetController
from tgfx.training.probed import probe_gradients
from tgfx.training.two_states import TwoStates

QUIET: dict[str, Any] = {"progress": False, "seed": 0}
Step = Callable[[nn.Module, list[Tensor]], Any]


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load()


@pytest.fixture(scope="module")
def models(digits: Digits) -> list[nn.Module]:
    return [trained_net(seed, digits) for seed in range(4)]


def loader(digits: Digits) -> DataLoader:
    return batches(digits, 32)


def apart(model: nn.Module, original: nn.Module, batch: list[Tensor]) -> Tensor:
    with torch.no_grad():
        wanted = original(batch[0])
    return model(batch[0]) - wanted


def probed(original: nn.Module) -> Step:
    def step(model: nn.Module, batch: list[Tensor]) -> tgfx.Probed:
        d = apart(model, original, batch)
        return tgfx.Probed(d.square().sum(1).mean() / 2, (d * torch.randn_like(d)).sum(1).mean())

    return step


# -- evidence ----------------------------------------------------------------------------------------------


def test_the_curvature_is_that_of_the_probe() -> None:
    """Gradients of ½·h·(gate − best)² with some noise of their own: whatever their size, h is what the probe has."""
    generator = torch.Generator().manual_seed(0)
    h = torch.logspace(-6, 0, 200, dtype=torch.float64)
    best = torch.rand(200, generator=generator, dtype=torch.float64)
    evidence, opened, samples = TwoStates(200), torch.ones(200, dtype=torch.bool), 16
    for step in range(400):
        if step % 20 == 19:
            opened = opened ^ (torch.rand(200, generator=generator) < 0.1)
        evidence.moved(opened)
        noise = torch.randn(2, 200, generator=generator, dtype=torch.float64) * (h / samples).sqrt()
        assert evidence.update(h * (opened.double() - best) + noise[0], samples, noise[1])
    relative = evidence.curvature() / h
    assert 0.9 < float(relative.mean()) < 1.1
    assert float(relative.std()) < 2 * math.sqrt(2 / 100)  # the mean square of about 100 deviates
    truth = h * (best - 0.5)
    large = h > 0.1
    rise = evidence.rise(opened)
    assert float(torch.corrcoef(torch.stack([rise[large], truth[large]]))[0, 1]) > 0.7
    small = h < 1e-4  # of these the slope is mostly noise, larger than the curvature: none may seem dear by it
    assert float(rise[small].abs().max()) < float(h[large].min())


def test_gates_that_matter_least_are_found() -> None:
    """Among many that hardly matter, from a few batches; with the same noise on the gradient itself they are not."""
    generator = torch.Generator().manual_seed(0)
    h = torch.logspace(-5, 0, 2000, dtype=torch.float64)
    opened = torch.ones(2000, dtype=torch.bool)
    clean, noisy = TwoStates(2000), TwoStates(2000)
    for _ in range(12):
        own, noise = torch.randn(2, 2000, generator=generator, dtype=torch.float64) * (h / 32).sqrt()
        clean.update(0.3 * own, 32, noise)
        noisy.update(0.3 * own + noise, 32)
    worst = [h[evidence.rise(opened).argsort()[:600]].sum().item() for evidence in (clean, noisy)]
    best = h[:600].sum().item()
    assert worst[0] < 2 * best < 0.1 * worst[1], (worst, best)


def test_a_probe_that_is_not_finite_changes_nothing() -> None:
    evidence = TwoStates(2)
    assert evidence.update(torch.ones(2), 4, torch.ones(2))
    before = evidence.state_dict()
    assert not evidence.update(torch.ones(2), 4, torch.tensor([1.0, math.inf]))
    after = evidence.state_dict()
    assert all(torch.equal(v, after[k]) if isinstance(v, Tensor) else v == after[k] for k, v in before.items())


def test_states_from_before_there_were_probes_are_taken() -> None:
    evidence, other = TwoStates(3), TwoStates(3)
    evidence.update(torch.ones(3), 4)
    state = {k: v for k, v in evidence.state_dict().items() if k not in ("probes", "probed")}
    other.load_state_dict(state)
    assert other.seen == 1 and other.probes == 0 and torch.equal(other.mean, evidence.mean)


# -- the gradient -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["constant", "sigmoid"])
def test_probes_leave_the_gradients_as_they_are(shape: str, models: list[nn.Module], digits: Digits) -> None:
    gated = tgfx.transform(copy.deepcopy(models[0]), digits[0][:2], gate=tgfx.GateSpec(shape=shape)).train()
    batch = [digits[0][:16] + 0.1]
    torch.manual_seed(0)
    loss, probe = probed(nn.Sequential(*models[1]))(gated, batch)
    loss.backward(retain_graph=True)
    before = {name: gate.weight.grad.clone() for name, gate in gated.gates.items()}  # type: ignore[union-attr]
    found = probe_gradients(gated, probe)
    for name, gate in gated.gates.items():
        assert torch.equal(gate.weight.grad, before[name])  # type: ignore[arg-type]
    step = 1e-3  # against the difference of the probe by the first gate's own value
    hidden = gated.gate_slots("0")[0]
    with torch.no_grad():
        model = copy.deepcopy(models[0])
        torch.manual_seed(0)
        here = float(probed(models[1])(model, batch).probe)
        model[0].weight[0] *= 1 - step
        model[0].bias[0] *= 1 - step
        torch.manual_seed(0)
        there = float(probed(models[1])(model, batch).probe)
    assert float(found[hidden]) == pytest.approx((here - there) / step, rel=2e-2, abs=1e-4)


# -- training ------------------------------------------------------------------------------------------------


def test_a_budget_is_met(models: list[nn.Module], digits: Digits) -> None:
    """From two models that agree, where the loss has no gradient at all and only the probe tells; by gates that matter
    less than others."""
    gated = tgfx.transform(copy.deepcopy(models[0]), digits[0][:2])
    options: dict[str, Any] = {"budget": {"flops": 0.7}, "steps": 80, "train": "gates", **QUIET}
    result = tgfx.fit(gated, loader(digits), training_step=probed(models[0]), **options)
    assert 0.69 <= result.ratios["flops"] <= 0.7
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        chosen = float(apart(gated.eval(), models[0], [digits[0]]).square().sum(1).mean())
        for gate in gated.gates.values():
            opened = gate.is_open()
            gate.set_open_(opened[torch.randperm(len(opened), generator=generator)])
        at_random = float(apart(gated, models[0], [digits[0]]).square().sum(1).mean())
    assert chosen < 0.2 * at_random, (chosen, at_random)


def test_resumes_exactly(models: list[nn.Module], digits: Digits, tmp_path: Path) -> None:
    resumed_exactly(
        lambda: tgfx.transform(copy.deepcopy(models[0]), digits[0][:2]), lambda: loader(digits), probed(models[0]),
        37, tmp_path / "run.pt", budget={"flops": 0.5}, steps=60, train="gates", **QUIET,
    )  # fmt: skip


def test_batches_of_a_step_are_summed_up(
    models: list[nn.Module], digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches of n samples tell as much as one of 2·n: the mean of their probes, over 2·n samples."""
    seen: list[tuple[int, float]] = []
    update = TwoStates.update

    def watched(self: TwoStates, gradient: Tensor, samples: int, probe: Tensor | None = None) -> bool:
        if probe is not None:  # at the end gates stand still, and nobody asks
            seen.append((samples, samples * float(probe.square().mean())))
        return update(self, gradient, samples, probe)

    monkeypatch.setattr(TwoStates, "update", watched)
    for accumulate in (1, 4):
        gated = tgfx.transform(copy.deepcopy(models[0]), digits[0][:2])
        options: dict[str, Any] = {"budget": {"flops": 0.99}, "steps": 24, "train": "gates", **QUIET}
        tgfx.fit(gated, loader(digits), training_step=probed(models[0]), accumulate=accumulate, **options)
    one, four = seen[:20], seen[len(seen) // 2 :][:20]
    assert {samples for samples, _ in one} == {32}
    assert sum(samples == 128 for samples, _ in four) >= 17  # an epoch ends with what is left
    sizes = [sum(size for _, size in own) / len(own) for own in (one, four)]
    assert 0.5 < sizes[0] / sizes[1] < 2.0, sizes


def test_weights_that_are_trained_want_no_probe(models: list[nn.Module], digits: Digits) -> None:
    gated = tgfx.transform(copy.deepcopy(models[0]), digits[0][:2])
    with pytest.raises(InputError, match="nobody asks for one") as caught:
        tgfx.fit(gated, loader(digits), training_step=probed(models[0]), budget={"flops": 0.5}, steps=4, **QUIET)
    assert 'train="gates"' in str(caught.value)


def test_a_probe_that_is_not_finite_stops_the_run(models: list[nn.Module], digits: Digits) -> None:
    def step(model: nn.Module, batch: list[Tensor]) -> tgfx.Probed:
        d = apart(model, models[0], batch)
        return tgfx.Probed(d.square().mean(), d.sum() * math.nan)

    gated = tgfx.transform(copy.deepcopy(models[0]), digits[0][:2])
    before = copy.deepcopy(gated.state_dict())
    with pytest.raises(TrainingError, match="probe is not finite"):
        tgfx.fit(gated, loader(digits), training_step=step, budget={"flops": 0.5}, steps=4, train="gates", **QUIET)
    assert all(torch.equal(value, before[name]) for name, value in gated.state_dict().items())


def test_a_probe_without_a_gradient_is_refused(models: list[nn.Module], digits: Digits) -> None:
    def step(model: nn.Module, batch: list[Tensor]) -> tgfx.Probed:
        loss = apart(model, models[0], batch).square().mean()
        return tgfx.Probed(loss, loss.detach())

    gated = tgfx.transform(copy.deepcopy(models[0]), digits[0][:2])
    with pytest.raises(TrainingError, match="does not depend on anything") as caught:
        tgfx.fit(gated, loader(digits), training_step=step, budget={"flops": 0.5}, steps=4, train="gates", **QUIET)
    assert "probe" in str(caught.value)


def test_plain_losses_need_none(models: list[nn.Module], digits: Digits) -> None:
    gated = tgfx.transform(copy.deepcopy(models[0]), digits[0][:2])
    controller = BudgetController(gated, {"flops": 0.5}, steps=4, weights_frozen=True)
    assert isinstance(controller.evidence, TwoStates) and not controller.evidence.probes
    controller.close()


def test_a_probe_that_no_gate_makes_is_refused(models: list[nn.Module], digits: Digits) -> None:
    """With the wrong side detached it has a gradient, but none that tells of gates."""
    original = copy.deepcopy(models[0]).requires_grad_(True)

    def step(model: nn.Module, batch: list[Tensor]) -> tgfx.Probed:
        said = model(batch[0])
        d = said - original(batch[0]).detach()
        wrong = said.detach() - original(batch[0])
        return tgfx.Probed(d.square().mean(), (wrong * torch.randn_like(wrong)).sum(1).mean())

    gated = tgfx.transform(copy.deepcopy(models[0]), digits[0][:2])
    with pytest.raises(TrainingError, match="does not depend on the gates"):
        tgfx.fit(gated, loader(digits), training_step=step, budget={"flops": 0.5}, steps=4, train="gates", **QUIET)


def test_a_gradient_of_a_probe_that_is_not_finite_stops_the_run(models: list[nn.Module], digits: Digits) -> None:
    def step(model: nn.Module, batch: list[Tensor]) -> tgfx.Probed:
        d = apart(model, models[1], batch)
        return tgfx.Probed(d.square().mean(), d.mean() + (0 * d).sum().sqrt())

    gated = tgfx.transform(copy.deepcopy(models[0]), digits[0][:2])
    with pytest.raises(TrainingError, match="gradient of the probe is not finite"):
        tgfx.fit(gated, loader(digits), training_step=step, budget={"flops": 0.5}, steps=4, train="gates", **QUIET)


def test_segments_may_be_computed_again_for_both(models: list[nn.Module], digits: Digits) -> None:
    """Gradient checkpointing: two backward passes through one forward, and statistics move once."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip
    ends = []
    for checkpointing in (False, True):
        gated = tgfx.transform(copy.deepcopy(model), digits[0][:2])
        if checkpointing:
            gated.gradient_checkpointing_enable()
        options: dict[str, Any] = {"budget": {"flops": 0.6}, "steps": 12, "train": "gates", "recalibrate": 3, **QUIET}
        tgfx.fit(gated, loader(digits), training_step=probed(models[0]), **options)
        ends.append(gated.state_dict())
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name
