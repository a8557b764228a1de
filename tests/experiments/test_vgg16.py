"""VGG-16 in quick mode, and where its weights come from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import tgfx
from examples.cifar10 import data
from examples.vgg16 import run as vgg16
from examples.vgg16.model import FULLY, VGG, load_convolutions_, start_batch_norm_
from examples.vgg16.steps import Experiment, Settings, label_of, line_of, lines_of


@pytest.mark.parametrize("loss", ["blur", "labels"])
def test_vgg16_quick(loss: str) -> None:
    found = vgg16.main(["--quick", "--quiet", "--loss", loss])
    assert found["gates-0.2"]["settings"]["gate_loss"] == loss
    assert found["tune"]["accuracy"] > 0.9  # of ten classes
    for name, budget in (("gates-0.5", 0.5), ("gates-0.2", 0.2), ("joint", 0.1)):
        own = found[name]
        assert 0.99 * budget <= own["params"] <= budget
        assert own["file_apart"] < 1e-4
        assert own["sparse_bytes"] < 1.5 * budget * own["dense_bytes"]
    assert found["gates-0.5"]["accuracy"] > found["tune"]["accuracy"] - 0.03
    assert found["joint"]["accuracy"] > found["tune"]["accuracy"] - 0.05
    assert found["further"]["steps"] == found["joint"]["settings"]["joint_steps"]


def test_the_figure_shows_every_share_that_is_done(tmp_path: Path) -> None:
    for name, result in (
        ("tune", {"accuracy": 0.9, "weights": 14_700_000}),
        ("gates-0.1", {"params": 0.1, "accuracy": 0.7, "settings": {"gate_steps": 100}}),
        ("gates-0.5", {"params": 0.499, "accuracy": 0.91, "settings": {"gate_steps": 300}}),
        ("joint-0.05", {"params": 0.05, "accuracy": 0.8}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    assert line_of(tmp_path) == [(1.0, 0.9), (0.499, 0.91), (0.1, 0.7)]
    assert label_of(tmp_path) == "14.7 million weights, 100 and 300 steps"
    shutil.copytree(tmp_path, tmp_path / "other")
    assert list(lines_of([tmp_path, tmp_path / "other"]))[1] == f"{label_of(tmp_path)} (other)"
    with pytest.raises(SystemExit, match="no folder in which `tune` was run"):
        line_of(tmp_path / "elsewhere")


def test_a_folder_holds_one_net_and_what_was_made_of_it(tmp_path: Path) -> None:
    images = data.made(64), data.made(40, seed=1)
    settings = Settings(batch=32, tune_steps=2, joint_steps=4, gate_steps=4, gate_batch=32, shares=[0.5], recalibrate=0)
    widths = (4, "pool", 6, "pool", 8, "pool", 8, "pool", 8, "pool")

    def experiment(*fully: int, seed: int = 0) -> Experiment:
        torch.manual_seed(seed)
        return Experiment(lambda: VGG(widths, fully=fully), *images, tmp_path, settings, show=False)

    first = experiment()
    with pytest.raises(SystemExit, match="run the step 'tune' first"):
        first.gates()
    tuned = first.tune(lambda model, images: None)
    assert experiment().tune(lambda model, images: None) == tuned
    with pytest.raises(SystemExit, match="begins"):
        experiment(seed=1).tune(lambda model, images: None)
    found = first.gates()["gates-0.5"]
    assert first.gates()["gates-0.5"] == found
    with pytest.raises(SystemExit, match="another net"):
        experiment(12, 10).gates()
    (tmp_path / "tune" / "model.pt").unlink()
    torch.save(VGG(widths).state_dict(), tmp_path / "tune" / "model.pt")  # tuned anew
    with pytest.raises(SystemExit, match="begins"):
        first.gates()


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


def test_vgg16_has_the_fully_connected_layers_of_the_published_net() -> None:
    with torch.device("meta"):
        published = VGG(fully=FULLY)
    layers = [tuple(layer.weight.shape) for layer in published.classifier if isinstance(layer, torch.nn.Linear)]
    assert layers == [(4096, 512 * 7 * 7), (4096, 4096), (10, 4096)]
    small = VGG((4, "pool", 6, "pool", 8, "pool", 8, "pool", 8, "pool"), fully=(12, 10))
    gated = tgfx.transform(small, torch.randn(2, 3, 32, 32), granularity="weight")
    assert gated(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert sum(name.startswith("classifier") for name in gated.gates) == 3


def test_vgg16_goes_on_from_tuned_convolutions(tmp_path: Path) -> None:
    widths = (4, "pool", 6, "pool", 8, "pool", 8, "pool", 8, "pool")
    tuned, fuller = VGG(widths), VGG(widths, fully=(12, 10))
    with pytest.raises(FileNotFoundError, match="--tuned"):
        vgg16._from_tuned_(fuller, tmp_path)
    (tmp_path / "tune").mkdir()
    torch.save(tuned.state_dict(), tmp_path / "tune" / "model.pt")
    vgg16._from_tuned_(fuller, tmp_path)
    for name, value in tuned.features.state_dict().items():
        assert torch.equal(fuller.features.state_dict()[name], value), name
