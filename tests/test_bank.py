"""The bank that holds the gates of a model."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import tgfx
from tgfx.errors import InputError


@pytest.mark.parametrize("name", ["key", "names", "gates", "is_open", "record", "places", "constants", "state_dict_"])
def test_a_layer_may_be_called_what_the_bank_of_gates_calls_its_own(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict([(name, nn.Linear(4, 8)), ("act", nn.ReLU()), ("head", nn.Linear(8, 3))]))
    if hasattr(tgfx.GatedModule, name):
        with pytest.raises(InputError, match="names that a gated model needs"):
            tgfx.transform(model, torch.randn(2, 4))
        return
    gated = tgfx.transform(model, torch.randn(2, 4)).eval()
    gated.gates[name].set_open_(torch.arange(8) % 2 == 0)
    again = tgfx.transform(model, torch.randn(2, 4)).eval()
    again.load_state_dict(gated.state_dict())
    x = torch.randn(5, 4)
    torch.testing.assert_close(tgfx.shrink(again)(x), gated(x), rtol=1e-5, atol=1e-6)
    assert pickle.loads(pickle.dumps(gated)).gates[name].open_count() == 4
