"""A stage of an experiment: its result stands for the settings it was begun with, also where it was stopped between."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.cifar10 import data
from examples.gradient_shapes import run as gradient_shapes
from examples.mistakes import without_traceback
from examples.resnet56 import peer
from examples.resnet56 import run as resnet56
from examples.stage import Stage, digest


def finished(seconds: float = 0.0) -> Any:
    return SimpleNamespace(stopped="finished", steps=3, seconds=seconds)


def test_a_result_is_given_back_for_the_same_settings_and_refused_for_others(tmp_path: Path) -> None:
    asked = {"steps": 40, "crop": (1, 2), "settings": {"loss": "blur", "seed": 0}}
    stage = Stage(tmp_path / "gates", asked)
    assert stage.begin() is None
    stage.trained(finished(100.0))
    stage.write({"accuracy": 0.5})
    again = Stage(tmp_path / "gates", asked).begin()
    assert again is not None and again["accuracy"] == 0.5 and again["crop"] == [1, 2] and again["wall"] >= 100
    other = {**asked, "crop": (1, 3), "settings": {"loss": "labels", "seed": 0}, "new": None, "rate": 0.1}
    with pytest.raises(SystemExit) as refused:
        Stage(tmp_path / "gates", other).begin()
    said = str(refused.value)
    for part in (
        "crop [1, 2] there, [1, 3] asked for",
        "loss 'blur' there, 'labels' asked for",
        "rate None there, 0.1 asked for",
        str(tmp_path / "gates"),
    ):
        assert part in said
    assert "seed" not in said and "new" not in said
    with pytest.raises(SystemExit, match="steps 40 there, None asked for"):
        Stage(tmp_path / "gates", {key: value for key, value in asked.items() if key != "steps"}).begin()


def test_a_stage_that_was_stopped_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    assert Stage(tmp_path, {"lr": 0.1}).begin() is None
    torch.save({}, tmp_path / "checkpoint.pt")
    assert Stage(tmp_path, {"lr": 0.1}).begin() is None
    with pytest.raises(SystemExit, match=r"lr 0\.1 there, 0\.2 asked for"):
        Stage(tmp_path, {"lr": 0.2}).begin()
    assert Stage(tmp_path, {"lr": 0.2}, prefix="second.").begin() is None  # beside it, in the same folder
    assert not (tmp_path / "result.json").exists()


def test_a_stage_that_left_nothing_takes_other_settings(tmp_path: Path) -> None:
    """Its settings were bad ones, perhaps: they do not lock the folder for the corrected command."""
    assert Stage(tmp_path, {"lr": -0.1}).begin() is None
    second = Stage(tmp_path, {"lr": 0.1})
    assert second.begin() is None
    assert json.loads((tmp_path / "asked.json").read_text()) == {"lr": 0.1}
    second.trained(finished())
    second.write({"accuracy": 0.5})
    with pytest.raises(SystemExit, match=r"lr 0\.1 there, -0\.1 asked for"):
        Stage(tmp_path, {"lr": -0.1}).begin()
    own = Stage(tmp_path, {"lr": 0.1}, prefix="a.", checkpoint="a.pt")  # a folder of several stages
    assert own.begin() is None
    torch.save({}, tmp_path / "a.pt.previous")
    with pytest.raises(SystemExit, match="other settings"):
        Stage(tmp_path, {"lr": 0.2}, prefix="a.", checkpoint="a.pt").begin()
    (tmp_path / "a.asked.json").unlink()
    with pytest.raises(SystemExit, match="does not say what it was begun with"):
        own.begin()


def test_results_from_before_a_setting_was_noted_are_read(tmp_path: Path) -> None:
    first = Stage(tmp_path, {"lr": 0.1})
    first.begin()
    first.write({"accuracy": 0.5})
    again = Stage(tmp_path, {"lr": 0.1, "features": "abc"}, later=["features"])
    assert again.begin() == json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").unlink()
    again.begin()
    again.write({"accuracy": 0.5})
    with pytest.raises(SystemExit, match="features 'abc' there, 'abd' asked for"):
        Stage(tmp_path, {"lr": 0.1, "features": "abd"}, later=["features"]).begin()


def test_files_that_are_broken_or_from_elsewhere_are_named(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"lr": 0.1})
    (tmp_path / "result.json").write_text('{"accuracy": 0.5}')
    with pytest.raises(SystemExit, match="does not say what it was begun with"):
        stage.begin()
    (tmp_path / "asked.json").write_text('{"lr": 0.1')
    with pytest.raises(SystemExit, match=r"asked\.json holds no JSON"):
        stage.begin()
    with pytest.raises(SystemExit, match="bring it here"), without_traceback():
        raise FileNotFoundError("bring it here")


def test_a_digest_tells_weights_apart() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    first = digest(model)
    assert first == digest(model.state_dict()) and len(first) == 12
    model[1].num_batches_tracked += 1
    assert digest(model) != first
    image = torch.arange(6, dtype=torch.uint8)
    assert digest(image.view(2, 3)) != digest(image.view(3, 2))
    assert digest(image.view(3, 2).t().contiguous().t()) == digest(image.view(3, 2))  # however it lies in memory


@pytest.fixture
def on_made_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The full modes, with a small net and images made here."""

    def given(options: Any) -> Any:
        return resnet56.quick_model(), data.made(256), data.made(100, seed=1)

    for module in (resnet56, peer):
        monkeypatch.setattr(module, "given", given)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole = data.Batches.__iter__

    def interrupted(self: data.Batches):  # type: ignore[no-untyped-def]
        for index, batch in enumerate(whole(self)):
            if index == step and self.augment:
                signal.raise_signal(signal.SIGINT)
            yield batch

    monkeypatch.setattr(data.Batches, "__iter__", interrupted)


def test_an_interrupted_run_writes_no_result_and_keeps_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = gradient_shapes._quick_task()
    with monkeypatch.context() as context:
        interrupt_at(context, 3)
        with pytest.raises(SystemExit, match="start it again"):
            gradient_shapes.curve(task, "constant", 0, tmp_path)
    assert (tmp_path / "constant-0.pt").is_file() and not (tmp_path / "constant-0.result.json").exists()
    task.lr *= 2
    with pytest.raises(SystemExit, match=r"lr 0\.05 there, 0\.1 asked for"):
        gradient_shapes.curve(task, "constant", 0, tmp_path)
    task.lr /= 2
    found = gradient_shapes.curve(task, "constant", 0, tmp_path)
    assert found.steps[-1] == task.steps
    assert gradient_shapes.curve(task, "constant", 0, tmp_path) == found


def test_a_finished_resnet_is_not_trained_again_nor_renamed(
    tmp_path: Path, on_made_images: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ["--out", str(tmp_path), "--steps", "12", "--batch", "32", "--budget", "0.6", "--quiet", "--train", "gates"]
    with monkeypatch.context() as context:
        interrupt_at(context, 3)
        with pytest.raises(SystemExit, match="start it again"):
            resnet56.main(ask)
    report = resnet56.main(ask)
    written = (tmp_path / "result.json").read_bytes()
    assert resnet56.main(ask) == report and (tmp_path / "result.json").read_bytes() == written
    for other in (["--lr", "0.5"], ["--seed", "7"], ["--bf16"], ["--recalibrate", "2"], ["--loss", "taught"]):
        with pytest.raises(SystemExit, match=f"{other[0].removeprefix('--')} .* there, .* asked for"):
            resnet56.main([*ask, *other])
    assert (tmp_path / "result.json").read_bytes() == written


def test_a_bad_option_does_not_lock_the_folder(tmp_path: Path, on_made_images: None) -> None:
    ask = ["--out", str(tmp_path), "--steps", "4", "--batch", "32", "--budget", "0.6", "--quiet"]
    with pytest.raises(SystemExit, match="budget"):
        resnet56.main([*ask, "--budget", "0.0001"])  # no gates meet it
    assert resnet56.main(ask)["budget"] == 0.6


def test_a_finished_peer_is_not_trained_again_nor_renamed(tmp_path: Path, on_made_images: None) -> None:
    pytest.importorskip("torch_pruning")
    ask = ["--out", str(tmp_path), "--epochs", "2", "--batch", "32", "--budget", "0.7"]
    report = peer.main(ask)
    assert peer.main(ask) == json.loads((tmp_path / "result.json").read_text()) == report
    with pytest.raises(SystemExit, match=r"budget 0\.7 there, 0\.5 asked for"):
        peer.main([*ask[:-1], "0.5"])


def test_a_peer_that_was_stopped_goes_on(tmp_path: Path, on_made_images: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had not been stopped: after the cut, with the optimizer, rates and batches that it had."""
    pytest.importorskip("torch_pruning")
    ask = ["--epochs", "3", "--sparse-epochs", "1", "--batch", "32", "--budget", "0.7", "--out"]
    whole = peer.main([*ask, str(tmp_path / "whole")])
    assert whole["tool"].startswith("torch-pruning 1.")
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as context:
        passes = iter(range(3))
        batches = data.Batches.__iter__

        def interrupted(self: data.Batches):  # type: ignore[no-untyped-def]
            if self.augment and next(passes) == 2:
                raise KeyboardInterrupt
            return batches(self)

        context.setattr(data.Batches, "__iter__", interrupted)
        with pytest.raises(SystemExit, match="start it again to go on"):
            peer.main([*ask, str(stopped)])
    assert (stopped / "checkpoint.pt").is_file() and not (stopped / "result.json").exists()
    with pytest.raises(SystemExit, match="budget"):
        peer.main([*ask, str(stopped), "--budget", "0.5"])
    found = peer.main([*ask, str(stopped)])
    times = ("seconds", "wall")
    assert {k: v for k, v in found.items() if k not in times} == {k: v for k, v in whole.items() if k not in times}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--steps", "0"], "above 0"),
        (["--budget", "0"], "at most 1"),
        (["--rule", "paper"], "needs --weight"),
        (["--weight", "3"], "--rule paper"),
        (["--train", "joint", "--loss", "probe"], "--train gates"),
        (["--train", "joint", "--recalibrate", "5"], "--recalibrate"),
        (["--train", "gates", "--settle", "5"], "--settle"),
        (["--gate-lr", "0.1"], "--rule paper"),
        (["--close", "1.5"], "no share"),
    ],
)
def test_options_without_effect_are_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        resnet56.main([*options, "--quick"])
    assert complaint in capsys.readouterr().err


def test_the_rule_of_the_paper_and_late_closing_have_quick_runs() -> None:
    by_paper = ["--quick", "--quiet", "--train", "gates", "--rule", "paper", "--weight", "4"]
    assert resnet56.main(by_paper)["loss"] == "match"
    assert resnet56.main(["--quick", "--quiet", "--close", "0.95"])["steps"] == 12
