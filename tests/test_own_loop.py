"""The user's own training loop: what it may do, and what is found out instead of never closing a gate."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.support.own_loop import GRANULARITIES, X, Y, gated_mlp, ratio, sgd, train
from tgfx.errors import BudgetError, InputError
from tgfx.training.controller import BudgetController

# -- two budgets in one loss -------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_two_kinds_in_two_calls_are_an_error(granularity: str) -> None:
    gated = gated_mlp(granularity)
    with pytest.raises(BudgetError, match="two budgets") as caught:
        train(gated, sgd(gated), 1, lambda _: gated.budget_loss(flops=0.5) + gated.budget_loss(params=0.5))
    assert "flops 50.0%" in caught.value.found and "params 50.0%" in caught.value.found
    assert "in one call" in caught.value.fix


def test_two_shares_in_two_calls_are_an_error() -> None:
    gated = gated_mlp()
    with pytest.raises(BudgetError, match="two budgets"):
        train(gated, sgd(gated), 2, lambda _: gated.budget_loss(params=0.5) + gated.budget_loss(params=0.4))


def test_two_rules_in_one_loss_are_an_error() -> None:
    gated = gated_mlp()
    with pytest.raises(BudgetError, match="two budgets") as caught:
        train(gated, sgd(gated), 1, lambda _: gated.budget_loss(params=0.5) + gated.budget_loss(params=0.5, weight=1.0))
    assert "with a weight" in caught.value.found and "without a weight" in caught.value.found


def test_the_same_budget_may_be_asked_for_by_every_batch_of_a_step() -> None:
    gated = gated_mlp()
    optimizer = sgd(gated)
    for _ in range(12):
        for part in (slice(0, 8), slice(8, 16)):
            loss = F.cross_entropy(gated(X[part]), Y[part]) + gated.budget_loss(params=0.5, steps=12)
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert gated.controller.taken == 12
    assert 0.45 < ratio(gated) <= 0.5


def test_for_the_log_anything_may_be_asked() -> None:
    gated = gated_mlp()
    gated.budget_loss(params=0.5)
    running = gated.controller
    with torch.no_grad():
        assert gated.budget_loss(flops=0.3).item() == pytest.approx(0.49, abs=1e-6)
        assert gated.budget_loss(flops=0.3, weight=2.0).item() == pytest.approx(0.98, abs=1e-6)
    assert gated.controller is running and not running.closed


def test_another_kind_may_follow_after_a_step() -> None:
    gated = gated_mlp()
    optimizer = sgd(gated)
    train(gated, optimizer, 3, lambda _: gated.budget_loss(flops=0.5, steps=10))
    first = gated.controller
    train(gated, optimizer, 10, lambda _: gated.budget_loss(params=0.5, steps=10))
    assert first.closed and gated.controller.taken == 10
    assert ratio(gated) <= 0.5


# -- a schedule of one's own -------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("steps", [60, 20])  # shorter than the run: it goes on by itself
def test_a_share_that_falls_from_step_to_step(granularity: str, steps: int) -> None:
    gated = gated_mlp(granularity)
    train(gated, sgd(gated), 60, lambda i: gated.budget_loss(params=1 - 0.5 * min(1, (i + 1) / 50), steps=steps))
    assert 0.45 < ratio(gated) <= 0.5


def test_evidence_and_step_count_outlive_a_change_of_the_share() -> None:
    gated = gated_mlp()
    optimizer = sgd(gated)
    train(gated, optimizer, 5, lambda i: gated.budget_loss(params=0.9 - 0.01 * i, steps=60))
    controller = gated.controller
    assert (controller.taken, controller.evidence.seen) == (5, 4)  # the first loss has a gradient of its own
    assert controller.budget["params"] == pytest.approx(0.86)
    with pytest.raises(BudgetError, match="cannot be met"):
        gated.budget_loss(params=0.001, steps=60)
    assert gated.controller is controller and controller.budget["params"] == pytest.approx(0.86)


@settings(max_examples=8, deadline=None)
@given(shares=st.lists(st.floats(0.3, 1.0), min_size=1, max_size=4), steps=st.integers(8, 40))
def test_whatever_the_shares_were_the_last_is_met(shares: list[float], steps: int) -> None:
    """Asked for in turn, and the last for as long as the run has steps and a tenth more."""
    gated = gated_mlp()
    optimizer = sgd(gated)
    for index, share in enumerate(shares):
        train(gated, optimizer, 3, lambda _, share=share: gated.budget_loss(params=share, steps=steps), first=index)
    train(gated, optimizer, steps + steps // 10 + 2, lambda _: gated.budget_loss(params=shares[-1], steps=steps))
    assert shares[-1] - 0.07 < ratio(gated) <= shares[-1] + 1e-9  # a channel is up to 0.05 here


def test_another_budget_after_the_last_step_begins_anew() -> None:
    gated = gated_mlp()
    optimizer = sgd(gated)
    train(gated, optimizer, 10, lambda _: gated.budget_loss(params=0.8, steps=10))
    first = gated.controller
    train(gated, optimizer, 2, lambda _: gated.budget_loss(params=0.4, steps=20))
    assert first.closed and gated.controller.taken == 2
    assert 0.6 < gated.controller.targets["params"] <= 0.8  # step by step, not at once
    train(gated, optimizer, 18, lambda _: gated.budget_loss(params=0.4, steps=20))
    assert ratio(gated) <= 0.4


def test_another_length_in_the_middle_is_an_error() -> None:
    gated = gated_mlp()
    optimizer = sgd(gated)
    train(gated, optimizer, 2, lambda _: gated.budget_loss(params=0.5, steps=10))
    gated.budget_loss(params=0.5)  # not to say it again is fine
    with pytest.raises(InputError, match="another number of steps") as caught:
        gated.budget_loss(params=0.5, steps=20)
    assert "steps=10" in caught.value.expected and "steps=20" in caught.value.found
    gated.controller.close()
    gated.budget_loss(params=0.5, steps=20)
    assert gated.controller.schedule.steps == 20


def test_a_new_share_at_a_stand_still_is_saved_with_the_state() -> None:
    gated = gated_mlp()
    train(gated, sgd(gated), 9, lambda _: gated.budget_loss(params=0.8, steps=10))
    assert gated.controller.phase == "hold"
    gated.budget_loss(params=0.5, steps=10)
    saved = gated.controller.state_dict()
    again = gated.attach(BudgetController(gated, {"params": 0.5}, steps=10))
    again.load_state_dict(saved)
    train(gated, sgd(gated), 1, lambda _: torch.zeros(()))
    assert ratio(gated) <= 0.5


# -- modes, and loops without an optimizer -----------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gates_that_train_in_a_model_in_eval_mode(granularity: str) -> None:
    gated = gated_mlp(granularity).eval()
    gated.bank.train()
    train(gated, sgd(gated), 30, lambda _: gated.budget_loss(params=0.5, steps=30))
    assert 0.45 < ratio(gated) <= 0.5
    assert gated.budget_loss(params=0.3).requires_grad is False and gated.controller.budget["params"] == 0.5


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("through_data", [False, True])
def test_updates_by_hand_are_noticed_once(granularity: str, through_data: bool) -> None:
    gated = gated_mlp(granularity)
    with pytest.warns(UserWarning, match="no step of a torch.optim.Optimizer was seen") as caught:
        for _ in range(120):
            gated.zero_grad()
            (F.cross_entropy(gated(X), Y) + gated.budget_loss(params=0.5, steps=100)).backward()
            with torch.no_grad():
                for parameter in gated.parameters():
                    if parameter.grad is not None:  # those of gates over single weights are freed at once
                        (parameter.data if through_data else parameter).sub_(parameter.grad, alpha=0.05)
    assert len(caught) == 1 and caught[0].filename == __file__


def test_many_batches_before_the_first_step_are_no_reason_to_warn() -> None:
    gated = gated_mlp()
    optimizer = sgd(gated)
    for _ in range(130):
        (F.cross_entropy(gated(X[:2]), Y[:2]) + gated.budget_loss(params=0.5, steps=1)).backward()
    optimizer.step()
    assert gated.controller.taken == 1


def test_by_hand_the_papers_rule_works_and_is_silent() -> None:
    gated = gated_mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):
            gated.zero_grad()
            gated.budget_loss(params=0.5, weight=20.0).backward()
            with torch.no_grad():
                for gate in gated.gates.values():
                    gate.weight.sub_(gate.weight.grad)
    assert ratio(gated) < 1
