"""What a forward does beside its operators is written into the graph, or its module is kept: never lost in silence."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tgfx
from tests.support.random_models import randomised
from tests.support.stepwise import MODES, exact_cut, same_step_for_step
from tgfx.errors import CaptureError


class Part(nn.Module):
    """`act` is the body of a forward, over a few tensors."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.key, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.listed = [self.scale]
        self.register_buffer("run", torch.linspace(-1, 1, 8))
        self.register_buffer("count", torch.tensor(0))
        self.step, self.steps = 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


class Net(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.middle = nn.Linear(4, 8), part, nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.part(self.first(x).tanh())).tanh())


class ExportedNet(Net):
    """fx does not follow writing to places that a tensor tells."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, torch.arange(2)] = x[:, 2:]
        return super().forward(x + y)


def _compared(act: Callable[[Any, Tensor], Tensor], kind: type[Net] = Net) -> tgfx.GatedModule:
    model = randomised(kind(Part(act)).double())
    inputs = [torch.randn(5, 4, dtype=torch.float64) for _ in MODES]
    gated = tgfx.transform(model.eval(), inputs[0])
    same_step_for_step(copy.deepcopy(model), copy.deepcopy(gated), inputs)
    if not gated.facts.source.opaque:
        exact_cut(copy.deepcopy(gated), inputs[0])
    return gated


# -- gradients -------------------------------------------------------------------------------------------------------


def _no_grad(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = part.key(x).sigmoid()
    return x * y


@torch.no_grad()
def _decorated(part: Any, x: Tensor) -> Tensor:
    return part.key(x) + F.linear(x, part.key.weight)


def _half_decorated(part: Any, x: Tensor) -> Tensor:
    return x * _decorated(part, x)


def _set(part: Any, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    y = part.key(x)
    torch.set_grad_enabled(True)
    return x + y


def _by_mode(part: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not part.training):
        y = part.key(x)
    return x + y


def _on_again(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = part.key(x)
        with torch.enable_grad():
            z = part.key(x * y)
    return x + y * z


def _buffer(part: Any, x: Tensor) -> Tensor:
    if part.training:
        with torch.no_grad():
            part.run.mul_(0.9).add_(x.mean(0), alpha=0.1)
            part.count += 1
    return x * part.run


def _in_place(part: Any, x: Tensor) -> Tensor:
    y = part.key(x)
    with torch.no_grad():
        y.mul_(0.5)
        y += part.scale
        z = F.relu(y, inplace=True)
    return x + y * z


def _handed_on(part: Any, x: Tensor) -> Tensor:
    halves = part.key(x).chunk(2, dim=1)
    with torch.no_grad():
        left, right = halves[0], halves[1] * 2
    return x * torch.cat([left, right.contiguous()], dim=1)


def _statistics(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = part.norm(x)
    return x + y


def _layer_and_more(part: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = part.key(x).relu() + part.key(x)
    return x * y


REGIONS = {
    f.__name__: f
    for f in (
        _no_grad, _half_decorated, _set, _by_mode, _on_again, _buffer, _in_place, _handed_on, _statistics,
        _layer_and_more,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.filterwarnings("ignore:.*another path in train mode")
def test_regions_without_gradients_are_in_the_graph(name: str) -> None:
    gated = _compared(REGIONS[name])
    assert not gated.facts.source.opaque
    assert gated.facts.source.front_end == "fx"
    assert "middle" in gated.gates


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.filterwarnings("ignore:.*another path in train mode")
def test_regions_without_gradients_are_in_exported_graphs(name: str) -> None:
    gated = _compared(REGIONS[name], ExportedNet)
    assert gated.facts.source.front_end == "export"
    assert "middle" in gated.gates


class LoopingNet(Net):
    """By its example's sizes fx can follow the loop, which is then another one at another batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            z = self.first(x).relu() + y
        for row in x[:, 0].unsqueeze(1):
            z = z + row.mean()
        return self.last(self.middle(self.part(y * z).tanh()).tanh())


@pytest.mark.filterwarnings("ignore:.*another path in train mode")
def test_regions_without_gradients_beside_a_loop_over_the_batch() -> None:
    gated = _compared(lambda part, x: x, LoopingNet)
    assert gated.facts.source.front_end == "export" and "middle" in gated.gates


def test_autocast_switched_off_is_no_region() -> None:
    def off(part: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return part.key(x)

    for kind in (Net, ExportedNet):
        gated = _compared(off, kind)
        assert not gated.facts.source.opaque
        assert "part.key" in gated.gates


def test_what_has_no_gradient_is_left_alone() -> None:
    """As the position tables of Hugging Face, which are made under no_grad."""

    def table(part: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            angles = (part.run * 2).cos()
        return x * angles

    nodes = _compared(table).facts.source.module.graph.nodes
    assert not [node for node in nodes if node.target == "detach"]


def test_several_tensors_at_once_under_no_grad_keep_their_module() -> None:
    def joined(part: Any, x: Tensor) -> Tensor:
        halves = part.key(x).chunk(2, dim=1)
        with torch.no_grad():
            y = torch.cat(halves, dim=1)
        return x + y

    gated = _compared(joined)
    assert gated.facts.source.opaque == {"part"}
    assert "no_grad" in str(gated.facts.channels.refusals[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient checkpointing", "ignore:.*requires_grad=True")
def test_checkpoints_are_no_regions_without_gradients(reentrant: bool) -> None:
    gated = _compared(lambda part, x: x + checkpoint(part.key, x, use_reentrant=reentrant))
    assert not gated.facts.source.opaque
    assert not [node for node in gated.facts.source.module.graph.nodes if node.target == "detach"]


# -- what no graph holds ---------------------------------------------------------------------------------------------


def _autocast(part: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x.float() @ part.key.weight.float()
    return x + y


def _counter(part: Any, x: Tensor) -> Tensor:
    if part.training:
        part.step += 1
    return x * (1 + part.step)


def _counter_in_a_list(part: Any, x: Tensor) -> Tensor:
    part.steps[0] += 1
    return x * part.steps[0]


def _python_random(part: Any, x: Tensor) -> Tensor:
    return x * random.random() if part.training else x


def _numpy_random(part: Any, x: Tensor) -> Tensor:
    return x * float(np.random.rand()) if part.training else x


def _torch_random(part: Any, x: Tensor) -> Tensor:
    return x if part.training and float(torch.rand(())) < 0.5 else x * 2


def _rebound(part: Any, x: Tensor) -> Tensor:
    if part.training:
        part.run = part.run * 0.9 + x.detach().mean(0)
    return x * part.run


def _data(part: Any, x: Tensor) -> Tensor:
    if part.training:
        part.run.data = part.run * 0.9 + x.detach().mean(0)
    return x * part.run


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _own_backward(part: Any, x: Tensor) -> Tensor:
    return x + _StraightThrough.apply(part.key(x))


KEPT = {
    "autocast": _autocast,
    "attribute 'step'": _counter,
    "attribute 'steps'": _counter_in_a_list,
    "Python's random": _python_random,
    "numpy.random": _numpy_random,
    "from torch": _torch_random,
    "place of 'run'": _rebound,
    "assigns to .data": _data,
    "own backward": _own_backward,
}


@pytest.mark.parametrize("reason", KEPT)
def test_modules_that_do_more_than_a_graph_are_kept(reason: str) -> None:
    np.random.seed(0)
    gated = _compared(KEPT[reason])
    assert gated.facts.source.opaque == {"part"}
    assert "middle" in gated.gates
    (refusal,) = gated.facts.channels.refusals
    assert reason in refusal.reason
    assert refusal.node == "part"
    assert refusal.limit


@pytest.mark.parametrize("reason", ["autocast", "attribute 'step'", "attribute 'steps'"])
def test_exported_models_that_do_more_than_a_graph_are_refused(reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        tgfx.transform(ExportedNet(Part(KEPT[reason])).double(), torch.randn(5, 4, dtype=torch.float64))


def test_exported_models_that_draw_in_train_mode_say_that_they_keep_the_eval_path() -> None:
    """As those of Hugging Face that mask their input at random (SpecAugment)."""
    with pytest.warns(UserWarning, match="takes the eval path there too"):
        gated = tgfx.transform(ExportedNet(Part(_python_random)).double(), torch.randn(5, 4, dtype=torch.float64))
    (refusal,) = gated.facts.channels.refusals
    assert "train mode (it draws from Python's random); the eval path is kept in both" in refusal.reason
    assert refusal.limit


@pytest.mark.parametrize("reason", KEPT)
def test_a_model_that_does_more_than_a_graph_is_refused(reason: str) -> None:
    model = Part(KEPT[reason]).double()
    with pytest.raises(CaptureError, match=reason):
        tgfx.transform(model, torch.randn(5, 8, dtype=torch.float64))
    assert (model.step, model.steps) == (0, [0])
    assert type(model.run) is Tensor


# -- parameters and buffers that are reached in other ways -----------------------------------------------------------


def _penalty(part: Any, x: Tensor) -> Tensor:
    return x + sum(p.square().sum() for p in part.parameters() if p.ndim == 1) * 0.1


def _from_a_list(part: Any, x: Tensor) -> Tensor:
    return F.linear(x * part.listed[0] - part.listed[0].abs(), torch.diag(part.listed[0]))


def _from_tables(part: Any, x: Tensor) -> Tensor:
    return part.key(x) + 2 * part._parameters["scale"] + next(part.buffers())


def _counted(part: Any, x: Tensor) -> Tensor:
    part.count += 1
    return x * torch.exp(-0.1 * part.count)


@pytest.mark.parametrize("act", [_penalty, _from_a_list, _from_tables, _counted])
def test_tensors_of_the_model_are_named_however_they_are_reached(act: Callable[[Any, Tensor], Tensor]) -> None:
    gated = _compared(act)
    assert not gated.facts.source.opaque
    assert "middle" in gated.gates
