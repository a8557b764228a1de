"""The loader of CIFAR-10."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.cifar10 import data


def test_both_packings_of_cifar10_are_read_alike(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    npm, tar = tmp_path / "npm", tmp_path / "tar"
    npm.mkdir(), tar.mkdir()
    batches = [rng.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8) for _ in range(6)]
    labels = [rng.integers(0, 10, 4).tolist() for _ in range(6)]
    names = [*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]
    for name, pixels in zip(names, batches, strict=True):
        Image.fromarray(pixels.transpose(0, 2, 3, 1).reshape(4, 1024, 3)).save(npm / f"{name}.png")
    (npm / "train_lables.json").write_text(json.dumps([label for part in labels[:5] for label in part]))
    (npm / "test_lables.json").write_text(json.dumps(labels[5]))
    with tarfile.open(tar / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name, pixels, classes in zip(names, batches, labels, strict=True):
            content = pickle.dumps({b"data": pixels.reshape(4, -1), b"labels": classes})
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    for one, other in zip(data.load(npm), data.load(tar), strict=True):
        assert torch.equal(one.pixels, other.pixels) and torch.equal(one.labels, other.labels)
    with pytest.raises(FileNotFoundError, match=r"cifar-10-python\.tar\.gz"):
        data.load(tmp_path)


def test_augmented_batches_are_shifts_and_mirrors() -> None:
    images = data.made(40)
    loader = data.Batches(images, 8, augment=True, seed=3)
    assert len(loader) == 5 and len(data.Batches(images, 16, augment=False)) == 3
    x, labels = next(iter(loader))
    assert x.shape == (8, 3, 32, 32)
    plain = torch.cat([batch for batch, _ in data.Batches(images, 16, augment=False)])
    inner = x[0, :, 12:20, 12:20]
    candidates = [(i, mirrored) for i in range(40) for mirrored in (False, True) if images.labels[i] == labels[0]]

    def found(index: int, mirrored: bool) -> bool:
        image = plain[index].flip(2) if mirrored else plain[index]
        windows = image.unfold(1, 8, 1).unfold(2, 8, 1).permute(1, 2, 0, 3, 4)[8:17, 8:17]
        return bool((windows - inner).abs().amax((2, 3, 4)).min() < 1e-6)

    assert any(found(index, mirrored) for index, mirrored in candidates)
