"""Mixed precision, loss scaling, gradient accumulation and checkpointing around a gated model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tests.support.torchvision_ops  # noqa: F401  before torchvision
import tgfx
from tests.support import promises

IMAGE = (3, 32, 32)


def convnet() -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


def inverted() -> nn.Module:
    import torchvision

    return torchvision.models.mobilenet_v3_small(num_classes=10)


def vit() -> nn.Module:
    import torchvision

    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.1)  # starts at zero, and then nothing behind it has a gradient
    return model


@pytest.mark.parametrize("make", [convnet, inverted, vit])
def test_bfloat16_training(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, *IMAGE), torch.arange(4)
    gated = tgfx.transform(make(), x).train()
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.01))
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = gated(x)
            loss = cross_entropy(out, y) + gated.budget_loss(flops=0.7, steps=4)
        assert out.dtype is torch.bfloat16 and bool(loss.isfinite())
        loss.backward()
        for name, gate in gated.gates.items():
            gradient = gate.weight.grad
            assert gradient is not None and gradient.dtype is torch.float32, name
            assert bool(gradient.isfinite().all()) and bool(gradient.any()), name
        optimizer.step()
    assert gated.controller is not None and gated.controller.taken == 3
    gated.eval()
    assert gated.ratio("flops").item() <= 0.7
    values = torch.cat([gate() for gate in gated.gates.values()])
    assert values.dtype is torch.float32 and set(values.unique().tolist()) == {0.0, 1.0}
    compact = tgfx.shrink(gated)
    with torch.no_grad():
        promises.assert_close(compact(x), gated(x), 1e-5, "float32 after bfloat16 training")
        with torch.autocast("cpu", torch.bfloat16):
            # the same roundings but for sums over other numbers of terms: two units in the last place of bfloat16
            promises.assert_close(compact(x).float(), gated(x).float(), 2**-6, "bfloat16")


class Plain(nn.Module):
    """No batch statistics, so that parts of a batch add up to the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.norm(self.stem(x))))


def gated_plain(dtype: torch.dtype = torch.float64) -> tuple[tgfx.GatedModule, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Plain().to(dtype)
    x, y = torch.randn(12, 6, dtype=dtype), torch.randint(0, 4, (12,))
    return tgfx.transform(model, x[:1]).train(), x, y


@pytest.mark.parametrize("fused", [False, True])
def test_the_controller_sees_unscaled_gradients(fused: bool) -> None:
    plain, x, y = gated_plain(torch.float32)
    scaled = copy.deepcopy(plain)
    evidence = []
    for gated, scale in ((plain, 1.0), (scaled, 2.0**12)):
        optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.1), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        controller = gated.attach(tgfx.BudgetController(gated, {"flops": 0.5}, steps=50))
        for _ in range(3):
            scaler.scale(cross_entropy(gated(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert controller.evidence.seen == 3
        evidence.append(controller.evidence)
    # powers of two scale without rounding
    assert torch.equal(evidence[0].mean, evidence[1].mean)
    assert torch.equal(evidence[0].square, evidence[1].square)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_no_evidence(fused: bool) -> None:
    gated, x, y = gated_plain(torch.float32)
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.1), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    controller = gated.attach(tgfx.BudgetController(gated, {"flops": 0.5}, steps=50))
    scaler.scale(cross_entropy(gated(x) * float("inf"), y)).backward()
    scaler.step(optimizer)
    assert controller.taken == 0 and controller.evidence.seen == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_samples_of_a_step_that_the_scaler_skips_do_not_count(set_to_none: bool, late: bool) -> None:
    """Whether gradients are thrown away before the next call of the model or after it."""
    gated, x, y = gated_plain(torch.float32)
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.1), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    controller = gated.attach(tgfx.BudgetController(gated, {"flops": 0.5}, steps=50))
    for step in range(6):
        for part in (slice(0, 4), slice(4, 12)):
            if not late and part.start == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss = cross_entropy(gated(x[part]), y[part])
            if late and part.start == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            scaler.scale(loss * float("inf") if step in (2, 3) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert step in (2, 3) or controller.evidence.samples == 12
    assert controller.taken == 4


def test_choices_are_pulled_as_hard_under_a_scaler() -> None:
    """Fused optimizers divide by the scale themselves, and so would do with what is added to the gradient."""
    found = []
    for scale, fused in ((1.0, False), (2.0**10, False), (2.0**10, True)):
        torch.manual_seed(0)
        choice = tgfx.Choice([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])
        gated = tgfx.transform(nn.Sequential(nn.Linear(4, 8), choice), torch.zeros(1, 4)).train()
        optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.1), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        gated.attach(tgfx.BudgetController(gated, {"params": 0.5}, steps=50))
        scaler.scale(0 * gated(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        found.append(gated.gates["1"].weight.detach().clone())
    assert found[0][1] > found[0][0]
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-6, atol=0)


@pytest.mark.parametrize("parts", [2, 3])
def test_accumulated_gradients_are_those_of_the_whole_batch(parts: int) -> None:
    whole, x, y = gated_plain()
    split = copy.deepcopy(whole)
    for gated, count in ((whole, 1), (split, parts)):
        optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.1), lr=0.1, momentum=0.9)
        gated.attach(tgfx.BudgetController(gated, {"flops": 0.5}, steps=8))
        for _ in range(8):
            for a, b in zip(x.chunk(count), y.chunk(count), strict=True):
                (cross_entropy(gated(a), b) / count).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, expected), found in zip(whole.named_parameters(), split.parameters(), strict=True):
        tolerance = 1e-6 if name.startswith("gate_bank") else 1e-11  # latent weights are ratios of small numbers
        promises.assert_close(found.detach(), expected.detach(), tolerance, name)
    assert (whole.open_slots() == split.open_slots()).all() and not whole.open_slots().all()
    assert whole.controller is not None and split.controller is not None
    promises.assert_close(split.controller.evidence.square, whole.controller.evidence.square, 1e-9, "curvature")


class Checkpointed(Plain):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        if self.how == "sequential":
            x = checkpoint_sequential(self.body, 2, x, use_reentrant=False)
        elif self.how == "training only" and not self.training:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.how == "reentrant")
        return self.out(x)


@pytest.mark.parametrize("how", ["plain", "reentrant", "sequential", "training only"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_checkpoints_inside_the_model_are_seen_through(how: str) -> None:
    torch.manual_seed(0)
    model = Checkpointed(how).double().train()
    x = torch.randn(5, 6, dtype=torch.float64)
    with pytest.warns(UserWarning, match="Checkpointed uses gradient checkpointing, which its gated copy does not"):
        gated = tgfx.transform(model, x)
    assert list(gated.gates) == ["stem", "body.0", "body.2"]
    for each in (model, gated):
        each(x).square().sum().backward()
    own = dict(gated.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and own[name].grad is not None
        promises.assert_close(own[name].grad, parameter.grad, 1e-12, name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_gated_model(reentrant: bool) -> None:
    plain, x, y = gated_plain()
    wrapped = copy.deepcopy(plain)
    for gated in (plain, wrapped):
        optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.1), lr=0.1)
        gated.attach(tgfx.BudgetController(gated, {"flops": 0.5}, steps=6))
        for _ in range(6):
            optimizer.zero_grad()
            given = x.clone().requires_grad_()
            out = checkpoint(gated, given, use_reentrant=reentrant) if gated is wrapped else gated(given)
            assert isinstance(out, Tensor)
            cross_entropy(out, y).backward()
            optimizer.step()
    for (name, expected), found in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
        assert expected.grad is not None and found.grad is not None
        promises.assert_close(found.grad, expected.grad, 1e-12, f"gradient of {name}")
        promises.assert_close(found.detach(), expected.detach(), 1e-12, name)
    assert plain.controller is not None and wrapped.controller is not None
    # samples are counted once, not again when the checkpoint recomputes
    assert torch.equal(plain.controller.evidence.square, wrapped.controller.evidence.square)
