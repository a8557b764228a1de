"""The gates of one weight, in its shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tgfx.bank import GateBank
from tgfx.gates import GateSpec, TrainableGate
from tgfx.ops.recompute import Recipe, remember
from tgfx.ops.weight_gate import GatedWeight, OpenSum, weighted_sum

_SMALLEST = 1e-3  # of a mean weight: what an entry that is exactly zero starts from, so that its gate is open


class WeightGate(TrainableGate):
    """A gate for every entry of a weight. Calling it with the weight gates it; without, it gives the gate values."""

    def __init__(self, weight: Tensor, spec: GateSpec, generator: torch.Generator | None = None) -> None:
        init: Any = _magnitudes(weight, spec.init_value) if spec.init == "magnitude" else spec.init
        super().__init__(
            weight.numel(),
            M=spec.M,
            shape=spec.shape,
            binary=spec.binary,
            init=init,
            init_value=spec.init_value,
            generator=generator,
        )
        self.weight = torch.nn.Parameter(self.weight.detach().reshape(weight.shape))
        self._counted: tuple[Tensor, int] | None = None

    def forward(self, weight: Tensor | None = None, *, owned: bool = False) -> Tensor:
        """`owned`: see GatedWeight."""
        if weight is None:
            return super().forward()
        latent, settings = self.weight, self.settings
        if not self.training:
            # chosen, not multiplied: a closed entry is zero whatever it was
            return weight.where(settings.binary_value(latent) != 0, 0)
        if torch.compiler.is_compiling():  # the compiler decides itself what to keep for backward
            return weight * settings.trained(latent).to(weight.dtype)
        gated, count = GatedWeight.apply(weight, latent, settings, owned)
        if gated.requires_grad:
            remember(gated, Recipe(weight, latent, settings))
        self._counted = (count, latent._version) if count.requires_grad else None
        return gated

    def open_sum(self, factor: Tensor) -> Tensor:
        """Sum of factor · gate value (0-dim, differentiable in training mode)."""
        latent = self.weight
        if not self.training:
            return weighted_sum(latent, self.settings.binary_value, factor)
        if factor.numel() == 1 and torch.is_grad_enabled() and self._counted and self._counted[1] == latent._version:
            return self._counted[0] * factor.reshape(())  # from the forward that ran with these very gates
        return OpenSum.apply(latent, self.settings, factor)

    def open_count(self) -> int:
        one = torch.ones([1] * self.weight.ndim, dtype=torch.float64, device=self.weight.device)
        return int(weighted_sum(self.weight, self.settings.binary_value, one))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counted": None}  # belongs to one forward

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, {super().extra_repr()}"


class WeightBank(GateBank):
    """The gates of all weights, by name."""

    def forward(self) -> Tensor:
        """All gate values laid end to end, and the constant one: as large as the weights themselves."""
        values = [gate().reshape(-1) for gate in self.gates().values()]
        return torch.cat([*values, torch.ones_like(values[0][:1])])

    def is_open(self) -> Tensor:
        return torch.cat([gate.is_open().reshape(-1) for gate in self.gates().values()])


def _magnitudes(weight: Tensor, scale: float) -> Tensor:
    """|w| relative to its mean, so that the smallest weights are the first to close."""
    size = weight.detach().abs().reshape(-1).to(torch.promote_types(weight.dtype, torch.float32))
    mean = float(size.mean()) or 1.0
    return size.div_(mean).clamp_(min=_SMALLEST).mul_(scale)
