"""Channels that share an axis with the batch: gates fit at every batch, whatever the order of the axis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.promises import EXACT, IDENTITY, assert_close, gate_at_random
from tgfx.errors import PassError
from tgfx.passes.carry import _carried

HEADS, SIZE = 2, 4
Split = Callable[[Tensor], Tensor]


def heads_last(t: Tensor) -> Tensor:
    b, n, _ = t.shape
    return t.view(b, n, HEADS, SIZE).permute(0, 2, 1, 3).reshape(b * HEADS, n, SIZE)


def batch_last(t: Tensor) -> Tensor:
    b, n, _ = t.shape
    return t.view(b, n, HEADS, SIZE).permute(2, 0, 1, 3).reshape(HEADS * b, n, SIZE)


def by_minus_one(t: Tensor) -> Tensor:
    return t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2).flatten(0, 1)


def scaled_before(t: Tensor) -> Tensor:
    b, n, _ = t.shape
    return (t.view(b, n, HEADS, SIZE).transpose(1, 2) * 0.5).tanh().reshape(-1, n, SIZE)


def scaled_after(t: Tensor) -> Tensor:
    return (heads_last(t) / 2).sin()


def beside_positions(t: Tensor) -> Tensor:
    """As DeBERTa-v2 lays a table of positions over every sample: the repeat does nothing at a batch of one."""
    b, n, _ = t.shape
    table = t[:1].view(1, n, HEADS, SIZE).transpose(1, 2).reshape(-1, n, SIZE)
    return table.repeat(b, 1, 1)


class Attention(nn.Module):
    """As in BLOOM, DeBERTa-v2, BoTNet and HaloNet."""

    def __init__(self, split: Split) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        if self.split is batch_last:
            return self.o(y.view(HEADS, b, n, SIZE).permute(1, 2, 0, 3).reshape(b, n, HEADS * SIZE))
        return self.o(y.view(b, HEADS, n, SIZE).permute(0, 2, 1, 3).reshape(b, n, HEADS * SIZE))


class Reading(nn.Module):
    """`read` on features whose groups lie beside the batch."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.read = nn.Linear(6, 8), nn.Linear(8, 3), read

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp()
        y = self.read(y.reshape(x.shape[0] * HEADS, SIZE)).reshape(x.shape[0], 8)
        return self.head(y)


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y - y.mean(1, keepdim=True),
    "std": lambda y: y / y.std(-1, keepdims=True),
    "layer norm": lambda y: F.layer_norm(y, (SIZE,)),
    "sum": lambda y: y * y.sum(1, True),
}


def holds(model: nn.Module, shape: tuple[int, ...], batch: int, granularity: str = "channel") -> tgfx.GatedModule:
    torch.manual_seed(1)
    model = model.double().eval()
    gated = tgfx.transform(model, torch.randn(batch, *shape, dtype=torch.float64), granularity=granularity).eval()
    with torch.no_grad():
        for other in (batch, 3, 1, 4):
            x = torch.randn(other, *shape, dtype=torch.float64)
            for gate in gated.gates.values():
                gate.set_open_(torch.ones(len(gate.weight), dtype=torch.bool))
            assert_close(gated(x), model(x), IDENTITY, f"all gates open, batch {other} after {batch}")
            gate_at_random(gated, 0.5, other)
            assert_close(tgfx.shrink(gated)(x), gated(x), EXACT, f"the cut model, batch {other} after {batch}")
    return gated


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("split", [heads_last, batch_last, by_minus_one, scaled_before, scaled_after, beside_positions])
def test_heads_beside_the_batch(split: Split, batch: int) -> None:
    torch.manual_seed(0)
    assert {"q", "v"} <= set(holds(Attention(split), (5, 6), batch).gates)


@pytest.mark.parametrize("batch", [1, 2])
def test_gates_over_heads(batch: int) -> None:
    torch.manual_seed(0)
    assert len(holds(Attention(heads_last), (5, 6), batch, "head").gates) == 1


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("read", READS)
def test_reductions_beside_the_batch(read: str, batch: int) -> None:
    torch.manual_seed(0)
    holds(Reading(READS[read]), (6,), batch)


def test_training_goes_on_in_a_smaller_model() -> None:
    """compact_ keeps the way of the gates."""
    torch.manual_seed(0)
    model = Attention(scaled_before).double().eval()
    gated = tgfx.transform(model, torch.randn(1, 5, 6, dtype=torch.float64)).eval()
    gate_at_random(gated, 0.5, 0)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        before = gated(x)
        tgfx.compact_(gated)
        assert_close(gated(x), before, EXACT, "compacted")
        gate_at_random(gated, 0.6, 1)
        assert_close(tgfx.shrink(gated)(x), gated(x), EXACT, "the cut model after it")
    gated.train()(x).sum().backward()
    assert all(gate.weight.grad is not None for gate in gated.gates.values())


class ConditionalConvolution(nn.Module):
    """As in CondConv: every sample has its own kernel, and the batch lies in the groups of one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.route = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.kernels, self.head = nn.Parameter(torch.randn(4, 8 * 9)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        b, c, h, w = y.shape
        kernels = (self.route(y.mean((2, 3))).sigmoid() @ self.kernels).view(b * 8, 1, 3, 3)
        y = F.conv2d(y.reshape(1, b * c, h, w), kernels, padding=1, groups=8 * b)
        return self.head(y.permute(1, 0, 2, 3).reshape(b, 8, h, w).mean((2, 3)))


@pytest.mark.parametrize("batch", [1, 2])
def test_groups_that_follow_the_batch(batch: int) -> None:
    torch.manual_seed(0)
    gated = holds(ConditionalConvolution(), (3, 6, 6), batch)
    assert gated.gates, "nothing is gated, so nothing was tested"


class NormalisedPerSample(nn.Module):
    """Groups of channels, all samples of a batch beside each other on one axis."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first, self.head, self.groups = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), groups

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        b, c, h, w = y.shape
        return self.head(F.group_norm(y.reshape(1, b * c, h, w), b * self.groups).reshape(b, c, h, w).tanh())


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_group_norm_over_all_samples(groups: int, batch: int) -> None:
    torch.manual_seed(0)
    holds(NormalisedPerSample(groups), (3, 6, 6), batch)


def test_a_way_that_is_gone_is_an_error() -> None:
    torch.manual_seed(0)
    facts = tgfx.transform(Attention(heads_last).eval(), torch.randn(1, 5, 6)).facts
    site = next(s for s in facts.placement.sites if s.operand is not None and s.operand.route is not None)
    with pytest.raises(PassError, match="cut off"):
        _carried(site.operand.route, {})
