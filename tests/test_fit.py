"""tgfx.fit: what it trains, what it is given, and every way to end."""

import csv
import io
import os
import signal
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import tgfx
from tests.support.training import SmallNet, images, is_gate, loader, same_state, small_gated, state
from tgfx.errors import TrainingError

QUIET = {"progress": False, "budget": {"flops": 0.5}, "lr": 0.05}
X, Y = images()


def accuracy(model: nn.Module) -> dict[str, float]:
    assert not model.training and not torch.is_grad_enabled()
    return {"accuracy": (model(X).argmax(1) == Y).float().mean().item()}


@pytest.fixture
def gated() -> tgfx.GatedModule:
    return small_gated()


# -- what is trained ---------------------------------------------------------------------------------------


def test_joint_training_meets_the_budget_and_learns(gated) -> None:
    result = tgfx.fit(gated, loader(), F.cross_entropy, epochs=12, val=accuracy, seed=0, **QUIET)
    assert (result.stopped, result.steps) == ("finished", 72)
    assert 0.46 <= result.ratios["flops"] <= 0.5  # one channel of 12 is about 4% here
    assert result.ratios["flops"] == pytest.approx(float(gated.eval().ratio("flops")), abs=1e-12)
    scores = result.history.column("val_accuracy")
    assert len(scores) == 12 and scores[-1] >= 0.95, scores  # chance is 0.25
    compact = tgfx.shrink(gated)
    with torch.no_grad():
        assert accuracy(compact.eval()) == {"accuracy": scores[-1]}


@pytest.mark.parametrize("recalibrate", [0, 3])
def test_gates_only(gated, recalibrate: int) -> None:
    """Weights and, without recalibration, batch norm statistics are the same bits."""
    tgfx.fit(gated, loader(), F.cross_entropy, epochs=4, seed=0, **{**QUIET, "budget": {"flops": 1.0}})
    before = state(gated)
    result = tgfx.fit(gated, loader(), F.cross_entropy, epochs=4, train="gates", recalibrate=recalibrate, **QUIET)
    changed = same_state(before, gated.state_dict())
    statistics = {name for name in before if "running" in name or "num_batches" in name}
    assert {name for name in changed if is_gate(name, gated)}
    assert {name for name in changed if not is_gate(name, gated)} == (statistics if recalibrate else set())
    assert 0.46 <= result.ratios["flops"] <= 0.5
    assert all(p.requires_grad for p in gated.parameters())


def test_without_a_budget_the_gates_are_held(gated) -> None:
    gate = next(iter(gated.gates.values()))
    gate.set_open_(torch.arange(12) % 2 == 0)
    before = state(gated)
    result = tgfx.fit(gated, loader(), F.cross_entropy, **{**QUIET, "budget": None})
    changed = same_state(before, gated.state_dict())
    assert changed and not any(is_gate(name, gated) for name in changed)
    assert result.ratios["flops"] < 1


def test_the_papers_rule_lets_the_optimizer_move_the_gates(gated) -> None:
    before = state(gated)
    options = {**QUIET, "rule": "paper", "weight": 4.0, "gate_lr": 1.0}
    result = tgfx.fit(gated, loader(), F.cross_entropy, epochs=5, **options)
    assert [n for n in same_state(before, gated.state_dict()) if is_gate(n, gated)]
    assert result.ratios["flops"] < 1 and set(result.history.column("phase")) == {"train"}


def test_modes_and_controllers_are_put_back(gated) -> None:
    gated.train()
    gated.conv1.eval()
    gated.budget_loss(flops=0.3)
    earlier = gated.controller
    tgfx.fit(gated, loader(), F.cross_entropy, **QUIET)
    assert gated.training and not gated.conv1.training
    assert gated.controller is None and earlier is not None and earlier.closed


def test_a_second_run_goes_on_from_where_the_first_ended(gated) -> None:
    tgfx.fit(gated, loader(), F.cross_entropy, epochs=3, **QUIET)
    reached = float(gated.eval().ratio("flops"))
    result = tgfx.fit(gated, loader(), F.cross_entropy, epochs=3, **{**QUIET, "budget": {"flops": 0.3}})
    assert max(result.history.column("ratio_flops")) <= reached + 1e-9
    assert result.ratios["flops"] <= 0.3


# -- steps -------------------------------------------------------------------------------------------------


def test_accumulation_is_the_mean_over_batches() -> None:
    """Two batches of 8 and one of 16 give the same step, in a model without batch statistics."""

    def trained(batch: int, accumulate: int) -> nn.Module:
        torch.manual_seed(0)
        gated = tgfx.transform(nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4)), X[:2])
        data = [(X[i : i + batch], Y[i : i + batch]) for i in range(0, 96, batch)]
        result = tgfx.fit(gated, data, F.cross_entropy, epochs=3, accumulate=accumulate, **QUIET)
        assert result.steps == 18
        return gated

    one, two = trained(16, 1), trained(8, 2)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_the_last_step_of_an_epoch_may_have_fewer_batches(gated) -> None:
    assert tgfx.fit(gated, loader(20), F.cross_entropy, epochs=2, accumulate=4, **QUIET).steps == 4  # 4 + 1, twice


def test_clipping_is_for_weights(gated) -> None:
    before = state(gated)
    options = {**QUIET, "weight_decay": 0.0, "lr": 1.0, "scheduler": None, "clip": 1e-3, "budget": {"flops": 1.0}}
    tgfx.fit(gated, loader(96), F.cross_entropy, **options)
    moved = [gated.state_dict()[n] - before[n] for n, p in gated.named_parameters() if not is_gate(n, gated)]
    assert torch.stack([m.norm() for m in moved]).norm() == pytest.approx(1e-3, rel=1e-3)


def test_bf16(gated) -> None:
    seen = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return F.cross_entropy(output.float(), target)

    result = tgfx.fit(gated, loader(), loss_fn, epochs=2, amp=torch.bfloat16, **QUIET)
    assert set(seen) == {torch.bfloat16} and result.ratios["flops"] <= 0.5
    assert all(p.dtype == torch.float32 for p in gated.parameters())


def test_schedulers(gated) -> None:
    cosine = tgfx.fit(gated, loader(), F.cross_entropy, log_every=1, **QUIET).history.column("lr")
    assert cosine[0] == 0.05 and cosine[3] == pytest.approx(0.025) and cosine == sorted(cosine, reverse=True)
    constant = tgfx.fit(gated, loader(), F.cross_entropy, scheduler=None, **QUIET).history.column("lr")
    assert set(constant) == {0.05}
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=1.0))
    own = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    rates = tgfx.fit(gated, loader(), F.cross_entropy, optimizer=optimizer, scheduler=own, **QUIET).history.column("lr")
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


# -- batches -----------------------------------------------------------------------------------------------


class Keyed(nn.Module):
    """Takes and gives what Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallNet()

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(pixels), labels)}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(36, 24), nn.Linear(36, 24), nn.Linear(24, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.c(torch.relu(self.a(left) + self.b(right)))


def test_batches_of_all_forms() -> None:
    flat = X.flatten(1)
    cases = [
        (Keyed(), {"pixels": X, "labels": Y}, None),
        (TwoInputs(), ((flat, flat), Y), F.cross_entropy),
        (TwoInputs(), ({"left": flat, "right": flat}, Y), F.cross_entropy),
        (nn.Sequential(nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 36)), flat, F.mse_loss),
        (SmallNet(), (X, Y, torch.ones(96)), lambda o, y, w: (w * F.cross_entropy(o, y, reduction="none")).mean()),
    ]
    for model, batch, loss_fn in cases:
        args = batch[0] if isinstance(batch, tuple) else batch
        gated = tgfx.transform(model, args)
        result = tgfx.fit(gated, [batch], loss_fn, epochs=6, **QUIET)
        assert result.steps == 6 and result.ratios["flops"] <= 0.5, type(model).__name__


def test_a_training_step_of_ones_own(gated) -> None:
    def training_step(model: nn.Module, batch: SimpleNamespace) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    data = [SimpleNamespace(x=X, y=Y)]
    assert tgfx.fit(gated, data, training_step=training_step, steps=5, **QUIET).steps == 5


def test_tensors_are_moved_wherever_they_are_packed() -> None:
    from tgfx.training.device import to_device

    Pair = namedtuple("Pair", "a b")
    moved = to_device([{"x": X}, Pair(X, "name"), (X, None, 3)], torch.device("meta"))
    assert moved[0]["x"].is_meta and moved[1].a.is_meta and moved[1].b == "name"
    assert moved[2][0].is_meta and moved[2][1:] == (None, 3) and isinstance(moved[1], Pair)


def test_batch_sizes_may_change_from_step_to_step(gated) -> None:
    data = [(X[:n], Y[:n]) for n in (3, 17, 2, 40, 8)]
    assert tgfx.fit(gated, data, F.cross_entropy, epochs=4, **QUIET).ratios["flops"] <= 0.5


# -- ways to end -------------------------------------------------------------------------------------------


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    def run(name: str, strike: int | None) -> tuple[tgfx.GatedModule, tgfx.FitResult]:
        gated, calls = small_gated(), 0

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == strike:
                os.kill(os.getpid(), signal.SIGINT)
            return F.cross_entropy(output, target)

        result = tgfx.fit(gated, loader(), loss_fn, epochs=3, checkpoint=tmp_path / name, seed=2, **QUIET)
        return gated, result

    whole, _ = run("whole.pt", None)
    _, stopped = run("part.pt", 8)
    assert (stopped.stopped, stopped.steps) == ("interrupted", 8)
    assert stopped.checkpoint == tmp_path / "part.pt" and stopped.checkpoint.exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed, result = run("part.pt", None)
    assert (result.stopped, result.steps) == ("finished", 18)
    assert same_state(whole.state_dict(), resumed.state_dict()) == []


def test_a_second_ctrl_c_interrupts_at_once(gated) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        tgfx.fit(gated, loader(), loss_fn, **QUIET)
    assert gated.controller is None


@pytest.mark.parametrize("where", ["loss", "gradient", "data"])
def test_not_finite_applies_nothing_and_keeps_the_last_checkpoint(tmp_path: Path, gated, where: str) -> None:
    calls, good = 0, {}

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        loss = F.cross_entropy(output, target)
        if calls < 6 or where == "data":
            return loss
        return loss * float("inf") if where == "loss" else loss + (loss - loss.detach()).sqrt()  # slope 1/0

    class Data:
        def __len__(self) -> int:
            return 8

        def __iter__(self):
            for index in range(8):
                if index == 5:
                    good.update(state(gated))
                yield (X + (float("nan") if where == "data" and index == 5 else 0), Y)

    with pytest.raises(TrainingError, match="not finite") as caught:
        tgfx.fit(gated, Data(), loss_fn, checkpoint=tmp_path / "c.pt", checkpoint_every=2, **QUIET)
    assert "step 6, epoch 1" in caught.value.where and f"{tmp_path / 'c.pt'} (step 4)" in caught.value.where
    assert good and same_state(good, gated.state_dict()) == []  # batch norm statistics too
    assert torch.load(tmp_path / "c.pt", weights_only=True)["step"] == 4


def test_a_loader_that_raises(tmp_path: Path, gated) -> None:
    class Data:
        broken = True

        def __len__(self) -> int:
            return 8

        def __iter__(self):
            for index in range(8):
                if index == 5 and self.broken:
                    raise OSError("disk gone")
                yield X, Y

    data = Data()
    with pytest.raises(TrainingError, match="the loader failed") as caught:
        tgfx.fit(gated, data, F.cross_entropy, checkpoint=tmp_path / "c.pt", **QUIET)
    error = caught.value
    assert isinstance(error.__cause__, OSError) and "disk gone" in error.found
    assert "batch 6 of epoch 1" in error.where and "(step 5)" in error.where
    data.broken = False
    result = tgfx.fit(small_gated(), data, F.cross_entropy, checkpoint=tmp_path / "c.pt", **QUIET)
    assert (result.stopped, result.steps) == ("finished", 8)


# -- what is shown and logged ------------------------------------------------------------------------------


def test_history_and_logs(tmp_path: Path, gated) -> None:
    result = tgfx.fit(gated, loader(), F.cross_entropy, epochs=2, val=accuracy, val_every=4, log=tmp_path, **QUIET)
    history = result.history
    assert history.columns == [
        "step", "epoch", "seconds", "loss", "lr", "phase", "ratio_flops", "target_flops", "open", "val_accuracy",
    ]  # fmt: skip
    assert history.column("step") == list(range(1, 13)) and len(history.column("val_accuracy")) == 3
    assert history.column("epoch") == [1] * 6 + [2] * 6
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [float(row["loss"]) for row in rows] == history.column("loss")
    assert [row["val_accuracy"] != "" for row in rows] == [step % 4 == 0 for step in range(1, 13)]
    kept = history.kept_at(12)
    assert kept == {name: gate.open_count() for name, gate in gated.gates.items()}
    assert sum(kept.values()) == history.rows[-1]["open"]
    assert history.kept_at(1) == {name: 12 for name in gated.gates}


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(gated, terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    tgfx.fit(gated, loader(), F.cross_entropy, epochs=10, **{**QUIET, "progress": console})
    shown = text.getvalue()
    for part in ("60", "loss", "hold", "flops", "(target 0.500)", "open channels", "left"):
        assert part in shown, shown
    if not terminal:
        assert len(shown.splitlines()) == 20 and "\x1b" not in shown


def test_silent_without_progress(gated, capfd) -> None:
    tgfx.fit(gated, loader(), F.cross_entropy, **QUIET)
    assert capfd.readouterr() == ("", "")


def test_workers(gated) -> None:
    data = DataLoader(loader().dataset, batch_size=32, num_workers=1, shuffle=True)
    assert tgfx.fit(gated, data, F.cross_entropy, epochs=1, **QUIET).steps == 3
