"""Tables that are sliced to the length of the input, and shapes taken from another value: cuts hold at every size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.promises import EXACT, IDENTITY, assert_close, gate_at_random
from tgfx.errors import NothingToGateError

SEQUENCES = [(2, n, 3) for n in (10, 12, 16, 7)]
IMAGES = [(2, 3, 8, 8), (3, 3, 8, 8), (2, 3, 6, 8), (1, 3, 7, 9)]


class Sequence(nn.Module):
    def __init__(self, act: Callable) -> None:
        super().__init__()
        self.first, self.head, self.act = nn.Linear(3, 8), nn.Linear(8, 2), act
        self.table, self.square = nn.Parameter(torch.randn(1, 16, 8)), nn.Parameter(torch.randn(16, 16))
        self.register_buffer("fixed", torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self, self.first(x)))


class Image(nn.Module):
    def __init__(self, act: Callable) -> None:
        super().__init__()
        self.first, self.wide, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8), act
        self.up, self.head = nn.ConvTranspose2d(8, 8, 3, 2, 1), nn.LazyConv2d(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self, self.first(x).relu()))


def _memory(model: Sequence, y: Tensor) -> Tensor:
    rows = model.table[0, : y.size(1)]
    return (y @ rows.t()).softmax(-1) @ rows


def _narrowed(model: Sequence, y: Tensor) -> Tensor:
    return y + torch.narrow(model.table, 1, 16 - y.shape[1], y.shape[1])


def _split(model: Sequence, y: Tensor) -> Tensor:
    n = y.shape[1]
    return y * model.table.split([n, 16 - n], 1)[0].sum(1, keepdim=True)


def _padded(model: Sequence, y: Tensor) -> Tensor:
    return (F.pad(y, (0, 0, 0, 16 - y.shape[1])) * model.table)[:, : y.shape[1]]


SLICED: dict[str, Callable] = {
    "positions": lambda model, y: y + model.table[:, : y.size(1)],
    "last positions": lambda model, y: y + model.table[:, -y.size(1) :],
    "memory": _memory,
    "bias": lambda model, y: model.square[: y.shape[1], : y.shape[1]] @ y,
    "narrow": _narrowed,
    "split": _split,
    "pad": _padded,
    "scan": lambda model, y: y * model.square[0, : y.shape[1]].exp().cumsum(0)[-1],
    "buffer": lambda model, y: y + model.fixed[: y.shape[1]],
}


def same_at(model: nn.Module, shapes: list[tuple[int, ...]]) -> tgfx.GatedModule:
    with torch.no_grad():
        model(torch.randn(shapes[0]))
    model = model.double().eval()
    gated = tgfx.transform(model, torch.randn(shapes[0], dtype=torch.float64)).eval()
    with torch.no_grad():
        for seed, shape in enumerate(shapes):
            x = torch.randn(shape, dtype=torch.float64)
            for gate in gated.gates.values():
                gate.set_open_(torch.ones(len(gate.weight), dtype=torch.bool))
            assert_close(gated(x), model(x), IDENTITY, f"all gates open at {shape}")
            gate_at_random(gated, 0.5, seed)
            compact = tgfx.shrink(gated)
            for other in shapes:
                x = torch.randn(other, dtype=torch.float64)
                assert_close(compact(x), gated(x), EXACT, f"the cut model at {other}")
    return gated


@pytest.mark.parametrize("name", SLICED)
def test_tables_are_kept_whole(name: str) -> None:
    torch.manual_seed(0)
    gated = same_at(Sequence(SLICED[name]), SEQUENCES)
    assert all(len(gate.weight) <= 8 for gate in gated.gates.values())  # no row of a table


def test_what_is_sliced_by_its_own_channels_is_not() -> None:
    """Half of the channels are half of them, however long the input is."""

    def halves(model: Sequence, y: Tensor) -> Tensor:
        _, n, c = y.shape
        y = y + model.table[:, :n]
        return torch.cat([y[..., : c // 2] * y[..., c // 2 :].sigmoid(), y[..., : y.size(-1) // 2]], -1)

    torch.manual_seed(0)
    gated = same_at(Sequence(halves), SEQUENCES)
    assert [len(gate.weight) for gate in gated.gates.values()] == [4]


def _pooled(model: Image, y: Tensor) -> Tensor:
    return model.wide(y.mean((2, 3)))[:, :, None, None]


def _flat(model: Image, y: Tensor) -> Tensor:
    return model.wide(y.flatten(2).transpose(1, 2)).transpose(1, 2).contiguous()


SHAPES: dict[str, Callable] = {
    "expand_as": lambda model, y: torch.cat([y, _pooled(model, y).expand_as(y)], 1),
    "reshape_as": lambda model, y: torch.cat([y, _flat(model, y).reshape_as(y)], 1),
    "view_as": lambda model, y: torch.cat([y, _flat(model, y).view_as(y)], 1),
    "unflatten": lambda model, y: y.flatten(2).tanh().unflatten(2, y.shape[2:]),
    "output_size": lambda model, y: model.up(y, output_size=[2 * n for n in y.shape[2:]]).relu(),
    "output_size, by position": lambda model, y: model.up(y[:, :, ::2, ::2].contiguous(), y.shape[2:]).relu(),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_another_value(name: str) -> None:
    torch.manual_seed(0)
    assert same_at(Image(SHAPES[name]), IMAGES).gates


def test_values_that_are_broadcast_to_each_other_are_kept() -> None:
    model = Image(lambda model, y: torch.cat(torch.broadcast_tensors(_pooled(model, y), y), 1))
    model(torch.randn(IMAGES[0]))
    with pytest.raises(NothingToGateError, match="broadcast_tensors"):
        tgfx.transform(model, torch.randn(IMAGES[0]))


EMPTY: dict[str, Callable] = {
    "reshape": lambda t: (t.reshape(-1, 4) * 2).reshape(t.shape),
    "unflatten": lambda t: (t.unflatten(-1, (2, -1)) * 2).flatten(-2),
    "view": lambda t: (t.reshape(t.shape[0], -1, 2, 2) * 2).reshape(t.shape) + 1,
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_part_without_channels_is_reshaped(name: str) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 12), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([EMPTY[name](part) for part in self.first(x).split(4, -1)], -1))

    torch.manual_seed(0)
    gated = same_at(Parts(), SEQUENCES)
    (gate,) = gated.gates.values()
    gate.set_open_(torch.arange(len(gate.weight)) >= len(gate.weight) // 3)  # none of the first part
    compact = tgfx.shrink(gated)
    for shape in SEQUENCES:
        x = torch.randn(shape, dtype=torch.float64)
        assert_close(compact(x), gated(x), EXACT, f"the cut model at {shape}")


def _by_parts(y: Tensor) -> Tensor:
    return torch.complex(y[..., :4], y[..., 4:]).abs() + torch.polar(y[..., :4], y[..., 4:]).real


def _turned(y: Tensor) -> Tensor:
    """As in the complex form of rotary positions."""
    pairs = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2))
    turns = torch.polar(
        torch.ones(y.shape[1], 4, dtype=y.dtype), torch.arange(y.shape[1], dtype=y.dtype)[:, None] * 0.3
    )
    return torch.view_as_real(pairs * turns).flatten(-2)[..., ::2] + pairs.conj().imag


@pytest.mark.parametrize("act", [_by_parts, _turned])
def test_the_parts_of_a_complex_number_go_together(act: Callable) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(3, 8), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(act(self.first(x)))

    torch.manual_seed(0)
    gated = same_at(Complex(), SEQUENCES)
    assert [len(gate.weight) for gate in gated.gates.values()] == [4]
