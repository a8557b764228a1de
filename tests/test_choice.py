"""Choices: one of several layers by gradient descent, priced exactly, the others gone after the cut."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tgfx
from tests.support import promises
from tgfx.choice_gate import ChoiceGate
from tgfx.errors import InputError, PlanError


class Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Net(nn.Module):
    """A choice in a residual branch, one in the trunk, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        normed = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.small = tgfx.Choice([nn.Conv2d(8, 8, 3, padding=1), normed, nn.Identity(), Zero()])
        self.trunk = tgfx.Choice([nn.Conv2d(8, 12, 1), nn.Conv2d(8, 12, 5, padding=2)])
        self.again = tgfx.Choice([nn.Conv2d(12, 12, 3, padding=1), nn.Identity(), nn.Identity()], init=1)
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        x = x + self.small(x)
        x = torch.relu(self.trunk(x))
        x = self.again(torch.tanh(self.again(x)))
        return self.out(x.mean((2, 3)))


class Case:
    blocks = ()

    def build(self) -> Net:
        torch.manual_seed(0)
        return Net().double()

    def example(self, batch: int = 2) -> Tensor:
        return torch.randn(batch, 3, 5, 5, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)


CASE = Case()
CHOICES = {"small": 4, "trunk": 2, "again": 3}


def choose(gated: tgfx.GatedModule, **wanted: int) -> None:
    for name, index in wanted.items():
        gated.gates[name].set_open_(torch.arange(CHOICES[name]) == index)


# -- the gate ----------------------------------------------------------------------------------------------


def test_eval_is_one_hot_and_training_lies_next_to_it() -> None:
    gate = ChoiceGate(3, tgfx.GateSpec(init=lambda size: torch.tensor([0.3, 1.71, -2.0])))
    assert gate.chosen() == 1
    values = gate.train()().detach()
    assert float((values - torch.tensor([0.0, 1.0, 0.0])).abs().max()) < 2e-5
    assert abs(float(values.sum()) - 1) < 1e-6
    assert gate.eval()().tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("shape", ["constant", "sigmoid", "tanh"])
def test_derivative_is_the_shape_on_the_simplex(shape: str) -> None:
    weight = torch.tensor([0.3, 1.7, -2.0, 0.9], dtype=torch.float64)
    gate = ChoiceGate(4, tgfx.GateSpec(shape=shape, init=lambda size: weight)).double()
    jacobian = torch.autograd.functional.jacobian(lambda w: torch.func.functional_call(gate, {"weight": w}, ()), weight)
    slope = {"constant": torch.ones_like(weight), "sigmoid": None, "tanh": 1 - weight.tanh() ** 2}[shape]
    slope = weight.sigmoid() * (1 - weight.sigmoid()) if slope is None else slope
    expected = torch.diag(slope) - slope.expand(4, 4) / 4
    torch.testing.assert_close(jacobian, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(jacobian.sum(0), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)


def test_set_open_chooses() -> None:
    gate = ChoiceGate(3, tgfx.GateSpec())
    for index in (2, 0, 1, 1):
        gate.set_open_(torch.arange(3) == index)
        assert gate.chosen() == index and gate.is_open().nonzero().item() == index and gate.open_count() == 1
    for mask in (torch.tensor([True, True, False]), torch.zeros(3, dtype=torch.bool), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(InputError, match="mask does not fit"):
            gate.set_open_(mask)


def test_bad_arguments() -> None:
    for alternatives in ([], [nn.Identity()], [nn.Identity(), 3], None):
        with pytest.raises(InputError, match="a choice needs layers"):
            tgfx.Choice(alternatives)
    for init in (-1, 2, 1.5, True):
        with pytest.raises(InputError, match="init cannot be used"):
            tgfx.Choice([nn.Identity(), nn.Identity()], init=init)
    with pytest.raises(InputError):
        tgfx.Choice([nn.Identity(), nn.Identity()], init=torch.ones(3))
    with pytest.raises(InputError, match="largest weight"):
        tgfx.Choice([nn.Identity(), nn.Identity()], gate=tgfx.GateSpec(binary=lambda w: w > 1))
    with pytest.raises(InputError, match="gate cannot be used"):
        tgfx.Choice([nn.Identity(), nn.Identity()], gate="tanh")


def test_alternatives_must_fit() -> None:
    choice = tgfx.Choice([nn.Linear(4, 6), nn.Linear(4, 1)])
    with pytest.raises(InputError, match=r"do not fit together"):
        choice(torch.randn(2, 4))
    with pytest.raises(InputError, match=r"do not fit together"):
        tgfx.transform(nn.Sequential(choice, nn.ReLU()), torch.randn(2, 4))


# -- without transform -------------------------------------------------------------------------------------


def test_eval_runs_only_the_chosen_one() -> None:
    calls = []

    class Noted(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(self)
            return x

    layers = [Noted(), Noted(), Noted()]
    choice = tgfx.Choice(layers, init=1)
    assert choice.selected() == 1
    choice.eval()(torch.ones(2))
    assert calls == [layers[1]]
    choice.train()(torch.ones(2))
    assert len(calls) == 4


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "transformed"])
def test_descent_finds_the_only_useful_one(seed: int, gated: bool) -> None:
    """A teacher convolution; one alternative is near it, and the loss alone has to find out which."""
    torch.manual_seed(seed)
    useful = 1 + seed % 3
    teacher = nn.Conv2d(4, 4, 3, padding=1)
    layers: list[nn.Module] = [nn.Identity(), nn.Conv2d(4, 4, 1), Zero(), nn.Conv2d(4, 4, 5, padding=2)]
    near = nn.Conv2d(4, 4, 3, padding=1)
    near.load_state_dict({k: v + 0.1 * torch.randn_like(v) for k, v in teacher.state_dict().items()})
    layers.insert(useful, near)
    choice = tgfx.Choice(layers, init=0)
    model = tgfx.transform(choice, torch.randn(2, 4, 6, 6)) if gated else choice
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        x = torch.randn(16, 4, 6, 6)
        with torch.no_grad():
            y = teacher(x)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    found = model.gates["choice"].chosen() if gated else model.selected()
    assert found == useful
    assert float(loss.detach()) < 1e-3


# -- with transform ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["channel", "layer", ("channel", "layer")], ids=str)
def test_gated_is_the_model(granularity: str | tuple[str, ...]) -> None:
    model = CASE.build()
    gated = tgfx.transform(model, CASE.example(), granularity=granularity)
    assert [g.name for g in gated.groups if g.kind == "choice"] == list(CHOICES)
    assert gated.gates["again"].chosen() == 1
    assert model.small.number is None and isinstance(model.small.gate, ChoiceGate)
    for mode in (True, False):
        gated.train(mode)
        model.train(mode)
        promises.assert_close(gated(CASE.example(3)), model(CASE.example(3)), 1e-12, f"training={mode}")


@pytest.mark.parametrize("granularity", ["channel", "layer", ("channel", "layer")], ids=str)
def test_every_choice_is_cut_and_priced_exactly(granularity: str | tuple[str, ...]) -> None:
    gated = tgfx.transform(CASE.build(), CASE.example(), granularity=granularity).eval()
    generator = torch.Generator().manual_seed(0)
    for small, trunk, again in itertools.product(range(4), range(2), range(3)):
        for group in gated.facts.coupling.groups:
            if group.kind != "choice":
                mask = torch.rand(group.size, generator=generator) < 0.6
                mask[0] |= group.kind == "channel"
                gated.gates[group.name].set_open_(mask)
        choose(gated, small=small, trunk=trunk, again=again)
        compact = tgfx.shrink(gated).eval()
        promises.exact_cut(CASE, gated, compact)  # type: ignore[arg-type]
        promises.exact_price(CASE, gated, compact)  # type: ignore[arg-type]
        promises.price_as_polynomial(gated)
        promises.only_torch_modules(compact)
        left = {n.split(".")[2] for n, _ in compact.named_parameters() if n.startswith("trunk")}
        assert left == {str(trunk)}


def test_budget_picks_the_cheap_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 1), tgfx.Choice([nn.Conv2d(6, 6, 5, padding=2), nn.Conv2d(6, 6, 1)]))
    gated = tgfx.transform(model, torch.randn(1, 3, 6, 6), granularity="layer")
    assert gated.gates["1"].chosen() == 0
    optimizer = torch.optim.SGD(gated.bank.parameters(), lr=1.0)
    for _ in range(20):
        optimizer.zero_grad()
        gated.budget_loss(weight=1.0, flops=gated.cheapest()).backward()
        optimizer.step()
    assert gated.gates["1"].chosen() == 1
    assert abs(float(gated.eval().ratio("flops")) - gated.cheapest("flops")) < 1e-12


def test_copies_and_plans_keep_the_choice(tmp_path: Path) -> None:
    gated = tgfx.transform(CASE.build(), CASE.example(), granularity=("channel", "layer")).eval()
    choose(gated, small=1, trunk=1, again=0)
    x = CASE.example(3)
    for twin in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        assert torch.equal(twin(x), gated(x))
        assert float(twin.cost("params")) == float(gated.cost("params"))
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    rebuilt = tgfx.load_plan(folder, CASE.build(), CASE.example()).eval()
    assert torch.equal(rebuilt(x), tgfx.shrink(gated).eval()(x))
    plan = json.loads((folder / "plan.json").read_text())
    plan["kept"]["trunk"] = [0, 1]
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="no single alternative"):
        tgfx.load_plan(folder, CASE.build(), CASE.example())


def test_what_people_read() -> None:
    gated = tgfx.transform(CASE.build(), CASE.example())
    choose(gated, small=2)
    assert "one of 4: alternative 2 is chosen" in " ".join(str(gated.report()).replace("│", " ").split())
    assert "a choice of one among 4, alternative 2 is chosen" in gated.explain("small")
    assert {"trunk[0]", "trunk[1]"} <= {str(symbol) for symbol in gated.cost_expr("flops").free_symbols}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def test_choices_in_choices_over_a_shared_layer() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    inner = tgfx.Choice([shared, nn.Identity(), Residual()])
    outer = tgfx.Choice([inner, nn.Sequential(shared, nn.Tanh()), Residual()])
    model = nn.Sequential(nn.Linear(4, 8), outer, nn.ReLU(), nn.Linear(8, 3)).double()
    x = torch.randn(3, 4).double()
    gated = tgfx.transform(model, x, granularity=("channel", "layer")).eval()
    promises.assert_close(gated(x), model.eval()(x), 1e-12, "identity")
    stem = [term for term in gated.facts.cost.terms["params"] if term.origin == "0.weight"]
    assert all(axis >= 0 for term in stem for axis in term.axes), "the stem is needed whatever is chosen"
    branches = [group.name for group in gated.groups if group.kind == "layer"]
    for first, second, state in itertools.product(range(3), range(3), itertools.product((True, False), repeat=2)):
        gated.gates["1"].set_open_(torch.arange(3) == first)
        gated.gates["1.alternatives.0"].set_open_(torch.arange(3) == second)
        for name, opened in zip(branches, state, strict=True):
            gated.gates[name].set_open_(torch.tensor([opened]))
        compact = tgfx.shrink(gated).eval()
        promises.assert_close(compact(x), gated(x), 1e-12, "cut")
        with FlopCounterMode(display=False) as counter:
            compact(x)
        assert float(gated.cost("flops")) * len(x) == counter.get_total_flops()
        assert float(gated.cost("params")) == sum(p.numel() for p in compact.parameters())


class Untraceable(nn.Module):
    """Depends on data: neither front end can look inside."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = tgfx.Choice([nn.Linear(6, 6), nn.Linear(6, 6)], init=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.choice(x) if float(x.detach().sum()) > -1e9 else x


def test_a_choice_in_a_closed_box_decides_by_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), Untraceable(), nn.Linear(6, 2)).double()
    x = torch.randn(3, 4).double()
    gated = tgfx.transform(model, x).eval()
    assert not [g for g in gated.groups if g.kind == "choice"]
    gated.gates["0"].set_open_(torch.arange(8) % 2 == 0)
    promises.assert_close(tgfx.shrink(gated).eval()(x), gated(x), 1e-12, "cut")


class Windowed(nn.Module):
    """Needs torch.export: plain fx cannot follow the loop over a size."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = tgfx.Choice([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Identity()])
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[1] // 2):
            x = x + 1
        return self.out(x + self.choice(x))


@pytest.mark.parametrize("index", range(3))
def test_choices_through_torch_export(index: int) -> None:
    torch.manual_seed(0)
    model, x = Windowed().double(), torch.randn(2, 4, 6).double()
    gated = tgfx.transform(model, x, granularity=("channel", "layer")).eval()
    assert gated.facts.source.front_end == "export"
    promises.assert_close(gated(x), model.eval()(x), 1e-12, "identity")
    gated.gates["choice"].set_open_(torch.arange(3) == index)
    compact = tgfx.shrink(gated).eval()
    promises.assert_close(compact(x), gated(x), 1e-12, "cut")
    assert float(gated.cost("params")) == sum(p.numel() for p in compact.parameters())
