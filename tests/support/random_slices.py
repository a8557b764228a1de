"""Random slices, parts, look-ups and moves along channels, in random spellings: by position or name, from the end,
in steps, empty, or changed in place."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Move = Callable[[Tensor], Tensor]
KINDS: list[Callable[[random.Random, int], Move]] = []


def chain(seed: int, channels: int) -> Move:
    """One to three of them, one after the other; none leaves nothing."""
    dice, moves = random.Random(seed), []
    for _ in range(dice.randint(1, 3)):
        moves.append(dice.choice(KINDS)(dice, channels))
        channels = moves[-1](torch.zeros(1, channels, 2, 2)).shape[1]

    def moved(y: Tensor) -> Tensor:
        for move in moves:
            y = move(y)
        return y

    return moved


def _kind(make: Callable[[random.Random, int], Move]) -> Callable[[random.Random, int], Move]:
    KINDS.append(make)
    return make


def _slice(dice: random.Random, channels: int, *, empty: bool = True) -> slice:
    while True:
        start = dice.choice([None, 0, dice.randrange(channels), -dice.randint(1, channels)])
        stop = dice.choice([None, channels + 3, dice.randint(0, channels), -dice.randint(1, channels)])
        chosen = slice(start, stop, dice.choice([None, 1, 1, 2, 3]))
        if empty or range(channels)[chosen]:
            return chosen


def _joined(parts: tuple[Tensor, ...] | list[Tensor], order: list[float]) -> Tensor:
    """All parts, in an order of their own."""
    ranked = sorted(range(len(parts)), key=lambda i: order[i])
    return torch.cat([parts[i] for i in ranked], 1)


@_kind
def _sliced(dice: random.Random, channels: int) -> Move:
    s = _slice(dice, channels, empty=False)
    return dice.choice([lambda y: y[:, s], lambda y: y[..., s, :, :], lambda y: y[None, :, s][0]])


@_kind
def _with_slices(dice: random.Random, channels: int) -> Move:
    s, t = _slice(dice, channels), _slice(dice, channels)
    return lambda y: torch.cat([y[:, s], y, y[:, t] * 2], dim=1)


@_kind
def _narrowed(dice: random.Random, channels: int) -> Move:
    start = dice.randrange(-channels, channels)
    length = dice.randint(1, channels - start % channels)
    return dice.choice(
        [
            lambda y: y.narrow(1, start, length),
            lambda y: torch.narrow(input=y, dim=1, start=start, length=length),
            lambda y: y.narrow(dim=-3, start=start, length=length),
        ]
    )


@_kind
def _split(dice: random.Random, channels: int) -> Move:
    count = dice.randint(1, channels)
    cuts = sorted(dice.randint(0, channels) for _ in range(2))
    sizes = [cuts[0], cuts[1] - cuts[0], channels - cuts[1]]
    order = [dice.random() for _ in range(channels + 3)]
    parts = dice.choice(
        [
            lambda y: y.chunk(count, 1),
            lambda y: torch.chunk(input=y, chunks=count, dim=-3),
            lambda y: torch.split(tensor=y, split_size_or_sections=count, dim=1),
            lambda y: y.split(split_size=sizes, dim=-3),
            lambda y: y.split_with_sizes(sizes, 1),
            lambda y: torch.tensor_split(y, count, 1),
            lambda y: y.tensor_split(cuts, dim=1),
            lambda y: y.unbind(1),
        ]
    )
    return lambda y: _joined([p if p.ndim == y.ndim else p.unsqueeze(1) for p in parts(y)], order)


@_kind
def _looked_up(dice: random.Random, channels: int) -> Move:
    places = [dice.randrange(-channels, channels) for _ in range(dice.randint(1, channels))]
    index, mask = torch.tensor(places) % channels, torch.zeros(channels, dtype=torch.bool)
    mask[index] = True
    return dice.choice(
        [
            lambda y: y[:, places],
            lambda y: torch.index_select(input=y, dim=1, index=index),
            lambda y: y[:, mask],
            lambda y: torch.stack([y[:, i] for i in places], dim=1),
            lambda y: torch.cat([y[:, :, index[:0]], y], 2),
        ]
    )


@_kind
def _written(dice: random.Random, channels: int) -> Move:
    s, how, place = _slice(dice, channels), dice.randrange(6), dice.randrange(channels)

    def move(y: Tensor) -> Tensor:
        y = y * 1
        if how == 0:
            y[:, s].mul_(2)
        elif how == 1:
            y[:, s] = -y[:, s]
        elif how == 2:
            y[:, s] += 1
        elif how == 3:
            y.flatten(2)[:, s].sub_(1).neg_()
        elif how == 4:
            y[:, place] = y[:, 0] * 3
        else:
            view = y[:, s]
            y.mul_(3)
            y = torch.cat([y, view], 1)
        return y

    return move


@_kind
def _copied(dice: random.Random, channels: int) -> Move:
    def move(y: Tensor) -> Tensor:
        y = y * 1
        last = y.permute(0, 2, 3, 1).contiguous()
        last.mul_(2)
        return y + last.permute(0, 3, 1, 2)

    return move


@_kind
def _reshaped(dice: random.Random, channels: int) -> Move:
    groups = dice.choice([d for d in range(1, channels + 1) if channels % d == 0])
    return dice.choice(
        [
            lambda y: y.view(y.shape[0], groups, -1, *y.shape[2:]).transpose(1, 2).reshape(y.shape),
            lambda y: torch.unflatten(input=y, dim=1, sizes=(groups, -1))[:, :, ::2].flatten(1, 2),
            lambda y: y.unflatten(1, (groups, -1))[:, -1:].flatten(1, 2),
            lambda y: y.unflatten(1, (groups, -1)).sum(1),
            lambda y: F.channel_shuffle(y, groups),
        ]
    )


@_kind
def _moved(dice: random.Random, channels: int) -> Move:
    before, after, shift = dice.randint(-1, 2), dice.randint(0, 2), dice.randrange(channels)
    before = max(before, 1 - channels)
    return dice.choice(
        [
            lambda y: y.flip(-3),
            lambda y: torch.roll(y, shift, 1),
            lambda y: y.repeat(1, 2, 1, 1),
            lambda y: torch.repeat_interleave(input=y, repeats=2, dim=-3),
            lambda y: F.pad(input=y, pad=[0, 0, 0, 0, before, after], value=0.5),
            lambda y: y * y[:, shift:].sum(1, keepdim=True).sigmoid(),
        ]
    )
