"""Gates over frozen single weights: chosen by curvature and by the slopes met on the way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import tgfx
from tests.support.digits import Digits, batches, load, trained_net
from tgfx.errors import TrainingError
from tgfx.gates import GateSettings
from tgfx.training import weight_slopes, weight_worth
from tgfx.training.weight_controller import WeightController
from tgfx.training.weight_evidence import WeightEvidence
from tgfx.training.weight_slopes import SlopeEvidence, memory_of, rate_of
from tgfx.training.weight_worth import worth_at_threshold

QUIET: dict[str, Any] = {"train": "gates", "progress": False, "seed": 0}
HELD_OUT = 597


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load()


def looked_at(digits: Digits) -> Digits:
    x, y = (each[:-HELD_OUT] for each in digits)
    return x, y


@pytest.fixture(scope="module")
def model(digits: Digits) -> nn.Module:
    return trained_net(0, looked_at(digits))


def loader(digits: Digits) -> DataLoader:
    return batches(looked_at(digits), 32)


def gates_of(model: nn.Module, digits: Digits, share: float, **options: Any) -> tgfx.GatedModule:
    gated = tgfx.transform(copy.deepcopy(model), digits[0][:2], granularity="weight")
    options = {"steps": 150, **QUIET, **options}
    tgfx.fit(gated, loader(digits), options.pop("loss_fn", F.cross_entropy), budget={"params": share}, **options)
    return gated.eval()


def accuracy(model: nn.Module, digits: Digits) -> float:
    x, y = (each[-HELD_OUT:] for each in digits)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def opened(gated: tgfx.GatedModule) -> dict[str, Tensor]:
    return {name: gate.is_open() for name, gate in gated.gates.items()}


# -- training ------------------------------------------------------------------------------------------------


def test_slopes_find_weights_that_work_together(
    model: nn.Module, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 0.15 of the weights, none of them trained; on images that were not looked at."""
    whole = accuracy(model, digits)
    by_both = gates_of(model, digits, 0.15)
    monkeypatch.setattr(weight_slopes, "STEP", 0.0)
    by_curvature = gates_of(model, digits, 0.15)
    for gated in (by_both, by_curvature):
        assert 0.149 < float(gated.ratio("params")) <= 0.15
    found = accuracy(by_both, digits), accuracy(by_curvature, digits)
    assert found[0] > whole - 0.1 and found[1] < whole - 0.3, (whole, found)


def test_closed_gates_may_come_back(model: nn.Module, digits: Digits) -> None:
    closed: dict[str, Tensor] = {}
    back = 0

    def seen(gated: tgfx.GatedModule) -> dict[str, float]:
        nonlocal back
        now = opened(gated)
        back += sum(int((now[name] & was).sum()) for name, was in closed.items())
        closed.update({name: ~own | closed.get(name, ~own) for name, own in now.items()})
        return {}

    gates_of(model, digits, 0.3, val=seen, val_every=5)
    assert back > 0


def test_the_weights_stay_as_they_are(model: nn.Module, digits: Digits) -> None:
    gated = gates_of(model, digits, 0.3)
    cut = tgfx.shrink(gated)
    for name, weight in cut.named_parameters():
        open_ones = gated.gates[name].is_open() if name in gated.gates else torch.ones_like(weight, dtype=torch.bool)
        assert torch.equal(weight, model.get_parameter(name) * open_ones)
    with torch.no_grad():
        torch.testing.assert_close(cut(digits[0]), gated(digits[0]), rtol=0, atol=0)


@pytest.mark.parametrize("shape", ["constant", "tanh"])
def test_the_scale_of_the_loss_does_not_matter(shape: str, model: nn.Module, digits: Digits) -> None:
    """A power of two rounds nothing: the same gates, each of them."""
    found = []
    for scale in (1.0, 2.0**-7):
        gated = tgfx.transform(
            copy.deepcopy(model), digits[0][:2], granularity="weight", gate=tgfx.GateSpec(shape=shape)
        )
        tgfx.fit(
            gated, loader(digits), lambda said, y, scale=scale: scale * F.cross_entropy(said, y),
            budget={"params": 0.3}, steps=60, **QUIET,
        )  # fmt: skip
        found.append(opened(gated))
    assert all(torch.equal(own, found[1][name]) for name, own in found[0].items())


def test_resumes_exactly(model: nn.Module, digits: Digits, tmp_path: Path) -> None:
    whole = gates_of(model, digits, 0.3, steps=60)
    seen = 0

    def killed(said: Tensor, y: Tensor) -> Tensor:
        nonlocal seen
        seen += 1
        if seen == 38:
            raise KeyError("stop")
        return F.cross_entropy(said, y)

    options: dict[str, Any] = {"steps": 60, "checkpoint": tmp_path / "c.pt", "checkpoint_every": 10}
    with pytest.raises(KeyError):
        gates_of(model, digits, 0.3, loss_fn=killed, **options)
    again = gates_of(model, digits, 0.3, **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["params", "flops"])
def test_budgets_of_layers_with_different_prices_are_met(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()  # fmt: skip
    data = [(torch.randn(8, 3, 12, 12), torch.randint(10, (8,))) for _ in range(6)]
    gated = tgfx.transform(model, data[0][0], granularity="weight")
    tgfx.fit(gated, data, F.cross_entropy, budget={kind: 0.3}, steps=40, **QUIET)
    assert 0.295 < float(gated.eval().ratio(kind)) <= 0.3


# -- evidence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["constant", "sigmoid"])
def test_the_worth_is_the_curvature_less_the_slopes(shape: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 5, 3, 3, generator=generator, dtype=torch.float64)
    settings, latent = GateSettings(shape=shape), torch.full(weight.shape, 0.3).requires_grad_()
    plain, evidence = WeightEvidence(weight.shape, memory=10), SlopeEvidence(weight.shape, memory=10)
    total = torch.zeros_like(weight)
    for _ in range(4):
        slopes = torch.randn(weight.shape, generator=generator)
        by_latent = slopes if settings.slope(latent) is None else slopes * settings.slope(latent)
        for own in (plain, evidence):
            latent.grad = by_latent.clone()
            assert own.update(weight, latent, settings)
        total += slopes
    evidence.rate = 0.25
    rows = slice(2, 5)
    wanted = plain.worth(weight, rows) - 0.25 * total[rows]
    torch.testing.assert_close(evidence.worth(weight, rows), wanted, rtol=1e-5, atol=1e-6)
    score = torch.empty_like(latent)
    evidence.write_(score, weight, torch.full((1, 1, 1, 1), 4.0))
    assert torch.equal(score[rows] > 0, wanted > 0) and bool((score < 0).any())
    torch.testing.assert_close(score[rows].square(), 4 * wanted.abs().float(), rtol=1e-4, atol=1e-5)


def test_batches_of_a_step_add_up_and_what_is_thrown_away_does_not() -> None:
    weight = torch.ones(4, 3)
    settings, latent = GateSettings(), torch.ones(4, 3).requires_grad_()
    evidence = SlopeEvidence(weight.shape, memory=10)

    def take(value: float) -> None:
        latent.grad = torch.full((4, 3), value)
        evidence.take(weight, latent, settings)

    take(1.0)
    take(2.0)
    assert evidence.learn(factor=0.5) and bool((evidence.slopes == 1.5).all())
    take(5.0)
    evidence.forget()
    assert not evidence.learn() and bool((evidence.slopes == 1.5).all())
    take(float("nan"))
    assert not evidence.learn() and bool((evidence.slopes == 1.5).all()) and evidence.seen == 1


def test_noise_moves_a_gate_at_the_threshold_by_a_share_of_its_worth() -> None:
    generator = torch.Generator().manual_seed(0)
    for steps, worth in ((60, 1e-8), (400, 3.0)):
        noise = torch.randn(steps, 2000, generator=generator, dtype=torch.float64) * worth**0.5
        moved = rate_of(worth, steps) * noise.sum(0)
        assert float(moved.std()) == pytest.approx(weight_slopes.STEP * worth, rel=0.1)
    assert memory_of(10) == 10 and memory_of(200) == 40 and memory_of(10**6) == 200


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["params", "flops"])
def test_the_worth_at_the_threshold_is_that_of_the_last_weight_with_room(share: float, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()
    gated = tgfx.transform(model, torch.randn(1, 3, 8, 8), granularity="weight")
    evidence = {}
    for name, gate in gated.gates.items():
        evidence[name] = WeightEvidence(gate.weight.shape, memory=10)
        evidence[name].row += torch.rand_like(evidence[name].row)
        evidence[name].column += torch.rand_like(evidence[name].column)
        evidence[name].mean += 1
    price = {name: factor.reshape(-1)[0] for name, factor in gated.facts.cost.factors[kind].items()}  # one a layer here
    scales = {name: (1 / each).reshape([1] * gated.gates[name].weight.ndim) for name, each in price.items()}
    found = worth_at_threshold(gated, evidence, scales, {kind: share})
    each = {name: evidence[name].worth(gated.get_parameter(name).detach(), slice(None)) for name in gated.gates}
    last = [name for name, worth in each.items() if bool((worth == found).any())]
    assert len(last) == 1
    rank = found * float(scales[last[0]])
    above = sum(float((worth * scales[name] > rank).sum() * price[name]) for name, worth in each.items())
    room = share * gated.total(kind) - gated.fixed_cost(kind)
    assert above <= room * (1 + 1e-9)
    if share < 1:
        assert above + 2 * max(map(float, price.values())) > room


@pytest.mark.parametrize("entries", [1 << 13, 1 << 14])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_a_sample_sees_all_columns(entries: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights with a structure of their own, as padded images have it, and small layers count for what they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 40), nn.ReLU(), nn.Linear(40, 3))
    gated = tgfx.transform(model, torch.randn(2, 1024), granularity="weight")
    evidence = {}
    for name, gate in gated.gates.items():
        own = evidence[name] = WeightEvidence(gate.weight.shape, memory=10)
        own.row += torch.rand_like(own.row)
        own.column += torch.rand_like(own.column).square()
        own.mean += 1
    evidence["0.weight"].column.view(32, 32)[:, ::4] = 1e-6
    scales = {name: torch.ones([1] * gate.weight.ndim) for name, gate in gated.gates.items()}

    def found() -> float:
        return worth_at_threshold(gated, evidence, scales, {"params": share})

    exact = found()
    monkeypatch.setattr(weight_worth, "SAMPLE", entries)
    assert found() == pytest.approx(exact, rel=0.1)


def test_gradients_with_a_graph_and_those_that_a_user_keeps_are_left_alone() -> None:
    weight = torch.randn(6, 5)
    evidence, latent = SlopeEvidence(weight.shape, memory=10), torch.full(weight.shape, 0.3).requires_grad_()
    kept = torch.rand(6, 5)
    for _ in range(3):
        (latent.grad,) = torch.autograd.grad(latent.square().sum(), latent, create_graph=True)
        assert latent.grad.requires_grad
        evidence.update(weight, latent, GateSettings())
        latent.grad = None
    assert not evidence.slopes.requires_grad
    copy.deepcopy(evidence.state_dict())
    latent.grad, before = kept, kept.clone()
    evidence.update(weight, latent, GateSettings(shape="sigmoid"))
    assert torch.equal(kept, before)


# -- who uses it ---------------------------------------------------------------------------------------------


def test_only_frozen_weights_keep_a_number_for_each_gate(model: nn.Module, digits: Digits) -> None:
    def controller(*, frozen: bool) -> WeightController:
        gated = tgfx.transform(copy.deepcopy(model), digits[0][:2], granularity="weight")
        for parameter in [] if not frozen else gated.parameters():
            parameter.requires_grad_(any(parameter is gate.weight for gate in gated.gates.values()))
        return gated.attach(WeightController(gated, {"params": 0.5}, steps=10))  # type: ignore[return-value]

    joint, frozen = controller(frozen=False), controller(frozen=True)
    assert not joint.weights_frozen and not any(isinstance(own, SlopeEvidence) for own in joint.evidence.values())
    assert frozen.weights_frozen and all(isinstance(own, SlopeEvidence) for own in frozen.evidence.values())
    assert "slopes" not in joint.state_dict()["evidence"]["0.weight"]
    with pytest.raises(TrainingError, match="slopes of shape"):
        frozen.load_state_dict(joint.state_dict())
    with pytest.raises(TrainingError, match="no slopes"):
        joint.load_state_dict(frozen.state_dict())


def test_gates_that_are_held_keep_no_slopes(model: nn.Module, digits: Digits) -> None:
    gated = tgfx.transform(copy.deepcopy(model), digits[0][:2], granularity="weight")
    gated.gates["0.weight"].weight.requires_grad_(False)
    controller = WeightController(gated, {"params": 0.6}, steps=20, weights_frozen=True)
    slopes = {name for name, own in controller.evidence.items() if isinstance(own, SlopeEvidence)}
    assert slopes == set(gated.gates) - {"0.weight"}
    controller.close()
    tgfx.fit(gated, loader(digits), F.cross_entropy, budget={"params": 0.6}, steps=20, **QUIET)
    assert 0.59 < float(gated.eval().ratio("params")) <= 0.6
    assert bool(gated.gates["0.weight"].is_open().all())


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_the_rate_of_the_gates_does_not_matter(lr: float, model: nn.Module, digits: Digits) -> None:
    """In a loop of one's own, with an optimizer that has nothing but gates and keeps no state."""
    gated = tgfx.transform(copy.deepcopy(model), digits[0][:2], granularity="weight")
    gates = [gate.weight for gate in gated.gates.values()]
    gated.train().requires_grad_(False)
    for gate in gates:
        gate.requires_grad_(True)
    optimizer = torch.optim.SGD(gates, lr=lr)
    steps = 40
    for x, y in [batch for batch, _ in zip(loader(digits), range(steps), strict=False)] * 2:
        optimizer.zero_grad()
        (F.cross_entropy(gated(x), y) + gated.budget_loss(params=0.3, steps=steps)).backward()
        optimizer.step()
    assert 0.299 < float(gated.eval().ratio("params")) <= 0.3


def test_a_checkpoint_without_slopes_is_refused_and_the_model_stays(
    model: nn.Module, digits: Digits, tmp_path: Path
) -> None:
    file = tmp_path / "c.pt"
    gates_of(model, digits, 0.3, steps=20, checkpoint=file)
    state = torch.load(file, weights_only=True)
    for own in state["state"]["controller"]["evidence"].values():
        del own["slopes"]  # as an older version wrote it
    torch.save(state, file)
    gated = tgfx.transform(copy.deepcopy(model), digits[0][:2], granularity="weight")
    with pytest.raises(TrainingError, match="resume=False"):
        tgfx.fit(
            gated, loader(digits), F.cross_entropy, budget={"params": 0.3}, steps=20, checkpoint=file, **QUIET
        )  # fmt: skip
    assert float(gated.eval().ratio("params")) == 1
