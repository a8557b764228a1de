"""A mean or a spread over gated channels is the same however its call is spelled, and over however many gated axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import tgfx
from tests.support.promises import EXACT, IDENTITY, assert_close, gate_at_random
from tgfx.errors import NothingToGateError
from tgfx.ops.spelling import named_arguments

Reduction = Callable[[Tensor], Tensor]


class Reduced(nn.Module):
    """Tokens and channels both have gates; `reduction` reads one, the other, or both."""

    def __init__(self, reduction: Reduction) -> None:
        super().__init__()
        self.channels, self.tokens = nn.Linear(3, 6), nn.Linear(4, 5)
        self.back, self.head = nn.Linear(5, 4), nn.Linear(6, 2)
        self.reduction = reduction

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(self.channels(x).relu().transpose(1, 2)).transpose(1, 2).exp()
        r = self.reduction(y)
        y = y * r if r.ndim == y.ndim else y * r.sum().sqrt()
        return self.head(self.back(y.transpose(1, 2)).transpose(1, 2))


def holds(model: nn.Module, x: Tensor, density: float = 0.5, seeds: range = range(2)) -> tgfx.GatedModule:
    model, x = model.double().eval(), x.double()
    gated = tgfx.transform(model, x).eval()
    with torch.no_grad():
        assert_close(gated(x), model(x), IDENTITY, "all gates open")
        for seed in seeds:
            gate_at_random(gated, density, seed)
            assert_close(tgfx.shrink(gated, verify=False)(x), gated(x), EXACT, "the cut model")
    return gated


SPELLINGS: dict[str, Reduction] = {
    "mean(keepdims)": lambda y: y.mean(-1, keepdims=True),
    "mean(keepdims) over all": lambda y: y.mean((0, 1, 2), keepdims=True),
    "mean(axis)": lambda y: y.mean(axis=2),
    "torch.mean(a=)": lambda y: torch.mean(a=y, axis=(1, -1), keepdims=True),
    "mean(dtype)": lambda y: y.mean((1, 2), True, dtype=torch.float64),
    "mean([])": lambda y: y.mean([]),
    "std(False)": lambda y: y.std(False),
    "torch.std(y, False)": lambda y: torch.std(y, False),
    "std(dim, False, True)": lambda y: y.std(-1, False, True),
    "std(None, False)": lambda y: y.std(None, False),
    "std(correction=None)": lambda y: y.std(2, correction=None),
    "std(input=)": lambda y: torch.std(input=y, axis=[1, 2], unbiased=False, keepdims=True),
    "var(False)": lambda y: y.var(False),
    "var(unbiased)": lambda y: y.var(unbiased=False),
    "var(correction)": lambda y: y.var((1, 2), correction=0.5, keepdim=True),
    "aten.var.dim": lambda y: torch.ops.aten.var.dim(y, [2], False, True),
    "aten.std.correction": lambda y: torch.ops.aten.std.correction(y, correction=0),
    "layer_norm(by name)": lambda y: F.layer_norm(normalized_shape=y.shape[2:], input=y),
    "layer_norm(two axes)": lambda y: F.layer_norm(y, y.shape[1:]),
    "torch.layer_norm": lambda y: torch.layer_norm(y, (6,), None, None, 0.1, False),
    "rms_norm": lambda y: F.rms_norm(eps=0.1, normalized_shape=(5, 6), input=y),
    "group_norm": lambda y: F.group_norm(y.transpose(1, 2), num_groups=2, eps=0.1).transpose(1, 2),
    "torch.group_norm": lambda y: torch.group_norm(y.transpose(1, 2), 2, None, None, 0.1, False).transpose(1, 2),
    "torch.batch_norm": lambda y: torch.batch_norm(
        y.transpose(1, 2), None, None, None, None, True, 0.1, 0.2, False
    ).transpose(1, 2),
    "norm over two axes": lambda y: y.norm(dim=(1, 2), keepdim=True),
    "sum over two axes": lambda y: y.sum(axis=(1, 2), keepdims=True),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_is_exact(spelling: str) -> None:
    torch.manual_seed(0)
    gated = holds(Reduced(SPELLINGS[spelling]), torch.randn(5, 4, 3))
    assert {"channels", "tokens"} & set(gated.gates), "nothing is gated, so nothing was tested"


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_spelling_is_exact(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["mean", "std", "var", "sum", "amax", "logsumexp", "norm"]))
    dims = data.draw(st.sampled_from([0, 1, 2, -1, (1, 2), [-1], (2, 0), (0, 1, 2)]))
    keep = data.draw(st.sampled_from([{}, {"keepdim": True}, {"keepdims": True}, {"keepdim": False}]))
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dict(keep)
    if data.draw(st.booleans()) and name != "norm":
        args = (dims,)
    else:
        kwargs[data.draw(st.sampled_from(["dim", "axis"]))] = dims
    if name in ("std", "var"):
        spread = data.draw(st.sampled_from([{}, {"unbiased": False}, {"correction": 0}, {"correction": 2}]))
        kwargs |= spread
        if args and data.draw(st.booleans()):
            args, kwargs = (*args, False), dict(keep)
    if name == "norm":  # which knows its own names only, and one or two axes
        assume(dims != (0, 1, 2))
        kwargs = {{"axis": "dim", "keepdims": "keepdim"}.get(key, key): value for key, value in kwargs.items()}
    torch.manual_seed(data.draw(st.integers(0, 9)))
    function = None if data.draw(st.booleans()) else getattr(torch, name)

    def reduction(y: Tensor) -> Tensor:
        return function(y, *args, **kwargs) if function else getattr(y, name)(*args, **kwargs)

    try:
        holds(Reduced(reduction), torch.randn(5, 4, 3), seeds=range(1))
    except NothingToGateError:
        assert name in ("amax", "logsumexp")


def test_what_a_spelling_means_is_told_or_not_at_all() -> None:
    graph = fx.Graph()
    x, unknown = graph.placeholder("x"), graph.placeholder("unknown")
    call = graph.call_method
    assert named_arguments(call("std", (x, False))) == {"self": x, "unbiased": False}
    assert named_arguments(call("std", (x, 1))) == {"self": x, "dim": 1}
    assert named_arguments(call("std", (x, unknown))) is None  # an axis, or whether to correct
    assert named_arguments(call("mean", (x,), {"axis": 1, "keepdims": True})) == {"self": x, "dim": 1, "keepdim": True}
    assert named_arguments(call("mean", (x, 1), {"axis": 1})) is None
    assert named_arguments(graph.call_function(torch.mean, (x, 1), {"out": unknown})) is None


class Layers(nn.Module):
    """Each layer is called by the name of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.second, self.group = nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8)
        self.fc, self.norm, self.head = nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(input=self.conv(input=x)).relu()
        y = self.group(input=self.second(input=y)).relu().mean(axis=(2, 3))
        return self.head(input=self.norm(input=self.fc(input=y)))


def test_layers_called_by_name() -> None:
    torch.manual_seed(0)
    model = Layers()
    nn.init.normal_(model.bn.bias)
    gated = holds(model, torch.randn(2, 3, 7, 7))
    assert set(gated.gates) == {"conv", "second", "fc"}
