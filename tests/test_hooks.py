"""Layers with hooks stay layers: the hooks run, in both modes, and their channels are kept for that reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises


class Net(nn.Module):
    def __init__(self, norm: nn.Module, exported: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = norm
        self.second = nn.Linear(8, 6)
        self.third = nn.Linear(6, 6)
        self.out = nn.Linear(6, 2)
        self.exported = exported

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        if self.exported:
            for i in range(x.shape[1]):  # plain fx cannot follow this
                y = y + i
        return self.out(torch.relu(self.third(torch.relu(self.second(y)))))


def doubled(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return 2 * output


@pytest.mark.parametrize("exported", [False, True], ids=["fx", "export"])
@pytest.mark.parametrize("layer", ["norm", "second"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
@pytest.mark.filterwarnings("ignore:.*another path in train mode.*:UserWarning")
def test_forward_hooks_run(norm: type[nn.Module], layer: str, exported: bool) -> None:
    torch.manual_seed(0)
    model = Net(norm(8), exported).double()
    model.get_submodule(layer).register_forward_hook(doubled)
    x = torch.randn(5, 4, dtype=torch.float64)
    gated = tgfx.transform(model, x)
    assert gated.facts.source.front_end == ("export" if exported else "fx")
    for training in (True, False):
        model.train(training), gated.train(training)
        promises.assert_close(gated(x).detach(), model(x).detach(), promises.IDENTITY, f"training={training}")
    promises.gate_at_random(gated, 0.5, seed=0)
    with torch.no_grad():
        promises.assert_close(tgfx.shrink(gated)(x), gated(x), promises.EXACT, "cut")


def test_hooked_channels_are_kept_and_the_reason_is_given() -> None:
    model = Net(nn.LayerNorm(8), False)
    model.second.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    model.second.register_full_backward_hook(lambda module, *gradients: None)
    gated = tgfx.transform(model, torch.zeros(1, 4))
    assert list(gated.gates) == ["third"]
    assert "hooks are registered" in gated.explain("second")
