"""Gates over residual branches: found where they are, identical when open, gone without a trace when closed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tgfx
from tests.support import promises
from tests.support.residual_gates import check_cut, open_gates_change_nothing, set_gates
from tests.support.residual_models import BLOCKS, ResidualCase, trained_once
from tgfx.errors import NothingToGateError

GRANULARITIES = [("layer",), ("channel", "layer")]
CASES = [ResidualCase((name,)) for name in BLOCKS] + [ResidualCase(("projected", "nested", "shared", "post"))]
IDS = [" + ".join(case.names) for case in CASES]


def layers(gated: tgfx.GatedModule) -> list[tgfx.Group]:
    return [group for group in gated.groups if group.kind == "layer"]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_branch_is_found(case: ResidualCase, granularity: tuple[str, ...]) -> None:
    gated = tgfx.transform(case.build(), case.example(), granularity=granularity)
    assert len(layers(gated)) == case.branches, [group.name for group in layers(gated)]
    assert any(group.kind == "channel" for group in gated.facts.coupling.groups) == ("channel" in granularity)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_open_gates_change_nothing(case: ResidualCase, granularity: tuple[str, ...]) -> None:
    gated, own = open_gates_change_nothing(case, granularity)
    for group in layers(gated):
        assert bool(own[f"gate_bank.{group.name.replace('.', '/')}.weight"].any()), f"{group.name} learns nothing"


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_each_branch_alone(case: ResidualCase, granularity: tuple[str, ...]) -> None:
    """Closing one branch leaves a model without its parameters that still trains."""
    model = case.build()
    for index in range(case.branches):
        gated = tgfx.transform(model, case.example(), granularity=granularity).eval()
        before = gated(case.example())
        group = layers(gated)[index]
        gated.gates[group.name].set_open_(torch.tensor([False]))
        assert float((gated(case.example()) - before).detach().abs().max()) > 1e-6, "the branch did not matter"
        compact = check_cut(case, gated)
        if "shared" not in case.names:
            left = {name for name, _ in compact.named_parameters()}
            assert left == {n for n, _ in model.named_parameters()} - {member.name for member in group.members}
        loss, gradients = trained_once(compact, case.example(3))
        found, own = trained_once(gated, case.example(3))
        promises.assert_close(loss, found, 1e-6, "loss in training")  # off by the gate's own s(w) <= 1 / M
        assert gradients.keys() <= own.keys()


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=3),
    st.sampled_from(GRANULARITIES),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.3, 0.7]),
)
def test_any_gates_on_any_chain(names: list[str], granularity: tuple[str, ...], seed: int, density: float) -> None:
    case = ResidualCase(tuple(names), seed)
    gated = tgfx.transform(case.build(), case.example(), granularity=granularity).eval()
    set_gates(gated, seed, density)
    check_cut(case, gated)
    promises.marginal_is_the_slope(gated)


def test_channels_of_a_closed_branch_may_all_be_closed() -> None:
    case = ResidualCase(("inverted", "post"))
    gated = tgfx.transform(case.build(), case.example(), granularity=("channel", "layer")).eval()
    closed = next(group for group in layers(gated) if group.name == "blocks.0")
    gated.gates[closed.name].set_open_(torch.tensor([False]))
    inside = {member.name for member in closed.members}
    emptied = 0
    for group in gated.facts.coupling.groups:
        if group.kind == "channel" and {member.name for member in group.members} <= inside:
            gated.gates[group.name].set_open_(torch.zeros(group.size, dtype=torch.bool))
            emptied += 1
    assert emptied > 1
    check_cut(case, gated)


def test_a_shared_layer_costs_until_its_last_branch_closes() -> None:
    case = ResidualCase(("shared",))
    gated = tgfx.transform(case.build(), case.example(), granularity="layer").eval()
    first, second = [gated.gates[group.name] for group in layers(gated)]
    own = 8 * 8 * 9 + 8
    whole = gated.total("params")
    price = []
    for states in ((True, True), (True, False), (False, True), (False, False)):
        first.set_open_(torch.tensor([states[0]]))
        second.set_open_(torch.tensor([states[1]]))
        check_cut(case, gated)
        price.append(float(gated.cost("params")))
    assert price == [whole, whole, whole, whole - own]


def test_projection_stays() -> None:
    case = ResidualCase(("projected",))
    gated = tgfx.transform(case.build(), case.example(), granularity="layer")
    (group,) = layers(gated)
    assert group.name == "blocks.0"
    assert {m.name.split(".")[2] for m in group.members} == {"conv1", "bn1", "conv2", "bn2"}


def test_ignored_layers_keep_their_branch() -> None:
    case = ResidualCase(("post", "pre"))
    gated = tgfx.transform(case.build(), case.example(), granularity="layer", ignore="blocks.1.branch.0")
    assert [group.name for group in layers(gated)] == ["blocks.0"]
    with pytest.raises(NothingToGateError, match="no residual branch"):
        tgfx.transform(case.build(), case.example(), granularity="layer", ignore="blocks.*")


def test_no_branch_is_an_error_only_if_nothing_else_was_asked_for() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    with pytest.raises(NothingToGateError, match="no residual branch"):
        tgfx.transform(model, torch.randn(2, 4), granularity="layer")
    assert list(tgfx.transform(model, torch.randn(2, 4), granularity=("layer", "channel")).gates) == ["0"]


def test_strict_does_not_ask_for_channels() -> None:
    class Sorted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.sort(self.f(x)).values

    with pytest.raises(tgfx.TgfxError, match="strict"):
        tgfx.transform(Sorted(), torch.randn(2, 4), granularity=("channel", "layer"), strict=True)
    assert list(tgfx.transform(Sorted(), torch.randn(2, 4), granularity="layer", strict=True).gates) == ["f"]


def test_copies_and_plans_carry_the_gates(tmp_path: Path) -> None:
    case = ResidualCase(("projected", "nested", "attention, norm first"))
    gated = tgfx.transform(case.build(), case.example(), granularity=("channel", "layer")).eval()
    set_gates(gated, 5)
    compact = tgfx.shrink(gated).eval()
    x = case.example(3)
    for twin in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        assert torch.equal(twin(x), gated(x))
        assert float(twin.cost("flops")) == float(gated.cost("flops"))
        assert torch.equal(tgfx.shrink(twin).eval()(x), compact(x))
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    rebuilt = tgfx.load_plan(folder, ResidualCase(case.names, seed=9).build(), case.example()).eval()
    assert torch.equal(rebuilt(x), compact(x))
    assert rebuilt.state_dict().keys() == compact.state_dict().keys()


def test_what_people_read() -> None:
    case = ResidualCase(("projected", "post"))
    gated = tgfx.transform(case.build(), case.example(), granularity=("channel", "layer"))
    gated.gates["blocks.1"].set_open_(torch.tensor([False]))
    text = str(gated.report())
    assert "channels, 2 layers" in text and "goes as a whole" in text
    assert "a residual branch under one gate, closed" in gated.explain("blocks.1")
    assert "a residual branch under one gate, open" in gated.explain("blocks.0.conv1")
    assert "added by iadd at iadd" in gated.explain("blocks.1")
    assert {row["kind"] for row in gated.report().rows()} == {"channel", "layer"}
    assert "n[blocks.0]" in {str(symbol) for symbol in gated.cost_expr("params").free_symbols}


def test_rounding_leaves_branches_alone() -> None:
    case = ResidualCase(("post", "pre"))
    gated = tgfx.transform(case.build(), case.example(), granularity=("channel", "layer")).eval()
    gated.gates["blocks.0"].set_open_(torch.tensor([False]))
    compact = tgfx.shrink(gated, round_to=4)
    assert not any(name.startswith("blocks.0") for name, _ in compact.named_parameters())


def test_the_cheapest_model_has_no_branch() -> None:
    case = ResidualCase(("post", "pre"))
    gated = tgfx.transform(case.build(), case.example(), granularity="layer").eval()
    cheapest = gated.cheapest("flops")
    for group in layers(gated):
        gated.gates[group.name].set_open_(torch.tensor([False]))
    assert float(gated.ratio("flops")) == cheapest < 0.5


def test_budget_closes_branches() -> None:
    """The budget's own gradient reaches the gates of branches: half of the FLOPs are given up."""
    case = ResidualCase(("post", "post", "pre", "pre"))
    gated = tgfx.transform(case.build(), case.example(), granularity="layer")
    optimizer = torch.optim.SGD([gate.weight for gate in gated.gates.values()], lr=1.0)
    for _ in range(60):
        optimizer.zero_grad()
        gated.budget_loss(weight=1.0, flops=0.5).backward()
        optimizer.step()
    closed = [name for name, gate in gated.gates.items() if not gate.open_count()]
    assert closed, {name: gate.weight.item() for name, gate in gated.gates.items()}
