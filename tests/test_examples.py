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
from examples.resnet56 import run as resnet56
from examples.sine import run as sine
from examples.translation import data as sentences
from examples.translation import run as translation
from examples.translation.data import padded
from examples.translation.decoding import greedy
from examples.translation.model import END, PAD, START, Sizes, Translator


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


def test_translation_quick() -> None:
    report = translation.main(["--quick", "--quiet"])
    base, further, *cut = (report[step] for step in ("base", "further", "heads-0.75", "heads-0.5"))
    assert sum(base["kept"].values()) == sum(further["kept"].values()) == 24
    assert min(base["right"], further["right"]) >= 0.9
    for one, share in zip(cut, (0.75, 0.5), strict=True):
        assert abs(one["heads"] - share) <= 0.01 * share
        assert sum(one["kept"].values()) == round(24 * one["heads"])  # counted in the weights
        assert one["difference"] < 1e-5
        assert one["params"] < 1 and one["flops"] < 1
        assert one["right"] >= 0.8
    assert cut[1]["params"] < cut[0]["params"]
    rates = report["speed"]["pieces_per_second"]
    assert list(rates) == ["base", "heads-0.75", "heads-0.5"] and rates["base"]["decoding_ratio"] == 1


def test_translations_are_the_likeliest_pieces() -> None:
    """Written one after the other, with keys and values kept, they are those that one pass over them all gives."""
    torch.manual_seed(0)
    model = Translator(Sizes.alike(30, layers=2, width=16, heads=4, inner=8, dropout=0.3)).eval()
    source = padded([[5, 6, 7, 8, END], [9, END]])
    written = greedy(model, source, 6, until_end=False)
    so_far = torch.cat([torch.full((2, 1), START), written[:, :-1]], 1)
    assert torch.equal(model(source, so_far).argmax(2), written)
    alone = greedy(model, source[1:, :2], 6, until_end=False)  # padding changes nothing
    assert torch.equal(alone, written[1:])


def test_batches_of_sentences_hold_every_pair_once(tmp_path: Path) -> None:
    pairs = sentences.made(300)
    loader = sentences.Batches(pairs, 256, seed=1)
    seen = []
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(source.numel() + target.numel() <= 256 for (source, target), _ in batches)
        assert all(torch.equal(so_far[:, 1:][target[:, 1:] != PAD], target[:, :-1][target[:, 1:] != PAD])
                   for (_, so_far), target in batches)  # fmt: skip
        rows = [row[: row.index(END)] for (source, _), _ in batches for row in source.tolist()]
        assert sorted(rows) == sorted(pairs.source)
        seen.append(rows)
    assert seen[0] != seen[1]
    (tmp_path / "val.en").write_text("a house .\nzwölf\n", encoding="utf-8")
    assert sentences.read(tmp_path, "val", "en") == ["a house .", "zwölf"]
    with pytest.raises(FileNotFoundError, match=r"github\.com/multi30k/dataset"):
        sentences.read(tmp_path, "val", "de")


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
