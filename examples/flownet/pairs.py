"""Pairs of images with the flow between them: made, stored, read, and handed out in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.flownet.casting import random_scene
from examples.flownet.photos import digest_of, read_image
from examples.mistakes import reading
from examples.stage import read_json, write_json

GREY = 0.45  # about the mean of photographs
MADE_OF = "made_of.json"
FLO_MAGIC = 202021.25  # the first number in a .flo file


@dataclass(frozen=True)
class Pairs:
    """Arrays, in memory or on disk: both images of a pair as bytes (n, 6, h, w), flows in pixels (n, 2, h, w)."""

    images: Any
    flows: Any

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, chosen: Any) -> tuple[Tensor, Tensor]:
        """What a net takes, and the flow."""
        return normalised(np.array(self.images[chosen])), torch.from_numpy(np.array(self.flows[chosen], np.float32))


class PairBatches:
    """A loader of random crops, turned over at random and with other light.

    Each pass draws from `generator`, which tgfx.fit saves and restores: a run that is resumed sees the same batches.
    """

    def __init__(self, pairs: Pairs, size: tuple[int, int], batch: int, *, seed: int = 0) -> None:
        self.pairs, self.size, self.batch = pairs, size, batch
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.pairs) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rng = np.random.default_rng(int(torch.randint(2**62, (), generator=self.generator)))
        order = rng.permutation(len(self.pairs))
        for start in range(0, len(self) * self.batch, self.batch):
            crops = [self._crop(index, rng) for index in order[start : start + self.batch]]
            yield torch.stack([image for image, _ in crops]), torch.stack([flow for _, flow in crops])

    def _crop(self, index: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        height, width = self.size
        _, _, rows, columns = self.pairs.images.shape
        top, left = rng.integers(rows - height + 1), rng.integers(columns - width + 1)
        part = (slice(None), slice(top, top + height), slice(left, left + width))
        image, flow = self.pairs.batch((index, *part))
        for axis, component in ((2, 0), (1, 1)):
            if rng.uniform() < 0.5:  # mirrored: so is the motion along that axis
                image, flow = image.flip(axis), flow.flip(axis)
                flow[component].neg_()
        light = torch.from_numpy(rng.uniform(0.7, 1.3) * rng.uniform(0.9, 1.1, (3, 1, 1))).float()
        change = float(rng.uniform(0.97, 1.03))  # of the light between the frames
        return (image + GREY) * torch.cat([light, light * change]) - GREY, flow


def made_pairs(
    photos: Sequence[Tensor],
    size: tuple[int, int],
    count: int,
    seed: int,
    store: Path | None = None,
    *,
    speed: float = 1.0,
) -> Pairs:
    """Random scenes; with `store` on disk there, or read from there if they were made before."""
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "images": ((count, 6, *size), np.uint8),
        "flows": ((count, 2, *size), np.float16),
    }
    if store is None:
        pairs = Pairs(*(np.empty(shape, kind) for shape, kind in shapes.values()))
        _fill(pairs, photos, size, seed, speed)
        return pairs
    made_of = {"photographs": digest_of(photos), "seed": seed, "speed": speed}
    if not store.exists():
        aside = store.with_name(store.name + ".writing")  # a store that exists is whole
        aside.mkdir(parents=True, exist_ok=True)
        mapped = (
            np.lib.format.open_memmap(aside / f"{name}.npy", mode="w+", shape=shape, dtype=kind)
            for name, (shape, kind) in shapes.items()
        )
        _fill(Pairs(*mapped), photos, size, seed, speed)
        write_json(aside / MADE_OF, made_of)
        aside.rename(store)
    pairs = Pairs(*(np.load(store / f"{name}.npy", mmap_mode="r") for name in shapes))
    noted = store / MADE_OF  # pairs made by an earlier version have none
    if pairs.images.shape != shapes["images"][0] or (noted.is_file() and read_json(noted) != made_of):
        raise SystemExit(f"{store} holds other pairs ({pairs.images.shape}): remove it, or choose another --out")
    return pairs


def _fill(pairs: Pairs, photos: Sequence[Tensor], size: tuple[int, int], seed: int, speed: float) -> None:
    for index in range(len(pairs)):
        scene = random_scene(photos, *size, np.random.default_rng([seed, index]), speed)
        first, seen = scene.render(0)
        second, _ = scene.render(1)
        pairs.images[index] = torch.cat([first, second]).mul_(255).round_().clamp_(0, 255).byte().numpy()
        pairs.flows[index] = scene.flow(seen).numpy()


def read_chairs(folder: Path) -> Pairs:
    """Pairs of FlyingChairs: NAME-img0.ppm, NAME-img1.ppm and NAME-gt.flo."""
    names = [path.name.removesuffix("-gt.flo") for path in sorted(folder.glob("*-gt.flo"))]
    if not names:
        raise FileNotFoundError(
            f"{folder} holds no pairs of FlyingChairs: expected 0000000-img0.ppm, -img1.ppm, -gt.flo, ... "
            "(https://github.com/lmb-freiburg/flownet2, data/FlyingChairs_examples)"
        )
    with reading(folder, "whole pairs of FlyingChairs, all of one size"):
        images = [torch.cat([read_image(folder / f"{name}-img{index}.ppm") for index in (0, 1)]) for name in names]
        flows = [read_flo(folder / f"{name}-gt.flo") for name in names]
        return Pairs(torch.stack(images).mul_(255).round_().byte().numpy(), torch.stack(flows).numpy())


def read_flo(path: Path) -> Tensor:
    """(2, h, w) in pixels, from Middlebury's format."""
    raw = path.read_bytes()
    if np.frombuffer(raw, "<f4", 1)[0] != np.float32(FLO_MAGIC):
        raise ValueError(f"{path} is not a .flo file")
    width, height = np.frombuffer(raw, "<i4", 2, offset=4)
    values = np.frombuffer(raw, "<f4", 2 * width * height, offset=12)
    return torch.from_numpy(values.reshape(height, width, 2).transpose(2, 0, 1).astype(np.float32))


def normalised(images: np.ndarray) -> Tensor:
    """Bytes as numbers around zero."""
    return torch.from_numpy(images).float().div_(255).sub_(GREY)
