"""Training goes on as if nothing had happened: the steps of the uncompacted model with the dead gates held at zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tgfx
from tests.support.compaction_models import MODELS, images, model
from tests.support.promises import assert_close
from tests.support.random_models import Case, build, single_cases
from tests.support.trajectories import (
    OPTIMIZERS,
    SAME,
    Trainer,
    close_alike,
    random_keep,
    same_price,
    same_state,
    same_weights,
    start,
)

# one of each kind of block
SINGLE = list({tuple(name for name, _ in case.blocks): (tag, case) for tag, case in single_cases()}.values())


def follow(small: Trainer, large: Trainer, batches: list[Tensor]) -> None:
    large.hold_what_is_gone_in(small.gated)
    for number, x in enumerate(batches):
        torch.manual_seed(number)
        found = small.step(x)
        torch.manual_seed(number)
        assert_close(found.detach(), large.step(x).detach(), SAME, f"loss of step {number}")
    same_weights(small.gated, large.gated)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_after_each_of_two_compactions(name: str, optimizer: str) -> None:
    small = start(model(name), images(2), OPTIMIZERS[optimizer])
    for number in range(5):
        small.step(images(4, number))
    large = small.copy()
    for round_number, density in enumerate((0.6, 0.35)):
        close_alike(small, large, random_keep(density, 3 + round_number))
        report = tgfx.compact_(small.gated, small.optimizer, patience=0)
        assert report.removed
        same_price(small.gated, large.gated)
        same_state(small, large)
        follow(small, large, [images(4, 10 + number) for number in range(20)])
        same_state(small, large)
    x = images(3, 99)
    compact, expected = tgfx.shrink(small.gated).eval(), tgfx.shrink(large.gated).eval()
    assert_close(compact(x).detach(), expected(x).detach(), 1e-9, "shrunk output")
    assert [(n, p.shape) for n, p in compact.named_parameters()] == [
        (n, p.shape) for n, p in expected.named_parameters()
    ]


@pytest.mark.parametrize("case", [case for _, case in SINGLE], ids=[tag for tag, _ in SINGLE])
def test_every_block(case: Case) -> None:
    small = start(build(case), case.example(), OPTIMIZERS["adam"])
    if small.draws_random_numbers():  # other sizes draw other numbers
        small.gated.eval().bank.train()
    small.step(case.example(2))
    large = small.copy()
    for seed in (3, 4):
        close_alike(small, large, random_keep(0.6, seed))
        removed = tgfx.compact_(small.gated, small.optimizer, patience=0)
        assert removed or seed == 4  # the first round may leave one channel in every group
        same_price(small.gated, large.gated)
        follow(small, large, [case.example(2 + number) for number in range(2)])


def test_a_whole_branch_goes() -> None:
    small = start(model("branched"), images(2), OPTIMIZERS["adam"])
    for number in range(3):
        small.step(images(4, number))
    large = small.copy()
    close_alike(small, large, lambda group, size: torch.full((size,), group != "c1"), keep_one=False)
    watched = {name: small.gated.get_parameter(name) for name in ("c1.weight", "c2.weight", "b0.weight", "b1.bias")}
    stem = small.gated.get_parameter("stem.weight")
    report = tgfx.compact_(small.gated, small.optimizer, patience=0)
    assert report.left["c1"] == (0, 12) and "c1" not in small.gated.gates
    assert set(watched) < set(report.gone)
    assert not set(report.gone) & {name for name, _ in small.gated.named_parameters()}
    held = {id(p) for group in small.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in small.gated.parameters()} == {id(p) for p in small.optimizer.state}
    assert small.gated.get_parameter("stem.weight") is stem
    assert "c1" not in small.gated.code
    same_price(small.gated, large.gated)
    follow(small, large, [images(4, 10 + number) for number in range(20)])
    assert len(list(tgfx.shrink(small.gated).parameters())) == len(list(tgfx.shrink(large.gated).parameters()))


def test_a_group_that_must_stay_keeps_its_best_channel() -> None:
    small = start(model("branched"), images(2), OPTIMIZERS["sgd"])
    gate = small.gated.gates["c3"]
    with torch.no_grad():
        gate.weight.copy_(torch.tensor([-3.0, -2.0, -1.0, -4.0, -5.0, -6.0]))
    large = small.copy()
    report = tgfx.compact_(small.gated, small.optimizer, patience=0)
    assert report.left["c3"] == (1, 6) and report.waiting == 1
    assert small.gated.gates["c3"].weight.tolist() == [-1.0]
    assert small.gated.gate_slots("c3").tolist() == [large.gated.groups["c3"].start + 2]
    follow(small, large, [images(4, number) for number in range(5)])
