"""tgfx.fit(compact_every=...): smaller on the way, the budget met all the same, and exact after an abort."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import tgfx
from tests.support.training import SmallNet, images, loader, same_state, small_gated
from tgfx.compaction import is_compacted
from tgfx.errors import GranularityError, InputError, TgfxError, TrainingError
from tgfx.plan import fingerprint

QUIET = {"progress": False, "budget": {"flops": 0.5}, "lr": 0.05}
X, Y = images()


def weights(gated: tgfx.GatedModule) -> int:
    gates = sum(gate.weight.numel() for gate in gated.gates.values())
    return sum(p.numel() for p in gated.parameters()) - gates


class Branched(nn.Module):
    """Its branch can go as a whole: nothing shifts at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.wide, self.inner = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.back, self.fc = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.back(torch.relu(self.inner(self.wide(x))))
        return self.fc(x.mean((2, 3)))


# -- a run -------------------------------------------------------------------------------------------------


def test_smaller_on_the_way_and_the_budget_is_met() -> None:
    gated = small_gated().eval()
    before, architecture, whole = dict(gated.named_parameters()), fingerprint(gated), weights(gated)
    seen: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(gated.conv2.weight.shape[0])
        return F.cross_entropy(output, target)

    result = tgfx.fit(gated, loader(), loss_fn, epochs=12, seed=0, compact_every=5, log_every=7, **QUIET)
    assert 0.46 <= result.ratios["flops"] <= 0.5
    assert seen == sorted(seen, reverse=True) and seen[-1] < seen[0] == 12  # what was trained had shrunk
    assert all(p is before[name] for name, p in gated.named_parameters())
    assert fingerprint(gated) == architecture
    assert not any(module.training for module in gated.modules())
    counts = result.history.column("parameters")
    assert counts[0] == whole and counts[-1] == weights(gated) < 0.7 * whole
    steps = {row["step"] for row in result.history.rows}
    assert {step for step in range(1, 73) if step % 7 == 0} < steps  # and a row where something was removed
    assert steps - set(range(0, 73, 7)) <= set(range(0, 73, 5)) | {72}
    compact = tgfx.shrink(gated).eval()
    with torch.no_grad():
        torch.testing.assert_close(compact(X), gated(X), rtol=0, atol=1e-5)
        assert (compact(X).argmax(1) == Y).float().mean() >= 0.95  # chance is 0.25
    assert sum(p.numel() for p in compact.parameters()) == weights(gated)  # all that was closed has gone
    assert tgfx.finish(gated, flops=0.5).moved == 0


def test_patience_is_passed_on() -> None:
    def removals(patience: int) -> list[float]:
        rows = tgfx.fit(
            small_gated(), loader(), F.cross_entropy, epochs=6, seed=0, compact_every=3, patience=patience, **QUIET
        ).history.rows
        return [row["step"] for row in rows if row["parameters"] < rows[0]["parameters"]]

    assert min(removals(0)) <= min(removals(1))
    assert min(removals(5)) >= 3 * (5 + 1)  # closed at six moments in a row
    assert removals(100) == []


def test_what_lands_on_the_budget_is_not_removed() -> None:
    """Few and dear channels: the best closed one of each group stays until the gates stand still."""
    for seed in range(6):
        result = tgfx.fit(
            small_gated(), loader(), F.cross_entropy, epochs=8, seed=seed, compact_every=1, patience=0, **QUIET
        )
        assert 0.5 - 0.045 < result.ratios["flops"] <= 0.5  # a channel costs 0.045 or more


@pytest.mark.parametrize("options", [{"train": "gates"}, {"rule": "paper", "weight": 4.0, "gate_lr": 1.0}], ids=str)
def test_other_ways_to_train(options: dict[str, Any]) -> None:
    gated = small_gated()
    whole = weights(gated)
    result = tgfx.fit(gated, loader(), F.cross_entropy, epochs=8, seed=0, compact_every=4, **QUIET, **options)
    assert result.ratios["flops"] < 1 and weights(gated) < whole
    assert all(p.requires_grad for p in gated.parameters())


def test_held_gates_that_are_closed_go() -> None:
    gated = small_gated()
    gated.gates["conv1"].set_open_(torch.arange(12) % 2 == 0)
    tgfx.fit(gated, loader(), F.cross_entropy, compact_every=2, **{**QUIET, "budget": None})
    assert gated.conv1.weight.shape[0] == 6


# -- resume ------------------------------------------------------------------------------------------------


def failing(at: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise ZeroDivisionError
        return F.cross_entropy(output, target)

    return loss_fn


def same_history(a: tgfx.FitResult, b: tgfx.FitResult) -> bool:
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in r.history.rows] for r in (a, b)]
    return rows[0] == rows[1]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fail_at", [5, 12, 20, 33])
def test_an_aborted_run_ends_as_if_never_aborted(tmp_path: Path, optimizer: type, fail_at: int) -> None:
    def run(at: int | None, name: str) -> tuple[tgfx.GatedModule, tgfx.FitResult]:
        gated = small_gated()
        rates = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        result = tgfx.fit(
            gated, loader(), failing(at), epochs=6, seed=2, checkpoint=tmp_path / name, checkpoint_every=1, patience=0,
            compact_every=3, optimizer=optimizer(tgfx.param_groups(gated, lr=0.01), lr=0.01, **rates), **QUIET,
        )  # fmt: skip
        return gated, result

    whole, expected = run(None, "whole.pt")
    assert weights(whole) < weights(small_gated())
    with pytest.raises(ZeroDivisionError):
        run(fail_at, "part.pt")
    torch.manual_seed(99)
    resumed, found = run(None, "part.pt")
    assert same_state(whole.state_dict(), resumed.state_dict()) == []
    assert same_history(found, expected)


def test_resume_without_a_branch_that_has_gone(tmp_path: Path) -> None:
    """The fresh optimizer holds parameters that the model of the checkpoint has not got any more."""

    def run(at: int | None, name: str) -> tgfx.GatedModule:
        torch.manual_seed(0)
        gated = tgfx.transform(Branched(), X[:2])
        gated.gates["wide"].set_open_(torch.zeros(8, dtype=torch.bool))
        options = {**QUIET, "budget": None, "checkpoint": tmp_path / name, "checkpoint_every": 1, "seed": 2}
        tgfx.fit(gated, loader(), failing(at), epochs=2, compact_every=2, patience=0, **options)
        return gated

    whole = run(None, "whole.pt")
    assert "wide" not in whole.gates and "back.weight" not in dict(whole.named_parameters())
    with pytest.raises(ZeroDivisionError):
        run(8, "part.pt")
    assert same_state(whole.state_dict(), run(None, "part.pt").state_dict()) == []


def test_checkpoints_of_other_compactions(tmp_path: Path) -> None:
    options = {**QUIET, "checkpoint": tmp_path / "c.pt", "checkpoint_every": 4, "epochs": 6, "patience": 0}
    gated = small_gated()
    with pytest.raises(ZeroDivisionError):
        tgfx.fit(gated, loader(), failing(33), compact_every=8, **options)
    for other in ({"compact_every": None}, {"compact_every": 4}, {"compact_every": 8, "patience": 1}):
        fresh = small_gated()
        with pytest.raises(TrainingError, match=r"another (compact_every|patience)"):
            tgfx.fit(fresh, loader(), F.cross_entropy, **{**options, **other})
        assert not is_compacted(fresh.state_dict())
    gated.gates["conv1"].set_open_(torch.arange(len(gated.gates["conv1"].weight)) == 0)
    tgfx.compact_(gated, patience=0)  # further than the checkpoint
    with pytest.raises(TrainingError, match="does not fit this run") as caught:
        tgfx.fit(gated, loader(), F.cross_entropy, compact_every=8, **options)
    assert "has not got any more" in str(caught.value)


# -- refusals ----------------------------------------------------------------------------------------------


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux = nn.Linear(36, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x.flatten(1)).relu()
        return (self.b(x), self.aux(x)) if self.training else self.b(x)


def normed() -> nn.Module:
    model = SmallNet()
    parametrizations.weight_norm(model.conv2)
    return model


REFUSED = {
    "weights": (SmallNet, "weight", GranularityError, "single weights"),
    "two structures": (Auxiliary, "channel", InputError, "another path in train mode"),
    "parametrised": (normed, "channel", InputError, "a parametrization computes"),
}


@pytest.mark.parametrize(("build", "granularity", "kind", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compacted(build: Any, granularity: str, kind: type[TgfxError], complaint: str) -> None:
    gated = tgfx.transform(build(), X[:2], granularity=granularity)
    before = {name: tensor.clone() for name, tensor in gated.state_dict().items()}
    with pytest.raises(kind, match=complaint) as caught:
        tgfx.fit(gated, loader(), F.cross_entropy, compact_every=2, **QUIET)
    assert caught.value.fix
    with pytest.raises(kind, match=complaint):
        tgfx.compact_(gated, patience=0)
    assert same_state(before, gated.state_dict()) == []


@pytest.mark.parametrize("wrong", [{"compact_every": 0}, {"compact_every": 2, "patience": -1}], ids=str)
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        tgfx.fit(small_gated(), loader(), F.cross_entropy, **QUIET, **wrong)
