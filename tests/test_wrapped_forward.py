"""A forward behind a wrapper that takes (*args, **kwargs), as most of transformers' are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tgfx


def wrapped(forward: Callable) -> Callable:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("legacy", None)
        return forward(self, *args, **kwargs)

    return wrapper


class Decides(nn.Module):
    """Asks for numbers: no front end follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class Base(nn.Module):
    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.middle = middle if middle is not None else nn.Tanh()

    def run(self, x: Tensor) -> Tensor:
        return self.c(self.middle(self.b(torch.relu(self.a(x)))))


class ManyNames(Base):
    @wrapped
    def forward(self, x: Tensor, p: Any = None, q: Any = None, r: Any = None, t: Any = None, **kw: Any) -> Tensor:
        return self.run(x) if p is None else self.run(x) * p


class OneName(Base):
    @wrapped
    def forward(self, x: Tensor, **kw: Any) -> Tensor:
        return self.run(x)


class ByName(Base):
    @wrapped
    def forward(self, x: Tensor, /, *rest: Any, scale: float = 2.0, shift: Tensor | None = None, **kw: Any) -> Tensor:
        return self.run(x) * scale + (0 if shift is None else shift)


class Looks(Base):
    """Whether more is given decides what is computed."""

    @wrapped
    def forward(self, x: Tensor, p: Any = None, **kw: Any) -> Tensor:
        return self.run(x) * (3 if "more" in kw else 1)


def example(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 5, 6)), dtype=torch.double)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", [ManyNames, OneName, ByName, Looks])
def test_is_traced_and_what_cannot_be_followed_stays_closed(kind: type[Base], closed: bool) -> None:
    model = kind(Decides() if closed else None).double().eval()
    gated = tgfx.transform(model, example()).eval()
    assert gated.facts.source.front_end == "fx"
    assert set(gated.gates) == ({"a"} if closed else {"a", "b"})
    for x in (example(), example(1, 3, 6), -example().abs() * 9):
        torch.testing.assert_close(gated(x), model(x), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        gated.gates["a"].weight[::2] = -1
    x = example(4, 2, 6)
    torch.testing.assert_close(tgfx.shrink(gated).eval()(x), gated(x), rtol=1e-12, atol=1e-12)


def test_arguments_of_the_example_are_inputs_by_their_names() -> None:
    model = ManyNames(Decides()).double().eval()
    x, p = example(), torch.rand(3, dtype=torch.double)
    gated = tgfx.transform(model, {"x": x, "p": p}).eval()
    for other in (p, p * 2):
        torch.testing.assert_close(gated(x, p=other), model(x, p=other), rtol=1e-12, atol=1e-12)


def test_keyword_only_arguments_are_inputs_and_plain_ones_fixed() -> None:
    model, x, shift = ByName(Decides()).double().eval(), example(), torch.rand(3, dtype=torch.double)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        @wrapped
        def forward(self, x: Tensor, *, shift: Tensor, scale: float = 2.0, **kw: Any) -> Tensor:
            return self.inner(x, shift=shift, scale=scale)

    outer = Outer().eval()
    gated = tgfx.transform(outer, {"x": x, "shift": shift}).eval()
    torch.testing.assert_close(gated(x, shift=-shift), outer(x, shift=-shift), rtol=1e-12, atol=1e-12)
    with pytest.raises(AssertionError, match="scale was"):
        gated(x, shift=shift, scale=3.0)


def test_more_than_the_example_gave_is_an_error() -> None:
    gated = tgfx.transform(Looks(Decides()).double().eval(), example()).eval()
    with pytest.raises(TypeError, match="more"):
        gated(example(), more=1)
    with pytest.raises(AssertionError, match="p was None"):
        gated(example(), p=example())


def test_more_in_the_example_is_followed_or_refused() -> None:
    model = Looks().double().eval()
    x = example()
    try:
        gated = tgfx.transform(model, {"x": x, "more": 1}).eval()
    except tgfx.TgfxError:
        return
    torch.testing.assert_close(gated(x, more=1), model(x, more=1), rtol=1e-12, atol=1e-12)
