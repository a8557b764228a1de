"""Photographs to cut scenes from, (3, h, w) from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from examples.stage import digest


def read_photos(folder: Path) -> list[Tensor]:
    """All photographs of a folder."""
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no photographs: expected the images of BSDS500 in DATA/bsds500/train and "
            "DATA/bsds500/test (https://github.com/BIDS/BSDS500, BSDS500/data/images)"
        )
    return [read_image(path) for path in paths]


def digest_of(photos: Sequence[Tensor]) -> str:
    """Tells photographs from others by their number, their sizes and a pixel here and there, which takes no time."""
    return digest(*(photo[:, ::16, ::16] for photo in photos))


def read_image(path: Path) -> Tensor:
    from PIL import Image

    with Image.open(path) as image:
        return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1).float().div_(255)


def made_photos(count: int, seed: int = 0) -> list[Tensor]:
    """Clouds of colour at several scales, in place of photographs: enough texture to follow, nothing to download."""
    generator = torch.Generator().manual_seed(seed)
    photos = []
    for _ in range(count):
        clouds = torch.zeros(1, 3, 160, 240)
        for cells in (4, 12, 36, 80):
            noise = torch.randn(1, 3, cells, cells * 3 // 2, generator=generator)
            clouds += F.interpolate(noise, (160, 240), mode="bicubic", align_corners=True)
        photos.append((0.5 + 0.14 * clouds[0]).clamp(0, 1))
    return photos
