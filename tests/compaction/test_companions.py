"""What goes along with a model: optimizer state of any kind, gradients, averages, schedulers, scalers, hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tgfx
from tests.support.compaction_models import images, model
from tests.support.trajectories import Trainer, random_keep
from tgfx.errors import InputError
from tgfx.passes.survivors import Survivors


def trained(name: str = "resnet", make: Any = None, steps: int = 2) -> Trainer:
    gated = tgfx.transform(model(name), images(2))
    trainer = Trainer(gated, make or (lambda p: torch.optim.Adam(p, lr=1e-3)))
    for number in range(steps):
        trainer.step(images(3, number))
    return trainer


def close_some(gated: tgfx.GatedModule, density: float = 0.5, seed: int = 1) -> None:
    keep = random_keep(density, seed)
    for name, gate in gated.gates.items():
        mask = keep(name, len(gate.weight))
        mask[0] = True
        gate.set_open_(mask)


def test_the_same_objects_only_smaller() -> None:
    trainer = trained()
    gated, before = trainer.gated, dict(trainer.gated.named_parameters())
    modules = {name: m for name, m in gated.named_modules() if name != "gate_index"}
    group = trainer.optimizer.param_groups[0]
    names, params = list(before), group["params"]
    close_some(gated)
    report = tgfx.compact_(gated, trainer.optimizer, patience=0)
    assert report and report.parameters[1] < report.parameters[0]
    assert list(dict(gated.named_parameters())) == names
    assert all(p is before[name] for name, p in gated.named_parameters())
    assert trainer.optimizer.param_groups[0] is group and group["params"] is params
    assert {name: m for name, m in gated.named_modules() if name != "gate_index"} == modules
    conv = gated.get_submodule("blocks.1.conv1")
    assert tuple(conv.weight.shape) == (conv.out_channels, conv.in_channels, 3, 3)
    assert conv.out_channels < 16


def test_gradients_hooks_and_settings_stay() -> None:
    trainer = trained()
    gated, calls = trainer.gated, []
    gated.bn.register_forward_hook(lambda *_: calls.append("bn"))
    gated.get_parameter("head.weight").register_hook(lambda g: calls.append("grad"))
    gated.bn.momentum = 0.37
    close_some(gated)
    expected = gated.get_parameter("blocks.0.bn1.weight").grad.clone()
    kept = gated.gates["blocks.0.conv1"].is_open()
    tgfx.compact_(gated, trainer.optimizer, patience=0)
    calls.clear()  # the proof runs the model too
    assert torch.equal(gated.get_parameter("blocks.0.bn1.weight").grad, expected[kept])
    assert all(p.grad is not None and p.grad.shape == p.shape for p in gated.parameters())
    trainer.step(images(3))
    assert calls == ["bn", "grad"]
    assert gated.bn.momentum == 0.37 and tgfx.shrink(gated).bn.momentum == 0.37
    gated.bn.momentum = 0.5
    close_some(gated, 0.5, 7)
    tgfx.compact_(gated, trainer.optimizer, patience=0)
    assert gated.bn.momentum == 0.5 and tgfx.shrink(gated).bn.momentum == 0.5


def test_channels_last_stays() -> None:
    trainer = trained()
    trainer.gated.to(memory_format=torch.channels_last)
    close_some(trainer.gated)
    tgfx.compact_(trainer.gated, trainer.optimizer, patience=0)
    assert trainer.gated.get_parameter("blocks.0.conv1.weight").is_contiguous(memory_format=torch.channels_last)


class Factored(torch.optim.Optimizer):
    """Keeps rows and columns, a count, a list, and (for `odd`) something of no known shape."""

    def __init__(self, params: list[nn.Parameter], odd: bool = False) -> None:
        super().__init__(params, {"lr": 1e-3, "odd": odd})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", torch.zeros(())) + 1
                state["pair"] = [p.detach().clone(), p.detach().square()]
                if p.ndim == 2:
                    state["row"], state["col"] = p.detach().sum(-1), p.detach().sum(-2)
                    state["kept_dims"] = p.detach().sum(-1, keepdim=True)
                if group["odd"] and p.ndim == 2:
                    state["odd"] = torch.ones(7)


def test_factored_state_is_cut_by_axis() -> None:
    trainer = trained("vit", Factored)
    gated, optimizer, name = trainer.gated, trainer.optimizer, "blocks.0.proj.weight"
    weight = gated.get_parameter(name)  # square: sizes do not tell the axes apart
    close_some(gated)
    facts = gated.facts
    survivors = Survivors(facts.channels, facts.coupling, gated.open_slots())
    rows, columns = survivors.kept(facts.channels.params[name])
    assert len(rows) != len(columns)
    before = dict(optimizer.state[weight])
    tgfx.compact_(gated, optimizer, patience=0)
    state = optimizer.state[weight]
    assert torch.equal(state["row"], before["row"][rows])
    assert torch.equal(state["col"], before["col"][columns])
    assert torch.equal(state["kept_dims"], before["kept_dims"][rows])
    assert torch.equal(state["pair"][0], weight) and state["step"] == 2


def test_state_of_no_known_shape_is_dropped_with_a_warning() -> None:
    trainer = trained("resnet", lambda p: Factored(p, odd=True))
    close_some(trainer.gated)
    with pytest.warns(UserWarning, match=r"dropped and starts anew: head\.weight"):
        report = tgfx.compact_(trainer.gated, trainer.optimizer, patience=0)
    assert report.reset == ("head.weight",)
    assert trainer.gated.head.weight not in trainer.optimizer.state
    assert trainer.gated.stem.weight in trainer.optimizer.state


def test_adafactor_goes_on() -> None:
    trainer = trained("resnet", lambda p: torch.optim.Adafactor(p, lr=1e-3))
    close_some(trainer.gated)
    report = tgfx.compact_(trainer.gated, trainer.optimizer, patience=0)
    assert report and not report.reset
    assert torch.isfinite(trainer.step(images(3)))


def test_schedulers_groups_and_several_optimizers() -> None:
    gated = tgfx.transform(model("branched"), images(2)).train()
    weights = [(n, p) for n, p in gated.named_parameters() if not n.startswith("gate_bank")]
    first = torch.optim.SGD([{"params": weights[:4]}, {"params": weights[4:], "lr": 0.5}], lr=0.1, momentum=0.9)
    second = torch.optim.Adam(gated.bank.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(first, 1, 0.1)
    for _ in range(2):
        gated(images(2)).square().mean().backward()
        first.step(), second.step(), schedule.step()
    gated.gates["c1"].set_open_(torch.zeros(12, dtype=torch.bool))
    with pytest.raises(InputError, match="not in the optimizer"):
        tgfx.compact_(gated, first, patience=0)
    tgfx.compact_(gated, [first, second], patience=0)
    for group in first.param_groups:
        assert group["param_names"] == [
            n for n, p in gated.named_parameters() if any(p is own for own in group["params"])
        ]
    schedule.step()
    assert [round(g["lr"], 6) for g in first.param_groups] == [0.0001, 0.0005]
    gated(images(2)).square().mean().backward()
    first.step(), second.step()


@pytest.mark.parametrize("kind", ["averaged", "averaged buffers", "copy", "wrapped", "state_dict", "parameters"])
def test_averages_are_cut_along(kind: str) -> None:
    class Wrapped:  # as timm's ModelEma
        def __init__(self, module: nn.Module) -> None:
            self.module = copy.deepcopy(module)

    trainer = trained("branched")
    gated = trainer.gated
    average: Any = {
        "averaged": lambda: AveragedModel(gated, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "averaged buffers": lambda: AveragedModel(gated, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
        "copy": lambda: copy.deepcopy(gated),
        "wrapped": lambda: Wrapped(gated),
        "state_dict": lambda: copy.deepcopy(gated.state_dict()),
        "parameters": lambda: {n: p.detach().clone() for n, p in gated.named_parameters()} | {"other": torch.ones(3)},
    }[kind]()
    trainer.step(images(3, 5))
    if kind.startswith("averaged"):
        average.update_parameters(gated)
    for number in range(2):
        close_some(gated, 0.6, number)
        if number:
            gated.gates["c1"].set_open_(torch.zeros_like(gated.gates["c1"].is_open()))
        tgfx.compact_(gated, trainer.optimizer, ema=average, patience=0)
        trainer.step(images(3, number))
        if kind.startswith("averaged"):
            average.update_parameters(gated)
    inner = average if kind in ("copy", "state_dict", "parameters") else average.module
    tensors = inner if isinstance(inner, dict) else inner.state_dict()
    wanted = dict(gated.named_parameters()) if kind == "parameters" else gated.state_dict()
    assert {n: t.shape for n, t in tensors.items() if n != "other"} == {n: t.shape for n, t in wanted.items()}
    assert not torch.equal(tensors["stem.weight"], wanted["stem.weight"])  # its own values
    if kind == "state_dict":
        copy.deepcopy(gated).load_state_dict(average)
    elif kind != "parameters":
        assert torch.isfinite(inner.eval()(images(2))).all()
        tgfx.shrink(inner)


@pytest.mark.parametrize("compacted", [False, True])
def test_an_average_of_buffers_leaves_the_gates_where_they_are(compacted: bool) -> None:
    """Whole numbers do not survive i * 0.9 + i * 0.1, so those that say where gates are must not be buffers."""
    gated = tgfx.transform(model("resnet"), images(2)).eval()
    close_some(gated)
    if compacted:
        close_some(gated, 0.7, 2)
        assert tgfx.compact_(gated, patience=0)
        close_some(gated, 0.7, 3)
    average = AveragedModel(gated, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    by_state = copy.deepcopy(gated)  # as timm's ModelEmaV2 does it
    x = images(2)
    for _ in range(60):
        average.update_parameters(gated)
        for own, other in zip(by_state.state_dict().values(), gated.state_dict().values(), strict=True):
            own.copy_(0.9 * own + 0.1 * other)
    for found in (average.module, by_state):
        torch.testing.assert_close(found(x), gated(x), rtol=1e-5, atol=1e-6)
        tgfx.shrink(found)
    assert tgfx.compact_(gated, ema=[average, by_state], patience=0)
    tgfx.shrink(average.module)


def test_where_gates_are_follows_the_model_through_devices_and_types() -> None:
    gated = tgfx.transform(model("resnet"), images(2)).eval()
    close_some(gated)
    tgfx.compact_(gated, patience=0)
    x, state = images(2), copy.deepcopy(gated.state_dict())
    expected = gated(x)
    gated.graph.lint()
    assert gated.to("meta")(x.to("meta")).shape == expected.shape
    gated.to_empty(device="cpu").load_state_dict(state)  # to_empty forgets all values
    assert torch.equal(gated(x), expected)
    torch.testing.assert_close(gated.float()(x.float()), expected.float(), rtol=1e-3, atol=1e-4)
    assert not [name for name, _ in gated.named_buffers() if name.startswith("gate_")]


def test_averages_that_do_not_fit_are_refused() -> None:
    trainer = trained()
    late = copy.deepcopy(trainer.gated)
    close_some(trainer.gated)
    for wrong in ({}, {"nothing": torch.ones(1)}, {"stem.weight": torch.ones(1)}, trainer.gated, nn.Linear(2, 2), 3):
        with pytest.raises(InputError):
            tgfx.compact_(trainer.gated, trainer.optimizer, ema=wrong, patience=0)
    assert trainer.gated.bank.recorded() is None
    tgfx.compact_(trainer.gated, trainer.optimizer, patience=0)
    with pytest.raises(InputError, match="average does not fit"):
        tgfx.compact_(trainer.gated, trainer.optimizer, ema=late, patience=0)


def test_a_scaler_must_not_be_in_the_middle_of_a_step() -> None:
    trainer = trained()
    scaler = torch.amp.GradScaler("cpu")
    close_some(trainer.gated)
    scaler.scale(trainer.gated(images(2)).square().mean()).backward()
    scaler.unscale_(trainer.optimizer)
    with pytest.raises(InputError, match="middle of a step"):
        tgfx.compact_(trainer.gated, trainer.optimizer, scaler=scaler, patience=0)
    scaler.step(trainer.optimizer)
    scaler.update()
    assert tgfx.compact_(trainer.gated, trainer.optimizer, scaler=scaler, patience=0)
