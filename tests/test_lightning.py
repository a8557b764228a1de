"""GateCallback in real Lightning runs: budget, logs, checkpoints, mistakes."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tgfx
from tests.support import promises
from tgfx.errors import InputError, MissingPackageError, OptimizerError

lightning = pytest.importorskip("lightning", reason="lightning is an optional package")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from tgfx.lightning import GateCallback  # noqa: E402

# Lightning's own remarks: few workers, a missing logger, torch's older names
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`.*"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 32, 3, padding=1)
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.out(torch.relu(self.second(x)).mean((2, 3)))


class Task(lightning.LightningModule):
    def __init__(self, net: nn.Module, parameters: Any = None) -> None:
        super().__init__()
        self.net = net
        self.trained = parameters

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = tgfx.param_groups(self.net, lr=0.05) if self.trained is None else self.trained
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def loader(dtype: torch.dtype = torch.float32) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 1, 6, 6, generator=generator).to(dtype)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (48,), generator=generator)), batch_size=8)


def gated_net() -> tgfx.GatedModule:
    torch.manual_seed(0)
    return tgfx.transform(Net(), torch.zeros(1, 1, 6, 6)).train()


def trainer(callback: GateCallback, *more: Any, **options: Any) -> Any:
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1)
    options = {"enable_checkpointing": False, "max_epochs": 5, **quiet, **options}
    return lightning.Trainer(callbacks=[callback, *more], log_every_n_steps=1, **options)


def test_meets_the_budget_and_logs() -> None:
    gated, callback = gated_net(), GateCallback({"flops": 0.5})
    run = trainer(callback)
    run.fit(Task(gated), loader())
    assert callback.controller is not None and callback.controller.taken == 30
    assert callback.controller.schedule.steps == 30  # from the trainer
    assert callback.controller.closed
    logged = run.callback_metrics
    assert {"ratio_flops", "target_flops", "channels", "phase"} <= set(logged)
    assert float(logged["phase"]) == 3 and float(logged["target_flops"]) == 0.5
    promises.budget_is_used_up(gated, "flops", 0.5)
    assert float(logged["channels"]) == gated.open_slots().sum()
    x = torch.randn(3, 1, 6, 6)
    with torch.no_grad():
        assert torch.allclose(tgfx.shrink(gated)(x), gated(x), atol=1e-5)


def test_single_weights() -> None:
    torch.manual_seed(0)
    gated, callback = tgfx.transform(Net(), torch.zeros(1, 1, 6, 6), granularity="weight"), GateCallback({"flops": 0.3})
    run = trainer(callback, accumulate_grad_batches=2)
    run.fit(Task(gated), loader())
    assert callback.controller is not None and callback.controller.phase == "hold" and callback.controller.closed
    logged = run.callback_metrics
    assert float(logged["target_flops"]) == pytest.approx(0.3) and float(logged["phase"]) == 3
    assert float(logged["channels"]) == sum(gate.open_count() for gate in gated.gates.values())
    assert 0.29 < gated.eval().ratio("flops").item() <= 0.3


def test_a_choice_meets_the_budget() -> None:
    torch.manual_seed(0)
    net = Net()
    net.second = tgfx.Choice([nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)], init=0)  # type: ignore[assignment]
    gated = tgfx.transform(net, torch.zeros(1, 1, 6, 6), granularity="layer")
    trainer(GateCallback({"flops": 0.2})).fit(Task(gated), loader())
    assert gated.gates["second"].chosen() == 1  # type: ignore[union-attr]
    assert gated.eval().ratio("flops").item() <= 0.2


def test_a_choice_is_pulled_to_the_budget() -> None:
    """Alternatives that compute the same: only the budget tells them apart. Lightning steps with a closure."""
    torch.manual_seed(0)
    net = Net()
    alternatives = [nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)]
    for parameter in nn.ModuleList(alternatives).parameters():
        parameter.requires_grad_(False).zero_()
    net.second = tgfx.Choice(alternatives)  # type: ignore[assignment]
    gated = tgfx.transform(net, torch.zeros(1, 1, 6, 6))
    trainer(GateCallback({"flops": 0.1}, steps=100)).fit(Task(gated), loader())  # it stops long before the end
    dear, cheap = gated.gates["second"].weight.tolist()
    assert cheap > dear + 1e-3


def test_single_weights_where_only_gates_are_trained() -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(Net(), torch.zeros(1, 1, 6, 6), granularity="weight")
    gates = [gate.weight for gate in gated.gates.values()]
    gated.requires_grad_(False)
    for latent in gates:
        latent.requires_grad_(True)
    callback = GateCallback({"flops": 0.3})
    task = Task(gated, gates)
    before = [latent.detach().clone() for latent in gates]

    class Watch(lightning.Callback):
        def on_train_batch_end(self, *rest: Any) -> None:
            assert callback.controller is not None
            if callback.controller.taken < 2:  # the first gates to close do so after the third step
                assert all(torch.equal(latent, old) for latent, old in zip(gates, before, strict=True))

    trainer(callback, Watch()).fit(task, loader())
    assert 0.29 < gated.eval().ratio("flops").item() <= 0.3


def test_accumulated_batches_are_one_step() -> None:
    callback = GateCallback({"flops": 0.5})
    trainer(callback, accumulate_grad_batches=3).fit(Task(gated_net()), loader())
    assert callback.controller is not None and callback.controller.schedule.steps == 10
    assert callback.controller.taken == 10 and callback.controller.phase == "hold"


def test_resumes_from_lightnings_checkpoint(tmp_path: Path) -> None:
    gated = gated_net()
    twin = copy.deepcopy(gated)
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    trainer(GateCallback({"flops": 0.5}), keep, enable_checkpointing=True).fit(Task(gated), loader())
    callback = GateCallback({"flops": 0.5})
    trainer(callback).fit(Task(twin), loader(), ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=False)
    assert callback.controller is not None and callback.controller.taken == 30
    for (name, expected), found in zip(gated.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name


def test_gets_smaller_while_training_and_resumes_small(tmp_path: Path) -> None:
    gated = gated_net()
    twin, plain = copy.deepcopy(gated), copy.deepcopy(gated)
    keep = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    small = GateCallback({"flops": 0.5}, compact_every=4, patience=1)
    whole = dict(plain.named_parameters())["first.weight"].numel()
    trainer(small, keep, enable_checkpointing=True).fit(Task(gated), loader())
    assert gated.get_parameter("first.weight").numel() < whole
    assert gated.ratio("flops").item() <= 0.5
    checkpoint = tmp_path / "epoch=3.ckpt"
    saved = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert saved["net.first.weight"].numel() < whole  # this one was taken from a model that was already smaller
    callback = GateCallback({"flops": 0.5}, compact_every=4, patience=1)
    trainer(callback).fit(Task(twin), loader(), ckpt_path=checkpoint, weights_only=False)
    for (name, expected), found in zip(gated.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    with pytest.raises(RuntimeError, match="size mismatch"):  # a callback that compacts nothing leaves the model whole
        trainer(GateCallback({"flops": 0.5})).fit(Task(plain), loader(), ckpt_path=checkpoint, weights_only=False)


def test_compaction_changes_nothing_but_the_size() -> None:
    gated = gated_net().double()
    twin = copy.deepcopy(gated)
    data = loader(torch.float64)
    trainer(GateCallback({"flops": 0.5})).fit(Task(gated), data)
    callback = GateCallback({"flops": 0.5}, compact_every=1, patience=100)  # nothing is closed long enough
    trainer(callback).fit(Task(twin), data)
    assert (twin.open_slots() == gated.open_slots()).all()
    x = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        promises.assert_close(twin.eval()(x), gated.eval()(x), 1e-12, "output")


def test_sizes_are_multiples() -> None:
    gated = gated_net()
    trainer(GateCallback({"flops": 0.6}, round_to=4)).fit(Task(gated), loader())
    assert all(gate.open_count() % 4 == 0 for gate in gated.gates.values())
    assert gated.ratio("flops").item() <= 0.6
    with pytest.raises(InputError, match="round_to"):
        GateCallback({"flops": 0.5}, round_to=0)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_odd_compaction_steps(every: Any) -> None:
    with pytest.raises(InputError, match="compact_every"):
        GateCallback({"flops": 0.5}, compact_every=every)


def test_training_that_ends_early_lands_on_the_budget() -> None:
    gated = gated_net()

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            trainer.should_stop = trainer.global_step >= 8

    with pytest.warns(UserWarning, match="after 8 of 30 steps, in the close phase"):
        trainer(GateCallback({"flops": 0.5}), Stop()).fit(Task(gated), loader())
    promises.budget_is_used_up(gated, "flops", 0.5)


def test_steps_of_the_user_go_beyond_one_fit() -> None:
    gated, callback = gated_net(), GateCallback({"flops": 0.5}, steps=100)
    trainer(callback, max_epochs=1).fit(Task(gated), loader())  # no warning: more is to come
    assert callback.controller is not None and callback.controller.phase == "close"
    assert gated.eval().ratio("flops").item() > 0.8


def test_an_optimizer_without_the_gates() -> None:
    gated = gated_net()
    task = Task(gated, list(gated.get_submodule("first").parameters()))
    with pytest.raises(OptimizerError, match="does not hold the gates"):
        trainer(GateCallback({"flops": 0.5})).fit(task, loader())


def test_no_gated_model_or_two() -> None:
    with pytest.raises(InputError, match="exactly one gated model"):
        trainer(GateCallback({"flops": 0.5})).fit(Task(Net(), list(Net().parameters())), loader())
    task = Task(gated_net())
    task.other = gated_net()
    with pytest.raises(InputError, match="net, other"):
        trainer(GateCallback({"flops": 0.5})).fit(task, loader())
    callback = GateCallback({"flops": 0.5}, gated="net")
    trainer(callback).fit(task, loader())
    assert callback.controller is not None and callback.controller.gated is task.net


def test_an_endless_trainer() -> None:
    with pytest.raises(InputError, match="no end"):
        trainer(GateCallback({"flops": 0.5}), max_epochs=-1).fit(Task(gated_net()), loader())


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "tgfx.lightning")
    with pytest.raises(MissingPackageError, match=r"pip install tgfx\[lightning\]"):
        import tgfx.lightning  # noqa: F401


class Toggled(lightning.LightningModule):
    """Gates and weights take turns, each with an optimizer of its own; Lightning freezes the others meanwhile."""

    def __init__(self, net: tgfx.GatedModule) -> None:
        super().__init__()
        self.net, self.automatic_optimization = net, False

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        gates = [gate.weight for gate in self.net.gates.values()]
        own = {id(gate) for gate in gates}
        weights = [p for p in self.net.parameters() if id(p) not in own]
        return [torch.optim.SGD(weights, lr=0.05), torch.optim.SGD(gates, lr=0.05)]


def test_only_steps_of_the_gates_count_where_optimizers_take_turns() -> None:
    gated, callback = gated_net(), GateCallback({"flops": 0.5}, steps=40)
    trainer(callback, max_epochs=5).fit(Toggled(gated), loader())  # 30 batches, two steps each
    assert callback.controller is not None
    assert callback.controller.taken in (30, 31)  # the first step is seen before anybody knows who holds the gates
    promises.budget_is_used_up(gated, "flops", 0.5)
