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
<<<<<<< HEAD:tests/experiments/test_cifar10.py
<<<<<<< HEAD:tests/experiments/test_cifar10.py
=======
=======
from examples.flownet import run as flownet
>>>>>>> flow:tests/test_examples.py
from examples.resnet56 import run as resnet56
from examples.sine import run as sine
from examples.vgg16 import run as vgg16
from examples.vgg16.model import VGG, load_convolutions_, start_batch_norm_


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
>>>>>>> vgg:tests/test_examples.py


def test_vgg16_quick() -> None:
    found = vgg16.main(["--quick", "--quiet"])
    assert found["tune"]["accuracy"] > 0.9  # of ten classes
    for name, budget in (("gates-0.5", 0.5), ("gates-0.2", 0.2), ("joint", 0.1)):
        own = found[name]
        assert 0.99 * budget <= own["params"] <= budget
        assert own["file_apart"] < 1e-4
        assert own["sparse_bytes"] < 1.5 * budget * own["dense_bytes"]
    assert found["gates-0.5"]["accuracy"] > found["tune"]["accuracy"] - 0.03
    assert found["joint"]["accuracy"] > found["tune"]["accuracy"] - 0.05
    assert found["further"]["steps"] == found["joint"]["settings"]["joint_steps"]


def test_vgg16_starts_from_the_features_of_torchvision(tmp_path: Path) -> None:
    """Batch norm that is put between the loaded layers changes nothing but the scale of the features."""
    widths = (4, "pool", 6, 8, "pool")
    plain = VGG(widths)
    plain.features = torch.nn.Sequential(*(x for x in plain.features if not isinstance(x, torch.nn.BatchNorm2d)))
    model = VGG(widths).eval()
    load_convolutions_(model, plain.state_dict())
    images = torch.randn(16, 3, 32, 32)
    start_batch_norm_(model, images)
    with torch.no_grad():
        wanted, found = plain.features(images), model.features(images)
    scale = found.norm() / wanted.norm()
    torch.testing.assert_close(found, scale * wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="3 convolutions"):
        load_convolutions_(VGG(), plain.state_dict())
    with pytest.raises(FileNotFoundError, match="torchvision"):
        vgg16._from_imagenet_(model, data.made(8), tmp_path / "none.safetensors")


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
