"""Copies share memory until one of the two is written to, whatever way the write comes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import tgfx
from tgfx.capture.copying import copy_model

is_shared = torch._C._is_cow_tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(self.one(x)).relu())


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def values(model: nn.Module) -> dict[str, np.ndarray]:
    """Copied bit by bit, away from torch."""
    return {name: np.array(tensor.detach().clone().tolist()) for name, tensor in model.state_dict().items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_nothing_is_copied_by_transform(net: Net) -> None:
    gated = tgfx.transform(net, torch.randn(1, 3, 16, 16))
    weights = [p for n, p in gated.named_parameters() if "gate_" not in n]
    assert weights
    assert all(map(is_shared, weights))


def _step(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.train()(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()


def _by_numpy(model: nn.Module) -> None:
    model.one.weight.detach().numpy()[0] = 7


def _by_view(model: nn.Module) -> None:
    model.one.weight.data.view(-1)[:5].zero_()


def _by_pointer(model: nn.Module) -> None:
    import ctypes

    (ctypes.c_float * 4).from_address(model.one.weight.data_ptr())[0] = 7.0


def _by_storage(model: nn.Module) -> None:
    model.one.weight.untyped_storage().fill_(1)


def _by_load(model: nn.Module) -> None:
    model.load_state_dict(Net().state_dict())


def _by_statistics(model: nn.Module) -> None:
    with torch.no_grad():
        model.train()(torch.randn(2, 3, 8, 8))


def _by_init(model: nn.Module) -> None:
    nn.init.zeros_(model.two.weight)


WRITES = [_step, _by_numpy, _by_view, _by_pointer, _by_storage, _by_load, _by_statistics, _by_init]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("which", ["original", "copy"])
def test_a_write_to_one_is_not_seen_by_the_other(net: Net, write: Callable[[nn.Module], None], which: str) -> None:
    twin = copy_model(net)
    before = values(net)
    written, other = (net, twin) if which == "original" else (twin, net)
    write(written)
    assert not same(before, values(written))
    assert same(before, values(other))


def test_an_array_that_shows_the_weights_goes_on_showing_them(net: Net) -> None:
    array = net.one.weight.detach().numpy()
    twin = copy_model(net)
    array[0] = 7
    assert bool((net.one.weight[0] == 7).all())
    assert not bool((twin.one.weight[0] == 7).any())
    nn.init.zeros_(net.one.weight)
    assert not array.any()


def test_memory_of_others_is_copied_at_once(net: Net, tmp_path: Path) -> None:
    array = np.ones((16, 3, 3, 3), dtype=np.float32)
    net.one.weight = nn.Parameter(torch.from_numpy(array))
    net.two.weight.data.share_memory_()
    twin = copy_model(net)
    before = values(twin)
    array[:] = 2
    with torch.no_grad():
        net.two.weight.add_(1)
    assert same(before, values(twin))
    file = tmp_path / "weights.pt"
    torch.save(net.state_dict(), file)
    net.load_state_dict(torch.load(file, mmap=True), assign=True)
    twin = copy_model(net)
    before = values(twin)
    with torch.no_grad():
        net.two.weight.add_(1)
    assert same(before, values(twin))


@pytest.mark.parametrize(
    "through",
    [
        copy.deepcopy,
        lambda state: pickle.loads(pickle.dumps(state)),
        lambda state: torch.load(io.BytesIO(_saved(state))),
        lambda state: safetensors.torch.load(safetensors.torch.save(state)),
        lambda state: {name: tensor.share_memory_() for name, tensor in state.items()},
    ],
    ids=["deepcopy", "pickle", "torch.save", "safetensors", "share_memory"],
)
def test_shared_weights_are_saved_as_they_are(net: Net, through: Callable[[dict], dict]) -> None:
    twin = copy_model(net)
    found = through(dict(twin.state_dict()))
    assert all(torch.equal(found[name], tensor) for name, tensor in net.state_dict().items())
    nn.init.zeros_(net.one.weight)
    assert all(bool(tensor.any()) for name, tensor in found.items() if name == "one.weight")


def _saved(state: dict) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
