"""The guarantees of the design (G1, G2, G3, G5), on every block by itself and on random chains of blocks."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tgfx
from tests.support import promises
from tests.support.chains import densities, examples, gated_at, seeds
from tests.support.random_models import Case, build, cases, single_cases

SINGLE = single_cases()
each_block = pytest.mark.parametrize("case", [case for _, case in SINGLE], ids=[tag for tag, _ in SINGLE])


# -- every block alone -------------------------------------------------------------------------------------


@each_block
def test_block_cut_and_price_are_exact(case: Case) -> None:
    model = build(case)
    gated = tgfx.transform(model, case.example())
    promises.identical_in_eval(case, model, gated)
    promises.whole_price(model, gated)
    for density in (0.5, 0.0):
        promises.gate_at_random(gated, density, seed=3)
        compact = tgfx.shrink(gated, verify=False)
        promises.exact_cut(case, gated, compact)
        promises.exact_price(case, gated, compact)
        promises.price_as_polynomial(gated)
        filled = promises.dead_count_for_nothing(case, gated)
    assert filled > 0  # with one gate open in every group there must be something dead


@each_block
def test_block_trains_as_before(case: Case) -> None:
    promises.identical_in_training(case)


# -- random chains -----------------------------------------------------------------------------------------


@examples(40)
@given(cases())
def test_identity_in_eval(case: Case) -> None:
    model = build(case)
    promises.identical_in_eval(case, model, tgfx.transform(model, case.example()))


@examples(30)
@given(cases())
def test_identity_in_training_step_for_step(case: Case) -> None:
    promises.identical_in_training(case)


@examples(10)
@given(cases())
def test_identity_in_float32(case: Case) -> None:
    model = build(case).float()
    x = case.example()
    x = x.float() if x.is_floating_point() else x
    gated = tgfx.transform(model, x).eval()
    assert all(p.dtype == torch.float32 for p in gated.parameters())
    with torch.no_grad():
        promises.assert_close(gated(x), model(x), 1e-5, "gated output")


@examples(60)
@given(cases(), densities, seeds)
def test_cut_is_exact(case: Case, density: float, seed: int) -> None:
    gated = gated_at(case, density, seed)
    promises.exact_cut(case, gated, tgfx.shrink(gated))


@examples(15)
@given(cases(), densities, seeds, st.sampled_from((2, 3, 4)))
def test_cut_to_round_sizes_is_exact(case: Case, density: float, seed: int, multiple: int) -> None:
    gated = gated_at(case, density, seed)
    before = {name: gate.is_open() for name, gate in gated.gates.items()}
    compact = tgfx.shrink(gated, round_to=multiple)
    for name, gate in gated.gates.items():
        assert torch.equal(gate.is_open(), before[name])  # asking for round sizes does not move the gates
        count = int(before[name].sum())
        rounded = min(-(-count // multiple) * multiple, len(before[name]))
        dead = torch.where(before[name], -torch.inf, gate.weight)  # the best of the dead, first come first
        revived = before[name].clone()
        revived[torch.sort(dead, descending=True, stable=True).indices[: rounded - count]] = True
        gate.set_open_(revived)
        assert gate.open_count() == rounded
    promises.exact_cut(case, gated, compact)
    promises.exact_price(case, gated, compact)


@examples(40)
@given(cases(), densities, seeds)
def test_dead_channels_count_for_nothing(case: Case, density: float, seed: int) -> None:
    promises.dead_count_for_nothing(case, gated_at(case, density, seed))


@examples(40)
@given(cases(), densities, seeds)
def test_price_is_exact(case: Case, density: float, seed: int) -> None:
    gated = gated_at(case, density, seed)
    promises.exact_price(case, gated, tgfx.shrink(gated, verify=False))
    promises.price_as_polynomial(gated)
    promises.marginal_is_the_slope(gated)
    promises.price_has_gradients(gated)


@examples(10)
@given(cases())
def test_price_of_the_whole(case: Case) -> None:
    model = build(case)
    gated = tgfx.transform(model, case.example())
    promises.whole_price(model, gated)
    promises.exact_price(case, gated, tgfx.shrink(gated))
    assert all(gated.cheapest(kind) < 1 for kind in ("flops", "params"))


def test_budget_loss_is_equation_8() -> None:
    case = Case("image", (("Residual", {"project": False, "inplace": False}),), "pool")
    gated = gated_at(case, 0.5, 0)
    used = float(gated.cost("flops")) / gated.total("flops")
    assert 0 < used < 1
    assert float(gated.budget_loss(flops=0.3)) == pytest.approx((0.3 - used) ** 2, rel=1e-6)
    both = (0.3 - used) ** 2 + (0.9 - float(gated.ratio("params"))) ** 2
    assert float(gated.budget_loss(flops=0.3, params=0.9, weight=7.0)) == pytest.approx(7 * both, rel=1e-6)


@examples(20)
@given(cases(), st.booleans())
def test_the_input_is_untouched(case: Case, training: bool) -> None:
    model = build(case).train(training)
    first = next(m for m in model.modules() if not list(m.children()))
    first.training = not training  # a layer in a mode of its own
    next(model.parameters()).requires_grad_(False)
    before, x = promises.snapshot(model), case.example()
    given_x = x.clone()
    rng = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    gated = tgfx.transform(model, x)
    assert {n: m.training for n, m in gated.named_modules() if n in before["modes"] and n}.items() <= before[
        "modes"
    ].items()
    promises.gate_at_random(gated, 0.5, 0)
    kept = promises.snapshot(gated)
    tgfx.shrink(gated)
    promises.assert_same_snapshot(kept, promises.snapshot(gated))
    promises.assert_same_snapshot(before, promises.snapshot(model))
    assert torch.equal(x, given_x)
    assert torch.equal(rng[0], torch.get_rng_state())
    assert rng[1] == np.random.get_state()[1].tolist() and rng[2] == random.getstate()
    # and no memory is shared: training one does not move the other
    with torch.no_grad():
        for parameter in gated.parameters():
            parameter.add_(1)
    promises.assert_same_snapshot(before, promises.snapshot(model))


@examples(15)
@given(cases(), densities, seeds)
def test_same_plan_every_time(case: Case, density: float, seed: int) -> None:
    one, two = gated_at(case, density, seed), gated_at(case, density, seed)
    assert str(one.report()) == str(two.report())
    assert one.groups.keys() == two.groups.keys()
    for name, group in one.groups.items():
        other = two.groups[name]
        assert (group.size, group.members, group.ties, group.frozen) == (
            other.size, other.members, other.ties, other.frozen,
        )  # fmt: skip
    assert one.code == two.code
    first, second = tgfx.shrink(one), tgfx.shrink(two)
    assert first.code == second.code
    left, right = first.state_dict(), second.state_dict()
    assert list(left) == list(right)
    assert all(torch.equal(left[name], right[name]) for name in left)
