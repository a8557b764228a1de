"""The trainable gate function (paper, section 3): a 0/1 decision with a derivative of our choice.

    TG(w) = b(w) + s(w)·g(w),    s(w) = (M·w − ⌊M·w⌋) / M

b is the binary gate, g the gradient shape. As 0 ≤ s ≤ 1/M and s′ = 1, TG is within |g|/M of b while its
derivative is within |g′|/M of g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tgfx.errors import InputError

__all__ = ["GateSettings", "GateSpec", "TrainableGate", "binary_gate", "trainable_gate"]

Elementwise = Callable[[Tensor], Tensor]


def _sigmoid_prime(weight: Tensor) -> Tensor:
    p = torch.sigmoid(weight)
    return p * (1 - p)


def _tanh_prime(weight: Tensor) -> Tensor:
    return 1 - torch.tanh(weight).square()


def _step(weight: Tensor) -> Tensor:
    return weight > 0


_SHAPES: dict[str, Elementwise] = {
    "constant": torch.ones_like,
    "sigmoid": _sigmoid_prime,
    "tanh": _tanh_prime,
}
_BINARIES: dict[str, Elementwise] = {"step": _step}
_INITS = ("constant", "random", "magnitude")


def binary_gate(weight: Tensor, binary: str | Elementwise = "step") -> Tensor:
    """b(w): exactly 0 or 1, in the dtype of `weight`, without gradient."""
    return _resolve("binary", binary, _BINARIES)(weight.detach()).to(weight.dtype)


def trainable_gate(
    weight: Tensor,
    *,
    M: float = 1e5,
    shape: str | Elementwise = "constant",
    binary: str | Elementwise = "step",
) -> Tensor:
    """TG(w), elementwise, in the dtype of `weight`."""
    # M·w overflows float16 and has no fraction left in bfloat16.
    w = weight.to(torch.promote_types(weight.dtype, torch.float32))
    scaled = M * w
    # This form keeps 0 <= s <= 1/M in floating point too: the difference is exact, w − ⌊M·w⌋/M is not.
    s = (scaled - scaled.detach().floor()) / M
    return (binary_gate(w, binary) + s * _resolve("shape", shape, _SHAPES)(w)).to(weight.dtype)


@dataclass(frozen=True)
class GateSettings:
    """The function a gate computes. Gates with equal settings may be evaluated as one concatenated vector."""

    M: float = 1e5
    shape: str | Elementwise = "constant"
    binary: str | Elementwise = "step"

    def __post_init__(self) -> None:
        _check_number("M", self.M, positive=True)
        _probe("shape", self.shape, _SHAPES)
        values = _probe("binary", self.binary, _BINARIES)
        if not bool(((values == 0) | (values == 1)).all()):
            raise InputError("a binary gate must give 0 or 1", expected="0 or 1", found=f"{values.tolist()}")

    def trained(self, weight: Tensor) -> Tensor:
        """TG(w): what a gate gives in training mode."""
        return trainable_gate(weight, M=self.M, shape=self.shape, binary=self.binary)

    def binary_value(self, weight: Tensor) -> Tensor:
        """b(w): what a gate gives in eval mode."""
        return binary_gate(weight, self.binary)

    def slope(self, weight: Tensor) -> Tensor | None:
        """TG′(w) by autograd itself; None where it is 1 everywhere."""
        if self.shape == "constant":
            return None
        with torch.enable_grad():
            leaf = weight.detach().requires_grad_()
            value = self.trained(leaf)
            (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        return slope

    def check_sign_decides(self) -> None:
        """Raise unless the gate is open at positive weights and closed at negative ones, from 0.001 to 1,000."""
        sizes = torch.logspace(-3, 3, 25, device="cpu")
        opened = self.binary_value(torch.cat([sizes, -sizes])) != 0
        if not torch.equal(opened, torch.arange(2 * len(sizes)) < len(sizes)):
            raise self.sign_error("train it by the paper's rule, budget_loss(weight=...), or use binary='step'")

    def sign_error(self, fix: str) -> InputError:
        return InputError(
            "the sign of a weight does not decide this gate",
            expected="a binary gate that is open at +|w| and closed at −|w|",
            found=f"binary={self.binary!r}",
            fix=fix,
        )


class TrainableGate(nn.Module):
    """A vector of trainable gates: calling it gives TG(w) in training mode and b(w), exactly 0/1, in eval.

    `init="constant"` starts every weight at `init_value`; with the default of 1, and M an integer, s is
    exactly 0 and so TG exactly 1. `"random"` is the paper's "simple random" initialisation; the paper names
    no distribution, we draw uniformly from (0, `init_value`] so that every step gate starts open; `transform` draws by
    the seed of the last torch.manual_seed, and leaves the state as it is. A tensor,
    or a callable from size to tensor, gives the weights themselves. `"magnitude"` is for granularity "weight" only:
    |w| over its mean times `init_value`, so that small weights close first.
    `shape` and `binary` may be lambdas, but the gate can then not be pickled.
    """

    def __init__(
        self,
        size: int,
        *,
        M: float = 1e5,
        shape: str | Elementwise = "constant",
        binary: str | Elementwise = "step",
        init: str | Tensor | Callable[[int], Tensor] = "constant",
        init_value: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError("a gate needs a size", expected="an integer of at least 1", found=repr(size))
        self.settings = GateSettings(M, shape, binary)
        self.init_value = init_value
        self.weight = nn.Parameter(_initial_weight(size, init, init_value, generator))

    def forward(self) -> Tensor:
        """The gate values, one for each weight."""
        value = self.settings.trained if self.training else self.settings.binary_value
        return value(self.weight)

    def is_open(self) -> Tensor:
        """Which gates are open, as a bool vector."""
        return self.settings.binary_value(self.weight) != 0

    def open_count(self) -> int:
        """How many gates are open."""
        return int(self.is_open().sum())

    @torch.no_grad()
    def set_open_(self, mask: Tensor) -> TrainableGate:
        """Open the gates where `mask` is true and close the others, by the sign of their weights."""
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape != self.weight.shape:
            shape = tuple(self.weight.shape)
            raise InputError("the mask does not fit", expected=f"bool tensor {shape}", found=_describe(mask))
        mask = mask.to(self.weight.device)
        # A weight of exactly 0 has no magnitude to keep.
        size = self.weight.abs().where(self.weight != 0, abs(self.init_value) or 1.0)
        weight = torch.where(mask, size, -size)
        if not torch.equal(self.settings.binary_value(weight) != 0, mask):
            raise self.settings.sign_error("write gate.weight yourself")
        self.weight.copy_(weight)
        return self

    def extra_repr(self) -> str:
        of = self.settings
        return f"{self.weight.numel()}, M={of.M:g}, shape={_label(of.shape)}, binary={_label(of.binary)}"


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """How to make gates of any size: the arguments of `TrainableGate` but the size, checked at once."""

    M: float = 1e5
    shape: str | Elementwise = "constant"
    binary: str | Elementwise = "step"
    init: str | Callable[[int], Tensor] = "constant"
    init_value: float = 1.0

    def __post_init__(self) -> None:
        GateSettings(self.M, self.shape, self.binary)
        if isinstance(self.init, Tensor):
            raise InputError(
                "a tensor has one size, a spec makes gates of many",
                expected="init as a name or a callable from size to tensor",
                found=_describe(self.init),
                fix="pass init=lambda size: ...",
            )
        _check_init(self.init, self.init_value)

    @property
    def settings(self) -> GateSettings:
        """The function the gates will compute."""
        return GateSettings(self.M, self.shape, self.binary)

    def build(self, size: int, *, generator: torch.Generator | None = None) -> TrainableGate:
        """A new gate layer of `size` gates."""
        return TrainableGate(
            size,
            M=self.M,
            shape=self.shape,
            binary=self.binary,
            init=self.init,
            init_value=self.init_value,
            generator=generator,
        )


def _resolve(what: str, choice: str | Elementwise, known: Mapping[str, Elementwise]) -> Elementwise:
    if callable(choice):
        return choice
    if not isinstance(choice, str) or choice not in known:
        names = ", ".join(map(repr, known))
        raise InputError(f"unknown {what}", expected=f"{names} or a callable", found=repr(choice))
    return known[choice]


def _probe(what: str, choice: str | Elementwise, known: Mapping[str, Elementwise]) -> Tensor:
    """Try the function on a few weights, so that a bad one fails here and not in the middle of training."""
    function = _resolve(what, choice, known)
    weight = torch.linspace(-2, 2, 9, device="cpu")
    try:
        value = function(weight)
    except Exception as cause:
        raise InputError(f"{what} failed on a vector of weights", found=repr(cause)) from cause
    if not isinstance(value, Tensor) or value.shape != weight.shape:
        expected = "a tensor of the shape of the weights"
        raise InputError(f"{what} must be elementwise", expected=expected, found=_describe(value))
    return value


def _check_number(name: str, value: float, *, positive: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (positive and value <= 0):
        expected = "a finite positive number" if positive else "a finite number"
        raise InputError(f"{name} is out of range", expected=expected, found=repr(value))


def _check_init(init: object, init_value: float) -> None:
    if not (isinstance(init, Tensor) or callable(init) or (isinstance(init, str) and init in _INITS)):
        expected = ", ".join(map(repr, _INITS)) + ", a tensor or a callable from size to tensor"
        raise InputError("unknown init", expected=expected, found=repr(init))
    _check_number("init_value", init_value, positive=isinstance(init, str) and init != "constant")


def _initial_weight(
    size: int,
    init: str | Tensor | Callable[[int], Tensor],
    init_value: float,
    generator: torch.Generator | None,
) -> Tensor:
    _check_init(init, init_value)
    if isinstance(init, str):
        if init == "magnitude":
            raise InputError(
                'init="magnitude" starts a gate from its weight, and this gate has none',
                expected='a gate per weight: tgfx.transform(model, granularity="weight")',
                found="gates of channels, or a bare TrainableGate",
            )
        if init == "constant":
            return torch.full((size,), float(init_value))
        device = None if generator is None else generator.device
        # rand is in [0, 1), so 1 − rand is in (0, 1].
        return init_value * (1 - torch.rand(size, generator=generator, device=device))
    value = init if isinstance(init, Tensor) else init(size)
    if not isinstance(value, Tensor) or value.shape != (size,) or not value.is_floating_point():
        raise InputError("init does not fit", expected=f"float tensor ({size},)", found=_describe(value))
    if not bool(value.isfinite().all()):
        raise InputError("init is not finite", expected="finite weights", found=f"{value.tolist()}")
    return value.detach().clone()


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    return repr(value)


def _label(choice: str | Elementwise) -> str:
    return choice if isinstance(choice, str) else getattr(choice, "__name__", repr(choice))
