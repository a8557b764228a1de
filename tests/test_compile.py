"""torch.compile of the gated model: one graph, no break, equal numbers, and a controller that works."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tests.support.torchvision_ops  # noqa: F401  before torchvision
import tgfx
from tests.support import promises


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 16, 3, padding=1)
        self.back = nn.Conv2d(16, 8, 1)
        self.grouped = nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.back(torch.relu(self.wide(x)))
        return self.out(self.grouped(x).mean((2, 3)))


def vit() -> nn.Module:
    import torchvision

    model = torchvision.models.VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=5)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


NO_COMPILER = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")),
    reason="inductor needs a C++ compiler and there is none",
)


# inductor's own use of torch's and Python's older names
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "backend"),
    [(Residual, "aot_eager"), (vit, "aot_eager"), pytest.param(Residual, "inductor", marks=NO_COMPILER)],
)
def test_one_graph_and_equal_numbers(make: Callable[[], nn.Module], backend: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    gated = tgfx.transform(make().double(), x)
    twin = copy.deepcopy(gated)
    compiled = torch.compile(twin, backend=backend, fullgraph=True)
    gated.train(), twin.train()
    expected, found = gated(x), compiled(x)
    promises.assert_close(found.detach(), expected.detach(), 1e-12, "output in train mode")
    for out in (expected, found):
        out.square().sum().backward()
    for (name, parameter), other in zip(gated.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None and other.grad is not None:
            scale = max(1.0, float(parameter.grad.abs().max()))
            assert float((parameter.grad - other.grad).abs().max()) <= 1e-10 * scale, name
    promises.gate_at_random(gated, 0.5, seed=0)
    promises.gate_at_random(twin, 0.5, seed=0)
    gated.eval(), twin.eval()
    with torch.no_grad():
        promises.assert_close(compiled(x), gated(x), 1e-12, "output in eval mode, half of the gates closed")
        promises.assert_close(tgfx.shrink(twin)(x), compiled(x), 1e-10, "cut")


def test_the_controller_works_on_a_compiled_model() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 5, (8,))
    plain = tgfx.transform(Residual().double(), x[:1]).train()
    twin = copy.deepcopy(plain)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for gated, call in ((plain, plain), (twin, compiled)):
        optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05), lr=0.05)
        # attached before the model is compiled: the controller's hook must not break the graph either
        gated.attach(tgfx.BudgetController(gated, {"flops": 0.5}, steps=12, batch_size=8))
        for _ in range(12):
            nn.functional.cross_entropy(call(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (plain.open_slots() == twin.open_slots()).all()
    assert twin.eval().ratio("flops").item() <= 0.5
    for (name, expected), found in zip(plain.named_parameters(), twin.parameters(), strict=True):
        promises.assert_close(found.detach(), expected.detach(), 1e-9, name)


def seen(controller: tgfx.BudgetController | None) -> int:
    assert controller is not None
    return controller.evidence.samples


def test_samples_of_a_compiled_model() -> None:
    """In the loop they are said, at the door of the compiled module counted, and known to tgfx.fit."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))
    gated = tgfx.transform(Residual(), x[:1]).train()
    compiled = torch.compile(gated, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(tgfx.param_groups(compiled, lr=0.05))

    def step(size: int, **options: int) -> None:
        loss = nn.functional.cross_entropy(compiled(x[:size]), y[:size])
        (loss + gated.budget_loss(flops=0.5, **options)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for size in (6, 6, 4):
        step(size, batch_size=size)
    assert seen(gated.controller) == 4
    controller = gated.attach(tgfx.BudgetController(compiled, {"flops": 0.5}))
    assert controller.gated is gated
    for size in (6, 6, 4):
        step(size)
    assert seen(controller) == 4
    controller.close()
    assert not compiled._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # looked at by dynamo
def test_fit_of_a_model_compiled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))
    gated = tgfx.transform(Residual(), x[:1]).train()
    gated.compile(backend="eager")
    made: list[tgfx.BudgetController] = []
    attach = type(gated).attach
    monkeypatch.setattr(type(gated), "attach", lambda own, c: made.append(c) or attach(own, c))  # type: ignore[func-returns-value]
    options = {"budget": {"flops": 0.5}, "accumulate": 2, "epochs": 3, "progress": False}
    tgfx.fit(gated, [(x, y), (x[:4], y[:4])], nn.functional.cross_entropy, **options)
    assert seen(made[0]) == 10
