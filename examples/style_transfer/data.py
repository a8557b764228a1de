"""Photographs and paintings as tensors of bytes: read from a folder, or a stand-in of our own making."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.stage import digest

SIDE = 256  # shorter side of photographs and paintings, and the side of test images, as the paper's frames
SUFFIXES = {".jpg", ".jpeg", ".png"}


@dataclass(frozen=True)
class Pictures:
    """Bytes (3, height, width) each, sizes may differ; `test` are squares."""

    train: list[Tensor]
    test: list[Tensor]
    styles: list[Tensor]
    names: list[str]  # of the styles

    @cached_property
    def digest(self) -> str:
        return digest(*self.train, *self.test, *self.styles)


class Crops:
    """A loader: random square crops of the photographs, mirrored or not, each with the number of a random style.

    Each pass draws from `generator`, which tgfx.fit saves and restores: a run that is resumed sees the same batches.
    """

    def __init__(self, photographs: list[Tensor], styles: int, *, side: int, batch: int, seed: int = 0) -> None:
        self.photographs, self.styles, self.side, self.batch = photographs, styles, side, batch
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.photographs) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.photographs), generator=self.generator).tolist()
        seed = int(torch.randint(2**31, (), generator=self.generator))
        draws = torch.Generator().manual_seed(seed)  # the loader's own state changes only between passes
        for index in range(len(self)):
            chosen = order[index * self.batch : (index + 1) * self.batch]
            crops = torch.stack([self._crop(self.photographs[number], draws) for number in chosen])
            yield as_floats(crops), torch.randint(self.styles, (self.batch,), generator=draws)

    def _crop(self, photograph: Tensor, draws: torch.Generator) -> Tensor:
        top, left = (int(torch.randint(length - self.side + 1, (), generator=draws)) for length in photograph.shape[1:])
        crop = photograph[:, top : top + self.side, left : left + self.side]
        return crop.flip(2) if torch.rand((), generator=draws) < 0.5 else crop


def as_floats(pixels: Tensor) -> Tensor:
    return pixels.float().div_(255)


def load(folder: Path) -> Pictures:
    """From bsds500/train, bsds500/test and styles of a folder."""
    paintings = _files(folder / "styles", "a few paintings as JPEG or PNG")
    photographs = "photographs as JPEG or PNG, e.g. those of BSDS500 (https://github.com/BIDS/BSDS500)"
    train = [_read(path) for path in _files(folder / "bsds500" / "train", photographs)]
    test = [_middle(_read(path)) for path in _files(folder / "bsds500" / "test", photographs)]
    return Pictures(train, test, [_read(path) for path in paintings], [path.stem for path in paintings])


def made(train: int = 24, test: int = 4, side: int = 40, seed: int = 0) -> Pictures:
    """Coloured blobs as photographs, gratings as paintings: enough to see a net learn, and nothing to download."""
    draws = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(float(side)), torch.arange(float(side)), indexing="ij")

    def blobs() -> Tensor:
        image = torch.full((3, side, side), 0.5)
        for _ in range(6):
            middle, colour = side * torch.rand(2, generator=draws), torch.rand(3, 1, 1, generator=draws)
            disc = ((y - middle[0]) ** 2 + (x - middle[1]) ** 2 < (side / 5) ** 2).float()
            image = image * (1 - disc) + colour * disc
        return (255 * image).to(torch.uint8)

    def grating(angle: float, colour: tuple[float, float, float]) -> Tensor:
        wave = 0.5 + 0.5 * torch.sin(1.2 * (np.cos(angle) * x + np.sin(angle) * y))
        return (255 * wave * torch.tensor(colour).view(3, 1, 1)).to(torch.uint8)

    styles = [grating(0.0, (1.0, 0.6, 0.2)), grating(1.0, (0.2, 0.5, 1.0))]
    return Pictures([blobs() for _ in range(train)], [blobs() for _ in range(test)], styles, ["warm", "cold"])


def _files(folder: Path, wanted: str) -> list[Path]:
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no pictures: expected {wanted} (see examples/style_transfer/README.md)"
        )
    return found


def _read(path: Path) -> Tensor:
    from PIL import Image

    with Image.open(path) as picture:
        scale = SIDE / min(picture.size)
        size = (max(SIDE, round(picture.width * scale)), max(SIDE, round(picture.height * scale)))
        pixels = np.asarray(picture.convert("RGB").resize(size, Image.Resampling.LANCZOS))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


def _middle(picture: Tensor) -> Tensor:
    top, left = ((length - SIDE) // 2 for length in picture.shape[1:])
    return picture[:, top : top + SIDE, left : left + SIDE].contiguous()
