"""Bad input: one exception tree, a text that helps, and nothing changed."""

import math

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tgfx.errors import (
    AlreadyGatedError,
    BudgetError,
    EmptyGroupError,
    GranularityError,
    IgnoreError,
    InputError,
    LazyModuleError,
    NothingToGateError,
    TgfxError,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.drop = nn.Conv2d(8, 6, 3, padding=1), nn.Dropout(0.1)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv1(x)))
        return self.fc(self.drop(torch.relu(self.conv2(x)).mean((2, 3))))


X = torch.zeros(2, 3, 8, 8)


@pytest.fixture
def model() -> nn.Module:
    return Net().train()


@pytest.fixture
def gated(model: nn.Module) -> tgfx.GatedModule:
    return tgfx.transform(model, X)


def refused(kind: type[TgfxError], call, *parts: str) -> TgfxError:
    """The call fails with this error, whose text says what was expected and found, and holds these parts."""
    with pytest.raises(kind) as caught:
        call()
    error, text = caught.value, str(caught.value)
    assert isinstance(error, TgfxError)
    assert error.message and error.expected and error.found, text
    for part in parts:
        assert part in text, text
    return error


# -- not a module ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, "resnet18", 3, Net, torch.relu, {"model": 1}], ids=lambda t: type(t).__name__)
def test_transform_wants_a_module(thing) -> None:
    refused(InputError, lambda: tgfx.transform(thing, X), "torch.nn.Module", type(thing).__name__)


@pytest.mark.parametrize("thing", [None, Net(), "gated"], ids=["None", "Net", "str"])
def test_shrink_wants_a_gated_model(thing) -> None:
    refused(InputError, lambda: tgfx.shrink(thing), "GatedModule", type(thing).__name__)


# -- inputs that do not fit --------------------------------------------------------------------------------

MISFITS = {
    "channels": torch.zeros(2, 4, 8, 8),
    "rank": torch.zeros(3),
    "type": torch.zeros(2, 3, 8, 8, dtype=torch.int64),
    "too many": (X, X),
    "none": (),
    "unknown name": {"image": X},
    "not a tensor": ("a picture",),
}


@pytest.mark.parametrize("example", MISFITS.values(), ids=MISFITS)
def test_inputs_that_do_not_fit(model: nn.Module, example) -> None:
    before = promises.snapshot(model)
    error = refused(InputError, lambda: tgfx.transform(model, example), "Net")
    assert error.fix and error.__cause__ is not None  # torch's own complaint is chained
    promises.assert_same_snapshot(before, promises.snapshot(model))


@pytest.mark.parametrize("example", ["a picture", 3, 2.5, {1, 2}], ids=repr)
def test_example_of_no_use(model: nn.Module, example) -> None:
    refused(InputError, lambda: tgfx.transform(model, example), type(example).__name__)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.c(self.a(left) + self.b(right))


class NoHint(nn.Module):
    """Its first layer does not say what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.randn(7, 5)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x @ self.weight)


@pytest.mark.parametrize("kind", [TwoInputs, NoHint])
def test_an_example_that_cannot_be_guessed(kind: type[nn.Module]) -> None:
    error = refused(InputError, lambda: tgfx.transform(kind()), kind.__name__)
    assert "tgfx.transform(model" in error.fix  # shows how to pass it


def test_example_shapes_that_are_understood() -> None:
    left, right = torch.randn(2, 3), torch.randn(2, 3)
    for example in ((left, right), [left, right], {"left": left, "right": right}):
        assert tgfx.transform(TwoInputs(), example).gates


# -- nothing to gate ---------------------------------------------------------------------------------------


class Single(nn.Module):
    """One channel between the layers: the last one of a group is never cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


NOTHING = {
    "output layer": (nn.Linear(3, 4), torch.zeros(2, 3)),
    "convolution": (nn.Conv2d(3, 4, 1), X),
    "no parameters": (nn.ReLU(), torch.zeros(2, 3)),
    "norm": (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), X),
    "single channel": (Single(), torch.zeros(2, 3)),
    "empty": (nn.Sequential(), torch.zeros(2, 3)),
}


@pytest.mark.parametrize(("model", "x"), NOTHING.values(), ids=NOTHING)
def test_nothing_to_gate(model: nn.Module, x: Tensor) -> None:
    before = promises.snapshot(model)
    error = refused(NothingToGateError, lambda: tgfx.transform(model, x), type(model).__name__)
    assert error.fix
    promises.assert_same_snapshot(before, promises.snapshot(model))


def test_everything_ignored_is_nothing_to_gate(model: nn.Module) -> None:
    refused(NothingToGateError, lambda: tgfx.transform(model, X, ignore="conv*"), "ignored")


# -- ignore ------------------------------------------------------------------------------------------------

STRANGERS = ["conv9", "layer*", "", "conv1.weights", nn.LSTM, nn.Linear(6, 4), ("conv1", "conv9"), ["conv?9"]]


@pytest.mark.parametrize("ignore", STRANGERS, ids=str)
def test_unknown_ignore(model: nn.Module, ignore) -> None:
    before = promises.snapshot(model)
    error = refused(IgnoreError, lambda: tgfx.transform(model, X, ignore=ignore))
    assert "conv1" in error.fix  # says which names there are
    promises.assert_same_snapshot(before, promises.snapshot(model))


@pytest.mark.parametrize("ignore", [3, [None], (3.5,)], ids=repr)
def test_ignore_of_another_type(model: nn.Module, ignore) -> None:
    refused((IgnoreError, InputError), lambda: tgfx.transform(model, X, ignore=ignore))


# -- budgets and kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 0.0, -0.5, 1.0001, 50, math.nan, math.inf, True, "0.5", None], ids=repr)
def test_budget_outside_its_range(gated: tgfx.GatedModule, share) -> None:
    refused(BudgetError, lambda: gated.budget_loss(flops=share), "flops", repr(share))


@pytest.mark.parametrize("share", [1, 1.0, 0.5])
def test_budget_in_its_range(gated: tgfx.GatedModule, share) -> None:
    assert gated.budget_loss(flops=share, weight=1.0).shape == ()


def test_a_share_that_cannot_be_reached_is_a_number_in_eval_mode_only(gated: tgfx.GatedModule) -> None:
    assert gated.eval().budget_loss(flops=1e-9, weight=1.0).shape == ()
    refused(BudgetError, lambda: gated.train().budget_loss(flops=1e-9, weight=1.0), "flops", "cannot be met", "0.0556")


@pytest.mark.parametrize("weight", [-1, -0.1, math.nan, math.inf, "a", True, [1.0], torch.ones(2)], ids=repr)
def test_weight_of_the_budget_loss(gated: tgfx.GatedModule, weight) -> None:
    refused(InputError, lambda: gated.budget_loss(flops=0.5, weight=weight), "weight", repr(weight))


@pytest.mark.parametrize("size", [0, -3, 2.5, "8", True], ids=repr)
def test_batch_size_of_the_budget_loss(gated: tgfx.GatedModule, size) -> None:
    refused(InputError, lambda: gated.budget_loss(flops=0.5, batch_size=size), "batch_size", repr(size))


# -- not a gated model -------------------------------------------------------------------------------------

TAKERS = {
    "param_groups": lambda model: tgfx.param_groups(model, lr=0.1),
    "check_optimizer": lambda model: tgfx.check_optimizer(model, torch.optim.SGD([nn.Parameter(X)], lr=0.1)),
    "BudgetController": lambda model: tgfx.BudgetController(model, {"flops": 0.5}),
    "finish": lambda model: tgfx.finish(model, flops=0.5),
    "fit": lambda model: tgfx.fit(model, [X], budget={"flops": 0.5}),
    "shrink": tgfx.shrink,
    "compact_": tgfx.compact_,
    "save_plan": lambda model: tgfx.save_plan(model, "nowhere"),
}


@pytest.mark.parametrize("name", TAKERS)
def test_only_gated_models_are_taken(name: str, model: nn.Module, gated: tgfx.GatedModule) -> None:
    call = TAKERS[name]
    assert "tgfx.transform" in (refused(InputError, lambda: call(model), "Net").fix or "")
    assert "tgfx.transform" in (refused(InputError, lambda: call(None), "NoneType").fix or "")
    wrapped = nn.Sequential(nn.Identity(), gated)
    assert "submodule '1'" in (refused(InputError, lambda: call(wrapped), "Sequential").fix or "")


@pytest.mark.parametrize("name", ["finish", "fit", "shrink", "compact_", "save_plan"])
def test_compiled_models_are_refused_with_what_to_pass(name: str, gated: tgfx.GatedModule) -> None:
    compiled = torch.compile(gated, backend="eager")
    error = refused(InputError, lambda: TAKERS[name](compiled), "OptimizedModule")
    assert ("gated.compile()" if name == "fit" else "that was compiled") in (error.fix or "")


def test_parameters_of_a_compiled_model_can_be_grouped(gated: tgfx.GatedModule) -> None:
    groups = tgfx.param_groups(torch.compile(gated, backend="eager"), lr=0.1)
    tgfx.check_optimizer(gated, torch.optim.SGD(groups))
    refused(InputError, lambda: tgfx.check_optimizer(gated, "sgd"), "str")


def test_single_weights_have_a_controller_of_their_own(model: nn.Module) -> None:
    gated = tgfx.transform(model, X, granularity="weight")
    refused(GranularityError, lambda: tgfx.BudgetController(gated, {"params": 0.5}), "weight")


def test_no_budget_at_all(gated: tgfx.GatedModule) -> None:
    refused(BudgetError, gated.budget_loss)


@pytest.mark.parametrize("kind", ["flop", "FLOPS", "seconds", "", None, 3], ids=repr)
def test_unknown_kind(gated: tgfx.GatedModule, kind) -> None:
    for ask in (gated.cost, gated.total, gated.ratio, gated.cost_expr, gated.marginal, gated.cheapest):
        refused(BudgetError, lambda ask=ask: ask(kind), "flops", "params", "channels", repr(kind))


def test_unknown_kind_of_budget(gated: tgfx.GatedModule) -> None:
    refused(BudgetError, lambda: gated.budget_loss(memory=0.5), "memory", "flops")


# -- shrink ------------------------------------------------------------------------------------------------


def test_gates_all_closed(gated: tgfx.GatedModule) -> None:
    gated.gates["conv2"].set_open_(torch.zeros(6, dtype=torch.bool))
    before = promises.snapshot(gated)
    error = refused(EmptyGroupError, lambda: tgfx.shrink(gated), "conv2", "6")
    assert error.fix and "conv2.weight[0]" in error.where
    promises.assert_same_snapshot(before, promises.snapshot(gated))
    gated.gates["conv2"].set_open_(torch.arange(6) == 2)  # and the model can still be used
    assert tgfx.shrink(gated).conv2.out_channels == 1


@pytest.mark.parametrize("multiple", [0, -8, 2.5, "8", True], ids=repr)
def test_round_to_is_a_positive_whole_number(gated: tgfx.GatedModule, multiple) -> None:
    refused(InputError, lambda: tgfx.shrink(gated, round_to=multiple), "round_to", repr(multiple))


# -- models that are not ready -----------------------------------------------------------------------------


def test_lazy_modules(model: nn.Module) -> None:
    lazy = nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU(), nn.Conv2d(8, 3, 1))
    error = refused(LazyModuleError, lambda: tgfx.transform(lazy, X), "0.weight")
    assert "run the model once" in error.fix
    assert isinstance(lazy[0].weight, nn.UninitializedParameter)
    lazy(X)
    assert tgfx.transform(lazy, X).gates


def test_lazy_buffers() -> None:
    """A lazy BatchNorm without affine has no parameter, only buffers that wait."""
    lazy = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LazyBatchNorm2d(affine=False), nn.Conv2d(8, 3, 1))
    refused(LazyModuleError, lambda: tgfx.transform(lazy, X), "1.running_mean")


def test_already_gated(gated: tgfx.GatedModule) -> None:
    error = refused(AlreadyGatedError, lambda: tgfx.transform(gated, X), "GatedModule")
    assert "shrink" in error.fix
    refused(AlreadyGatedError, lambda: tgfx.transform(nn.Sequential(gated, nn.Linear(4, 2)), X))


def test_a_shrunk_model_can_be_gated_again(gated: tgfx.GatedModule) -> None:
    gated.gates["conv1"].set_open_(torch.arange(8) < 5)
    again = tgfx.transform(tgfx.shrink(gated), X)
    assert {name: group.size for name, group in again.groups.items() if not group.frozen} == {
        "conv1": 5,
        "conv2": 6,
    }


# -- other options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["channels", "filter", "", None, 3], ids=repr)
def test_unknown_granularity(model: nn.Module, granularity) -> None:
    refused(GranularityError, lambda: tgfx.transform(model, X, granularity=granularity), repr(granularity))


@pytest.mark.parametrize("gate", ["sigmoid", 3, nn.Linear(2, 2), tgfx.GateSpec], ids=lambda g: type(g).__name__)
def test_gate_is_a_spec(model: nn.Module, gate) -> None:
    refused(InputError, lambda: tgfx.transform(model, X, gate=gate), "GateSpec")


@pytest.mark.parametrize("name", ["conv9", "conv", "gate_bank"])
def test_nothing_to_explain(gated: tgfx.GatedModule, name: str) -> None:
    error = refused(InputError, lambda: gated.explain(name), repr(name))
    assert "conv1" in error.fix
