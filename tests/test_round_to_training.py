"""round_to while training: sizes are multiples at every step, so that nothing is left to be rounded at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from tests.support.training import images, loader, small_gated
from tgfx.errors import BudgetError, GranularityError, InputError, TgfxError, TrainingError
from tgfx.training.controller import BudgetController

X, Y = images()
QUIET = {"progress": False, "budget": {"flops": 0.5}, "lr": 0.05}
ROUND = 4


def wide_gated(widths: tuple[int, ...] = (16, 24)) -> tgfx.GatedModule:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    before = X[0].numel()
    for width in widths:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return tgfx.transform(nn.Sequential(nn.Flatten(), *layers, nn.Linear(before, 4)), X[:2])


def counts(gated: tgfx.GatedModule) -> list[int]:
    return [gate.open_count() for gate in gated.gates.values()]


def is_rounded(gated: tgfx.GatedModule, multiple: int) -> bool:
    sizes = {group.name: group.size for group in gated.groups}
    return all(gate.open_count() % multiple == 0 or gate.open_count() == sizes[n] for n, gate in gated.gates.items())


def steps_of(gated: tgfx.GatedModule, count: int, **asked: Any) -> list[list[int]]:
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05))
    seen = []
    for _ in range(count):
        (F.cross_entropy(gated(X), Y) + gated.budget_loss(steps=count, **asked)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(counts(gated))
    return seen


# -- what it does --------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(2, 26), min_size=1, max_size=3),
    st.integers(1, 9),
    st.floats(0.45, 0.95),
    st.booleans(),
)
def test_sizes_are_multiples_at_every_step(widths: list[int], multiple: int, share: float, frozen: bool) -> None:
    gated = wide_gated(tuple(widths))
    if frozen:
        for name, parameter in gated.named_parameters():
            parameter.requires_grad_(name.startswith("gate_bank"))
    try:
        BudgetController(gated, {"params": share}, round_to=multiple).close()
    except BudgetError:
        return  # so few multiples that none is small enough: said before any step
    sizes = widths
    for seen in steps_of(gated, 12, params=share, round_to=multiple):
        assert all(n % multiple == 0 or n == size for n, size in zip(seen, sizes, strict=True))
    assert gated.ratio("params").item() <= share + 1e-6
    before = gated.open_slots()
    finished = tgfx.finish(gated, params=share, round_to=multiple)
    assert finished.moved == 0 and (gated.open_slots() == before).all()


def test_groups_close_in_steps_and_not_all_at_once() -> None:
    gated = wide_gated()
    seen = steps_of(gated, 40, params=0.4, round_to=ROUND)
    assert seen[0] == [16, 24]
    assert len({tuple(one) for one in seen}) > 3  # on the way, and not in one leap
    assert gated.ratio("params").item() <= 0.4


def test_without_it_sizes_are_any() -> None:
    """Or the tests above would see nothing."""
    seen = steps_of(wide_gated(), 40, params=0.4)
    assert any(n % ROUND for one in seen for n in one)


def test_fit_rounds_and_compacts() -> None:
    gated = small_gated()
    sizes: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert is_rounded(gated, ROUND)
        sizes.append(gated.conv2.weight.numel())
        return F.cross_entropy(output, target)

    result = tgfx.fit(gated, loader(), loss_fn, epochs=12, seed=0, compact_every=5, round_to=ROUND, **QUIET)
    assert result.ratios["flops"] <= 0.5
    assert is_rounded(gated, ROUND)
    assert gated.conv2.weight.shape[:2] == (counts(gated)[1], counts(gated)[0]) and sizes[-1] < sizes[0]
    assert tgfx.finish(gated, flops=0.5, round_to=ROUND).moved == 0


# -- what is refused -----------------------------------------------------------------------------------------


def refused(kind: type[TgfxError], call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("bad", [0, -8, 2.5, True, "8"])
def test_bad_multiples(bad: Any) -> None:
    gated = small_gated()
    refused(InputError, lambda: tgfx.fit(gated, loader(), F.cross_entropy, round_to=bad, **QUIET), "round_to")
    refused(InputError, lambda: BudgetController(gated, {"flops": 0.5}, round_to=bad), "round_to")
    refused(InputError, lambda: gated.budget_loss(flops=0.5, round_to=bad), "round_to")
    assert gated.controller is None


def test_a_budget_below_the_first_multiples_is_refused_before_training() -> None:
    gated = wide_gated((8, 8))
    before = counts(gated)
    refused(BudgetError, lambda: gated.budget_loss(params=0.3, round_to=8), "at least 1.0", "smaller round_to")
    assert counts(gated) == before and gated.controller is None


def test_only_the_default_rule_rounds() -> None:
    gated = small_gated()
    options = {**QUIET, "rule": "paper", "weight": 4.0, "round_to": 4}
    refused(InputError, lambda: tgfx.fit(gated, loader(), F.cross_entropy, **options), "default rule", "tgfx.finish")
    options = {"progress": False, "budget": None, "round_to": 4}
    refused(InputError, lambda: tgfx.fit(gated, loader(), F.cross_entropy, **options), "default rule")
    refused(InputError, lambda: gated.budget_loss(flops=0.5, weight=4.0, round_to=4), "default rule")


def test_another_multiple_in_the_middle() -> None:
    gated = wide_gated()
    gated.budget_loss(params=0.5, steps=10, round_to=4)
    gated.budget_loss(params=0.5, steps=10)  # as before
    refused(InputError, lambda: gated.budget_loss(params=0.5, steps=10, round_to=8), "round_to=4", "close()")


def test_single_weights_are_not_rounded() -> None:
    gated = tgfx.transform(nn.Linear(8, 4), torch.randn(2, 8), granularity="weight")
    refused(GranularityError, lambda: gated.budget_loss(params=0.5, round_to=4), "multiples")
    batches = [(torch.randn(2, 8), torch.zeros(2, dtype=torch.long))]
    options = {"progress": False, "budget": {"params": 0.5}, "round_to": 4}
    refused(GranularityError, lambda: tgfx.fit(gated, batches, F.cross_entropy, **options), "multiples")


def test_a_checkpoint_goes_on_with_its_own_multiple(tmp_path: Path) -> None:
    options = {**QUIET, "steps": 6, "seed": 0, "checkpoint": tmp_path / "last.pt"}
    tgfx.fit(small_gated(), loader(), F.cross_entropy, round_to=4, **options)
    again = small_gated()
    refused(TrainingError, lambda: tgfx.fit(again, loader(), F.cross_entropy, **options), "round_to=4")
    assert tgfx.fit(again, loader(), F.cross_entropy, round_to=4, **options).steps == 6
