"""Gates in batch norms: dead channels must stay zero up to every read, whatever is added or written on the way."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.promises import EXACT, assert_close, gate_at_random
from tests.support.random_models import randomised

Change = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    """conv -> batch norm -> (something) -> conv, and what that something may want to add."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 3)
        self.map, self.other, self.other_norm = nn.Conv2d(3, 1, 1), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.one, self.none = nn.Parameter(torch.full((1,), 0.7)), nn.Parameter(torch.tensor(0.7))
        self.table = nn.Parameter(torch.randn(1, 1, 7, 7))
        self.slope = nn.Parameter(torch.randn(8, 1, 1))
        self.register_buffer("fixed", torch.randn(1, 1, 7, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self, x, self.norm(self.first(x))))


def second(m: Net, x: Tensor) -> Tensor:
    """Another batch norm, whose channels are tied to the first's wherever they meet."""
    return m.other_norm(m.other(x))


ADDED: dict[str, Change] = {
    "map of one channel": lambda m, x, y: F.relu(y + m.map(x)),
    "map first": lambda m, x, y: F.relu(m.map(x) + y),
    "parameter of one entry": lambda m, x, y: F.relu(y + m.one),
    "parameter without axes": lambda m, x, y: F.relu(y + m.none),
    "table of positions": lambda m, x, y: y + m.table,
    "buffer of positions": lambda m, x, y: y + m.fixed,
    "mean over channels of the input": lambda m, x, y: y + x.mean(1, keepdim=True),
    "own mean over channels": lambda m, x, y: y + y.mean(1, keepdim=True),
    "constant row": lambda m, x, y: y + torch.linspace(0, 1, 7, dtype=x.dtype),
    "number": lambda m, x, y: y + 0.5,
    "number of the shape": lambda m, x, y: y + x.shape[-1],
    "parameter per channel": lambda m, x, y: y + m.slope,
    "alpha": lambda m, x, y: torch.add(y, m.one, alpha=2),
    "alpha of a tie": lambda m, x, y: torch.add(y, second(m, x), alpha=2),
    "keywords": lambda m, x, y: torch.add(input=y, other=m.one),
    "in place": lambda m, x, y: y.add_(m.map(x)),
    "in place, a tie": lambda m, x, y: y.add_(second(m, x)),
    "added to a sum": lambda m, x, y: F.relu(y + second(m, x)) + m.one,
    "added to a part that is joined": lambda m, x, y: torch.cat([y[:, :3] + m.map(x), y[:, 3:]], 1),
    "added to a stack": lambda m, x, y: torch.stack([y, y + m.one]).mean(0),
    "subtracted": lambda m, x, y: y - m.map(x),
    "subtracted from": lambda m, x, y: m.one - y,
    "chosen": lambda m, x, y: torch.where(m.fixed > 0, y, m.one),
    "greater of two": lambda m, x, y: torch.maximum(y, m.map(x)),
    "less of two": lambda m, x, y: torch.minimum(y, m.map(x)),
    "clamped from below": lambda m, x, y: y.clamp(min=m.one.expand(1)),
    "blended": lambda m, x, y: torch.lerp(y, m.table, 0.3),
    "product added": lambda m, x, y: torch.addcmul(y, m.one, m.table),
    "quotient added": lambda m, x, y: torch.addcdiv(y, m.one, m.fixed.abs() + 1),
    "filled": lambda m, x, y: y.masked_fill(m.fixed > 0, 0.7),
    "where the largest are": lambda m, x, y: y + 0.1 * F.max_pool2d(y, 3, 1, 1, return_indices=True)[1],
}


def own_output(m: Net, x: Tensor, y: Tensor) -> Tensor:
    y[:, :2] = y[:, :2].sigmoid() * 2 - 0.5
    return y


def one_row(m: Net, x: Tensor, y: Tensor) -> Tensor:
    y[:, :, 0] += 1
    return y


def set_row(m: Net, x: Tensor, y: Tensor) -> Tensor:
    y[:, :, 0] = 0.7
    return y


def in_a_chunk(m: Net, x: Tensor, y: Tensor) -> Tensor:
    left, _ = y.chunk(2, 1)
    left.sigmoid_()
    return y


def before_the_view(m: Net, x: Tensor, y: Tensor) -> Tensor:
    view = y.permute(0, 2, 3, 1)
    y.exp_()
    return view.permute(0, 3, 1, 2)


def behind_a_function(m: Net, x: Tensor, y: Tensor) -> Tensor:
    z = F.relu(y)
    z.mul_(2).add_(m.table)
    return z


def after_a_tie(m: Net, x: Tensor, y: Tensor) -> Tensor:
    z = y + second(m, x)
    z += m.map(x)
    return F.relu(z)


def then(write: Callable[[Tensor], object]) -> Change:
    def change(m: Net, x: Tensor, y: Tensor) -> Tensor:
        write(y)
        return y

    return change


WRITTEN: dict[str, Change] = {
    "sigmoid_": then(lambda y: y.sigmoid_()),
    "torch's function": then(torch.sigmoid_),
    "add_ in a view": then(lambda y: y.view(-1).add_(0.5)),
    "add_ in a ravelled view": then(lambda y: y.ravel().add_(0.5)),
    "fill_ in a window": then(lambda y: y[:, :, 1:3].fill_(0.3)),
    "copy_ of data": then(lambda y: y[:, :, 0].copy_(torch.ones(()))),
    "masked_fill_": then(lambda y: y.masked_fill_(y > 0.2, 0.7)),
    "an argument": then(lambda y: F.threshold(y, 0.1, 0.4, inplace=True)),
    "clamp_": then(lambda y: y.clamp_(min=0.3)),
    "reshaped like itself": then(lambda y: y.reshape_as(y).cos_()),
    "data": then(lambda y: y.data.cos_()),
    "own channels": own_output,
    "one row": one_row,
    "a row that is set": set_row,
    "a chunk": in_a_chunk,
    "before the view": before_the_view,
    "behind a function": behind_a_function,
    "after a tie": after_a_tie,
}


def relu(x: Tensor) -> Tensor:
    """Not what its name says."""
    return x.relu() + 1


def hidden(x: Tensor) -> Tensor:
    """Seen from outside, it gives the same on what is left after a cut."""
    return x.sigmoid_()


torch.fx.wrap("relu")
torch.fx.wrap("hidden")

BOXES: dict[str, Change] = {
    "another relu": lambda m, x, y: relu(y),
    "a write that is not seen": then(hidden),
    "a write, and its result": lambda m, x, y: hidden(y) + y,
}


@pytest.mark.parametrize("change", BOXES.values(), ids=BOXES)
def test_functions_seen_from_outside(change: Change) -> None:
    check(change, 1)


def check(change: Change, seed: int) -> tgfx.GatedModule:
    torch.manual_seed(seed)
    net = randomised(Net(change)).double().eval()
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    gated = tgfx.transform(net, x)
    for density in (0.5, 0.2):
        gate_at_random(gated, density, seed)
        gated.eval()
        compact = tgfx.shrink(gated, verify=False).eval()
        for batch in (x, torch.randn(3, 3, 7, 7, dtype=torch.float64)):
            with torch.no_grad():
                assert_close(compact(batch), gated(batch), EXACT, "the cut model")
    return gated


@pytest.mark.parametrize("change", ADDED.values(), ids=ADDED)
def test_what_is_added_behind_a_norm(change: Change) -> None:
    check(change, 0)


@pytest.mark.parametrize("change", WRITTEN.values(), ids=WRITTEN)
def test_what_is_written_behind_a_norm(change: Change) -> None:
    check(change, 1)


FOLDED: dict[str, Change] = {
    "plain": lambda m, x, y: F.relu(y),
    "tie": lambda m, x, y: F.relu(y + second(m, x)),
    "tie in place": lambda m, x, y: F.relu_(y.add_(second(m, x))),
    "relu written in place": then(lambda y: y.relu_()),
    "relu of a view": then(lambda y: F.relu(y.view(-1), inplace=True)),
    "parts joined": lambda m, x, y: torch.cat([F.relu(y[:, :3]), y[:, 3:]], 1),
}


@pytest.mark.parametrize("change", FOLDED.values(), ids=FOLDED)
def test_zeros_that_stay_are_still_folded(change: Change) -> None:
    """No gate costs anything per pixel, nor per weight."""
    gated = check(change, 2)
    assert {site.kind for site in gated.facts.placement.sites} == {"batch_norm"}
