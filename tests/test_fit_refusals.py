"""What tgfx.fit refuses, and that nothing was touched then."""

import pytest
import torch
from torch.nn import functional as F

import tgfx
from tests.support.training import SmallNet, images, is_gate, loader, same_state, small_gated, state
from tgfx.errors import BudgetError, InputError, OptimizerError, TgfxError, TrainingError

QUIET = {"progress": False, "budget": {"flops": 0.5}, "lr": 0.05}
X, Y = images()


@pytest.fixture
def gated() -> tgfx.GatedModule:
    return small_gated()


def refused(kind: type[TgfxError], match: str, *args, **options) -> TgfxError:
    gated = small_gated()
    before = state(gated)
    with pytest.raises(kind, match=match) as caught:
        tgfx.fit(gated, *(args or (loader(), F.cross_entropy)), **{**QUIET, **options})
    assert caught.value.expected and caught.value.found
    assert same_state(before, gated.state_dict()) == []
    assert gated.controller is None and all(p.requires_grad for p in gated.parameters())
    return caught.value


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan"), "half"])
def test_budgets_that_make_no_sense(share) -> None:
    refused(BudgetError, "flops", budget={"flops": share})


def test_a_budget_that_no_gates_can_meet() -> None:
    for rule in ({}, {"rule": "paper", "weight": 1.0}):
        error = refused(BudgetError, "cannot be met", budget={"flops": 0.001}, **rule)
        assert "flops of at least 0." in error.expected


WRONG = {
    "epochs": ({"epochs": 0}, "epochs is out of range"),
    "steps": ({"steps": -1}, "steps is out of range"),
    "accumulate": ({"accumulate": 0}, "accumulate is out of range"),
    "clip": ({"clip": -1.0}, "clip is a norm"),
    "amp": ({"amp": torch.float16}, "loss scaling"),
    "train": ({"train": "weights"}, "unknown train"),
    "rule": ({"rule": "other"}, "unknown rule"),
    "checkpoint_every": ({"checkpoint_every": 0}, "checkpoint_every is out"),
    "seed": ({"seed": 1.5}, "seed is out"),
    "weight of the default rule": ({"weight": 1.0}, "finds its own weight"),
    "no weight for the paper's": ({"rule": "paper"}, "needs the weight"),
    "gates without a budget": ({"budget": None, "train": "gates"}, "nothing to train towards"),
    "epochs and steps": ({"epochs": 1, "steps": 5}, "two lengths"),
    "two losses": ({"training_step": lambda model, batch: model(batch[0]).sum()}, "two ways to a loss"),
    "scheduler": ({"scheduler": "linear"}, "cannot be stepped"),
    "plateau": ({"scheduler": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)}, "cannot be stepped"),
    "schedule": ({"schedule": tgfx.Schedule(1000)}, "longer than the run"),
}


@pytest.mark.parametrize(("options", "complaint"), WRONG.values(), ids=WRONG)
def test_options_that_make_no_sense(options: dict, complaint: str) -> None:
    refused(InputError, complaint, **options)


def test_loaders_that_give_nothing() -> None:
    refused(TrainingError, "no batches", [], F.cross_entropy)
    refused(TrainingError, "no batches", (x for x in ()), F.cross_entropy, steps=3)
    refused(InputError, "cannot be iterated", 7, F.cross_entropy)
    assert "steps=" in refused(InputError, "how long", iter([(X, Y)]), F.cross_entropy).fix


def test_an_iterator_is_used_up_after_an_epoch(gated) -> None:
    with pytest.raises(TrainingError, match="no batches") as caught:
        tgfx.fit(gated, iter([(X, Y)] * 3), F.cross_entropy, steps=5, **QUIET)
    assert "epoch 2" in caught.value.found and "not an iterator" in caught.value.fix


def test_a_plain_model_is_not_fitted() -> None:
    with pytest.raises(InputError, match="only a gated model"):
        tgfx.fit(SmallNet(), loader(), F.cross_entropy, **QUIET)


def test_an_optimizer_built_before_transform() -> None:
    model = SmallNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gated = tgfx.transform(model, X[:2])
    with pytest.raises(OptimizerError, match="does not hold") as caught:
        tgfx.fit(gated, loader(), F.cross_entropy, optimizer=optimizer, **QUIET)
    assert "conv1.weight" in caught.value.found and "after tgfx.transform" in caught.value.fix
    optimizer = torch.optim.SGD([p for n, p in gated.named_parameters() if not is_gate(n, gated)], lr=0.1)
    with pytest.raises(OptimizerError, match="does not hold the gates"):
        tgfx.fit(gated, loader(), F.cross_entropy, optimizer=optimizer, **QUIET)


@pytest.mark.parametrize("value", ["good", "", None, [1.0, 2.0], torch.ones(2), {}], ids=repr)
def test_val_gives_numbers(gated, value) -> None:
    with pytest.raises(InputError, match="val gave something for 'accuracy' that is no number") as caught:
        tgfx.fit(gated, loader(), F.cross_entropy, val=lambda model: {"accuracy": value}, **QUIET)
    assert repr(value) in caught.value.found and caught.value.expected and caught.value.fix
    assert gated.controller is None


def test_losses_that_are_none() -> None:
    refused(TrainingError, "there is no loss", loader(), lambda o, y: 0.5)
    refused(TrainingError, "there is no loss", loader(), lambda o, y: o)
    refused(TrainingError, "there is no loss", loader(), None)
    refused(TrainingError, "does not depend", loader(), lambda o, y: o.detach().sum())
