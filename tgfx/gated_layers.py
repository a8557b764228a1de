"""BatchNorm whose affine is scaled by a gate: the same function as gating its output, at no cost per pixel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class _GatedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """forward(x, gate) = gate * batch_norm(x), computed as batch_norm with gate * weight and gate * bias."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        self._check_input_dim(x)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # cumulative average
                momentum = 1.0 / float(self.num_batches_tracked)
        use_batch = self.training or (self.running_mean is None and self.running_var is None)
        keep_stats = not self.training or self.track_running_stats
        gate = gate.reshape(-1).expand(self.num_features)  # one gate may stand for all channels
        weight = gate.to(x) if self.weight is None else self.weight * gate.to(self.weight)
        bias = None if self.bias is None else self.bias * gate.to(self.bias)
        return F.batch_norm(
            x,
            self.running_mean if keep_stats else None,
            self.running_var if keep_stats else None,
            weight,
            bias,
            use_batch,
            momentum,
            self.eps,
        )


class GatedBatchNorm1d(_GatedBatchNorm, nn.BatchNorm1d):
    pass


class GatedBatchNorm2d(_GatedBatchNorm, nn.BatchNorm2d):
    pass


class GatedBatchNorm3d(_GatedBatchNorm, nn.BatchNorm3d):
    pass


_GATED = {
    nn.BatchNorm1d: GatedBatchNorm1d,
    nn.BatchNorm2d: GatedBatchNorm2d,
    nn.BatchNorm3d: GatedBatchNorm3d,
}


def can_gate(module: nn.Module) -> bool:
    return type(module) in _GATED


def gated_batch_norm(module: nn.Module) -> nn.Module:
    """A gated twin that holds the very same tensors and children."""
    twin = _GATED[type(module)].__new__(_GATED[type(module)])
    twin.__dict__.update(module.__dict__)
    return twin
