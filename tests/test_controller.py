"""Training to a budget: it is met, on every kind of model and by every optimizer; evidence that is worth its name."""

import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from tests.support.budget_models import BUDGET_MODELS, data, mlp
from tests.support.digits import load
from tgfx.errors import BudgetError, InputError, OptimizerError
from tgfx.training.controller import BudgetController
from tgfx.training.evidence import Evidence
from tgfx.training.selection import Prices, all_open, cheapest, close_worst, land, protected

STEPS = 30
OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


class Bench:
    """A gated model that every test gets as new, and its data."""

    def __init__(self, name: str) -> None:
        build, shape = BUDGET_MODELS[name]
        self.x, self.y = data(shape)
        torch.manual_seed(0)
        self.gated = tgfx.transform(build(), self.x[:2])
        self._first = {name: tensor.clone() for name, tensor in self.gated.state_dict().items()}

    def new(self) -> tgfx.GatedModule:
        if self.gated.controller is not None:
            self.gated.controller.close()
            del self.gated.__dict__["_controller"]
        self.gated.load_state_dict(self._first)
        self.gated.zero_grad()
        return self.gated.train()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        chosen = torch.arange(16 * step, 16 * step + 16) % len(self.x)
        return self.x[chosen], self.y[chosen]

    def train(self, gated: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, penalty=None) -> None:
        for step in range(steps):
            x, y = self.batch(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(gated(x), y)
            (loss if penalty is None else loss + penalty()).backward()
            optimizer.step()


BENCHES: dict[str, Bench] = {}


def bench(name: str) -> Bench:
    if name not in BENCHES:
        BENCHES[name] = Bench(name)
    return BENCHES[name]


@pytest.fixture
def gated() -> tgfx.GatedModule:
    return bench("mlp").new()


def ratios(gated: tgfx.GatedModule, budget: dict[str, float]) -> dict[str, float]:
    return {kind: float(gated.eval().ratio(kind)) for kind in budget}


# -- the budget is met -------------------------------------------------------------------------------------

KINDS, SHARES = ("flops", "params", "channels"), (0.3, 0.5, 0.8)
EVERYWHERE = [  # every model with every kind; shares and optimizers take turns
    (model, {kind: SHARES[(i + j) % 3]}, list(OPTIMIZERS)[(i + j) % 5])
    for (i, model), (j, kind) in itertools.product(enumerate(BUDGET_MODELS), enumerate(KINDS))
]
ON_ONE = [
    ("mlp", {kind: share}, name)
    for (i, kind), (j, share) in itertools.product(enumerate(KINDS), enumerate(SHARES))
    for name in [list(OPTIMIZERS)[(i + 2 * j) % 5]]
]
CASES = [*EVERYWHERE, *(case for case in ON_ONE if case not in EVERYWHERE)]


@pytest.mark.parametrize(("model", "budget", "optimizer"), CASES, ids=lambda value: str(value))
def test_budget_is_met(model: str, budget: dict[str, float], optimizer: str) -> None:
    gated = bench(model).new()
    controller = BudgetController(gated, budget, steps=STEPS)
    bench(model).train(gated, OPTIMIZERS[optimizer](tgfx.param_groups(gated, lr=1e-3, weight_decay=0.1)))
    controller.close()
    for kind, ratio in ratios(gated, budget).items():
        assert budget[kind] - 0.01 <= ratio <= budget[kind] + 1e-9
    for gate in gated.gates.values():  # the floor
        assert gate.open_count() >= math.ceil(0.02 * len(gate.weight))


@pytest.mark.parametrize("model", ["mlp", "residual", "transformer"])
@pytest.mark.parametrize("budget", [{"flops": 0.4, "params": 0.4}, {"flops": 0.5, "channels": 0.6}], ids=str)
def test_mixed_budgets(model: str, budget: dict[str, float]) -> None:
    """Every kind is within its share, and the one that binds is met."""
    gated = bench(model).new()
    controller = BudgetController(gated, budget, steps=STEPS)
    bench(model).train(gated, torch.optim.SGD(tgfx.param_groups(gated, lr=0.05)))
    controller.close()
    found = ratios(gated, budget)
    assert all(found[kind] <= share + 1e-9 for kind, share in budget.items()), found
    assert any(found[kind] >= share - 0.01 for kind, share in budget.items()), found


def test_gates_stand_still_when_held(gated) -> None:
    controller = BudgetController(gated, {"flops": 0.5}, steps=STEPS)
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05))
    bench("mlp").train(gated, optimizer, steps=STEPS)
    assert controller.phase == "hold"
    before, weight = gated.open_slots(), gated.get_submodule("0").weight.detach().clone()
    bench("mlp").train(gated, optimizer, steps=5)
    assert (gated.open_slots() == before).all()
    assert not torch.equal(weight, gated.get_submodule("0").weight)
    controller.close()


def test_the_budget_loss_of_a_plain_loop(gated) -> None:
    optimizer = torch.optim.Adam(tgfx.param_groups(gated, lr=1e-3))
    bench("mlp").train(gated, optimizer, penalty=lambda: gated.budget_loss(flops=0.4, steps=STEPS))
    assert gated.controller is not None and gated.controller.phase == "hold"
    gated.controller.close()
    assert 0.39 <= ratios(gated, {"flops": 0.4})["flops"] <= 0.4


def test_a_closed_controller_is_replaced(gated) -> None:
    gated.budget_loss(flops=0.4)
    first = gated.controller
    first.close()
    gated.budget_loss(flops=0.4)
    assert gated.controller is not first and not gated.controller.closed
    gated.controller.close()


def test_a_started_model_goes_on_from_its_ratio(gated) -> None:
    for gate in gated.gates.values():
        gate.set_open_(torch.arange(len(gate.weight)) % 2 == 0)
    controller = BudgetController(gated, {"channels": 0.4}, steps=STEPS)
    assert controller.targets["channels"] == pytest.approx(ratios(gated, {"channels": 1})["channels"])
    controller.close()


# -- what is refused or warned about -----------------------------------------------------------------------


def test_infeasible_budgets_are_refused_with_the_cheapest(gated) -> None:
    least = cheapest(gated, "flops", 0.02)
    with pytest.raises(BudgetError, match="cannot be met") as caught:
        BudgetController(gated, {"flops": least * 0.99})
    assert f"{least:.4f}" in caught.value.expected
    BudgetController(gated, {"flops": least}).close()
    with pytest.raises(BudgetError, match=r"channels=0\.01 cannot be met"):
        tgfx.finish(gated, channels=0.01)


def test_a_floor_of_ones_own(gated) -> None:
    controller = BudgetController(gated, {"channels": 0.4}, steps=STEPS, floor=0.3)
    bench("mlp").train(gated, torch.optim.SGD(tgfx.param_groups(gated, lr=0.05)))
    controller.close()
    assert all(gate.open_count() >= 29 for gate in gated.gates.values())
    with pytest.raises(InputError, match="floor is a share"):
        BudgetController(gated, {"channels": 0.4}, floor=2)


def test_stall(gated) -> None:
    """An optimizer that steps while no gradient reaches the gates."""
    controller = BudgetController(gated, {"flops": 0.5}, steps=200)
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05))
    with pytest.warns(UserWarning, match="no gradient has reached the gates"):
        for _ in range(50):
            optimizer.step()
    controller.close()


def test_an_optimizer_without_the_gates_is_found_out(gated) -> None:
    gates = {id(gate.weight) for gate in gated.gates.values()}
    optimizer = torch.optim.SGD([p for p in gated.parameters() if id(p) not in gates], lr=0.05)
    with pytest.raises(OptimizerError, match="does not hold the gates") as caught:
        bench("mlp").train(gated, optimizer, penalty=lambda: gated.budget_loss(flops=0.5))
    assert all(f"/{name}" in caught.value.found or name in caught.value.found for name in gated.gates)
    gated.controller.close()
    with pytest.raises(OptimizerError):
        tgfx.check_optimizer(gated, optimizer)


def test_a_controller_does_not_outlive_its_model() -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(mlp(), torch.zeros(2, 20))
    controller = BudgetController(gated, {"flops": 0.5})
    alive = weakref.ref(gated)
    del gated
    gc.collect()
    assert alive() is None
    weight = nn.Parameter(torch.zeros(1))
    torch.optim.SGD([weight], lr=1.0).step()  # its hooks are global and must not mind
    controller.close()


# -- state -------------------------------------------------------------------------------------------------


def test_state_goes_on_exactly() -> None:
    own = bench("plain")

    def run(stop: int | None) -> dict[str, Tensor]:
        gated = own.new()
        optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05))
        controller = BudgetController(gated, {"flops": 0.4, "params": 0.4}, steps=STEPS)
        for step in range(STEPS):
            if step == stop:
                saved = controller.state_dict()
                controller.close()
                controller = BudgetController(gated, {"flops": 0.4, "params": 0.4}, steps=STEPS)
                controller.load_state_dict(saved)
            x, y = own.batch(step)
            optimizer.zero_grad()
            F.cross_entropy(gated(x), y).backward()
            optimizer.step()
        controller.close()
        return {name: tensor.clone() for name, tensor in gated.state_dict().items()}

    whole, parts = run(None), run(11)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_state_of_another_budget(gated) -> None:
    controller = BudgetController(gated, {"flops": 0.4})
    saved = controller.state_dict()
    controller.close()
    other = BudgetController(gated, {"flops": 0.5})
    with pytest.raises(BudgetError, match="another budget"):
        other.load_state_dict(saved)
    other.close()


def test_gates_are_chosen_by_the_state_they_had(gated) -> None:
    """An optimizer that throws all gates far to the closed side changes nothing: its step on gates is undone."""
    outcomes = []
    for rate in (0.0, 1e3):
        own = bench("mlp").new()
        groups = tgfx.param_groups(own, lr=0.05, gate_lr=rate)
        controller = BudgetController(own, {"flops": 0.5}, steps=STEPS)
        bench("mlp").train(own, torch.optim.SGD(groups))
        controller.close()
        outcomes.append({name: tensor.clone() for name, tensor in own.state_dict().items()})
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


# -- the paper's rule --------------------------------------------------------------------------------------


def test_budget_loss_is_equation_8(gated) -> None:
    for index, gate in enumerate(gated.gates.values()):
        gate.set_open_(torch.arange(len(gate.weight)) % (index + 2) == 0)
    gated.eval()
    expected = 3.0 * ((0.5 - gated.ratio("flops")) ** 2 + (0.25 - gated.ratio("params")) ** 2)
    found = gated.budget_loss(weight=3.0, flops=0.5, params=0.25)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    assert gated.controller is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_papers_rule_moves_gates(gated, optimizer: str) -> None:
    groups = tgfx.param_groups(gated, lr=1e-3, gate_lr=3.0, weight_decay=0.1)
    bench("mlp").train(
        gated, OPTIMIZERS[optimizer](groups), steps=60, penalty=lambda: gated.budget_loss(flops=0.5, weight=8.0)
    )
    assert ratios(gated, {"flops": 1})["flops"] < 0.95


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_param_groups_never_decay_gates(gated, optimizer: str) -> None:
    groups = tgfx.param_groups(gated, lr=0.1, weight_decay=0.5)
    held = [p for group in groups for p in group["params"]]
    assert len(held) == len(set(map(id, held))) == len(list(gated.parameters()))
    made = OPTIMIZERS[optimizer](groups)
    for parameter in gated.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gate, weight = next(iter(gated.gates.values())).weight, gated.get_submodule("0").weight
    before = gate.detach().clone(), weight.detach().clone()
    made.step()
    assert torch.equal(gate, before[0]) and not torch.equal(weight, before[1])
    weight.requires_grad_(False)
    assert not any(p is weight for group in tgfx.param_groups(gated, lr=0.1) for p in group["params"])
    weight.requires_grad_(True)


# -- evidence ----------------------------------------------------------------------------------------------


def test_evidence_ranks_gates_as_closing_them_does() -> None:
    """Spearman's correlation of Evidence.rise with the measured rise of the loss, over all gates of a trained net."""
    torch.manual_seed(0)
    x, y = load()
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    gated = tgfx.transform(model, x[:2]).train()
    optimizer = torch.optim.Adam([p for n, p in gated.named_parameters() if p.ndim > 1 or "bias" in n], lr=3e-3)
    evidence = Evidence(gated.facts.coupling.slots, memory=50)
    gates = list(gated.gates.values())
    for step in range(400):
        chosen = torch.randint(len(x), (32,))
        gated.zero_grad()
        F.cross_entropy(gated(x[chosen]), y[chosen]).backward()
        if step < 300:
            optimizer.step()
        else:
            assert evidence.update(torch.cat([gate.weight.grad for gate in gates]), 32)
    gated.eval()
    with torch.no_grad():
        base = F.cross_entropy(gated(x), y)
        rises = []
        for gate in gates:
            for index in range(len(gate.weight)):
                gate.weight[index] *= -1
                rises.append(float(F.cross_entropy(gated(x), y) - base))
                gate.weight[index] *= -1
    opened = torch.from_numpy(gated.open_slots())
    assert bool(opened.all())
    ranks = torch.stack([evidence.rise(opened).argsort().argsort(), torch.tensor(rises).argsort().argsort()]).double()
    correlation = float(torch.corrcoef(ranks)[0, 1])
    assert correlation > 0.7, correlation


def test_evidence_keeps_out_what_is_not_finite() -> None:
    evidence = Evidence(3, memory=4)
    assert evidence.update(torch.tensor([1.0, -2.0, 0.0]), 8)
    assert not evidence.update(torch.tensor([1.0, math.nan, 0.0]), 8)
    assert evidence.seen == 1
    torch.testing.assert_close(evidence.mean, torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64), rtol=0, atol=0)
    torch.testing.assert_close(evidence.square, torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64), rtol=0, atol=0)


def test_rise_is_second_order_and_counts_a_slope_beyond_its_noise() -> None:
    """Two batches of 8: gate 0 has a slope and no noise, gate 1 noise and no slope, gate 2 both."""
    evidence = Evidence(3, memory=4)
    evidence.update(torch.tensor([3.0, 1.0, 5.0]), 8)
    evidence.update(torch.tensor([3.0, -1.0, 3.0]), 8)
    error = 1 / math.sqrt(2)  # of gates 1 and 2: variance 1, two batches
    curvature = [9.0, 8.0, 8.0 + 16.0]
    slope = [3.0, 0.0, 4.0 - 2 * error]
    for opened, sign in ((True, 1), (False, -1)):
        expected = [sign * c / 2 - g for c, g in zip(curvature, slope, strict=True)]
        found = evidence.rise(torch.full((3,), opened))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_budgets_own_gradient_is_no_evidence(gated) -> None:
    """The first loss that budget_loss hands out has a gradient of its own."""
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05))
    bench("mlp").train(gated, optimizer, steps=1, penalty=lambda: gated.budget_loss(flops=0.5))
    assert gated.controller is not None and gated.controller.evidence.seen == 0
    bench("mlp").train(gated, optimizer, steps=1, penalty=lambda: gated.budget_loss(flops=0.5))
    assert gated.controller.evidence.seen == 1
    gated.controller.close()


# -- selection ---------------------------------------------------------------------------------------------


def test_the_worst_are_closed_and_no_more_than_needed(gated) -> None:
    prices, targets = Prices(gated), {"flops": 0.5}
    scores = torch.randperm(192, generator=torch.Generator().manual_seed(1)).double()
    keep = protected(gated, scores, 0.02)
    chosen, threshold = close_worst(prices, scores, all_open(gated), keep, targets)
    closed = ~chosen
    assert prices.met(chosen, targets) and bool((scores[closed] <= threshold).all())
    assert bool((scores[chosen & ~keep] > threshold).all()) and bool(chosen[keep].all())
    one_more = chosen.clone()
    one_more[int(scores.where(closed, -math.inf).argmax())] = True
    assert not prices.met(one_more, targets)
    landed = land(prices, chosen, scores, targets)
    assert prices.met(landed, targets) and bool(landed[chosen].all())
    assert prices.ratio("flops", landed) >= prices.ratio("flops", chosen)


def test_a_controller_that_nobody_holds_leaves_no_hook_behind(gated) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    gc.collect()  # what other tests have left
    before = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks), len(gated._forward_hooks)
    controller = BudgetController(gated, {"flops": 0.5}, steps=10)
    assert len(_global_optimizer_pre_hooks) == before[0] + 1
    del controller
    gc.collect()
    now = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks), len(gated._forward_hooks)
    assert now == before
