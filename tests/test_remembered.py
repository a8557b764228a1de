"""Answers are given again only where they are proven the same; a graph that is wired wrongly is still found out."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tgfx
from tgfx import transforming
from tgfx.errors import VerificationError
from tgfx.ir.remembered import Remembered

conv = torch.ops.aten.convolution.default


def arguments(x: Tensor, weight: Tensor, stride: int = 1) -> tuple:
    return (x, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 4, 8, 8, generator=generator), torch.randn(4, 4, 3, 3, generator=generator)


def recorded(run: Callable[[], object]) -> tuple[Remembered, object]:
    remembered = Remembered()
    with torch.no_grad(), remembered.recording():
        return remembered, run()


def test_equal_operands_get_the_answer_once(tensors) -> None:
    x, weight = tensors
    remembered, y = recorded(lambda: F.conv2d(x, weight, padding=1))
    assert remembered.call(conv, arguments(x.clone(), weight), {}) is y
    again = remembered.call(conv, arguments(x, weight), {})
    assert again is not y
    assert torch.equal(again, y)


def _one_bit(x: Tensor) -> Tensor:
    other = x.clone()
    other.view(torch.int32).view(-1)[5] ^= 1
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: arguments(_one_bit(x), w),
        lambda x, w: arguments(x, _one_bit(w)),
        lambda x, w: arguments(x, w, stride=2),
        lambda x, w: arguments(x.to(memory_format=torch.channels_last), w),
        lambda x, w: arguments(x.double(), w.double()),
    ],
    ids=["input", "weight", "stride", "layout", "dtype"],
)
def test_anything_else_is_computed(tensors, change) -> None:
    x, weight = tensors
    remembered, y = recorded(lambda: F.conv2d(x, weight, padding=1))
    args = change(x, weight)
    found = remembered.call(conv, args, {})
    assert found is not y
    assert torch.equal(found, conv(*args))


@pytest.mark.parametrize(
    "write",
    [
        lambda x, w, y: y.relu_(),
        lambda x, w, y: y.data.mul_(2),
        lambda x, w, y: y[:, :1].zero_(),
        lambda x, w, y: x.add_(1),
        lambda x, w, y: w.data.add_(1),
        lambda x, w, y: torch.tanh(x, out=y),
        lambda x, w, y: torch._foreach_add_([y], 1),
    ],
)
@pytest.mark.parametrize("when", ["recording", "replaying"])
def test_what_is_written_to_is_forgotten(tensors, write, when) -> None:
    x, weight = tensors

    def run() -> Tensor:
        y = F.conv2d(x, weight, padding=1)
        if when == "recording":
            write(x, weight, y)
        return y

    with torch.no_grad():
        remembered, y = recorded(run)
        if when == "replaying":
            with _Noting(remembered):
                write(x, weight, y)
        found = remembered.call(conv, arguments(x, weight), {})
        assert found is not y
        assert torch.equal(found, conv(*arguments(x, weight)))


class _Noting(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, remembered: Remembered) -> None:
        super().__init__()
        self.remembered = remembered

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.remembered.call(func, args, kwargs or {})


def test_train_mode_statistics_clear_all(tensors) -> None:
    x, weight = tensors
    mean, var = torch.zeros(4), torch.ones(4)

    def run() -> Tensor:
        y = F.conv2d(x, weight, padding=1)
        F.batch_norm(y, mean, var, training=True)
        return y

    remembered, y = recorded(run)
    assert remembered.call(conv, arguments(x, weight), {}) is not y


def test_random_attention_is_never_kept() -> None:
    q = torch.randn(1, 2, 4, 8)
    remembered, _ = recorded(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert not any(key[0] is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
                   for key in remembered._answers)  # fmt: skip


class Net(nn.Module):
    """Two layers of one shape, in-place and out-of-place activations, a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = (nn.Conv2d(i, 8, 3, padding=1) for i in (3, 8, 8))
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        y = self.two(torch.tanh(self.one(x)))
        return self.head((x + y).mean((2, 3)))


def _node(graph: fx.Graph, target: object) -> fx.Node:
    return next(n for n in graph.nodes if n.target == target)


def _swap_layers(graph: fx.Graph) -> None:
    one, two = _node(graph, "one"), _node(graph, "two")
    one.target, two.target = two.target, one.target


def _drop_activation(graph: fx.Graph) -> None:
    node = _node(graph, torch.tanh)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _drop_in_place(graph: fx.Graph) -> None:
    node = _node(graph, "relu")
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _write_to_output(graph: fx.Graph) -> None:
    head = _node(graph, "head")
    with graph.inserting_after(head):
        graph.call_function(operator.iadd, (head, 1.0))


def _write_between(graph: fx.Graph) -> None:
    two = _node(graph, "two")
    with graph.inserting_after(two):
        graph.call_method("mul_", (two, 2.0))


def _write_unseen(graph: fx.Graph) -> None:
    two = _node(graph, "two")
    with graph.inserting_after(two):
        data = graph.call_function(getattr, (two, "data"))
    with graph.inserting_after(data):
        graph.call_method("mul_", (data, 2.0))


def _leave_out_branch(graph: fx.Graph) -> None:
    add = _node(graph, operator.add)
    add.args = (add.args[0], add.args[0])


@pytest.mark.parametrize(
    "spoil",
    [
        _swap_layers, _drop_activation, _drop_in_place, _write_to_output, _write_between, _write_unseen,
        _leave_out_branch,
    ],
)  # fmt: skip
def test_wrong_graphs_are_found_out(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[fx.Graph], None]) -> None:
    def wrongly_captured(*args: object) -> object:
        source = tgfx.capture.capture(*args)
        spoil(source.module.graph)
        source.module.graph.lint()
        source.module.recompile()
        return source

    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(1, 3, 8, 8)
    tgfx.transform(model, x)
    monkeypatch.setattr(transforming, "capture", wrongly_captured)
    with pytest.raises(VerificationError, match="does not compute what the model does"):
        tgfx.transform(model, x)


def test_transform_computes_no_convolution_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    recalled = Remembered._recalled

    def counted(self: Remembered, *args: object) -> object:
        given.append(recalled(self, *args))
        return given[-1]

    monkeypatch.setattr(Remembered, "_recalled", counted)
    tgfx.transform(Net().eval(), torch.randn(1, 3, 8, 8))
    assert len(given) == 4
    assert all(value is not None for value in given)
