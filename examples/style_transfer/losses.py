"""The perceptual loss of Johnson et al. with a Gram matrix per style and layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.style_transfer.data import as_floats
from examples.style_transfer.features import Features

CONTENT_STAGE = 1  # relu2_2, counted from 0
STYLE_WEIGHT = 5.0
SMOOTH_WEIGHT = 0.05


@dataclass(frozen=True)
class Parts:
    """content and style are relative squared errors: 0 is equal, 1 is as far away as all zeros."""

    content: Tensor
    style: Tensor
    smooth: Tensor

    @property
    def total(self) -> Tensor:
        return self.content + STYLE_WEIGHT * self.style + SMOOTH_WEIGHT * self.smooth


class StyleLoss:
    """Compares stylised images with their photographs (what is shown) and with their styles (how it is painted).

    Relative errors make layers and paintings count alike: Gram matrices of one differ from those of another by
    orders of magnitude.
    """

    def __init__(self, features: Features, styles: list[Tensor]) -> None:
        self.features = features
        with torch.no_grad():
            each = [[gram(x) for x in features(as_floats(style).unsqueeze(0))] for style in styles]
        self.grams = [torch.cat(layer) for layer in zip(*each, strict=True)]  # a layer: (styles, channels, channels)

    def parts(self, stylised: Tensor, photographs: Tensor, style: Tensor) -> Parts:
        with torch.no_grad():
            shown = self.features(photographs, CONTENT_STAGE + 1)[-1]
        found = self.features(stylised)
        content = (found[CONTENT_STAGE] - shown).float().square().mean() / shown.float().square().mean()
        errors = []
        for layer, wanted in zip(found, self.grams, strict=True):
            target = wanted[style]
            errors.append((gram(layer) - target).square().sum((1, 2)) / target.square().sum((1, 2)))
        return Parts(content, torch.stack(errors).mean(), total_variation(stylised))

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        """For tgfx.fit(training_step=...)."""
        photographs, style = batch
        return self.parts(model(photographs, style), photographs, style).total


def gram(x: Tensor) -> Tensor:
    """(batch, channels, height, width) -> which channels are active together, (batch, channels, channels)."""
    with torch.autocast(x.device.type, enabled=False):  # sums over all pixels, of which differences matter
        flat = x.float().flatten(2)
        return flat @ flat.transpose(1, 2) / flat.shape[2]


def total_variation(images: Tensor) -> Tensor:
    down, right = images[:, :, 1:] - images[:, :, :-1], images[:, :, :, 1:] - images[:, :, :, :-1]
    return down.abs().float().mean() + right.abs().float().mean()
