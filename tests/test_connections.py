"""Gates over connections: what each layer reads of a residual sum and what each branch adds to it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tgfx
from tests.support import promises
from tests.support.residual_gates import check_cut, open_gates_change_nothing, set_gates
from tests.support.residual_models import BLOCKS, ResidualCase
from tgfx.errors import GranularityError

GRANULARITIES = [("connection",), ("connection", "layer")]
CASES = [ResidualCase((name,)) for name in BLOCKS] + [ResidualCase(("projected", "nested", "shared", "post"))]
IDS = [" + ".join(case.names) for case in CASES]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_open_gates_change_nothing(case: ResidualCase, granularity: tuple[str, ...]) -> None:
    open_gates_change_nothing(case, granularity)


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


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_dead_channels_count_for_nothing(case: ResidualCase) -> None:
    """Whatever stands in dead slices of the weights."""
    gated = tgfx.transform(case.build(), case.example(), granularity="connection").eval()
    set_gates(gated, 3)
    assert promises.dead_count_for_nothing(case, gated) > 0


def test_each_layer_and_each_branch_decides_for_itself() -> None:
    case = ResidualCase(("post", "post"))
    tied = tgfx.transform(case.build(), case.example())
    gated = tgfx.transform(case.build(), case.example(), granularity="connection")
    own = [{str(member) for member in group.members} for group in gated.facts.coupling.groups]
    for block in ("blocks.0", "blocks.1"):
        assert {f"{block}.conv1.weight[1]"} in own  # what it reads
        assert {f"{block}.conv2.weight[0]", f"{block}.bn2.weight[0]", f"{block}.bn2.bias[0]"} in own  # what it adds
    assert sum(g.size for g in gated.facts.coupling.groups) > sum(g.size for g in tied.facts.coupling.groups)
    kept = [str(group.frozen) for group in gated.facts.coupling.frozen]
    assert any("residual sum, whose connections have gates of their own" in reason for reason in kept)


def test_a_branch_that_adds_nothing_goes() -> None:
    case = ResidualCase(("post", "pre"))
    model = case.build()
    gated = tgfx.transform(model, case.example(), granularity="connection").eval()
    adds = next(g for g in gated.facts.coupling.groups if "blocks.0.bn2.weight[0]" in {str(m) for m in g.members})
    gated.gates[adds.name].set_open_(torch.zeros(adds.size, dtype=torch.bool))
    compact = tgfx.shrink(gated).eval()
    promises.exact_cut(case, gated, compact)
    promises.exact_price(case, gated, compact)
    left = {name for name, _ in compact.named_parameters()}
    assert left == {name for name, _ in model.named_parameters() if not name.startswith("blocks.0.")}


def test_what_has_nothing_to_look_up_is_as_it_was() -> None:
    case = ResidualCase(("post", "pre"))
    gated = tgfx.transform(case.build(), case.example(), granularity="connection").eval()
    compact = tgfx.shrink(gated)
    assert not [node for node in compact.graph.nodes if "select" in node.name or "connect" in node.name]


@pytest.mark.parametrize("case", [ResidualCase((name, "post")) for name in BLOCKS], ids=sorted(BLOCKS))
def test_compacted_on_the_way(case: ResidualCase) -> None:
    """The gates that are left still work in the smaller gated model, in train mode too."""
    gated = tgfx.transform(case.build(), case.example(), granularity="connection")
    set_gates(gated, 1, 0.7)
    other = copy.deepcopy(gated)
    before = sum(parameter.numel() for parameter in gated.parameters())
    tgfx.compact_(gated, patience=0)
    assert sum(parameter.numel() for parameter in gated.parameters()) < before
    generator = torch.Generator().manual_seed(2)
    for name, gate in gated.gates.items():  # close more of what is left
        left = torch.from_numpy(gated.gate_slots(name) - other.groups[name].start)
        mask = torch.rand(len(left), generator=generator) < 0.7
        mask[0] = True
        gate.set_open_(mask)
        whole = torch.zeros(other.groups[name].size, dtype=torch.bool)
        whole[left[mask]] = True
        other.gates[name].set_open_(whole)
    with torch.no_grad():
        promises.assert_close(gated.eval()(case.example(3)), other.eval()(case.example(3)), promises.EXACT, "compacted")
    check_cut(case, gated)


def test_copies_and_plans_carry_the_gates(tmp_path: Path) -> None:
    case = ResidualCase(("projected", "nested", "attention, norm first"))
    gated = tgfx.transform(case.build(), case.example(), granularity="connection").eval()
    set_gates(gated, 5)
    compact = tgfx.shrink(gated).eval()
    x = case.example(3)
    for twin in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        assert torch.equal(twin(x), gated(x))
        assert torch.equal(tgfx.shrink(twin).eval()(x), compact(x))
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    rebuilt = tgfx.load_plan(folder, ResidualCase(case.names, seed=9).build(), case.example()).eval()
    assert torch.equal(rebuilt(x), compact(x))


def test_a_budget_is_met_and_more_can_be_chosen() -> None:
    case = ResidualCase(("post", "pre", "post"))
    gated = tgfx.transform(case.build(), case.example(), granularity="connection")
    x = case.example(8)
    wanted = torch.randn_like(gated(x)).detach()
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.01))
    for _ in range(40):
        loss = (gated(x) - wanted).square().mean() + gated.budget_loss(flops=0.5, steps=40)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert 0.45 <= gated.eval().ratio("flops").item() <= 0.5
    check_cut(case, gated)


def test_models_without_a_residual_sum_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(GranularityError, match="no connections to gate"):
        tgfx.transform(model, torch.randn(2, 4), granularity="connection")
    with pytest.raises(GranularityError, match="cannot be mixed"):
        tgfx.transform(model, torch.randn(2, 4), granularity=("connection", "weight"))
