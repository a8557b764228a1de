"""recalibrate: statistics are the plain mean over the batches, and nothing else changes, least of all on failure."""

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support.training import SmallNet, images, same_state, small_gated, state
from tgfx.errors import TrainingError

X, Y = images()


def test_statistics_are_the_mean_over_batches() -> None:
    model = SmallNet().train()
    model.norm1.momentum = 0.3
    before = state(model)
    assert tgfx.recalibrate(model, [(X[:32], Y), (X[32:64], Y), (X[64:], Y)]) == 3
    with torch.no_grad():
        maps = [model.conv1(part) for part in X.split(32)]
    torch.testing.assert_close(model.norm1.running_mean, torch.stack([m.mean((0, 2, 3)) for m in maps]).mean(0))
    torch.testing.assert_close(model.norm1.running_var, torch.stack([m.var((0, 2, 3)) for m in maps]).mean(0))
    assert all("running" in name or "num_batches" in name for name in same_state(before, state(model)))
    assert model.training and model.drop.training and model.norm1.momentum == 0.3


def test_only_as_many_batches_as_asked_for() -> None:
    assert tgfx.recalibrate(SmallNet(), [X[:8]] * 5, limit=2) == 2
    assert tgfx.recalibrate(nn.Linear(2, 2), []) == 0  # no batch norm: nothing to do


def test_it_helps_a_gated_model() -> None:
    gated = small_gated().eval()
    for gate in gated.gates.values():
        gate.set_open_(torch.arange(12) % 2 == 0)
    tgfx.recalibrate(gated, [X])
    with torch.no_grad():
        own = gated.norm2
        seen: list[Tensor] = []
        hook = own.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        gated(X)
        hook.remove()
    # the second norm reads what the first gives with its new statistics, which are those of this very batch
    torch.testing.assert_close(own.running_mean, seen[0].mean((0, 2, 3)), rtol=0, atol=1e-2)


def broken():
    yield X[:8]
    raise OSError("disk gone")


@pytest.mark.parametrize("batches", [broken, list, lambda: [X[:8], X[:8, :, 0]]], ids=["raises", "empty", "misfit"])
def test_failure_puts_everything_back(batches) -> None:
    model = SmallNet().train()
    model.drop.eval()
    tgfx.recalibrate(model, [X])
    before = state(model)
    with pytest.raises((OSError, TrainingError, RuntimeError, ValueError)):
        tgfx.recalibrate(model, batches())
    assert same_state(before, state(model)) == []
    assert model.training and not model.drop.training and model.norm1.momentum == 0.1


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.BatchNorm2d(1), nn.BatchNorm2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_norm_that_sees_nothing_keeps_what_it_knew() -> None:
    model = WithUnused()
    model.unused.running_mean.fill_(7)
    tgfx.recalibrate(model, [X])
    assert model.unused.running_mean == 7 and model.used.running_mean == pytest.approx(X.mean().item(), abs=1e-6)
