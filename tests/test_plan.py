"""Plans: a cut on disk without pickle, rebuilt from the model's class; damaged or foreign ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import tgfx
from tgfx.errors import InputError, PlanError
from tgfx.plan import PLAN, WEIGHTS


class Net(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.b = nn.Conv2d(width, 10, 3)
        self.tied = nn.Linear(10, 10)
        self.again = nn.Linear(10, 10)
        self.again.weight = self.tied.weight
        self.out = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(torch.relu(self.bn(self.a(x)))).mean((2, 3))
        return self.out(torch.relu(self.again(torch.relu(self.tied(x)))))


EXAMPLE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gated() -> tgfx.GatedModule:
    torch.manual_seed(0)
    gated = tgfx.transform(Net(), EXAMPLE, ignore="b").eval()
    for gate in gated.gates.values():
        gate.set_open_(torch.arange(len(gate.weight)) % 3 != 1)
    return gated


def test_round_trip_is_bitwise(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    folder = tgfx.save_plan(gated, tmp_path / "deep" / "plan")
    assert sorted(p.name for p in folder.iterdir()) == [PLAN, WEIGHTS]
    rebuilt = tgfx.load_plan(folder, Net(), EXAMPLE).eval()
    compact = tgfx.shrink(gated).eval()
    assert torch.equal(rebuilt(EXAMPLE), compact(EXAMPLE))
    assert rebuilt.state_dict().keys() == compact.state_dict().keys()
    assert rebuilt.again.weight is rebuilt.tied.weight
    json.loads((folder / PLAN).read_text())  # a plain text file


def test_saving_again_replaces_the_pair(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    next(iter(gated.gates.values())).set_open_(torch.ones(12, dtype=torch.bool))
    tgfx.save_plan(gated, folder)
    rebuilt = tgfx.load_plan(folder, Net(), EXAMPLE).eval()
    assert torch.equal(rebuilt(EXAMPLE), tgfx.shrink(gated).eval()(EXAMPLE))
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]  # nothing half-written stays


def test_round_to_is_part_of_the_plan(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    folder = tgfx.save_plan(gated, tmp_path / "plan", round_to=4)
    rebuilt = tgfx.load_plan(folder, Net(), EXAMPLE)
    assert rebuilt.a.weight.shape[0] % 4 == 0


def test_another_architecture_is_refused(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    with pytest.raises(PlanError, match="another architecture"):
        tgfx.load_plan(folder, Net(width=16), EXAMPLE)
    with pytest.raises(PlanError, match="another architecture"):
        tgfx.load_plan(folder, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(1, 4))


def _cut_short(folder: Path) -> None:
    (folder / PLAN).write_text((folder / PLAN).read_text()[:40])


def _no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def _torn_weights(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def _edited(change: dict) -> None:
    def edit(folder: Path) -> None:
        plan = json.loads((folder / PLAN).read_text())
        plan.update({key: value(plan) for key, value in change.items()})
        (folder / PLAN).write_text(json.dumps(plan))

    return edit


DAMAGE = {
    "cut short": _cut_short,
    "no weights": _no_weights,
    "torn weights": _torn_weights,
    "another format": _edited({"format": lambda plan: 99}),
    "not a plan": lambda folder: (folder / PLAN).write_text("[]"),
    "position outside": _edited({"kept": lambda plan: {name: [0, 999] for name in plan["kept"]}}),
    "unsorted": _edited({"kept": lambda plan: {name: [1, 0] for name in plan["kept"]}}),
    "groups missing": _edited({"kept": lambda plan: {}}),
    "other cut than the weights": _edited({"kept": lambda plan: {name: [0] for name in plan["kept"]}}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_plans_are_refused(damage, gated: tgfx.GatedModule, tmp_path: Path) -> None:
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    damage(folder)
    with pytest.raises(PlanError):
        tgfx.load_plan(folder, Net(), EXAMPLE)


def test_missing_folder_and_wrong_object(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such folder"):
        tgfx.load_plan(tmp_path / "nowhere", Net(), EXAMPLE)
    with pytest.raises(InputError):
        tgfx.save_plan(Net(), tmp_path / "plan")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_plans_of_the_first_format_are_read(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    plan = json.loads((folder / PLAN).read_text())
    assert plan["format"] == 2 and plan["granularity"] == ["channel"]
    plan["format"] = 1
    del plan["granularity"]
    (folder / PLAN).write_text(json.dumps(plan))
    compact = tgfx.shrink(gated).eval()
    assert torch.equal(tgfx.load_plan(folder, Net(), EXAMPLE).eval()(EXAMPLE), compact(EXAMPLE))


def test_an_unknown_granularity_is_damage(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    folder = tgfx.save_plan(gated, tmp_path / "plan")
    plan = json.loads((folder / PLAN).read_text())
    plan["granularity"] = ["molecule"]
    (folder / PLAN).write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="cannot be read"):
        tgfx.load_plan(folder, Net(), EXAMPLE)
