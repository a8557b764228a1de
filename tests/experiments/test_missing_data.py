"""What a user can mend is told in a sentence: data that is missing or broken, packages, options, folders."""

from __future__ import annotations

import gzip
import importlib
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

from examples.cifar10 import data
from examples.flownet import run as flownet
from examples.mistakes import without_traceback
from examples.resnet56 import curve, peer
from examples.resnet56 import run as resnet56
from examples.resnet56.given import whole_model
from examples.sine import run as sine
from examples.style_transfer import features
from examples.translation import run as translation
from examples.translation import subwords, tasks
from examples.vgg16 import run as vgg16
from tgfx.errors import BudgetError, InputError, MissingPackageError, TrainingError

NEEDS_DATA = {
    "resnet56.run": ["--weights", "WEIGHTS"],
    "resnet56.curve": ["--weights", "WEIGHTS"],
    "resnet56.peer": ["--weights", "WEIGHTS"],
    "gradient_shapes.run": ["--weights", "WEIGHTS"],
    "vgg16.run": ["tune"],
    "style_transfer.run": [],
    "flownet.run": ["base"],
    "translation.run": [],
}


@pytest.mark.parametrize("name", NEEDS_DATA)
def test_data_that_is_missing_is_asked_for(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"examples.{name}").main
    weights = tmp_path / "weights.th"
    torch.save({}, weights)
    more = [str(weights) if word == "WEIGHTS" else word for word in NEEDS_DATA[name]]
    with pytest.raises(SystemExit) as refused:
        main([*more, "--out", str(tmp_path / "out")])
    said = f"{refused.value} {capsys.readouterr().err}"
    assert "--data" in said and "--quick" in said and "README" in said
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="empty"):
        main([*more, "--out", str(tmp_path / "out"), "--data", str(tmp_path / "empty")])
    assert not list((tmp_path / "out").rglob("result.json"))


@pytest.mark.parametrize("name", ["resnet56.run", "resnet56.curve", "resnet56.peer", "gradient_shapes.run"])
def test_weights_that_are_missing_are_asked_for(name: str, tmp_path: Path) -> None:
    main = importlib.import_module(f"examples.{name}").main
    with pytest.raises(SystemExit, match=r"--weights takes the state dict of a trained ResNet-56"):
        main(["--data", str(tmp_path), "--weights", str(tmp_path / "none.th"), "--out", str(tmp_path / "out")])
    (tmp_path / "other.th").write_bytes(b"no weights")
    with pytest.raises(SystemExit, match="expected the state dict of a ResNet-56"):
        whole_model(tmp_path / "other.th")


def test_files_of_another_kind_are_named(tmp_path: Path) -> None:
    other = tmp_path / "vgg16-397923af.pth"
    torch.save({"features.0.weight": torch.zeros(1)}, other)
    with pytest.raises(SystemExit, match=r"397923af\.pth cannot be read: expected .* as safetensors"):
        vgg16._from_imagenet_(vgg16.VGG(vgg16.QUICK_WIDTHS), data.made(8), other)
    with pytest.raises(SystemExit, match=r"397923af\.pth cannot be read: expected weights of VGG-16"):
        features.vgg16(tmp_path)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"cut off")
    with pytest.raises(SystemExit, match=r"tar\.gz cannot be read: expected the whole archive"):
        data.load(tmp_path)
    with gzip.open(tmp_path / "train.en.gz", "w") as packed:
        packed.write(b"a house\n" * 1000)
    (tmp_path / "train.en.gz").write_bytes((tmp_path / "train.en.gz").read_bytes()[:-20])
    with pytest.raises(SystemExit, match=r"train\.en\.gz cannot be read"):
        tasks.read(tmp_path, "train", "en")
    (tmp_path / "0000000-gt.flo").write_bytes(b"\0" * 20)
    for index in (0, 1):
        (tmp_path / f"0000000-img{index}.ppm").write_bytes(b"P6 1 1 255 \0\0\0")
    with pytest.raises(SystemExit, match="expected whole pairs of FlyingChairs"):
        flownet.read_chairs(tmp_path)


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sacrebleu", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match="pip install sacrebleu"):
        tasks._sacrebleu()
    with pytest.raises(SystemExit, match="pip install tokenizers"):
        subwords.Subwords(tmp_path / "subwords.json")

    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    with pytest.raises(SystemExit, match="pip install torch-pruning"):
        peer.main(["--quick"])


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    for place in (taken, taken / "below"):
        with pytest.raises(SystemExit, match=r"taken.* cannot be made a folder .*: choose another --out"):
            sine.main(["--quick", "--out", str(place)])


def test_what_nobody_expects_keeps_its_traceback() -> None:
    def broken(error: Exception, cause: Exception | None = None) -> None:
        with without_traceback():
            raise error from cause

    with pytest.raises(SystemExit, match="none: No such file or directory"), without_traceback():
        Path("none").read_text()
    with pytest.raises(SystemExit, match="no budget"):
        broken(BudgetError("no budget"))
    with pytest.raises(SystemExit, match="no number"):
        broken(InputError("no number"), OSError("disk"))
    with pytest.raises(SystemExit, match="no package"):
        broken(MissingPackageError("no package"), ImportError("onnxruntime"))
    for error in (KeyError("x"), ValueError("y"), RuntimeError("z"), AssertionError("w")):
        with pytest.raises(type(error)):
            broken(error)
    with pytest.raises(TrainingError):
        broken(TrainingError("the loader raised"), ZeroDivisionError())


@pytest.mark.parametrize(
    ("main", "options", "complaint"),
    [
        (curve.main, ["--shares", "0.5", "0.7"], "--shares fall"),
        (curve.main, ["--shares", "0.5", "0.5"], "--shares fall"),
        (curve.main, ["--shares", "1.5"], "1.5 is no share"),
        (curve.main, ["--steps", "0"], "0 is not above 0"),
        (resnet56.main, ["--budget", "nan"], "nan is no share"),
        (resnet56.main, ["--epochs", "0"], "0 is not above 0"),
        (peer.main, ["--budget", "0"], "0 is no share"),
        (peer.main, ["--sparse-epochs", "-1"], "fewer than --epochs"),
        (vgg16.main, ["joint", "--budget", "2"], "2 is no share"),
        (flownet.main, ["base", "--crop", "100", "64"], "multiples of 64"),
        (flownet.main, ["further", "--channels", "0"], "0 is no share"),
        (sine.main, ["--steps", "few"], "'few' is no whole number"),
        (translation.main, ["--step", "bogus"], "invalid choice: 'bogus'"),
        (translation.main, ["--steps", "0"], "0 is not above 0"),
    ],
)
def test_numbers_without_sense_are_refused_at_once(
    main: Callable[[list[str]], object], options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(options)
    assert refused.value.code == 2 and complaint in capsys.readouterr().err
