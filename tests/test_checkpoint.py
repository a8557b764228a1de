"""Checkpoints: all or nothing on disk, exact after a kill, and never of another model."""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import tgfx
from tests.support.killed_run import train
from tests.support.training import loader, same_state, small_gated
from tgfx.errors import TrainingError
from tgfx.training.checkpoint import Checkpoints

ROOT = Path(__file__).parent.parent


def checkpoints(folder: Path, architecture: str = "a") -> Checkpoints:
    return Checkpoints(folder / "last.pt", architecture, "Net")


# -- files -------------------------------------------------------------------------------------------------


def test_the_last_and_the_previous_are_kept(tmp_path: Path) -> None:
    own = checkpoints(tmp_path / "new" / "folder")
    assert own.load() is None
    for step in (1, 2, 3):
        own.save({"x": torch.tensor(step)}, step)
    assert sorted(path.name for path in own.path.parent.iterdir()) == ["last.pt", "last.pt.previous"]
    assert own.load() == {"x": torch.tensor(3)} and own.step == 3
    own.path.unlink()  # as after a kill between the two renames
    assert checkpoints(own.path.parent).load() == {"x": torch.tensor(2)}


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_file_gives_way_to_the_previous(tmp_path: Path, damage: str) -> None:
    own = checkpoints(tmp_path)
    for step in (1, 2):
        own.save({"x": torch.full((1000,), float(step))}, step)
    content = bytearray(own.path.read_bytes())
    if damage == "flipped":
        at = content.index(torch.full((8,), 2.0).numpy().tobytes()) + 400
        content[at] ^= 1
    spoilt = {"cut": content[: len(content) // 2], "flipped": content, "empty": b"", "text": b"hello"}[damage]
    own.path.write_bytes(spoilt)
    with pytest.warns(UserWarning, match=r"last\.pt: .*going on from last\.pt\.previous, step 1"):
        state = checkpoints(tmp_path).load()
    assert state is not None and state["x"][0] == 1
    own.previous.write_bytes(b"")
    with pytest.raises(TrainingError, match="no checkpoint can be read") as caught:
        checkpoints(tmp_path).load()
    assert caught.value.fix and caught.value.__cause__ is not None


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    checkpoints(tmp_path).save({}, 1)
    with pytest.raises(TrainingError, match="of another model"):
        checkpoints(tmp_path, "b").load()


def test_objects_are_refused_when_written_not_when_needed(tmp_path: Path) -> None:
    own = checkpoints(tmp_path)
    with pytest.raises(TrainingError, match="without unpickling code"):
        own.save({"x": nn.Linear(1, 1)}, 1)
    assert not list(tmp_path.iterdir())


def test_a_new_run_does_not_fall_back_to_an_old_one(tmp_path: Path) -> None:
    old = checkpoints(tmp_path)
    for step in (1, 2):
        old.save({}, step)
    checkpoints(tmp_path).save({}, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_folder_is_no_place(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="place is taken"):
        Checkpoints(tmp_path, "a", "Net")


# -- resume ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[tgfx.GatedModule, tgfx.FitResult, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return (*train(folder), folder)


@pytest.fixture(scope="module")
def compacted(tmp_path_factory) -> tuple[tgfx.GatedModule, tgfx.FitResult, Path]:
    folder = tmp_path_factory.mktemp("compacted")
    return (*train(folder, compact_every=3), folder)


def without_time(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize("every", [None, 3], ids=["whole", "compacted"])
def test_a_killed_run_ends_as_if_never_killed(tmp_path: Path, every: int | None, request) -> None:
    """SIGKILL at a moment that no one chose; weights, gates and history are equal to the bit."""
    patience = random.SystemRandom().uniform(0, 0.4)  # of the second or so that is left after the first checkpoint
    whole, expected, whole_folder = request.getfixturevalue("uninterrupted" if every is None else "compacted")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-m", "tests.support.killed_run", str(tmp_path), "0.03"]
    command += [] if every is None else [str(every)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        patient_until = time.monotonic() + 60
        while not (tmp_path / "last.pt").exists():
            assert process.poll() is None and time.monotonic() < patient_until
            time.sleep(0.005)
        time.sleep(patience)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"it was finished before it was killed, {patience} s"
    resumed, result = train(tmp_path, compact_every=every)
    assert every is None or resumed.conv2.weight.numel() < small_gated().conv2.weight.numel()
    assert same_state(whole.state_dict(), resumed.state_dict()) == []
    assert result.stopped == expected.stopped == "finished" and result.steps == expected.steps == 15
    assert without_time(result.history.rows) == without_time(expected.history.rows)
    assert result.history.kept == expected.history.kept
    logs = [
        list(csv.DictReader((folder / "log" / "metrics.csv").read_text().splitlines()))
        for folder in (whole_folder, tmp_path)
    ]
    assert without_time(logs[0]) == without_time(logs[1])


def test_a_finished_run_is_not_trained_again(tmp_path: Path, uninterrupted) -> None:
    whole, _, folder = uninterrupted
    again, result = train(folder)
    assert same_state(whole.state_dict(), again.state_dict()) == []
    assert (result.stopped, result.steps) == ("finished", 15)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_resume_with_any_loader_and_optimizer(tmp_path: Path, seed: int | None, optimizer: type) -> None:
    """Stopped by a loss function that fails at a step; loaders with and without a generator of their own."""

    def run(fail_at: int | None, name: str) -> tgfx.GatedModule:
        gated, calls = small_gated(), 0

        def loss_fn(output, target):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise ZeroDivisionError
            return F.cross_entropy(output, target)

        torch.manual_seed(11)
        tgfx.fit(
            gated, loader(seed=seed), loss_fn, budget={"params": 0.6}, epochs=3, checkpoint=tmp_path / name,
            optimizer=optimizer(tgfx.param_groups(gated, lr=0.01)), checkpoint_every=1, progress=False,
            scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=19),
        )  # fmt: skip
        return gated

    whole = run(None, "whole.pt")
    with pytest.raises(ZeroDivisionError):
        run(9, "part.pt")
    torch.manual_seed(99)
    assert same_state(whole.state_dict(), run(None, "part.pt").state_dict()) == []


def test_resume_with_workers(tmp_path: Path) -> None:
    """Workers read ahead, and draw from seeds of the epoch."""

    class Noisy(Dataset):
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.randn(1, 6, 6), index % 4

    def run(name: str, fail_at: int | None = None) -> tgfx.GatedModule:
        gated, calls = small_gated(), 0

        def loss_fn(output, target):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise ZeroDivisionError
            return F.cross_entropy(output, target)

        data = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1)
        options = {"budget": {"flops": 0.5}, "epochs": 2, "checkpoint_every": 1, "seed": 4, "progress": False}
        tgfx.fit(gated, data, loss_fn, checkpoint=tmp_path / name, **options)
        return gated

    whole = run("whole.pt")
    with pytest.raises(ZeroDivisionError):
        run("part.pt", fail_at=9)
    assert same_state(whole.state_dict(), run("part.pt").state_dict()) == []


OTHER_RUNS = {
    "budget": ({"budget": {"flops": 0.4}}, "another budget"),
    "epochs": ({"epochs": 3}, "another number of steps"),
    "batch size": ({"train_loader": loader(8)}, "another number of steps"),
    "rule": ({"rule": "paper", "weight": 2.0}, "another rule"),
    "scheduler": ({"scheduler": None}, "another scheduler"),
    "schedule": ({"schedule": tgfx.Schedule(6, close=0.3)}, "another schedule"),
}


@pytest.mark.parametrize(("change", "complaint"), OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_a_checkpoint_of_another_run(tmp_path: Path, change: dict, complaint: str) -> None:
    options = {"train_loader": loader(), "budget": {"flops": 0.5}, "epochs": 1, "checkpoint": tmp_path / "c.pt"}
    tgfx.fit(small_gated(), loss_fn=F.cross_entropy, progress=False, **options)
    gated = small_gated()
    before = {name: tensor.clone() for name, tensor in gated.state_dict().items()}
    with pytest.raises(TrainingError, match=complaint):
        tgfx.fit(gated, loss_fn=F.cross_entropy, progress=False, **{**options, **change})
    assert same_state(before, gated.state_dict()) == []
    assert tgfx.fit(gated, loss_fn=F.cross_entropy, progress=False, resume=False, **{**options, **change}).steps


def test_a_checkpoint_that_does_not_say_its_schedule(tmp_path: Path) -> None:
    """As they were written before; and one that says it knows the default by its numbers."""
    options = {"budget": {"flops": 0.5}, "epochs": 2, "checkpoint": tmp_path / "last.pt", "progress": False}
    tgfx.fit(small_gated(), loader(), F.cross_entropy, **options)
    assert tgfx.fit(small_gated(), loader(), F.cross_entropy, schedule=tgfx.Schedule(12), **options).steps == 12
    content = torch.load(tmp_path / "last.pt", weights_only=True)
    del content["state"]["settings"]["schedule"]
    torch.save(content, tmp_path / "last.pt")
    other = tgfx.Schedule(12, close=0.3)
    assert tgfx.fit(small_gated(), loader(), F.cross_entropy, schedule=other, **options).steps == 12


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    options = {"budget": {"flops": 0.5}, "checkpoint": tmp_path / "c.pt", "progress": False}
    tgfx.fit(small_gated(), loader(), F.cross_entropy, **options)
    with pytest.raises(TrainingError, match="of another model"):
        tgfx.fit(small_gated(width=13), loader(), F.cross_entropy, **options)
