"""Sparse files: bit-exact, as small as they are sparse, and refused when damaged or foreign."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tgfx
from tgfx.errors import InputError, SparseFileError
from tgfx.sparse_encoding import DELTAS, ENCODINGS, DamagedEncoding, Encoded, decode, encode

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.float8_e4m3fn,
]  # fmt: skip


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)


def sparse(shape: tuple[int, ...], density: float, dtype: torch.dtype, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    raw = np.asarray(rng.integers(1, 100, shape) * (rng.random(shape) < density))
    return torch.from_numpy(raw).to(torch.float32).to(dtype)


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from((0.0, 0.002, 0.03, 0.1, 0.3, 0.5, 0.95, 1.0)),
    st.sampled_from(DTYPES),
    st.integers(0, 5),
)
def test_encoding_is_exact_and_never_larger_than_dense(shape, density, dtype, seed) -> None:
    tensor = sparse(shape, density, dtype, seed)
    encoded = encode(tensor)
    assert encoded.encoding in ENCODINGS
    assert same_bits(decode(encoded, shape), tensor)
    assert encoded.nbytes <= tensor.nbytes


@pytest.mark.parametrize(
    ("density", "expected"), [(0.9, "mask"), (0.5, "mask"), (0.1, "delta4"), (0.01, "delta8"), (0.0005, "delta16")]
)
def test_the_smallest_encoding_is_chosen(density: float, expected: str) -> None:
    tensor = sparse((400, 1000), density, torch.float32, 0)
    encoded = encode(tensor)
    assert encoded.encoding == expected
    assert same_bits(decode(encoded, (400, 1000)), tensor)


def test_negative_zero_and_nan_come_back() -> None:
    tensor = torch.zeros(1000)
    tensor[[3, 500, 999]] = torch.tensor([-0.0, float("nan"), float("inf")])
    back = decode(encode(tensor), (1000,))
    assert same_bits(back, tensor) and encode(tensor).values.numel() == 3


@pytest.mark.parametrize("gap", [0, 14, 15, 16, 30, 254, 255, 256, 510, 65534, 65535, 65536, 131070])
def test_gaps_at_the_edge_of_a_unit(gap: int) -> None:
    tensor = torch.zeros(2 * gap + 40000)
    tensor[gap], tensor[2 * gap + 1] = 1, 2
    assert encode(tensor).encoding in DELTAS
    assert same_bits(decode(encode(tensor), tuple(tensor.shape)), tensor)


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01, 0.0005])
def test_parts_that_do_not_belong_together_are_refused(density: float) -> None:
    tensor = sparse((100, 1000), density, torch.float32, 0)
    whole = encode(tensor)
    assert whole.places is not None
    for broken in (
        Encoded(whole.encoding, whole.values[:-1], whole.places),
        Encoded(whole.encoding, whole.values, whole.places[:-1]),
        Encoded(whole.encoding, whole.values, None),
        Encoded("zip", whole.values, whole.places),
    ):
        with pytest.raises(DamagedEncoding):
            decode(broken, (100, 1000))
    with pytest.raises(DamagedEncoding):
        decode(whole, (10, 1000))


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.bn = nn.BatchNorm2d(width)
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(self.bn(self.conv(x)).mean((2, 3)))))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter *= torch.rand_like(parameter) < 0.1
    return net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_round_trip(model: nn.Module, tmp_path: Path, dtype: torch.dtype) -> None:
    model = model.to(dtype)
    path = tgfx.save_sparse(model, tmp_path / "deep" / "model.safetensors")
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
    state = tgfx.load_sparse(path)
    own = model.state_dict()
    assert list(state) == list(own)
    assert all(same_bits(state[name], own[name]) for name in own)
    assert state["two.weight"] is state["one.weight"]
    fresh = Net().to(dtype)
    tgfx.load_sparse(path, fresh)
    assert all(same_bits(fresh.state_dict()[name], own[name]) for name in own)
    dense = sum(t.nbytes for t in own.values()) - own["two.weight"].nbytes
    values = sum(int((p != 0).sum()) for p in model.parameters()) * own["one.weight"].element_size()
    assert path.stat().st_size < 0.6 * dense + 2500  # 10% of the entries, and where they are
    assert path.stat().st_size > values


def test_saving_again_replaces_the_file(model: nn.Module, tmp_path: Path) -> None:
    path = tgfx.save_sparse(model, tmp_path / "a.safetensors")
    with torch.no_grad():
        model.conv.weight.fill_(2)
    tgfx.save_sparse(model, path)
    assert bool((tgfx.load_sparse(path)["conv.weight"] == 2).all())
    assert len(list(tmp_path.iterdir())) == 1


def test_views_of_one_memory_are_told_apart(tmp_path: Path) -> None:
    whole = torch.randn(10, 10)
    state = {
        "a": whole[:5],
        "b": whole[5:],
        "c": whole.t(),
        "d": whole,
        "empty": torch.zeros(0, 3),
        "n": torch.ones(()),
    }
    back = tgfx.load_sparse(tgfx.save_sparse(state, tmp_path / "s"))
    assert all(same_bits(back[name], tensor) for name, tensor in state.items())


def test_conjugated_and_negated_views(tmp_path: Path) -> None:
    whole = torch.randn(6, 4, dtype=torch.complex64)
    whole[1:4] = 0
    state = {"a": whole, "b": whole.conj(), "c": whole.conj().imag, "d": whole.mH}
    back = tgfx.load_sparse(tgfx.save_sparse(state, tmp_path / "s"))
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e8m0fnu])
def test_what_safetensors_cannot_hold(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="cannot hold") as caught:
        tgfx.save_sparse({"a": torch.zeros(2), "b": torch.ones(3).to(dtype)}, tmp_path / "s")
    assert caught.value.found == f"b: {dtype}"
    assert not list(tmp_path.iterdir())


def refused(path: Path, *needles: str, model: nn.Module | None = None) -> None:
    with pytest.raises(SparseFileError) as caught:
        tgfx.load_sparse(path, model)
    assert str(path) in str(caught.value)
    for needle in needles:
        assert needle in str(caught.value), caught.value


def test_damaged_and_foreign_files(model: nn.Module, tmp_path: Path) -> None:
    path = tgfx.save_sparse(model, tmp_path / "model.safetensors")
    whole = path.read_bytes()
    refused(tmp_path / "nowhere", "No such file")
    broken = tmp_path / "broken"
    for content in (b"", b"hello", whole[: len(whole) // 2], whole[:-1], whole[:8] + b"x" + whole[9:]):
        broken.write_bytes(content)
        refused(broken)
    for at in (-1, -len(whole) // 3, -len(whole) // 2):  # a single bit, anywhere in the data
        flipped = bytearray(whole)
        flipped[at] ^= 1
        broken.write_bytes(bytes(flipped))
        refused(broken, "checksum")
    save_file(model.bn.state_dict(), broken)
    refused(broken, "format None")
    tensors = load_file(path)
    for metadata in (
        {"format": "tgfx-sparse", "version": "2", "tensors": "{}"},
        {"format": "tgfx-sparse", "version": "1"},
        {"format": "tgfx-sparse", "version": "1", "tensors": "{"},
        {"format": "tgfx-sparse", "version": "1", "tensors": json.dumps({"gone": {"encoding": "dense", "shape": []}})},
        {"format": "tgfx-sparse", "version": "1", "tensors": json.dumps({"one.weight": {"same_as": "later"}})},
        {"format": "tgfx-sparse", "version": "1", "tensors": "[1]"},
    ):
        save_file(tensors, broken, metadata)
        refused(broken)


def test_file_of_another_model(model: nn.Module, tmp_path: Path) -> None:
    path = tgfx.save_sparse(model, tmp_path / "model.safetensors")
    refused(path, "conv.weight", "another model", model=Net(32))
    refused(path, "absent", model=nn.Linear(3, 3))


def test_what_cannot_be_saved(model: nn.Module, tmp_path: Path) -> None:
    gated = tgfx.transform(model, torch.randn(1, 3, 8, 8), granularity="weight")
    for bad, needle in ((gated, "shrink"), (3, "int"), ({"a": 1}, "'a'")):
        with pytest.raises(InputError, match=needle):
            tgfx.save_sparse(bad, tmp_path / "x")
    with pytest.raises(InputError, match="places"):
        tgfx.save_sparse({"a": torch.zeros(2), "a::places": torch.zeros(2)}, tmp_path / "x")
    assert not list(tmp_path.iterdir())
