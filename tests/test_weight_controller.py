"""The default rule for gates over single weights: what it closes first, and what it leaves alone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tgfx
from tgfx.errors import InputError
from tgfx.gates import GateSettings
from tgfx.training.gradient_mark import TINY
from tgfx.training.weight_controller import WeightController
from tgfx.training.weight_evidence import WeightEvidence


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 3))


def batches(count: int = 8, *, dead: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        x = torch.randn(16, 12, generator=generator)
        x[:, :dead] = 0
        made.append((x, x[:, -3:].argmax(1)))
    return made


def fitted(model: nn.Module, data: list, share: float, **options) -> tgfx.GatedModule:
    gated = tgfx.transform(model, data[0][0], granularity="weight", gate=options.pop("gate", None))
    options = {"train": "gates", "steps": 40, "progress": False, **options}
    tgfx.fit(gated, data, F.cross_entropy, budget={"params": share}, **options)
    return gated.eval()


def test_weights_that_read_nothing_close_first_however_large() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[:, :4] *= 100
    gated = fitted(model, batches(dead=4), 0.8)
    opened = gated.gates["0.weight"].is_open()
    assert not bool(opened[:, :4].any())
    assert float(opened[:, 4:].float().mean()) > 0.8
    assert 0.79 < float(gated.ratio("params")) <= 0.8


def test_the_scale_of_a_layer_does_not_matter_where_the_next_undoes_it() -> None:
    model, scaled = net(), net()
    with torch.no_grad():
        scaled[0].weight.mul_(32), scaled[0].bias.mul_(32), scaled[2].weight.div_(32)  # type: ignore[operator]
    one, other = (fitted(each, batches(), 0.3) for each in (model, scaled))
    for name, gate in one.gates.items():
        assert torch.equal(gate.is_open(), other.gates[name].is_open())


@pytest.mark.parametrize("shape", ["constant", "tanh"])
def test_rows_and_columns_of_the_fisher_information_are_found(shape: str) -> None:
    """dloss/dw of size row · column: the score is |w| · row · column, whatever the shape of the gates' gradient."""
    generator = torch.Generator().manual_seed(0)
    row, column = torch.rand(40, generator=generator) + 0.1, torch.rand(30, generator=generator) + 0.1
    weight = torch.randn(40, 30, 3, 3, generator=generator, dtype=torch.float64)
    settings, latent = GateSettings(shape=shape), torch.full_like(weight, 0.4).requires_grad_()
    evidence = WeightEvidence(weight.shape, memory=100)
    for _ in range(100):
        slope = row.view(-1, 1, 1, 1) * column.view(1, -1, 1, 1) * torch.randn(weight.shape, generator=generator)
        latent.grad = None
        (settings.trained(latent) * weight * slope).sum().backward()
        assert evidence.update(weight, latent, settings)
    score = torch.empty_like(weight)
    evidence.write_(score, weight, torch.ones(1, 1, 1, 1))
    wanted = weight.abs() * row.view(-1, 1, 1, 1) * column.view(1, -1, 1, 1)
    torch.testing.assert_close(score, wanted, rtol=0.2, atol=1e-6)
    latent.grad = torch.full_like(latent, torch.nan)
    before = evidence.state_dict()
    assert not evidence.update(weight, latent, settings)
    assert torch.equal(evidence.row, before["row"])  # type: ignore[arg-type]


def test_without_any_gradient_the_smallest_weights_close() -> None:
    model = net()
    gated = tgfx.transform(model, torch.zeros(1, 12), granularity="weight")
    tgfx.fit(
        gated, [torch.zeros(2, 12)], training_step=lambda g, x: 0 * g(x).sum(), budget={"params": 0.5}, steps=20,
        train="gates", progress=False,
    )  # fmt: skip
    sizes = torch.cat([model.get_parameter(name).detach().abs().flatten() for name in gated.gates])
    opened = torch.cat([gate.is_open().flatten() for gate in gated.gates.values()])
    assert sizes[opened].min() >= sizes[~opened].max()
    assert 0.49 < float(gated.eval().ratio("params")) <= 0.5


def test_the_optimizer_does_not_move_the_gates() -> None:
    gated = tgfx.transform(net(), torch.zeros(1, 12), granularity="weight").train()
    optimizer = torch.optim.Adam(gated.parameters(), lr=10.0)
    for x, target in batches(1):
        optimizer.zero_grad()
        (F.cross_entropy(gated(x), target) + gated.budget_loss(params=0.5, steps=1000)).backward()
        optimizer.step()
    assert all(bool((gate.weight == 1).all()) for gate in gated.gates.values())


def test_a_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    data, options = batches(), {"train": "joint", "steps": 30, "checkpoint": tmp_path / "c.pt", "checkpoint_every": 9}
    whole = fitted(net(), data, 0.3, train="joint", steps=30)
    stopped = tgfx.transform(net(), data[0][0], granularity="weight")

    def crash(model: nn.Module) -> dict[str, float]:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        tgfx.fit(
            stopped, data, F.cross_entropy, budget={"params": 0.3}, val=crash, val_every=20, progress=False, **options
        )
    again = fitted(net(), data, 0.3, **options)
    for (name, one), other in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def in_training(model: nn.Module) -> tuple[tgfx.GatedModule, torch.optim.Optimizer]:
    gated = tgfx.transform(model, torch.zeros(1, 12), granularity="weight").train()
    return gated, torch.optim.SGD(tgfx.param_groups(gated, lr=0.1))


def test_no_gradient_is_warned_about() -> None:
    gated, optimizer = in_training(net())
    with pytest.warns(UserWarning, match="no gradient has reached the gates for 50 steps"):
        for _ in range(60):
            gated.budget_loss(params=0.5, steps=120)  # and no backward
            optimizer.zero_grad()
            optimizer.step()


def test_no_layer_collapses() -> None:
    """Far below what the first layer alone would take; without a floor the middle one had 0 of 4096 left."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    with torch.no_grad():
        model[2].weight.mul_(1e-4)
    gated = fitted(model, batches(), 0.028, train="joint")
    assert all(gate.open_count() >= 0.001 * gate.weight.numel() for gate in gated.gates.values())
    assert 0.027 < float(gated.ratio("params")) <= 0.028


def test_all_of_a_budget_of_one_stays() -> None:
    gated = fitted(net(), batches(), 1.0, train="joint")
    assert float(gated.ratio("params")) == 1.0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_of_gates_go_as_soon_as_they_are_made(accumulate: int) -> None:
    gated, optimizer = in_training(net())
    alive: list[int] = []

    smallest = min((gate.weight for gate in gated.gates.values()), key=lambda latent: latent.numel())

    def seen(latent: Tensor) -> None:  # after the controller's own hook, which is there since the first loss
        gradients = [gate.weight.grad for gate in gated.gates.values() if gate.weight is not smallest]
        marked = smallest.grad is None or bool((smallest.grad == TINY).all())
        alive.append(sum(gradient is not None for gradient in gradients) + (not marked))

    gated.budget_loss(params=0.5, steps=20)
    for gate in gated.gates.values():
        gate.weight.register_post_accumulate_grad_hook(seen)
    for _ in range(20):
        optimizer.zero_grad()
        for x, target in batches(accumulate):
            (F.cross_entropy(gated(x), target) + gated.budget_loss(params=0.5, steps=20)).backward()
            assert all(gate.weight.grad is None for gate in gated.gates.values() if gate.weight is not smallest)
            assert all(gated.get_parameter(name).grad is not None for name in gated.gates)
        optimizer.step()
    assert alive and not any(alive)
    assert all(evidence.seen for evidence in gated.controller.evidence.values())
    assert 0.49 < float(gated.eval().ratio("params")) <= 0.5
    copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))
    gated.controller.close()
    x, target = batches(1)[0]
    F.cross_entropy(gated.train()(x), target).backward()
    assert all(gate.weight.grad is not None for gate in gated.gates.values())


def test_the_evidence_is_that_of_whole_gradients() -> None:
    """Taken at once (weights are trained) or at the step (they are frozen), over one batch: the same numbers."""
    gated, frozen = in_training(net())[0], in_training(net())[0]
    for name in frozen.gates:
        frozen.get_parameter(name).requires_grad_(False)
    for bias in (p for name, p in frozen.named_parameters() if name.endswith("bias")):
        bias.requires_grad_(False)
    found = []
    for own in (gated, frozen):
        optimizer = torch.optim.SGD(tgfx.param_groups(own, lr=1e-12))
        controller = own.attach(WeightController(own, {"params": 0.5}, steps=100))
        for x, target in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(own(x), target).backward()
            kept = [gate.weight.grad is not None for gate in own.gates.values()]
            assert all(kept) if own is frozen else sum(kept) == 1  # the mark
            optimizer.step()
        found.append(controller.state_dict()["evidence"])
    for name, own in found[0].items():
        for part, value in own.items():
            torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(found[1][name][part]), rtol=1e-6, atol=0)


def test_a_gradient_that_is_not_finite_is_no_evidence() -> None:
    gated, optimizer = in_training(net())
    controller = gated.attach(WeightController(gated, {"params": 0.5}, steps=100))
    x, target = batches(1)[0]
    (F.cross_entropy(gated(x), target) * torch.nan).backward()
    optimizer.zero_grad()  # this step is left out
    for _ in range(2):
        F.cross_entropy(gated(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(own.seen == 2 and bool(own.row.isfinite().all()) for own in controller.evidence.values())


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_was_thrown_away_is_no_evidence(set_to_none: bool, parts: int) -> None:
    """Batches of a step that was left out do not count, those that are added up do."""
    found = []
    for left_out in (False, True):
        gated, optimizer = in_training(net())
        controller = gated.attach(WeightController(gated, {"params": 0.5}, steps=100))
        for step in range(4):
            if left_out and step == 2:
                for x, target in batches(2):
                    (1e3 * F.cross_entropy(gated(x), target)).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            for x, target in batches(parts):
                F.cross_entropy(gated(x), target).backward()
            optimizer.step()
        found.append(controller.state_dict()["evidence"])
    assert str(found[0]) == str(found[1]) and found[0]["0.weight"]["seen"] == 4


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_of_a_gradscaler_is_no_evidence(fused: bool, frozen: bool) -> None:
    """Powers of two scale without rounding: the same numbers to the bit, though the scale doubles at every step."""
    found = []
    for scaled in (False, True):
        gated = in_training(net())[0]
        own = {id(gate.weight) for gate in gated.gates.values()}
        for parameter in gated.parameters():
            parameter.requires_grad_(id(parameter) in own or not frozen)
        optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.0625), lr=0.0625, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1, enabled=scaled)
        controller = gated.attach(WeightController(gated, {"params": 0.5}, steps=100))
        for step, (x, target) in enumerate(batches(8)):
            optimizer.zero_grad()
            loss = F.cross_entropy(gated(x), target)
            if step in (2, 5):  # it overflows, and the step is left out
                if not scaled:
                    continue
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(controller.state_dict()["evidence"])
    assert str(found[0]) == str(found[1]) and found[0]["0.weight"]["seen"] == 6


def test_a_step_that_makes_state_is_none() -> None:
    """torch.distributed.checkpoint makes one, to have state to load into."""
    gated, _ = in_training(net())
    optimizer = torch.optim.Adam(tgfx.param_groups(gated, lr=0.1))
    controller = gated.attach(WeightController(gated, {"params": 0.5}, steps=10))
    get_optimizer_state_dict(gated, optimizer)
    assert optimizer.state and controller.taken == 0


def test_rate_zero_drives_the_gates() -> None:
    gated, optimizer = in_training(net())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for x, target in batches(20):
        optimizer.zero_grad()
        (F.cross_entropy(gated(x), target) + gated.budget_loss(params=0.5, steps=20)).backward()
        optimizer.step()
    assert gated.controller.taken == 20 and 0.49 < float(gated.eval().ratio("params")) <= 0.5


def test_shards_are_refused() -> None:
    gated, _ = in_training(net())
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(gated, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(InputError, match="sharded over ranks"):
            WeightController(gated, {"params": 0.5})
    finally:
        distributed.destroy_process_group()
