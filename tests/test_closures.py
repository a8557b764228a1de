"""optimizer.step(closure): gates go where they go with backward() before the step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tgfx
from tgfx.training.controller import BudgetController
from tgfx.training.weight_controller import WeightController

STEPS = 20
RATE = 5.0  # of the gates: an optimizer that moved them would be seen to


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 12, generator=generator)
    return x, x[:, :3].argmax(1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 3))


class Chosen(nn.Module):
    """Both alternatives compute the same: only the budget tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 16)
        alternatives = [nn.Linear(16, 16), nn.Linear(16, 16, bias=False)]
        for parameter in nn.ModuleList(alternatives).parameters():
            parameter.requires_grad_(False).zero_()
        self.choice = tgfx.Choice(alternatives)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.out(x + self.choice(x))


def chosen() -> nn.Module:
    torch.manual_seed(0)
    return Chosen()


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def train(gated: tgfx.GatedModule, *, closure: bool, model: Any = None, asked: bool = False, steps: int = STEPS) -> Any:
    """`asked`: the budget is asked for in the loss, so that the controller is made inside of the first closure."""
    model = gated if model is None else model
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05, gate_lr=RATE), lr=0.05)
    if not asked:
        kind = WeightController if hasattr(gated.facts, "uses") else BudgetController
        gated.attach(kind(gated, {"params": 0.5}, steps=STEPS))
    for step in range(steps):
        x, target = batch(step)

        def made(x: Tensor = x, target: Tensor = target) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            if asked:
                loss = loss + gated.budget_loss(params=0.5, steps=STEPS)
            loss.backward()
            return loss

        if closure:
            optimizer.step(made)
        else:
            made()
            optimizer.step()
    return gated.controller


def same(one: tgfx.GatedModule, other: tgfx.GatedModule) -> None:
    for (name, expected), found in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    assert one.controller.taken == other.controller.taken
    assert str(one.controller.state_dict()) == str(other.controller.state_dict())


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("make", "granularity"), [(net, "channel"), (net, "weight"), (chosen, "channel")])
def test_a_closure_changes_nothing(make: Any, granularity: str, frozen: bool, asked: bool) -> None:
    plain = tgfx.transform(make(), batch(0)[0], granularity=granularity).train()
    own = {id(gate.weight) for gate in plain.gates.values()}
    for parameter in plain.parameters():
        parameter.requires_grad_((parameter.requires_grad and not frozen) or id(parameter) in own)
    closed = copy.deepcopy(plain)
    for gated, closure in ((plain, False), (closed, True)):
        train(gated, closure=closure, asked=asked, steps=STEPS + 5)  # some of them where gates stand still
    same(plain, closed)
    assert plain.eval().ratio("params").item() <= 0.5


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_a_closure_in_distributed_training(one_process: None, granularity: str, asked: bool) -> None:
    plain = tgfx.transform(net(), batch(0)[0], granularity=granularity).train()
    closed = copy.deepcopy(plain)
    for gated, closure in ((plain, False), (closed, True)):
        train(gated, closure=closure, model=DistributedDataParallel(gated), asked=asked, steps=STEPS + 5)
    same(plain, closed)
    assert 0.45 < plain.eval().ratio("params").item() <= 0.5


def test_choices_are_pulled_to_the_budget() -> None:
    gated = tgfx.transform(chosen(), batch(0)[0]).train()
    train(gated, closure=True, steps=10)
    dear, cheap = gated.gates["choice"].weight.tolist()
    assert cheap > dear


@pytest.mark.parametrize("granularity", ["channel", "weight"])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(granularity: str, search: str | None) -> None:
    """It asks for gradients up to ten times a step: gates stand still meanwhile, and evidence is of the first."""
    gated = tgfx.transform(net(), batch(0)[0], granularity=granularity).train()
    optimizer = torch.optim.LBFGS(gated.parameters(), lr=0.1, max_iter=5, max_eval=10, line_search_fn=search)
    gated.budget_loss(params=0.5, steps=STEPS)
    controller = gated.controller
    calls: list[list[Tensor]] = []
    for step in range(STEPS):
        x, target = batch(step)
        first, seen, losses = len(calls), controller.taken, []

        def made(x: Tensor = x, target: Tensor = target, losses: list[float] = losses) -> Tensor:
            calls.append([gate.weight.detach().clone() for gate in gated.gates.values()])
            optimizer.zero_grad()
            loss = F.cross_entropy(gated(x), target) + gated.budget_loss(params=0.5, steps=STEPS)
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(made)
        assert len(calls) - first > 1 and controller.taken == seen + 1
        assert all(torch.equal(a, b) for call in calls[first:] for a, b in zip(call, calls[first], strict=True))
        if granularity == "channel":
            assert controller.evidence.samples in (1, 16)  # 1 is before any evidence
    learned = [controller.evidence] if granularity == "channel" else controller.evidence.values()
    assert all(0 < own.seen < STEPS for own in learned)  # not by the first loss, which is the budget's too
    assert 0.45 < gated.eval().ratio("params").item() <= 0.5


class Sharpness(torch.optim.Optimizer):
    """As SAM does: away from the minimum, gradients there, back, and a step of another optimizer inside this one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad if p.grad is not None else 0.0, alpha=0.01)
        with torch.enable_grad():
            loss = closure()
        for p, old in zip(held, before, strict=True):
            p.copy_(old)
        self.inner.step()
        return loss


@pytest.mark.parametrize("granularity", ["channel", "weight"])
def test_an_optimizer_in_another(granularity: str) -> None:
    gated = tgfx.transform(net(), batch(0)[0], granularity=granularity).train()
    optimizer = Sharpness(gated.parameters())
    for step in range(STEPS):
        x, target = batch(step)

        def made(x: Tensor = x, target: Tensor = target) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(gated(x), target) + gated.budget_loss(params=0.5, steps=STEPS)
            loss.backward()
            return loss

        made()
        optimizer.step(made)
    assert gated.controller.taken == STEPS
    learned = [gated.controller.evidence] if granularity == "channel" else gated.controller.evidence.values()
    # until the gates are held, but for the first step, in which nobody has seen who holds them
    assert all(own.seen >= STEPS // 2 - 1 for own in learned)
    assert 0.45 < gated.eval().ratio("params").item() <= 0.5
