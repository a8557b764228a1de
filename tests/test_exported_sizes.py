"""Sizes on the torch.export path: what export kept free is free, and what it fixed is an error elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tgfx.capture.exported import export_graph
from tgfx.capture.small_sizes import refuse_small_sizes


class Loops(nn.Module):
    """`body` does something that plain fx cannot follow."""

    def __init__(self, body: Callable[[Loops, Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.step, self.leave = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.ndim - 2):
            x = x * 2
        return self.leave(self.body(self, x))


def over_samples(m: Loops, x: Tensor) -> Tensor:
    return torch.stack([m.step(m.enter(x[i]).relu()).relu() for i in range(x.shape[0])])


def over_rows(m: Loops, x: Tensor) -> Tensor:
    return torch.stack([m.step(m.enter(row).relu()).relu() for row in x])


def over_time(m: Loops, x: Tensor) -> Tensor:
    hidden = x.new_zeros(x.size(0), 8)
    for t in range(x.size(1)):
        hidden = torch.tanh(m.enter(x[:, t]) + m.step(hidden))
    return hidden


def by_threshold(m: Loops, x: Tensor) -> Tensor:
    y = m.step(m.enter(x).relu()).relu()
    return y * 3 if x.shape[1] > 4 else y


def by_parity(m: Loops, x: Tensor) -> Tensor:
    y = m.step(m.enter(x).relu()).relu()
    return y if x.shape[0] % 2 == 0 else -y


def alone(m: Loops, x: Tensor) -> Tensor:
    y = m.step(m.enter(x).relu()).relu()
    return -y if x.shape[1] == 1 else y


def freely(m: Loops, x: Tensor) -> Tensor:
    return m.step(m.enter(x).relu()).relu().cumsum(1) / x.shape[1]


ANY = {(2, 5), (4, 5), (1, 5), (2, 9), (2, 4), (2, 1), (3, 7)}
RIGHT = {  # body -> sizes that have to work; all others may as well be refused
    over_samples: {(2, 5), (2, 9), (2, 4)},
    over_rows: {(2, 5), (2, 9), (2, 4)},
    over_time: {(2, 5), (4, 5), (1, 5)},
    by_threshold: {(2, 5), (4, 5), (1, 5), (2, 9), (3, 7)},
    by_parity: {(2, 5), (4, 5), (2, 9), (2, 4)},
    alone: ANY - {(2, 1)},
    freely: ANY,
}


def agree_or_refuse(run: Callable, model: nn.Module, must: set[tuple[int, int]]) -> None:
    for batch, length in ANY | {(0, 5), (2, 0), (1, 1)}:
        x = torch.randn(batch, length, 3, dtype=torch.double)
        try:
            with torch.no_grad():
                found = run(x)
        except AssertionError as error:
            assert (batch, length) not in must and "transform it anew" in str(error), (batch, length, error)
        else:
            promises.assert_close(found, model(x), promises.EXACT, f"{batch} samples of length {length}")


@pytest.mark.parametrize("body", RIGHT)
def test_right_or_refused_at_every_size(body: Callable) -> None:
    model = Loops(body).double().eval()
    gated = tgfx.transform(model, torch.randn(2, 5, 3, dtype=torch.double)).eval()
    assert gated.facts.source.front_end == "export" and gated.gates
    compact = tgfx.shrink(gated).eval()
    again = pickle.loads(pickle.dumps(compact))
    for run in (gated, copy.deepcopy(gated), compact, again):
        agree_or_refuse(run, model, RIGHT[body])
    assert not any(type(module).__module__.startswith("tgfx") for module in compact.modules())


@pytest.mark.parametrize("body", RIGHT)
def test_an_example_of_one_sample(body: Callable) -> None:
    model = Loops(body).double().eval()
    gated = tgfx.transform(model, torch.randn(1, 5, 3, dtype=torch.double)).eval()
    agree_or_refuse(gated, model, {(1, 5)} if body in (over_samples, over_rows, by_parity) else {(1, 5), (4, 5)})


def test_the_error_names_input_axis_and_size() -> None:
    gated = tgfx.transform(Loops(over_time).eval(), torch.randn(2, 5, 3)).eval()
    with pytest.raises(AssertionError, match=r"x\.shape\[1\] was 5 when .* transform it anew"):
        gated(torch.randn(2, 9, 3))


def test_image_sizes_are_the_examples() -> None:
    class Bands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).relu()
            for i in range(y.shape[2] // 4):
                y = torch.cat([y[:, :, : i + 1] * 2, y[:, :, i + 1 :]], 2)
            return self.last(y)

    model = Bands().eval()
    gated = tgfx.transform(model, torch.randn(2, 3, 14, 14)).eval()
    with pytest.raises(AssertionError, match=r"x\.shape\[[23]\] was 14"):
        gated(torch.randn(2, 3, 22, 22))
    x = torch.randn(3, 3, 14, 14)
    torch.testing.assert_close(gated(x), model(x), rtol=1e-5, atol=1e-6)


def test_two_lengths_that_have_to_be_equal() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor, times: int = 2) -> Tensor:
            for _ in range(x.ndim):
                x = x * times
            return (x + y) * y.shape[1]

    graph = export_graph(Adds(), (torch.randn(2, 5), torch.randn(2, 5)), {"times": 3})
    x, y = torch.randn(3, 6), torch.randn(3, 6)
    torch.testing.assert_close(graph(x, y, times=3), Adds()(x, y, 3))
    with pytest.raises(AssertionError, match="shape"):
        graph(x, y[:, :1], times=3)
    with pytest.raises(AssertionError, match="times was 3"):
        graph(x, y, times=2)


def test_small_sizes_are_tried_alone_and_together() -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return -x if x.shape[0] * x.shape[1] == 1 else x

    model = Alone()
    graph = export_graph(model, (torch.randn(2, 5),), {})
    refuse_small_sizes(model, graph, (torch.randn(2, 5),), {})
    for size in ((1, 5), (5, 1), (0, 5)):
        x = torch.randn(size)
        torch.testing.assert_close(graph(x), model(x))
    with pytest.raises(AssertionError, match=r"x.shape\[0\] == 1 and x.shape\[1\] == 1"):
        graph(torch.randn(1, 1))
