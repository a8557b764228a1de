"""Whole models: a stem, blocks, a head; a `Case` is plain data, and `build` makes the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.random_models.blocks import (
    BLOCKS,
    CHANNELED,
    CLASSES,
    CONV,
    DIMS,
    EXTENT,
    FEATURES,
    TOKENED,
    VOCABULARY,
    Block,
)

HEADS = {
    **dict.fromkeys(CHANNELED, ("pool", "mean", "flatten", "view", "conv", "relu_flatten")),
    **dict.fromkeys(TOKENED, ("mean", "first", "all", "norm")),
    "tokens": ("mean", "first", "all", "norm", "tied"),
}


class Head(nn.Module):
    """The layer that makes the output: its channels are never cut."""

    def __init__(self, kind: str, d: int, c: int, extent: int) -> None:
        super().__init__()
        self.kind, self.d = kind, d
        if kind == "conv":
            self.last = CONV[d](c, CLASSES, 1)
        elif "flatten" in kind or kind == "view":
            self.last = nn.Linear(c * extent**d, CLASSES)
        else:
            self.last = nn.Linear(c, CLASSES)
        self.norm = nn.LayerNorm(c) if kind == "norm" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "pool":
            x = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[self.d](x, 1)
            x = torch.flatten(x, 1)
        elif self.kind == "mean":
            x = x.mean(list(range(2, 2 + self.d)) if self.d else 1)
        elif self.kind in ("flatten", "relu_flatten"):
            x = x.flatten(1).sigmoid() if self.kind == "flatten" else torch.relu(x).flatten(1)
        elif self.kind == "view":
            x = x.view(x.size(0), -1) if self.d == 1 else x.reshape(x.shape[0], -1)
        elif self.kind == "first":
            x = x[:, 0]
        return self.last(self.norm(x))


class Model(nn.Module):
    def __init__(self, stem: nn.Module, blocks: list[Block], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x)


class TiedModel(Model):
    """Language model: the embedding is also the output layer's weight."""

    def __init__(self, stem: nn.Embedding, blocks: list[Block], width: int) -> None:
        super().__init__(stem, blocks, nn.Linear(width, VOCABULARY, bias=False))
        self.back = nn.Linear(blocks[-1].out, width)
        self.head.weight = stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for each in self.blocks:
            x = each(x)
        return self.head(self.back(x))


@dataclass(frozen=True)
class Case:
    """A recipe for a model: a family, blocks with their options, a head."""

    family: str
    blocks: tuple[tuple[str, dict[str, Any]], ...]
    head: str
    width: int = 8
    seed: int = 0
    channels_in: int = 3

    def example(self, batch: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + batch)
        d, extent = DIMS[self.family], EXTENT[self.family]
        if self.family == "tokens":
            return torch.randint(VOCABULARY, (batch, extent), generator=generator)
        if self.family == "sequence":
            return torch.randn(batch, extent, FEATURES, generator=generator, dtype=torch.float64)
        return torch.randn(batch, self.channels_in, *(extent,) * d, generator=generator, dtype=torch.float64)


def build(case: Case) -> nn.Module:
    """The model of a case, in float64 and eval mode, with no constant parameters or statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        d, extent, c = DIMS[case.family], EXTENT[case.family], case.width
        if case.family == "tokens":
            stem: nn.Module = nn.Embedding(VOCABULARY, c)
        elif case.family == "sequence":
            stem = nn.Linear(FEATURES, c)
        else:
            stem = CONV[d](case.channels_in, c, 3, padding=1)
        made = []
        for name, options in case.blocks:
            one = BLOCKS[name].make(d, c, extent, **options)
            c, extent = one.out, one.extent
            made.append(one)
        if case.head == "tied":
            model: nn.Module = TiedModel(stem, made, case.width)  # type: ignore[arg-type]
        else:
            model = Model(stem, made, Head(case.head, d, c, extent))
        return randomised(model.double()).eval()


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """A constant parameter or statistic would make a test blind to whatever it multiplies."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def single_cases() -> list[tuple[str, Case]]:
    """Every block by itself, with every value of every option, in each of its families."""
    found = []
    for name, blueprint in BLOCKS.items():
        for family in blueprint.families:
            for i, options in enumerate(blueprint.variants()):
                head = HEADS[family][i % len(HEADS[family])]
                tag = "-".join([family, name, *(f"{k}={v}" for k, v in options.items())])
                found.append((tag, Case(family, ((name, options),), head)))
    return found


@st.composite
def cases(draw: st.DrawFn, families: tuple[str, ...] = tuple(DIMS), longest: int = 3) -> Case:
    """Chains of up to `longest` blocks."""
    family = draw(st.sampled_from(families))
    names = [name for name, blueprint in BLOCKS.items() if family in blueprint.families]
    blocks, halved, marked = [], False, False
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=longest)):
        blueprint = BLOCKS[name]
        if blueprint.halves and halved:
            continue
        options = {key: draw(st.sampled_from(values)) for key, values in blueprint.options.items()}
        if options.get("how") == "token" and marked:
            continue
        halved, marked = halved or blueprint.halves, marked or options.get("how") == "token"
        blocks.append((name, options))
    head = draw(st.sampled_from(HEADS[family]))
    width = draw(st.sampled_from((8, 12, 16)))
    channels_in = draw(st.sampled_from((3, 1))) if family in CHANNELED else 3
    return Case(family, tuple(blocks), head, width, draw(st.integers(0, 3)), channels_in)
