"""A function that is called over the tensors of a layer becomes the layer only if it does, in both modes, the same."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.random_models import randomised
from tests.support.stepwise import MODES, exact_cut, same_step_for_step


class Frozen(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Counting(nn.BatchNorm2d):
    """As torch's own, written out (timm's layers with an activation do so)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        tensors = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.batch_norm(x, *tensors, self.training, self.momentum, self.eps)


class Uncounted(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        tensors = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.batch_norm(x, *tensors, self.training, self.momentum, self.eps)


class Statistics(nn.Module):
    """No batch norm, though its buffers have the names of one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))


class Net(nn.Module):
    def __init__(self, middle: Callable[[Any, Tensor], Tensor], bn: nn.Module) -> None:
        super().__init__()
        self.middle, self.flag = middle, False
        self.first, self.bn, self.last = nn.Conv2d(3, 8, 1), bn, nn.Conv2d(8, 3, 1)
        self.register_parameter("scale", nn.Parameter(torch.linspace(0.5, 2, 8)))
        self.register_buffer("num_batches_tracked", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x)).tanh())


class ExportedNet(Net):
    """fx does not follow writing to places that a tensor tells."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, torch.arange(2)] = x[:, 1:]
        return super().forward(x + y)


def _norm(**changed: Any) -> Callable[[Any, Tensor], Tensor]:
    """F.batch_norm over the layer's tensors with these arguments; names stand for the net's own."""

    def middle(net: Any, x: Tensor) -> Tensor:
        bn = net.bn
        given = {"weight": bn.weight, "bias": bn.bias, "training": net.training, "momentum": bn.momentum, "eps": bn.eps}
        given.update({k: getattr(net, v) if isinstance(v, str) else v for k, v in changed.items()})
        return F.batch_norm(x, bn.running_mean, bn.running_var, **given)

    return middle


def _own_statistics(net: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, net.bn.running_mean, net.bn.running_var, training=net.training)


def _count(net: Any, x: Tensor) -> Tensor:
    if net.training:
        net.num_batches_tracked.add_(1)
    return x * 2


def _used_count(net: Any, x: Tensor) -> Tensor:
    if net.training:
        net.bn.num_batches_tracked.add_(1)
    return _norm()(net, x) * (1 + net.bn.num_batches_tracked)


def _dropout_in_place(net: Any, x: Tensor) -> Tensor:
    y = x * 1
    F.dropout(y, 0.5, net.training, inplace=True)
    return x + y


CALLS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "frozen subclass": (lambda net, x: net.bn(x), lambda: Frozen(8)),
    "counting subclass": (lambda net, x: net.bn(x), lambda: Counting(8)),
    "uncounted subclass": (lambda net, x: net.bn(x), lambda: Uncounted(8)),
    "frozen": (_norm(training=False), lambda: nn.BatchNorm2d(8)),
    "always on": (_norm(training=True), lambda: nn.BatchNorm2d(8)),
    "momentum": (_norm(momentum=0.5), lambda: nn.BatchNorm2d(8)),
    "eps": (_norm(eps=1e-3), lambda: nn.BatchNorm2d(8)),
    "own weight": (_norm(weight="scale"), lambda: nn.BatchNorm2d(8)),
    "no weight": (_norm(weight=None, bias=None), lambda: nn.BatchNorm2d(8)),
    "as the layer, uncounted": (_norm(), lambda: nn.BatchNorm2d(8)),
    "count is used": (_used_count, lambda: nn.BatchNorm2d(8)),
    "statistics of its own": (_own_statistics, Statistics),
    "own num_batches_tracked": (_count, nn.Identity),
    "dropout off": (lambda net, x: F.dropout(x, 0.5, False), nn.Identity),
    "dropout by a flag": (lambda net, x: F.dropout(x, 0.5, net.training and net.flag), nn.Identity),
    "dropout by mode": (lambda net, x: F.dropout(x, 0.5, net.training), nn.Identity),
    "rate by mode": (lambda net, x: F.dropout(x, 0.5 if net.training else 0.1, net.training), nn.Identity),
    "dropout in place": (_dropout_in_place, nn.Identity),
    "feature dropout off": (lambda net, x: F.dropout2d(x, 0.5, False), nn.Identity),
}
FOLLOWING = {"counting subclass", "dropout by mode", "rate by mode", "dropout in place"}  # one graph for both modes


@pytest.mark.parametrize("kind", [Net, ExportedNet])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:.*another path in train mode")
def test_functions_keep_their_settings(name: str, kind: type[Net]) -> None:
    middle, bn = CALLS[name]
    model = randomised(kind(middle, bn()).double())
    inputs = [torch.randn(4, 3, 5, 5, dtype=torch.float64) for _ in MODES]
    gated = tgfx.transform(model.eval(), inputs[0])
    assert gated.facts.source.front_end == ("fx" if kind is Net else "export")
    assert len(gated.gates) == 1
    assert not gated.facts.channels.refusals
    if name in FOLLOWING:
        assert gated.training_graph is None
    exact_cut(copy.deepcopy(gated), inputs[0])
    same_step_for_step(copy.deepcopy(model), gated, inputs)


LOOK_UPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer pads": ({"padding_idx": 0}, {}),
    "call pads": ({}, {"padding_idx": 1}),
    "both pad": ({"padding_idx": 1}, {"padding_idx": -8}),
    "layer scales": ({"scale_grad_by_freq": True}, {}),
    "call scales": ({}, {"scale_grad_by_freq": True}),
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_keep_their_gradients(name: str) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(9, 8, **LOOK_UPS[name][0]), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.embedding(x, self.words.weight, **LOOK_UPS[name][1]).tanh())

    model = randomised(Words().double())
    inputs = [torch.tensor([[0, 1, 2, 0], [1, 1, 5, 8]])] * len(MODES)
    gated = tgfx.transform(model, inputs[0])
    assert len(gated.gates) == 1
    exact_cut(copy.deepcopy(gated), inputs[0])
    same_step_for_step(copy.deepcopy(model), gated, inputs)


def test_rms_norm_without_eps_is_no_layer_with_one() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 8), nn.RMSNorm(8, eps=1e-5), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.rms_norm(self.first(x) * 1e-3, (8,), self.norm.weight))

    model = Normed().double()
    x = torch.randn(2, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        gated = tgfx.transform(model, x)
    torch.testing.assert_close(gated(x), model(x), rtol=1e-12, atol=0)
