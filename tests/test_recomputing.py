"""gradient_checkpointing_enable: the same losses, gradients and statistics in less memory."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import tests.support.torchvision_ops  # noqa: F401  before torchvision
import tgfx
from tests.support import promises
from tests.support.chains import examples
from tests.support.random_models import Case, build, cases
from tgfx.errors import InputError
from tgfx.passes.segments import find_segments

EQUAL = 1e-12  # float64; the same computations, twice


class Storages(TorchDispatchMode):
    """Notes the memory of all results, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        return sum(size for storage, size in self.seen.values() if not storage.expired())


def step(gated: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss, gradients, and the bytes that are kept from forward to backward."""
    torch.manual_seed(3)
    with Storages() as storages:
        out = gated(x)
        kept = storages.alive()
    out = out if isinstance(out, Tensor) else sum(out)
    loss = (out - torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in gated.named_parameters() if p.grad is not None}, kept


def assert_the_same_in_segments(gated: tgfx.GatedModule, x: Tensor) -> tuple[int, int]:
    """Gives the bytes kept without and with recomputing."""
    again = copy.deepcopy(gated)
    again.gradient_checkpointing_enable()
    loss, gradients, kept = step(gated, x.clone())
    found, others, less = step(again, x.clone())
    promises.assert_close(found, loss, EQUAL, "loss")
    assert others.keys() == gradients.keys()
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert float((others[name] - gradient).abs().max()) <= EQUAL * scale, f"gradient of {name}"
    for (name, buffer), other in zip(gated.named_buffers(), again.buffers(), strict=True):
        promises.assert_close(other.double(), buffer.double(), EQUAL, f"{name} moves once")
    return kept, less


def resnet() -> nn.Module:
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


def densenet() -> nn.Module:
    import torchvision

    return torchvision.models.DenseNet(8, (3, 3, 3), 16, num_classes=10, drop_rate=0.2)


def shuffled() -> nn.Module:
    import torchvision

    return torchvision.models.shufflenet_v2_x0_5(num_classes=10)


def auxiliary() -> nn.Module:
    import torchvision

    return torchvision.models.googlenet(num_classes=10, init_weights=False)


def vit() -> nn.Module:
    import torchvision

    model = torchvision.models.VisionTransformer(64, 8, 6, 4, 32, 64, num_classes=10, dropout=0.1)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


@pytest.mark.parametrize("make", [resnet, densenet, shuffled, vit, auxiliary])
def test_the_same_in_less_memory(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    gated = tgfx.transform(make().double().train(), x)
    promises.gate_at_random(gated, 0.7, seed=0)
    kept, less = assert_the_same_in_segments(gated, x)
    assert less < 0.65 * kept


@examples(40)
@given(cases())
def test_random_models(case: Case) -> None:
    """Among them in-place changes, views of them, writes to buffers and to the input."""
    assert_the_same_in_segments(tgfx.transform(build(case).train(), case.example()), case.example(3))


@pytest.mark.parametrize("granularity", ["weight", "layer", ("channel", "layer", "head")], ids=str)
def test_all_granularities(granularity: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(16, 4)).double()
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    assert_the_same_in_segments(tgfx.transform(model.train(), x, granularity=granularity), x)


class InPlace(nn.Module):
    """Every cut between a value and what writes over it would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.out = nn.Linear(8, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            y = layer(x)
            view = y[:, :4]
            y += x
            view.mul_(2)
            x = F.relu(y, inplace=True)
        self.count.add_(1)
        return self.out(x) * self.count


def test_no_cut_between_a_value_and_what_writes_over_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    gated = tgfx.transform(InPlace().double().train(), x)
    assert_the_same_in_segments(gated, x)
    segments = find_segments(gated, gated.graph)
    assert sum(segment.repeatable for segment in segments) >= 3
    whole = [node.name for segment in segments for node in segment.nodes]
    assert whole == [node.name for node in gated.graph.nodes if node.op not in ("placeholder", "output")]


def test_layers_that_depend_on_what_they_move_run_once() -> None:
    """A second run of spectral norm would be another step of its power iteration."""
    torch.manual_seed(0)
    layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(5)]
    model = nn.Sequential(*(one for layer in layers for one in (layer, nn.Tanh())), nn.Linear(8, 2)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    assert_the_same_in_segments(tgfx.transform(model.train(), x), x)


def test_trains_compacts_copies_and_compiles() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(one for _ in range(8) for one in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())))
    x, y = torch.randn(32, 16, dtype=torch.float64), torch.arange(32) % 16
    plain = tgfx.transform(model.double().train(), x)
    again = copy.deepcopy(plain)
    again.gradient_checkpointing_enable({"use_reentrant": False})
    assert inspect.signature(again.forward) == inspect.signature(plain.forward)
    for gated in (plain, again):
        optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05), momentum=0.9)
        for number in range(12):
            optimizer.zero_grad()
            (F.cross_entropy(gated(x), y) + gated.budget_loss(params=0.5, steps=12)).backward()
            optimizer.step()
            if number % 5 == 4:
                tgfx.compact_(gated, optimizer, patience=0)
    for (name, expected), found in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        assert found[0] == name
        promises.assert_close(found[1].detach(), expected.detach(), 1e-9, name)
    for twin in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert twin.is_gradient_checkpointing
        assert torch.equal(twin(x), again(x))
    compiled = torch.compile(copy.deepcopy(again), backend="aot_eager", fullgraph=True)  # which keeps what it likes
    promises.assert_close(compiled(x), plain(x), 1e-12, "compiled")
    again.gradient_checkpointing_disable()
    assert not again.is_gradient_checkpointing and not pickle.loads(pickle.dumps(again)).is_gradient_checkpointing


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant=True"),
        ({"gradient_checkpointing_kwargs": {"context_fn": None}}, "context_fn"),
        ({"offload": True}, "offload=True"),
        ({"every_n_layers": 2}, "every_n_layers=2"),
    ],
    ids=str,
)
def test_what_there_is_not_is_refused(options: dict[str, Any], named: str) -> None:
    gated = tgfx.transform(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4))
    with pytest.raises(InputError, match=named):
        gated.gradient_checkpointing_enable(**options)
    assert not gated.is_gradient_checkpointing
