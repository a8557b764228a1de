"""A budget holds for choices too: it is met in every loop and by finish, or refused with what can be met."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tgfx
from tgfx.errors import BudgetError
from tgfx.training.attaching import attach_controller
from tgfx.training.selection import Prices, cheapest

STEPS = 30


class Net(nn.Module):
    """Nearly all of the cost is in the first alternative."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 96, 3, padding=1)
        self.choice = tgfx.Choice([nn.Conv2d(96, 96, 7, padding=3), nn.Conv2d(96, 96, 1)], init=0)
        self.out = nn.Linear(96, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.choice(torch.relu(self.stem(x))).mean((2, 3)))


class OnlyChoice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choice = tgfx.Choice([nn.Conv2d(3, 5, 7, padding=3), nn.Conv2d(3, 5, 1)], init=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.choice(x).mean((2, 3))


class Many(nn.Module):
    """Three choices, one of them within another."""

    def __init__(self, first: int = 0, inner: int = 0, second: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        nested = tgfx.Choice([nn.Linear(16, 16), nn.Identity()], init=inner)
        self.first = tgfx.Choice([nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16)), nested], init=first)
        self.second = tgfx.Choice([nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Identity()], init=second)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(torch.relu(self.first(torch.relu(self.stem(x))))))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, 4, 4, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def gated_net(kind: type[nn.Module] = Net) -> tgfx.GatedModule:
    torch.manual_seed(0)
    return tgfx.transform(kind(), batch()[0])


def by_fit(gated: tgfx.GatedModule, share: float, train: str = "joint") -> None:
    tgfx.fit(
        gated, [batch()], F.cross_entropy, budget={"flops": share}, steps=STEPS, lr=1e-3, train=train, progress=False
    )


def by_loop(gated: tgfx.GatedModule, share: float) -> None:
    x, target = batch()
    optimizer = torch.optim.SGD(tgfx.param_groups(gated.train(), lr=1e-3))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (F.cross_entropy(gated(x), target) + gated.budget_loss(flops=share, steps=STEPS)).backward()
        optimizer.step()


def by_callback(gated: tgfx.GatedModule, share: float) -> None:
    """What both adapters do: a controller, and a loop that knows nothing of it."""
    x, target = batch()
    controller = attach_controller(gated.train(), {"flops": share}, steps=STEPS)
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=1e-3))
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(gated(x), target).backward()
        optimizer.step()
    controller.close()


def by_gates_only(gated: tgfx.GatedModule, share: float) -> None:
    by_fit(gated, share, "gates")


def by_finish(gated: tgfx.GatedModule, share: float) -> None:
    finished = tgfx.finish(gated, flops=share)
    assert finished.ratio("flops") <= share
    assert finished.after["params"] == sum(p.numel() for p in finished.model.parameters())


WAYS = [by_fit, by_loop, by_callback, by_gates_only, by_finish]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", [0.0001, 0.0005, 0.05, 0.3])
def test_channels_and_a_choice(way, share: float) -> None:
    """0.0005 is less than the first alternative costs with the floor of its channels."""
    gated = gated_net()
    if share < cheapest(gated, "flops", 0.0 if way is by_finish else 0.02):
        with pytest.raises(BudgetError, match="at least"):
            way(gated, share)
        return
    way(gated, share)
    ratio, second = float(gated.eval().ratio("flops")), gated.gates["choice"].chosen() == 1
    assert second or share > 0.0005 or way is by_finish
    assert ratio <= share
    assert ratio >= share - 0.01 or (second and gated.open_slots().sum() == 2 * 96 + 1)  # no more to open


@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_a_choice(way) -> None:
    gated = gated_net(OnlyChoice)
    way(gated, 0.1)
    assert gated.gates["choice"].chosen() == 1
    assert float(gated.eval().ratio("flops")) == pytest.approx(0.02, abs=1e-12)
    whole = gated_net(OnlyChoice)
    way(whole, 0.99)  # what is chosen stays where it can
    assert whole.gates["choice"].chosen() == 0
    with pytest.raises(BudgetError, match=r"at least 0\.0200"):
        way(gated_net(OnlyChoice), 0.01)


def test_choices_stand_still_at_the_end() -> None:
    gated = gated_net()
    x, target = batch()
    optimizer = torch.optim.SGD(tgfx.param_groups(gated.train(), lr=1e-3, gate_lr=10.0))
    seen = []
    for _ in range(40):
        optimizer.zero_grad()
        (F.cross_entropy(gated(x), target) + gated.budget_loss(flops=0.05, steps=20)).backward()
        optimizer.step()
        seen.append(gated.gates["choice"].weight.detach().clone())
    assert not torch.equal(seen[0], seen[10])
    assert all(torch.equal(own, seen[-1]) for own in seen[12:])


def test_the_pull_of_the_budget_is_that_of_equation_8() -> None:
    """Added once a step, whether the loss is in the loop or not, and none of it reaches other gates."""
    x, target = batch()
    taken = []
    for asks in (True, False):
        gated = gated_net().train()
        optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.1))
        controller = attach_controller(gated, {"flops": 0.3}, steps=1000)
        controller.taken = 1  # it is at work
        (wanted,) = torch.autograd.grad(gated._distance(controller.budget), gated.gates["choice"].weight)
        loss = F.cross_entropy(gated(x), target)
        (task,) = torch.autograd.grad(loss, gated.gates["choice"].weight, retain_graph=True)
        if asks:
            loss = loss + gated.budget_loss(flops=0.3, steps=1000)
        before = gated.gates["choice"].weight.detach().clone()
        loss.backward()
        optimizer.step()
        moved = gated.gates["choice"].weight.detach() - before
        torch.testing.assert_close(moved, -0.1 * (task + wanted), rtol=1e-4, atol=1e-6)
        taken.append(gated.gates["stem"].weight.grad.clone())
    assert torch.equal(*taken)


@settings(max_examples=25, deadline=None)
@given(
    start=st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 2)),
    share=st.floats(0.02, 1.0),
    kinds=st.sampled_from([("flops",), ("params",), ("flops", "params")]),
    granularity=st.sampled_from(["channel", "layer"]),
    round_to=st.sampled_from([None, 4]),
)
def test_finish_meets_any_budget_or_refuses_it_rightly(
    start: tuple[int, int, int], share: float, kinds: tuple[str, ...], granularity: str, round_to: int | None
) -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(Many(*start), torch.randn(2, 6), granularity=granularity)
    before = {name: gate.weight.detach().clone() for name, gate in gated.gates.items()}
    budget = dict.fromkeys(kinds, share)
    try:
        finished = tgfx.finish(gated, budget, round_to=round_to)
    except BudgetError:
        assert all(torch.equal(before[name], gate.weight.detach()) for name, gate in gated.gates.items())
        prices, opened = Prices(gated), torch.zeros(gated.facts.coupling.slots, dtype=torch.bool)
        for group in gated.facts.coupling.groups:
            if group.kind == "channel":
                opened[torch.from_numpy(gated.gate_slots(group.name))[: round_to or 1]] = True
        slots = [torch.from_numpy(gated.gate_slots(g.name)) for g in gated.groups if g.kind == "choice"]
        for pick in itertools.product(*slots):
            trial = opened.clone()
            trial[torch.stack(pick)] = True
            assert not prices.met(trial, budget)
        return
    assert all(finished.ratio(kind) <= share + 1e-9 for kind in kinds)
    assert finished.after["params"] == sum(p.numel() for p in finished.model.parameters())


def test_the_least_sure_choice_changes_first() -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(Many(first=0, inner=0, second=0), torch.randn(2, 6), granularity="layer")
    with torch.no_grad():
        gated.gates["first"].weight.copy_(torch.tensor([1.0, 0.0]))
        gated.gates["second"].weight.copy_(torch.tensor([1.0, 0.1, 0.9]))
    twin = copy.deepcopy(gated)
    now = float(gated.eval().ratio("flops"))
    tgfx.finish(gated, flops=now - 0.01)
    assert gated.gates["first"].chosen() == 0 and gated.gates["second"].chosen() == 2
    with torch.no_grad():
        twin.gates["first"].weight.copy_(torch.tensor([1.0, 0.95]))
        twin.gates["first.alternatives.1"].weight.copy_(torch.tensor([0.0, 1.0]))
    tgfx.finish(twin, flops=now - 0.01)
    assert twin.gates["first"].chosen() == 1 and twin.gates["second"].chosen() == 0
