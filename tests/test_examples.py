"""The quick modes of the paper's experiments: they run, and what they report hangs together."""

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
from examples.flownet import run as flownet
from examples.resnet56 import run as resnet56
from examples.sine import run as sine


@pytest.mark.parametrize("train", ["joint", "gates"])
def test_resnet56_quick(train: str) -> None:
    report = resnet56.main(["--quick", "--quiet", "--train", train])
    assert report["steps"] == 12
    assert 0.55 <= report["flops"] <= 0.6
    assert 0 <= report["compact"] <= 1
    assert all(width > 0 for width in report["widths"].values())


def test_sine_quick(tmp_path: Path) -> None:
    found = sine.main(["--quick", "--out", str(tmp_path)])
    gates = [one for one in found if one.method == "gates"]
    softmax = [one for one in found if one.method == "softmax"]
    assert all(one.used == 1 for one in gates)
    assert all(one.used > 1 for one in softmax)
    assert sum(one.error < 1e-3 for one in gates) >= 2
    assert "<svg" in (tmp_path / "sine.svg").read_text()


@pytest.mark.filterwarnings("ignore:FlowNetSimple takes another path in train mode:UserWarning")
def test_flownet_quick() -> None:
    results = flownet.main(["--quick", "--quiet"])
    base, whole = results["base"], results["whole"]
    assert base["epe"]["held_out"] < 0.5 * base["before"]["held_out"]
    for budget in (0.6, 0.45):
        cut = results[f"channels-{budget:.2f}"]
        assert 0.99 * budget <= cut["channels"] <= budget
        assert cut["steps"] == whole["steps"]
        assert cut["gated_compact_delta"] < 1e-5 and cut["onnx_delta"] < 1e-4
        assert cut["params_count"] < budget * whole["params_count"]
        assert cut["safetensors_bytes"] < budget * whole["safetensors_bytes"]
        assert cut["epe"]["held_out"] < 1.1 * whole["epe"]["held_out"]
        assert sum(kept for kept, _ in cut["retained"].values()) + 10 == round(cut["channels"] * 738)


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
