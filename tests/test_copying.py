"""copy_model: the same copy as copy.deepcopy makes."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tgfx.capture import copy_model


class Odd(nn.Module):
    """Shares what can be shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = self.first
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("whole", torch.arange(6.0))
        self.register_buffer("part", self.whole[2:4], persistent=False)
        self.options = {"sizes": [1, 2], "owner": self, "fn": torch.relu}
        self.alias = self.options
        self.table = OrderedDict(a=(1, 2), b=([3],))
        self.up = nn.Upsample(scale_factor=2)
        self.items = nn.ModuleList([nn.ReLU(inplace=True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x)))


class OwnCopy(nn.Module):
    """Has a say in how it is copied."""

    def __deepcopy__(self, memo: dict) -> OwnCopy:
        twin = OwnCopy()
        twin.copied = True
        return twin


def test_shared_things_stay_shared() -> None:
    model = Odd()
    twin = copy_model(model)
    assert twin.second.weight is twin.first.weight
    assert twin.first.weight is not model.first.weight
    assert twin.again is twin.first
    assert twin.options["owner"] is twin
    assert twin.alias is twin.options
    assert twin.options["sizes"] is not model.options["sizes"]
    assert twin.table["b"][0] is not model.table["b"][0]
    twin.whole[2] = 70
    assert twin.part[0] == 70
    assert model.whole[2] == 2


def test_part_before_whole_stays_shared() -> None:
    model = nn.Module()
    memory = torch.arange(6.0)
    model.register_buffer("part", memory[2:4])
    model.register_buffer("whole", memory)
    twin = copy_model(model)
    twin.whole[2] = 70
    assert twin.part[0] == 70
    assert memory[2] == 2


@pytest.mark.parametrize("make", [Odd, lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda: nn.LSTM(3, 4)])
def test_equals_deepcopy(make) -> None:
    model = make()
    expected, found = copy.deepcopy(model), copy_model(model)
    assert [(n, type(m)) for n, m in found.named_modules()] == [(n, type(m)) for n, m in expected.named_modules()]
    for (name, m), (_, other) in zip(found.named_modules(), expected.named_modules(), strict=True):
        assert list(m.__dict__) == list(other.__dict__), name
        assert m._non_persistent_buffers_set == other._non_persistent_buffers_set
    state, wanted = found.state_dict(), expected.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)
    assert all(p.requires_grad == q.requires_grad for p, q in zip(found.parameters(), model.parameters(), strict=True))
    mine = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not mine & {t.data_ptr() for t in (*found.parameters(), *found.buffers())}


def test_plain_layers_need_no_deepcopy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def deepcopy(value: object, memo: dict) -> object:
        asked.append(type(value))
        return real(value, memo)

    real = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", deepcopy)
    copy_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.Linear(2, 2))))
    assert set(asked) == set()


def test_own_deepcopy_is_asked() -> None:
    model = nn.Sequential(OwnCopy(), nn.ReLU())
    assert copy_model(model)[0].copied


def test_hooks_and_instance_deepcopy_as_deepcopy_does() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    copy_model(model)(torch.zeros(1, 2))
    assert calls == [1]
