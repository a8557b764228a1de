"""Heads leave as channels do; gates over layers and choices stay gates, open or closed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tgfx
from tests.compaction.test_trajectory import follow
from tests.support.attention import LENGTH, Model, Variant
from tests.support.promises import assert_close
from tests.support.residual_models import ResidualCase
from tests.support.trajectories import OPTIMIZERS, Trainer, close_alike, random_keep, same_price, same_state
from tests.test_choice import CASE as CHOICES

STEPS = 10


def started(model: torch.nn.Module, example: Tensor, granularity: Any) -> Trainer:
    gated = tgfx.transform(model, example, granularity=granularity)
    generator = torch.Generator().manual_seed(5)  # at round weights TG would stand exactly on a jump
    for gate in gated.gates.values():
        with torch.no_grad():
            gate.weight.copy_(0.3 + 0.5 * torch.rand(gate.weight.shape, generator=generator, dtype=torch.float64))
    trainer = Trainer(gated, OPTIMIZERS["sgd"])
    trainer.step(example)
    return trainer


def close_channels(small: Trainer, large: Trainer, seed: int) -> None:
    """Channels and heads at random, the same in both; layers and choices as they are."""
    switches = {group.name for group in large.gated.facts.coupling.groups if group.is_switch}
    saved = [(t, n, t.gated.gates[n].weight.detach().clone()) for t in (small, large) for n in switches]
    for trainer, name, _ in saved:  # open for the time being
        trainer.gated.gates[name].weight.data.fill_(1)
    close_alike(small, large, random_keep(0.6, seed))
    for trainer, name, weight in saved:
        trainer.gated.gates[name].weight.data.copy_(weight)


def compacted_alike(small: Trainer, large: Trainer, batches: list[Tensor], *, rounds: int = 2) -> None:
    """Two rounds of: close, compact one of them, ten steps with the same losses; then the same small model."""
    for seed in range(rounds):
        close_channels(small, large, seed)
        assert tgfx.compact_(small.gated, small.optimizer, patience=0)
        same_price(small.gated, large.gated)
        same_state(small, large)
        follow(small, large, batches)
        same_state(small, large)
    compact, expected = tgfx.shrink(small.gated).eval(), tgfx.shrink(large.gated).eval()
    assert_close(compact(batches[0]).detach(), expected(batches[0]).detach(), 1e-9, "shrunk output")
    assert [p.shape for p in compact.parameters()] == [p.shape for p in expected.parameters()]


def sequences(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, LENGTH, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("granularity", ["head", ("channel", "head")], ids=str)
@pytest.mark.parametrize("options", [{}, {"layout": "fused"}, {"norm": "rms"}], ids=str)
def test_heads_leave(options: dict[str, Any], granularity: Any) -> None:
    torch.manual_seed(0)
    first, *batches = sequences(STEPS + 1)
    small = started(Model(Variant(**options)).double(), first, granularity)
    compacted_alike(small, small.copy(), batches)
    assert any(len(gate.weight) < 4 for name, gate in small.gated.gates.items() if name.startswith("blocks"))


def test_rows_of_a_closed_head_are_removed() -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(Model(Variant()).double(), sequences(1)[0], granularity="head").eval()
    before = {name: p.detach().clone() for name, p in gated.named_parameters()}
    gated.gates["blocks.0"].set_open_(torch.tensor([True, False, True, True]))
    assert tgfx.compact_(gated, patience=0).removed == {"blocks.0": 1}
    rows = torch.tensor([0, 1, 2, 6, 7, 8, 9, 10, 11])  # 4 heads of 3
    for name in ("q", "k", "values"):
        weight = gated.get_parameter(f"blocks.0.{name}.weight")
        assert torch.equal(weight, before[f"blocks.0.{name}.weight"][rows])


@pytest.mark.parametrize("names", [("post", "pre"), ("projected", "nested", "shared", "post")], ids=" ".join)
def test_closed_layers_stay_gates(names: tuple[str, ...]) -> None:
    case = ResidualCase(names)
    first, *batches = [case.example(2 + number % 3) for number in range(STEPS + 1)]
    small = started(case.build(), first, ("channel", "layer"))
    layers = [group.name for group in small.gated.facts.coupling.groups if group.kind == "layer"]
    with torch.no_grad():
        small.gated.gates[layers[0]].weight.fill_(-1)
    large = small.copy()
    compacted_alike(small, large, batches)
    assert all(name in small.gated.gates for name in layers)
    for trainer in (small, large):  # and it may open again
        with torch.no_grad():
            trainer.gated.gates[layers[0]].weight.fill_(0.4)
    follow(small, large, batches[:3])


def test_layers_alone_are_never_removed() -> None:
    case = ResidualCase(("post", "pre"))
    gated = tgfx.transform(case.build(), case.example(), granularity="layer")
    for gate in gated.gates.values():
        gate.set_open_(torch.tensor([False]))
    for _ in range(3):
        report = tgfx.compact_(gated)
        assert not report and report.waiting == 0
    assert {name: len(gate.weight) for name, gate in gated.gates.items()} == dict.fromkeys(gated.gates, 1)


@pytest.mark.parametrize("granularity", ["channel", ("channel", "layer")], ids=str)
def test_alternatives_that_are_not_chosen_stay(granularity: Any) -> None:
    first, *batches = [CHOICES.example(2 + number % 3) for number in range(STEPS + 1)]
    small = started(CHOICES.build(), first, granularity)
    large = small.copy()
    compacted_alike(small, large, batches)
    choices = {group.name: group.size for group in small.gated.facts.coupling.groups if group.kind == "choice"}
    assert {name: len(small.gated.gates[name].weight) for name in choices} == choices
    for trainer in (small, large):  # and may be chosen later
        trainer.gated.gates["trunk"].set_open_(torch.arange(2) != trainer.gated.gates["trunk"].chosen())
    follow(small, large, batches[:3])
