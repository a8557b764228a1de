"""Two real processes over loopback: equal gates at every step, one plan, and a killed rank that resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*LAUNCH, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("distributed")
    first = launch("tests.support.distributed_run", "first", str(folder))
    assert (folder / "first.json").is_file(), first.stderr[-4000:]
    assert first.returncode != 0, "rank 1 was to die"
    assert "exitcode  : 13" in first.stderr, first.stderr[-4000:]
    assert (folder / "checkpoint.pt").is_file()
    second = launch("tests.support.distributed_run", "second", str(folder))
    assert second.returncode == 0, second.stderr[-4000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("first", "second")}


def test_ddp_meets_the_budget(runs: dict[str, Any]) -> None:
    # gates, latent weights and ratio were compared between the ranks after each step, in the processes
    ddp = runs["first"]["ddp"]
    assert 0.49 <= ddp["ratio"] <= 0.5
    assert len(ddp["ratios"]) == 30 and ddp["ratios"][0] == pytest.approx(1, abs=1e-5)
    assert ddp["moved"] == 0  # the controller had landed there itself


def test_fsdp_does_what_ddp_does(runs: dict[str, Any]) -> None:
    ddp, fsdp = runs["first"]["ddp"], runs["first"]["fsdp"]
    assert fsdp["gates"] == ddp["gates"]
    assert fsdp["ratio"] == ddp["ratio"]
    assert fsdp["weights"] == pytest.approx(ddp["weights"], abs=1e-4)


def test_a_killed_rank_resumes(runs: dict[str, Any]) -> None:
    whole, resumed = runs["first"]["ddp"], runs["second"]["ddp"]
    assert runs["second"]["from"] == 10  # it died at 17, and saved every 10 steps
    assert resumed["gates"] == whole["gates"]
    assert resumed["weights"] == whole["weights"]  # to the bit


def test_channels_leave_on_all_ranks_alike(tmp_path: Path) -> None:
    # gates and weights were compared between the ranks after each step, in the processes
    done = launch("tests.support.distributed_run", "compacted", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "compacted.json").read_text())
    sizes = found["sizes"]
    assert len(sizes) == 30 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.8 * sizes[0]
    assert {step for step in range(2, 31) if sizes[step - 1] < sizes[step - 2]} <= set(range(4, 31, 4))
    assert 0.45 <= found["whole"]["ratio"] <= 0.5
    assert found["at resume"] == sizes[19] < sizes[0]
    assert found["resumed"]["weights"] == found["whole"]["weights"]  # to the bit


def test_single_weights_are_the_same_on_all_ranks() -> None:
    # compared after each step, in the processes
    done = launch("tests.support.weight_ranks")
    assert done.returncode == 0, done.stderr[-4000:]


def test_fit_refuses_several_processes(tmp_path: Path) -> None:
    done = launch("tests.support.distributed_run", "fit", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(tmp_path.iterdir())


def test_shards_are_not_compacted() -> None:
    done = launch("examples.distributed.train", "--quick", "--shard", "--compact-every", "5")
    assert done.returncode != 0 and "works with DDP only" in done.stderr


@pytest.mark.parametrize("options", [[], ["--compact-every", "4"]], ids=["whole", "compacted"])
def test_the_example_runs(options: list[str]) -> None:
    done = launch("examples.distributed.train", "--quick", "--steps", "20", *options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "50.0%" in done.stdout and "accuracy" in done.stdout
