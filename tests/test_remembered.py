"""Answers are given again only where they are proven the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tgfx.ir.kept_state import KeptState
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
    with torch.no_grad(), remembered.recording(KeptState(())):
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


def test_train_mode_statistics_are_written_to_silently(tensors) -> None:
    """The schema of batch norm does not say that it writes to its statistics."""
    x, weight = tensors
    mean, var = torch.zeros(4), torch.ones(4)

    def run() -> Tensor:
        y = F.conv2d(x, weight, mean, padding=1)
        F.batch_norm(y, mean, var, training=True)
        return y

    remembered, _ = recorded(run)
    args = (x, weight, mean, *arguments(x, weight)[3:])
    assert torch.equal(remembered.call(conv, args, {}), conv(*args))


def test_random_attention_is_never_kept() -> None:
    q = torch.randn(1, 2, 4, 8)
    remembered, _ = recorded(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert not any(key[0] is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
                   for key in remembered._answers)  # fmt: skip
