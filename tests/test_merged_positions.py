"""Channels that share an axis with positions: gates fit at every size of the input, whatever the order of the axis."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tgfx
from tests.support.promises import EXACT, IDENTITY, assert_close, gate_at_random
from tgfx.errors import NothingToGateError
from tgfx.passes.survivors import Survivors

Read = Callable[[Tensor], Tensor]
EXAMPLES = ((2, 3, 8, 4), (1, 3, 4, 4))
SIZES = ((2, 3, 8, 8), (1, 3, 4, 8), (3, 3, 8, 4), (2, 3, 5, 3), (2, 3, 4, 8))


class Reading(nn.Module):
    """What `read` tells of every sample scales its features."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.a, self.z, self.read = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1), read

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).sigmoid()
        return self.z(h / (1 + self.read(h).square().view(-1, 1, 1, 1)))


class Whole(nn.Module):
    """`change` on the features, back to their shape."""

    def __init__(self, change: Read) -> None:
        super().__init__()
        self.a, self.z, self.change = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1), change

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).sigmoid()
        return self.z(self.change(h).view(h.shape))


class Last(nn.Module):
    """`read` is the result."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.a, self.read = nn.Conv2d(3, 8, 3, padding=1), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.a(x).sigmoid())


class Flat(nn.Module):
    """A mean behind a layer that flattens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h).cos().mean(1)


def by_sizes(h: Tensor) -> Tensor:
    b, c, height, width = h.shape
    return h.view(b, c * height * width).sum(1)


def rows_first(h: Tensor) -> Tensor:
    return h.permute(0, 2, 1, 3).flatten(1)


def in_rows(h: Tensor) -> Tensor:
    b, c, height, width = h.shape
    return h.permute(0, 2, 3, 1).reshape(b, height, width * c)


READS: dict[str, Read] = {
    "norm": lambda h: h.flatten(1).norm(dim=1),
    "sum": lambda h: h.flatten(1).sum(1),
    "mean": lambda h: h.flatten(1).mean(1),
    "std": lambda h: h.flatten(1).std(1),
    "var by view": lambda h: h.view(h.shape[0], -1).var(dim=1, unbiased=False),
    "mean by reshape": lambda h: torch.reshape(h, (h.size(0), -1)).mean(-1),
    "sum by sizes": by_sizes,
    "flatten by name": lambda h: torch.flatten(input=h, start_dim=1).sum(1),
    "rows first": lambda h: rows_first(h).sigmoid().sum(1),
    "rows first, mean": lambda h: rows_first(h).exp().mean(1),
    "rows": lambda h: in_rows(h).std(2).sum(1),
    "width": lambda h: h.flatten(1, 2).mean(1).sum(1),
    "fold": lambda h: h.flatten(1).unsqueeze(1).square().sum((1, 2)),
    "bmm": lambda h: torch.bmm(h.flatten(1).unsqueeze(1), h.flatten(1).unsqueeze(2)),
    "gram": lambda h: (h.flatten(1) @ h.flatten(1).t()).diagonal(),
    "gram by T": lambda h: torch.mm(h.flatten(1), h.flatten(1).T).diagonal(),
    "einsum": lambda h: torch.einsum("bi,bi->b", h.flatten(1), h.flatten(1).cos()),
    "twice": lambda h: h.flatten(2).flatten(1).cos().mean(1),
    "after a pixel shuffle": lambda h: F.pixel_shuffle(h, 2).flatten(1).cos().mean(1),
    "patches": lambda h: F.unfold(h, 3, padding=1).flatten(1).cos().sum(1),
    "per element": lambda h: h.flatten(1).sum(1) / h.flatten(1).shape[1],
    "with the batch": lambda h: h.transpose(0, 1).flatten(1).cos().mean(1).sum(),
    "turned": lambda h: h.flatten(1).flip(1).view_as(h.flatten(1)).cos().mean(1),
    "module": Flat(nn.Flatten()),
    "modules": Flat(nn.Sequential(nn.PixelShuffle(2), nn.Tanh(), nn.Flatten())),
}
CHANGES: dict[str, Read] = {
    "normalize": lambda h: F.normalize(h.flatten(1)),
    "normalize rows": lambda h: F.normalize(h.flatten(1, 2), dim=1),
    "centred": lambda h: h.flatten(1) - h.flatten(1).mean(1, keepdim=True),
    "standard": lambda h: h.flatten(1) / h.flatten(1).std(1, keepdim=True),
    "layer norm": lambda h: F.layer_norm(h.flatten(1), h.flatten(1).shape[1:]),
    "layer norm of all": lambda h: F.layer_norm(h, h.shape[1:]),
    "number": lambda h: h.flatten(1) / h.flatten(1).shape[1],
}
RESULTS: dict[str, Read] = {
    "dot": lambda h: torch.dot(h.flatten(), h.flatten().cos()).view(1),
    "gram": lambda h: h.flatten(1) @ h.flatten(1).cos().t(),
    "all": lambda h: h.flatten(1).mean(),
    "all at once": lambda h: h.flatten().std(),
}


class Rows(nn.Module):
    """A layer over the width, its rows samples and channels: these are as many as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.row, self.z = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.adaptive_avg_pool2d(self.a(x), 3)
        return self.z(self.row(h.flatten(0, 1)).sigmoid().mean(0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "rows of a layer": Rows,
    **{f"reads {name}": lambda read=read: Reading(read) for name, read in READS.items()},
    **{f"changes by {name}": lambda change=change: Whole(change) for name, change in CHANGES.items()},
    **{f"gives {name}": lambda read=read: Last(read) for name, read in RESULTS.items()},
}


def noisy(gated: tgfx.GatedModule) -> None:
    """Large noise in the closed channels of the first layer."""
    facts = gated.facts
    survivors = Survivors(facts.channels, facts.coupling, gated.open_slots())
    own = dict(gated.named_parameters())
    for name in ("a.weight", "a.bias"):
        kept = survivors.kept(facts.channels.params[name])[0]
        dead = torch.ones(len(own[name]), dtype=torch.bool)
        dead[torch.from_numpy(kept) if kept is not None else slice(None)] = False
        own[name].data[dead] = 5 * torch.randn_like(own[name].data[dead])


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_size(name: str, example: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    gated = tgfx.transform(model, torch.randn(*example, dtype=torch.float64)).eval()
    assert gated.gates, "nothing is gated, so nothing was tested"
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in (example, *SIZES)]
    with torch.no_grad():
        for x in inputs:
            assert_close(gated(x), model(x), IDENTITY, f"all gates open, {tuple(x.shape)} after {example}")
        for seed in range(3):
            gate_at_random(gated, 0.5, seed)
            compact = tgfx.shrink(gated)
            for x in inputs:
                assert_close(compact(x), gated(x), EXACT, f"the cut model, {tuple(x.shape)} after {example}")
        before = [gated(x) for x in inputs]
        noisy(gated)
        for x, expected in zip(inputs, before, strict=True):
            assert_close(gated(x), expected, EXACT, f"noise in closed channels, {tuple(x.shape)} after {example}")


@pytest.mark.parametrize("read", ["std", "rows first, mean", "gram"])
def test_training_goes_on_in_a_smaller_model(read: str) -> None:
    """compact_ keeps the way of the gates."""
    torch.manual_seed(0)
    gated = tgfx.transform(Reading(READS[read]).double().eval(), torch.randn(2, 3, 8, 4, dtype=torch.float64)).eval()
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in SIZES]
    gate_at_random(gated, 0.6, 0)
    with torch.no_grad():
        before = [gated(x) for x in inputs]
        tgfx.compact_(gated)
        for x, expected in zip(inputs, before, strict=True):
            assert_close(gated(x), expected, EXACT, "compacted")
        gate_at_random(gated, 0.6, 1)
        for x in inputs:
            assert_close(tgfx.shrink(gated)(x), gated(x), EXACT, "the cut model after it")
    gated.train()(inputs[0]).sum().backward()
    assert all(gate.weight.grad is not None for gate in gated.gates.values())


SLICES: dict[str, Read] = {
    "slice": lambda h: h.flatten(1)[:, :90].cos().sum(1),
    "narrow": lambda h: h.flatten(1).narrow(1, 0, 40).norm(dim=1),
    "every other": lambda h: h.flatten(1)[:, ::2].sum(1),
    "half": lambda h: h.flatten(1).chunk(2, 1)[0].sum(1),
}


@pytest.mark.parametrize("name", SLICES)
def test_what_no_cut_could_follow_is_kept(name: str) -> None:
    """Part of such an axis shows other channels at another size."""
    torch.manual_seed(0)
    with pytest.raises(NothingToGateError, match="is sliced where it shares an axis with positions"):
        tgfx.transform(Reading(SLICES[name]).eval(), torch.randn(2, 3, 8, 4))


def test_sizes_that_are_always_the_same_need_no_way() -> None:
    torch.manual_seed(0)
    model = Reading(lambda h: F.adaptive_avg_pool2d(h, 2).flatten(1).cos().mean(1)).eval()
    gated = tgfx.transform(model, torch.randn(2, 3, 8, 4))
    assert gated.gates and all(s.operand is None or s.operand.route is None for s in gated.facts.placement.sites)
