"""Which summands are residual branches, and which only look like it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tgfx.errors import NothingToGateError
from tgfx.ir.switches import Edge


def names(model: nn.Module, *example: Tensor) -> list[str]:
    try:
        gated = tgfx.transform(model, example, granularity="layer")
    except NothingToGateError:
        return []
    return [group.name for group in gated.groups if group.kind == "layer"]


class Embedded(nn.Module):
    """Sums of embeddings and of a position table: nobody starts from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.hashed = nn.Embedding(9, 8), nn.Embedding(9, 8), nn.Embedding(9, 8)
        self.table = nn.Parameter(torch.randn(1, 5, 8))
        self.out = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word(ids) + self.place(torch.arange(5).expand(2, 5)) + self.hashed(ids)
        return self.out(x + self.table)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.relu(self.a(x) + self.b(y)))


class Equals(nn.Module):
    """Two sides of the same length: neither is the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.a(x) + self.b(x))


class Repeated(nn.Module):
    """RepVGG: the batch norm alone is the shortest way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 1)
        self.norm = nn.BatchNorm2d(6)
        self.wide = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.point = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.relu(self.wide(x) + self.point(x) + self.norm(x)).mean((2, 3))


class Observed(nn.Module):
    """The branch's value is also an output: it cannot go."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.f(x)
        return x + y, y


class Scaled(nn.Module):
    """x + 2 f(x) written with alpha: closing x would leave f, not 2 f."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.f(x), alpha=2)


class Spread(nn.Module):
    """What is left would have another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True) + self.f(x)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(8, 4), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.a(x)], 1)
        return self.out(torch.cat([x, self.b(x)], 1))


class Lateral(nn.Module):
    """A decoder added onto an encoder's value, which is a branch as a whole, with a branch inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1)
        self.deeper, self.up = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.relu(self.deep(x))
        y = y + torch.relu(self.deeper(y))
        return (x + self.up(y)).mean((2, 3))


IDS = torch.arange(10).reshape(2, 5) % 9
IMAGE = torch.randn(2, 3, 4, 4)
ROW = torch.randn(2, 4)


@pytest.mark.parametrize(
    ("model", "example", "expected"),
    [
        (Embedded(), (IDS,), []),
        (TwoInputs(), (ROW, ROW), []),
        (Equals(), (ROW,), []),
        (Repeated(), (IMAGE,), ["wide", "point"]),
        (Observed(), (ROW,), []),
        (Scaled(), (ROW,), []),
        (Spread(), (torch.randn(2, 4, 3, 3),), []),
        (Dense(), (ROW,), []),
        (Lateral(), (IMAGE,), ["deeper", "up"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_found(model: nn.Module, example: tuple[Tensor, ...], expected: list[str]) -> None:
    assert names(model, *example) == expected


def test_a_branch_holds_what_only_it_uses() -> None:
    gated = tgfx.transform(Lateral(), IMAGE, granularity="layer")
    members = {g.name: {m.name.partition(".")[0] for m in g.members} for g in gated.groups if g.kind == "layer"}
    assert members == {"deeper": {"deeper"}, "up": {"deep", "deeper", "up"}}
    assert set(gated.facts.switches.edges) == {Edge("add", 1), Edge("add_1", 1)}


class Auxiliary(nn.Module):
    """Another path in train mode: two graphs, one gate."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.f, self.aux, self.out = (nn.Linear(*s) for s in ((4, 6), (6, 6), (6, 2), (6, 2)))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = torch.relu(self.stem(x))
        y = x + torch.tanh(self.f(x))
        return (self.out(y), self.aux(x)) if self.training else self.out(y)


@pytest.mark.filterwarnings("ignore:.*takes another path in train mode")
def test_both_modes_share_a_gate() -> None:
    torch.manual_seed(0)
    model = Auxiliary().double()
    x = torch.randn(3, 4).double()
    gated = tgfx.transform(model, x, granularity=("channel", "layer"))
    assert gated.facts.source.training is not None
    for found, expected in zip(gated.train()(x), model.train()(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gated.train()(x)[0].sum().backward()
    assert bool(gated.gates["f"].weight.grad.any())
    gated.gates["f"].set_open_(torch.tensor([False]))
    without = model.out(torch.relu(model.stem(x)))
    torch.testing.assert_close(gated.train()(x)[0], without, rtol=0, atol=1e-4)  # s(w) <= 1 / M
    torch.testing.assert_close(gated.eval()(x), without, rtol=1e-12, atol=1e-12)
    compact = tgfx.shrink(gated).eval()
    torch.testing.assert_close(compact(x), without, rtol=1e-12, atol=1e-12)
    assert "f.weight" not in dict(compact.named_parameters()) and "aux.weight" in dict(compact.named_parameters())
    assert float(gated.cost("params")) == sum(p.numel() for p in compact.parameters())
