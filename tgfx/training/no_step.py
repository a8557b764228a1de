"""Calls of step() that train nothing, so that neither gates nor the count of steps may follow them."""

from __future__ import annotations

from torch.optim import Optimizer

from tgfx.sharding import whole


def trains_nothing(optimizer: Optimizer, *, zeroed: bool = False) -> bool:
    """zeroed: gradients of zeros are those that a controller has left."""
    return _skips(optimizer) or (not zeroed and _only_makes_state(optimizer))


def _skips(optimizer: Optimizer) -> bool:
    """Others are not even asked, but to fused ones a GradScaler says that a gradient is not finite."""
    return bool(getattr(optimizer, "found_inf", False))


def _only_makes_state(optimizer: Optimizer) -> bool:
    """What torch.distributed.checkpoint does, so that an optimizer has state to load into.

    It is the first step, at rate 0, with a gradient of zeros for whatever is trained. The rate alone does not tell:
    gates are trained at rate 0 too, and schedules of the rate may reach it early.
    """
    groups = optimizer.param_groups
    if optimizer.state or any(float(group["lr"]) for group in groups if group.get("lr") is not None):
        return False
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    return bool(trained) and all(p.grad is not None and not bool(whole(p.grad).any()) for p in trained)
