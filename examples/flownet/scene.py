"""Scenes with known motion, made from photographs as FlyingChairs was made from photographs and chairs.

A scene is a stack of layers: a background and objects cut out of other photographs. Every layer has an affine motion
from the first frame to the second; objects move with the background and by themselves. Points are (x, y) in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Box = tuple[int, int, int, int]  # left, top, right, bottom: pixels of a frame, the last two not included
Matrix = np.ndarray  # 3 x 3, affine


@dataclass(frozen=True)
class Outline:
    """A blob around the origin: radius * (1 + sum of Re(waves[k] e^(i k angle))), with a hole of the same form."""

    radius: float
    waves: np.ndarray
    hole: float

    @property
    def reach(self) -> float:
        return self.radius * (1 + float(np.abs(self.waves).sum())) + 1

    def coverage(self, x: Tensor, y: Tensor) -> Tensor:
        """How much of a pixel is inside, 0 to 1."""
        distance = (x.square() + y.square()).sqrt_()
        across, up = x / distance.clamp(min=1e-6), y / distance.clamp(min=1e-6)  # cosine and sine of the angle
        cosine, sine = across, up  # of its multiples
        edge = torch.ones_like(distance)
        for wave in self.waves.tolist():
            edge.add_(cosine, alpha=wave.real).sub_(sine, alpha=wave.imag)
            cosine, sine = cosine * across - sine * up, sine * across + cosine * up
        edge *= self.radius
        inside = (edge - distance + 0.5).clamp(0, 1)
        return inside if not self.hole else torch.minimum(inside, (distance - self.hole * edge + 0.5).clamp(0, 1))


@dataclass(frozen=True)
class Layer:
    """photo: (3, h, w), 0 to 1. Matrices go from the first frame: to the photo, to the outline, to the second frame."""

    photo: Tensor
    to_photo: Matrix
    motion: Matrix
    outline: Outline | None = None
    to_outline: Matrix | None = None


@dataclass(frozen=True)
class Scene:
    """Layers from back to front; the first is the background."""

    layers: Sequence[Layer]
    height: int
    width: int

    def render(self, frame: int) -> tuple[Tensor, Tensor]:
        """Frame 0 or 1: the image (3, h, w) from 0 to 1, and which layer is seen at each pixel."""
        image = torch.zeros(3, self.height, self.width)
        seen = torch.zeros(self.height, self.width, dtype=torch.int64)
        for index, layer in enumerate(self.layers):
            back = np.linalg.inv(layer.motion) if frame else np.eye(3)
            box = self._box(layer, frame)
            if box[0] >= box[2] or box[1] >= box[3]:
                continue
            texture = sampled(layer.photo, _moved(layer.to_photo @ back, box))
            left, top, right, bottom = box
            part, own = image[:, top:bottom, left:right], seen[top:bottom, left:right]
            if layer.outline is None:
                part.copy_(texture)
                continue
            cover = layer.outline.coverage(*_moved(layer.to_outline @ back, box))
            part.lerp_(texture, cover)
            own.masked_fill_(cover > 0.5, index)
        return image, seen

    def flow(self, seen: Tensor) -> Tensor:
        """(2, h, w): where the pixels of the first frame go, given which layer they belong to."""
        motions = torch.from_numpy(np.stack([layer.motion[:2] - np.eye(3)[:2] for layer in self.layers])).float()
        own = motions.flatten(1).t().contiguous()[:, seen]
        x, y = torch.arange(float(self.width)), torch.arange(float(self.height)).unsqueeze(1)
        return torch.stack([own[0] * x + own[1] * y + own[2], own[3] * x + own[4] * y + own[5]])

    def _box(self, layer: Layer, frame: int) -> Box:
        """The pixels that a layer can reach."""
        if layer.outline is None or layer.to_outline is None:
            return 0, 0, self.width, self.height
        reach = layer.outline.reach
        corners = np.array([[x, y, 1.0] for x in (-reach, reach) for y in (-reach, reach)]).T
        place = np.linalg.inv(layer.to_outline)
        x, y, _ = (layer.motion @ place if frame else place) @ corners
        left, right = np.clip([np.floor(x.min()), np.ceil(x.max()) + 1], 0, self.width)
        top, bottom = np.clip([np.floor(y.min()), np.ceil(y.max()) + 1], 0, self.height)
        return int(left), int(top), int(right), int(bottom)


def _moved(matrix: Matrix, box: Box) -> tuple[Tensor, Tensor]:
    """x and y of a box's pixels after an affine map."""
    left, top, right, bottom = box
    x, y = torch.arange(float(left), float(right)), torch.arange(float(top), float(bottom)).unsqueeze(1)
    first, second, _ = matrix.tolist()
    return first[0] * x + (first[1] * y + first[2]), second[0] * x + (second[1] * y + second[2])


def sampled(photo: Tensor, where: tuple[Tensor, Tensor]) -> Tensor:
    """A photo's colours at these points; mirrored beyond its border, so that everything moves as it should."""
    _, height, width = photo.shape
    x, y = where
    grid = torch.stack([x * (2 / (width - 1)) - 1, y * (2 / (height - 1)) - 1], -1)
    return F.grid_sample(photo[None], grid[None], padding_mode="reflection", align_corners=True)[0]
