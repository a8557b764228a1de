"""Parts of a model that switch autocast off stay in full precision when the gated model is trained with autocast."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tests.support.torchvision_ops  # noqa: F401  before anything that imports torchvision
import tgfx
from tests.support.promises import gate_at_random


class Island(nn.Module):
    """As a linear attention in full precision, in the middle of a model's own forward."""

    def __init__(self, *, exported: bool = False, nested: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.norm, self.exported, self.nested = nn.BatchNorm2d(8), exported, nested

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        with torch.autocast("cpu", enabled=False):
            y = y.float()
            y = y * torch.rsqrt(y.pow(2).mean((2, 3), keepdim=True) + 1e-6)
            y = y + self.norm(self.inner(y)).relu()
            if self.nested:
                with torch.no_grad(), torch.autocast("cpu", enabled=False):
                    z = y + self.inner(y)
                y = y + z
        if self.exported:  # a loop that fx does not follow
            for row in x[:, 0, 0]:
                y = y + row.mean() * 0
        return self.head(y)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def differs(one: Callable, other: Callable, x: Tensor) -> float:
    with torch.no_grad(), autocast():
        return float((one(x).float() - other(x).float()).abs().max())


KINDS = [{}, {"nested": True}, {"exported": True}, {"exported": True, "nested": True}]


@pytest.mark.parametrize("granularity", ["channel", "weight"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_region_without_autocast_is_in_the_graph(kind: dict[str, bool], granularity: str) -> None:
    torch.manual_seed(0)
    model, x = Island(**kind).eval(), torch.randn(2, 3, 8, 8)
    gated = tgfx.transform(model, x, granularity=granularity).eval()
    assert not gated.facts.source.opaque and gated.gates
    assert differs(gated, model, x) == 0
    assert differs(copy.deepcopy(gated), model, x) == 0
    assert differs(pickle.loads(pickle.dumps(gated)), model, x) == 0
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_training_is_that_of_the_model(kind: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model, x = Island(**kind).train(), torch.randn(2, 3, 8, 8)
    gated = tgfx.transform(model, x).train()
    gated.gradient_checkpointing_enable()
    for one in (model, gated):
        with autocast():
            loss = one(x).float().square().mean()
        loss.backward()
    mine = dict(gated.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(mine[name].grad, parameter.grad, rtol=1e-6, atol=1e-8), name
    gate_at_random(gated, 0.6, 0)
    gated.eval()
    with torch.no_grad(), autocast():
        before = gated(x)
        tgfx.compact_(gated)
        assert torch.equal(gated(x), before)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_cut_model_refuses_autocast(kind: dict[str, bool], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Island(**kind).eval(), torch.randn(2, 3, 8, 8)
    gated = tgfx.transform(model, x).eval()
    gate_at_random(gated, 0.6, 0)
    compact = tgfx.shrink(gated)
    assert torch.allclose(compact(x), gated(x), rtol=0, atol=1e-5)
    for one in (compact, copy.deepcopy(compact), pickle.loads(pickle.dumps(compact))):
        assert torch.equal(one(x), compact(x))
        with pytest.raises(AssertionError, match=r"outside of torch\.autocast"), autocast():
            one(x)
    tgfx.export_onnx(compact, tmp_path / "compact.onnx", x, dynamic_batch=False)


def test_where_autocast_changes_nothing_there_is_nothing_to_switch() -> None:
    """As in norms that are written out: everything is in full precision there already."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                y = y.float()
                y = y * torch.rsqrt(y.pow(2).mean((2, 3), keepdim=True) + 1e-6)
            return self.head(y)

    model, x = Norm().eval(), torch.randn(2, 3, 8, 8)
    gated = tgfx.transform(model, x).eval()
    assert differs(gated, model, x) == 0
    with autocast():
        tgfx.shrink(gated)(x)
