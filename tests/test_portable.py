"""G7: pickle keeps the code of a graph only, which is traced again when it is loaded. The model is still the same."""

from __future__ import annotations

import io
import math
import operator
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tgfx
from tgfx.ir.pickled_code import guard_pickle, lost_in_pickle
from tgfx.ir.portable import make_portable


class Net(nn.Module):
    """Three calls of it tell a buffer that moves from one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.part = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("table", torch.randn(2, 4))


class Alias(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        view = y[:, :4]
        y += 1
        y *= 2
        return self.head(y) + self.part(view)


class Counts(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.head(self.first(x).relu()) * self.count


class ReadsTable(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu()) + self.part(self.table.sum(0).tanh())


class OwnTensor(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        sums = torch.zeros(3, dtype=x.dtype)
        sums += self.head(y).mean(0)
        return self.head(y) + sums


class Noise(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu()) + torch.rand(3, dtype=x.dtype)


class AsksForSizes(Net):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1000 or not len(x):
            x = x + 1
        wanted = max(1, math.ceil(x.shape[1] / 3))
        return self.head(self.first(x).relu()) * wanted


class ReadsAsFar(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu()) + self.part(self.table[:1, : x.shape[1]] + x)


class LedByBuffers(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        y = self.count * y - (self.count - y) / (1 + y) + torch.add(self.count, y) + (self.count > y)
        fitted = F.interpolate(self.table[None], size=x.shape[1] * 2).mean() * (self.table @ x.t()).mean()
        return self.head(y) + fitted


class Pools(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()[:, :, None]
        return self.head((F.max_pool1d(y, 1) + F.adaptive_max_pool1d(y, 1)).flatten(1))


class Resizes(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        a, b = torch.split(F.layer_norm(y, (8,), self.head.weight[0], eps=1e-3), [4, 4], 1)
        return self.head(y) + self.part(a) + self.part(b)


MODELS = [Alias, Counts, ReadsTable, OwnTensor, Noise, AsksForSizes, Resizes, ReadsAsFar, Pools, LedByBuffers]
GRANULARITIES = ["channel", "weight"]


def cut(kind: type[Net], granularity: str) -> Any:
    torch.manual_seed(0)
    gated = tgfx.transform(kind().double(), torch.randn(5, 4, dtype=torch.float64), granularity=granularity).eval()
    for gate in gated.gates.values():
        gate.set_open_(torch.rand(gate.weight.shape) < 0.7)
    return tgfx.shrink(gated)


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_loaded_model_is_the_same(kind: type[Net], granularity: str) -> None:
    model = cut(kind, granularity)
    again = loaded(loaded(model))
    assert list(again.state_dict()) == list(model.state_dict())
    for other in (again, loaded(model)):
        for name, buffer in model.named_buffers():  # what is loaded later has to count
            buffer.add_(0.5)
            other.get_buffer(name).copy_(buffer)
        for step in range(3):
            x = torch.randn(5, 4, dtype=torch.float64)
            results = []
            for one in (model, other):
                torch.manual_seed(step)
                results.append(one(x))
            assert torch.equal(*results), step
        for name, buffer in model.named_buffers():
            assert torch.equal(other.get_buffer(name), buffer), name


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_loaded_gated_model_is_the_same(kind: type[Net], granularity: str) -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(kind().double(), torch.randn(5, 4, dtype=torch.float64), granularity=granularity).eval()
    other = loaded(loaded(gated))
    for step in range(3):
        x = torch.randn(5, 4, dtype=torch.float64)
        results = []
        for one in (gated, other):
            torch.manual_seed(step)
            results.append(one(x))
        assert torch.equal(*results), step


def test_a_model_in_another_precision_than_its_example() -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(Alias(), torch.randn(5, 4)).eval().double()
    again, x = loaded(tgfx.shrink(gated)), torch.randn(5, 4, dtype=torch.float64)
    assert torch.allclose(again(x), gated(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_it_computes_what_it_did(kind: type[Net]) -> None:
    """The spelling is another one, the numbers are not: against the gated model."""
    torch.manual_seed(0)
    gated = tgfx.transform(kind().double(), torch.randn(5, 4, dtype=torch.float64)).eval()
    for gate in gated.gates.values():
        gate.set_open_(torch.rand(gate.weight.shape) < 0.7)
    model = tgfx.shrink(gated)
    for step in range(3):
        x = torch.randn(5, 4, dtype=torch.float64)
        torch.manual_seed(step)
        expected = gated(x)
        torch.manual_seed(step)
        assert torch.allclose(model(x), expected, rtol=0, atol=1e-12)


def test_what_pickle_would_lose_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    own = graph.call_function(torch.zeros, (3,))
    graph.call_method("add_", (own, x))
    graph.output(own)
    module = fx.GraphModule(nn.Module(), graph)
    assert "zeros" in str(lost_in_pickle(module))
    make_portable(module, [torch.ones(3)])  # no parameter, so no device to make it on
    guard_pickle(module)
    assert torch.equal(module(torch.ones(3)), torch.ones(3))
    with pytest.raises(pickle.PicklingError, match="zeros"):
        pickle.dumps(module)


def test_numbers_are_not_changed_in_place() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):  # fx would write an annotation into the code, and has no import for it
            n = x.shape[0]
            n += 2
            return self.layer(x) * n

    module = fx.symbolic_trace(Sizes())
    (sized,) = (node for node in module.graph.nodes if node.target is operator.add)
    sized.target = operator.iadd  # as a tracer that keeps changes in place writes it
    make_portable(module, [torch.ones(3, 4)])
    assert sized.target is operator.add
    assert torch.equal(loaded(module)(torch.ones(2, 4)), module.layer(torch.ones(2, 4)) * 4)
