"""Changes in place through slices: the cut model must see them where the gated one does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tgfx
from tests.support.half_cut import Between, channels_gated, half_cut, images, kept_since


def _mul(y: Tensor) -> Tensor:
    y[:, ::2].mul_(2)
    return y


def _assign(y: Tensor) -> Tensor:
    y[:, ::2] = -y[:, 1::2]
    return y


def _into_zeros(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[:, ::2] = y[:, ::2]
    return y + z


def _augmented(y: Tensor) -> Tensor:
    y[:, 1::3] += 1
    return y


def _in_place_function(y: Tensor) -> Tensor:
    torch.nn.functional.leaky_relu(y[:, ::2] if y.ndim else y, -0.5, True)
    return y


def _view_of_a_view(y: Tensor) -> Tensor:
    y[:, ::2].transpose(2, 3)[:, :, 1:].neg_()
    return y


def _base_is_written(y: Tensor) -> Tensor:
    view = y[:, ::2]
    y.mul_(3)
    return torch.cat([y, view], 1)


def _twice(y: Tensor) -> Tensor:
    y.view(y.shape[0], 2, 4, *y.shape[2:])[:, :, ::2].mul_(2)
    return y


STRIDED = [_mul, _assign, _into_zeros, _augmented, _in_place_function, _view_of_a_view, _base_is_written, _twice]


@pytest.mark.parametrize("middle", STRIDED, ids=lambda f: f.__name__)
def test_what_is_written_through_strided_slices_is_not_lost(middle: Callable[[Tensor], Tensor]) -> None:
    class Two(Between):
        """A convolution before, that has gates."""

        def __init__(self) -> None:
            super().__init__(middle)
            self.before = torch.nn.Conv2d(3, 3, 1)
            self.between = torch.nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.between(self.before(x).sigmoid()))

    gated = half_cut(Two(), images(), images(3, seed=1))
    assert "changed in place" in kept_since(gated, "first")
    assert __file__ in kept_since(gated, "first")


def _contiguous_slice(y: Tensor) -> Tensor:
    y[:, 2:5].mul_(2)
    y[:, 5:] = y[:, :3] - 1
    return y


def _strided_and_only_read(y: Tensor) -> Tensor:
    return torch.cat([y[:, ::2], y[:, 1::2] * 2], 1)


def _written_into_another(y: Tensor) -> Tensor:
    """The slice of y is only read; what is written is a tensor of its own."""
    z = y[:, ::2] * 1
    z.mul_(2)
    return torch.cat([z, y[:, 1::2]], 1)


def _strided_over_space(y: Tensor) -> Tensor:
    y[:, :, ::2].mul_(2)
    return y


@pytest.mark.parametrize(
    "middle",
    [_contiguous_slice, _strided_and_only_read, _written_into_another, _strided_over_space],
    ids=lambda f: f.__name__,
)
def test_other_slices_stay_as_free_as_they_were(middle: Callable[[Tensor], Tensor]) -> None:
    gated = half_cut(Between(middle), images(), images(3, seed=1))
    assert channels_gated(gated) >= 5 and not isinstance(gated.groups["first"].frozen, tgfx.Refusal)
