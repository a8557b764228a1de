"""A loss that comes with a probe of its curvature, for runs in which only gates are trained.

What closing a gate costs is a matter of the loss's slope and of its curvature. Both can be read off the gradient of one
loss only if that is noisy, and then the slope is known no better than the noise allows. A probe keeps them apart: the
loss itself has the slope, and the probe, a second number of the same forward pass, is nothing but noise, of just the
size that tells the curvature (Gauss-Newton):

    half the squared distance d        probe = sum of d times a normal deviate, mean over samples
    cross-entropy                      probe = cross-entropy with classes drawn from the model's own beliefs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tgfx.errors import TrainingError
from tgfx.training.vectors import spread_gradients

if TYPE_CHECKING:
    from tgfx.gated import GatedModule


class Probed(NamedTuple):
    """What the `training_step` of tgfx.fit may return in place of a loss, with train="gates".

    Both are means over the samples of the batch.

    The mean square of the probe's gradient by one sample, over its noise, is the curvature of the loss.
    """

    loss: Tensor
    probe: Tensor


def probe_gradients(gated: GatedModule, probe: Tensor) -> Tensor:
    """Derivatives of the probe by what the gates give, one for each slot; nothing is left behind on the gates."""
    weights = {name: gate.weight for name, gate in gated.gates.items() if gate.weight.requires_grad}
    found = torch.autograd.grad(probe, list(weights.values()), allow_unused=True)
    if all(gradient is None for gradient in found):
        raise TrainingError(
            "the probe does not depend on the gates",
            expected="a probe computed from the output of the gated model, with its gradient",
            found="no gradient reaches a gate",
            where="the probe of training_step(model, batch)",
            fix="detach the other model's answers, not the gated one's; a checkpoint around the model must be "
            "use_reentrant=False",
        )
    return spread_gradients(gated, {name: g for name, g in zip(weights, found, strict=True) if g is not None})
