"""Outputs that only one mode has, or that have other names in it: each mode gives what the model gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tgfx
from tests.support import promises


class Moded(nn.Module):
    """`give` makes another output in train mode; with `loop`, plain fx cannot follow the model."""

    def __init__(self, give: Callable[[bool, Tensor, Tensor], Any], loop: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.give, self.loop = give, loop

    def forward(self, x: Tensor) -> Any:
        for _ in range(x.ndim if self.loop else 0):
            x = x * 2
        hidden = self.second(self.first(x).relu()).relu()
        return self.give(self.training, self.last(hidden), hidden)


def memory_in_eval(training: bool, y: Tensor, hidden: Tensor) -> Any:
    return {"y": y} if training else {"y": y, "memory": (hidden,)}


def auxiliary_in_training(training: bool, y: Tensor, hidden: Tensor) -> Any:
    return (y, hidden.sum(1)) if training else y


def another_name(training: bool, y: Tensor, hidden: Tensor) -> Any:
    return {"loss_of": y} if training else {"y": y}


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("give", [memory_in_eval, auxiliary_in_training, another_name])
def test_each_mode_gives_its_own(give: Callable, loop: bool) -> None:
    model = Moded(give, loop).double().eval()
    gated = tgfx.transform(model, torch.randn(2, 4, dtype=torch.double))
    assert gated.facts.source.front_end == ("export" if loop else "fx") and gated.gates
    recomputed = copy.deepcopy(gated)
    recomputed.gradient_checkpointing_enable()
    x = torch.randn(3, 4, dtype=torch.double)
    for run in (gated, copy.deepcopy(gated), pickle.loads(pickle.dumps(gated)), recomputed):
        for training in (True, False, True):
            expected, form = pytree.tree_flatten(model.train(training)(x))
            found, own = pytree.tree_flatten(run.train(training)(x))
            assert own == form
            for left, right in zip(found, expected, strict=True):
                promises.assert_close(left, right, promises.IDENTITY, f"training={training}")


def test_compiled_in_one_piece() -> None:
    gated = tgfx.transform(Moded(memory_in_eval, loop=True), torch.randn(3, 4))
    compiled = torch.compile(gated, backend="eager", fullgraph=True)
    for training in (True, False):
        gated.train(training)
        assert set(compiled(torch.randn(3, 4))) == ({"y"} if training else {"y", "memory"})


def test_xlnet_keeps_its_memory_in_eval_mode_only() -> None:
    import tests.support.torchvision_ops  # noqa: F401  before transformers

    hf = pytest.importorskip("transformers", reason="transformers is an optional package")
    torch.manual_seed(0)
    config = hf.XLNetConfig(vocab_size=30, d_model=16, n_layer=1, n_head=2, d_inner=16)
    model = hf.XLNetForSequenceClassification(config).double().eval()
    ids = {"input_ids": torch.randint(3, 30, (2, 6))}
    gated = tgfx.transform(model, ids)
    for training in (True, False):
        torch.manual_seed(1)
        expected = model.train(training)(**ids)
        torch.manual_seed(1)
        found = gated.train(training)(**ids)
        assert type(found) is type(expected) and list(found) == list(expected)
        promises.assert_close(found.logits, expected.logits, 1e-9, f"logits, training={training}")
