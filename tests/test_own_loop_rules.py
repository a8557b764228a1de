"""The user's own training loop: the paper's rule, rates and samples, whose budget it is, and its state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F

import tgfx
from tests.support.own_loop import GRANULARITIES, X, Y, gated_mlp, mlp, ratio, sgd, train
from tgfx.errors import BudgetError, InputError, OptimizerError, TrainingError
from tgfx.training.attaching import attach_controller
from tgfx.training.controller import BudgetController

# -- the paper's rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_papers_rule_after_the_default_rule(granularity: str) -> None:
    gated = gated_mlp(granularity)
    optimizer = sgd(gated, gate_lr=0.05)
    train(gated, optimizer, 3, lambda _: gated.budget_loss(params=0.9, steps=1000))
    controller = gated.controller
    before = [gate.weight.detach().clone() for gate in gated.gates.values()]
    train(gated, optimizer, 5, lambda _: gated.budget_loss(params=0.5, weight=20.0))
    assert controller.closed and gated.controller is None
    assert all(not torch.equal(gate.weight, old) for gate, old in zip(gated.gates.values(), before, strict=True))
    train(gated, optimizer, 2, lambda _: gated.budget_loss(params=0.9, steps=1000))
    assert gated.controller is not controller and gated.controller.taken == 2


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_papers_rule_refuses_what_cannot_be_met(granularity: str) -> None:
    gated = gated_mlp(granularity)
    least = gated.cheapest("params")
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        gated.budget_loss(params=least * 0.99, weight=1.0)
    assert f"{least:.4f}" in caught.value.expected
    gated.budget_loss(params=least, weight=1.0)
    with pytest.raises(BudgetError, match="cannot be met"):
        gated.budget_loss(params=least * 0.9, weight=1.0)  # also where the share has changed


@pytest.mark.parametrize("weight", [None, 4.0])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_optimizer_from_before_the_transform(weight: float | None, granularity: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gated = tgfx.transform(model, X[:2], granularity=granularity).train()
    with pytest.raises(OptimizerError, match="does not hold") as caught:
        train(gated, optimizer, 10, lambda _: gated.budget_loss(params=0.5, weight=weight))
    assert f"{len(list(gated.parameters()))} parameters" in caught.value.message
    assert "0.weight, 0.bias" in caught.value.found


@pytest.mark.parametrize("weight", [None, 4.0])
def test_two_optimizers_and_one_with_the_gates(weight: float | None) -> None:
    gated = gated_mlp()
    gates = {id(gate.weight) for gate in gated.gates.values()}
    weights = torch.optim.Adam([p for p in gated.parameters() if id(p) not in gates], lr=0.01)
    both = sgd(gated)
    for _ in range(8):
        weights.zero_grad(), both.zero_grad()
        (F.cross_entropy(gated(X), Y) + gated.budget_loss(params=0.5, weight=weight)).backward()
        weights.step(), both.step()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gates_in_two_optimizers_are_an_error(granularity: str, first: bool) -> None:
    """Whichever steps first."""
    gated = gated_mlp(granularity)
    name, gate = next(iter(gated.gates.items()))
    others = [p for p in gated.parameters() if p is not gate.weight]
    halves = [torch.optim.SGD([gate.weight], lr=0.05), torch.optim.SGD(others, lr=0.05)]
    stepped = halves[0 if first else 1]
    with pytest.raises(OptimizerError, match="some of the gates") as caught:
        train(gated, stepped, 2, lambda _: gated.budget_loss(params=0.5))
    count = len(gated.gates)
    assert f"{1 if first else count - 1} of {count}" in caught.value.found
    assert (f"{name} missing" in caught.value.found) is not first
    gate.weight.requires_grad_(False)
    if not first:
        train(gated, stepped, 2, lambda _: gated.budget_loss(params=0.8))
        assert gated.controller.taken == 2


def test_by_the_papers_rule_gates_may_be_in_two_optimizers() -> None:
    """There an optimizer moves gates itself."""
    gated = gated_mlp()
    one, other = (gate.weight for gate in gated.gates.values())
    halves = [torch.optim.SGD([latent], lr=0.05) for latent in (one, other)]
    before = one.detach().clone(), other.detach().clone()
    for _ in range(3):
        (F.cross_entropy(gated(X), Y) + gated.budget_loss(params=0.5, weight=4.0)).backward()
        for half in halves:
            half.step()
    assert not torch.equal(one, before[0]) and not torch.equal(other, before[1])


# -- rates and samples -------------------------------------------------------------------------------------


def test_rate_zero_drives_the_gates() -> None:
    gated = gated_mlp()
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.0))
    train(gated, optimizer, 30, lambda _: gated.budget_loss(params=0.5, steps=30))
    assert gated.controller.taken == 30 and 0.45 < ratio(gated) <= 0.5


def test_rate_zero_in_fit() -> None:
    gated = gated_mlp()
    options = {"train": "gates", "lr": 0.0, "steps": 30, "progress": False}
    result = tgfx.fit(gated, [(X, Y)], F.cross_entropy, budget={"params": 0.5}, **options)
    assert result.stopped == "finished" and 0.45 < result.ratios["params"] <= 0.5


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_that_makes_state_is_none(kind: type[torch.optim.Optimizer]) -> None:
    """torch.distributed.checkpoint makes one at rate 0, to have state to load into."""
    gated = gated_mlp()
    optimizer = kind(tgfx.param_groups(gated, lr=0.05))
    controller = gated.attach(BudgetController(gated, {"params": 0.5}, steps=10))
    get_optimizer_state_dict(gated, optimizer)
    assert controller.taken == 0 and controller.evidence.seen == 0
    train(gated, optimizer, 1, lambda _: torch.zeros(()))
    get_optimizer_state_dict(gated, optimizer)
    assert controller.taken == 1


def test_samples_of_validation_do_not_count() -> None:
    """In eval mode, though with gradients, or without a backward; two calls for one backward do."""
    gated = gated_mlp()
    optimizer = sgd(gated)
    controller = gated.attach(BudgetController(gated, {"params": 0.5}, steps=30))
    for _ in range(3):
        gated.eval()
        gated(X)
        gated.train()
        gated(X)
        optimizer.zero_grad()
        (F.cross_entropy(gated(X[:8]), Y[:8]) + F.cross_entropy(gated(X[8:11]), Y[8:11])).backward()
        optimizer.step()
        assert controller.evidence.samples == 11


# -- whose budget it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"params": 0.4}, {"flops": 0.5}, {"params": 0.5, "weight": 1.0}], ids=str)
def test_a_step_inside_fit_has_no_budget_of_its_own(asked: dict) -> None:
    gated = gated_mlp()

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + model.budget_loss(**asked)

    with pytest.raises(BudgetError, match=r"tgfx\.fit trains this model") as caught:
        tgfx.fit(gated, [(X, Y)], training_step=step, budget={"params": 0.5}, steps=5, progress=False)
    assert "leave budget_loss out" in caught.value.fix
    assert gated.controller is None
    asked.update(params=0.5, weight=None), asked.pop("flops", None)
    tgfx.fit(gated, [(X, Y)], training_step=step, budget={"params": 0.5}, steps=5, progress=False)  # it may agree


def test_a_callback_has_the_last_word() -> None:
    gated = gated_mlp()
    attach_controller(gated, {"params": 0.5}, steps=10)
    gated.budget_loss(params=0.5)
    with pytest.raises(BudgetError, match="the GateCallback trains this model"):
        gated.budget_loss(params=0.4)


def test_fit_by_the_papers_rule_leaves_nobody_behind() -> None:
    gated = gated_mlp()
    options = {"rule": "paper", "weight": 4.0, "steps": 3, "progress": False}
    tgfx.fit(gated, [(X, Y)], F.cross_entropy, budget={"params": 0.5}, **options)
    assert gated._watch is None


# -- gates ------------------------------------------------------------------------------------------------


def above_half(weight: Tensor) -> Tensor:
    return (weight > 0.5).float()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gates_that_the_sign_does_not_decide(granularity: str) -> None:
    gated = gated_mlp(granularity, gate=tgfx.GateSpec(binary=above_half))
    with pytest.raises(InputError, match="the sign of a weight does not decide this gate") as caught:
        gated.budget_loss(params=0.5)
    assert "weight=" in caught.value.fix
    gated.budget_loss(params=0.5, weight=1.0)
    same = gated_mlp(granularity, gate=tgfx.GateSpec(binary=lambda w: (w > 0).float()))
    same.budget_loss(params=0.5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("left_out", [False, True])
def test_gates_that_ask_for_no_gradient_stay(granularity: str, left_out: bool) -> None:
    """Open or closed, in the optimizer or not; the others meet the budget without them."""
    gated = gated_mlp(granularity)
    name, first = next(iter(gated.gates.items()))
    mask = torch.arange(first.weight.numel()).reshape(first.weight.shape) % 4 != 1
    with torch.no_grad():
        first.weight.copy_(torch.where(mask, 0.7, -0.7))
    first.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in gated.parameters() if p.requires_grad or not left_out], lr=0.05)
    train(gated, optimizer, 30, lambda _: gated.budget_loss(params=0.6, steps=30))
    assert torch.equal(first.weight, torch.where(mask, 0.7, -0.7))
    assert 0.55 < ratio(gated) <= 0.6
    least = gated.cheapest("params")
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        tgfx.finish(gated, params=least * 0.99)
    assert "requires_grad_(True)" in caught.value.fix and name in caught.value.fix
    assert tgfx.finish(gated, params=0.5).ratio("params") <= 0.5
    assert torch.equal(first.is_open(), mask)
    assert tgfx.finish(gated, params=least).ratio("params") == pytest.approx(least, abs=1e-12)
    assert torch.equal(first.is_open(), mask)


def test_all_gates_held() -> None:
    """Nothing to move, and nothing to complain about."""
    gated = gated_mlp()
    for gate in gated.gates.values():
        gate.weight.requires_grad_(False)
    with pytest.raises(BudgetError, match="cannot be met"):
        gated.budget_loss(params=0.9)
    optimizer = torch.optim.SGD([p for p in gated.parameters() if p.requires_grad], lr=0.05)
    train(gated, optimizer, 60, lambda _: gated.budget_loss(params=1.0, steps=60))
    assert gated.controller.taken == 60 and ratio(gated) == 1


def test_latent_weights_of_the_others_keep_their_order() -> None:
    """Of closed gates too the better one is nearer to opening, whatever gates are held (their scores are 0)."""
    gated = gated_mlp()
    next(iter(gated.gates.values())).weight.requires_grad_(False)
    controller = BudgetController(gated, {"params": 0.5}, steps=20)
    scores = torch.cat([torch.zeros(24), torch.arange(1.0, 25.0)]).double()
    weights = controller._latent(scores, scores != scores.clamp(max=10))[24:]
    controller.close()
    assert torch.equal(weights.argsort(), torch.arange(24))
    assert torch.equal(weights > 0, torch.arange(24) >= 10)


# -- state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_state_of_another_model_is_refused_and_changes_nothing(granularity: str) -> None:
    wide = tgfx.transform(
        nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 5)),
        X[:2],
        granularity=granularity,
    ).train()
    saved = []
    for gated in (wide, gated_mlp(granularity)):
        train(gated, sgd(gated), 3, lambda _, gated=gated: gated.budget_loss(params=0.5, steps=10))
        saved.append(gated.controller.state_dict())
    with pytest.raises(TrainingError, match="of another model") as caught:
        gated.controller.load_state_dict(saved[0])
    assert "shape" in caught.value.expected and caught.value.found
    now = gated.controller.state_dict()
    assert str(now) == str(saved[1])
    gated.controller.load_state_dict(saved[1])


def test_the_state_of_a_run_with_other_frozen_weights_is_refused() -> None:
    gated = gated_mlp()
    one = BudgetController(gated, {"params": 0.5}, weights_frozen=True)
    other = BudgetController(gated, {"params": 0.5}, weights_frozen=False)
    for controller, state in ((one, other.state_dict()), (other, one.state_dict())):
        with pytest.raises(TrainingError, match="trained something else"):
            controller.load_state_dict(state)
        controller.close()
