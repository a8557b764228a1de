"""Does a closed box mind a cut? Run it on operands with channels gathered out, and compare.

For Python functions and layers without tensors that we only see from outside (drop path, a user's own activation). What
they do with sizes (`x.shape[-1] ** -0.5`) is invisible to the operator rules, so seeing it work is the only proof.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from tgfx.ir.facts import TensorIds

if TYPE_CHECKING:
    from tgfx.passes.channels import ChannelRecorder

TRIALS = 2


def survives_cut(recorder: ChannelRecorder, node: fx.Node, result: Any) -> bool:
    """Whether the callee commutes with taking channels out, for a few random choices of them."""
    return all(_trial(recorder, node, result, seed) for seed in range(TRIALS))


def _trial(recorder: ChannelRecorder, node: fx.Node, result: Any, seed: int) -> bool:
    dice = np.random.default_rng(seed)
    alive = dice.random(recorder.space.size) < 0.6
    alive[0] = True
    args, kwargs = recorder.fetch_args_kwargs_from_env(node)
    try:
        smaller = torch.utils._pytree.tree_map(lambda v: _gathered(recorder, v, alive), (args, kwargs))
        expected = torch.utils._pytree.tree_map(lambda v: _gathered(recorder, v, alive), result)
        found = getattr(recorder, node.op)(node.target, *smaller)
    except Exception:
        return False
    left, right = torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(found)
    return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))


def _gathered(recorder: ChannelRecorder, value: Any, alive: np.ndarray) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    ids: TensorIds = recorder.ids(value)
    for layer in ids.layers:
        axes = [a for a in range(layer.ndim) if layer.shape[a] > 1]
        if len(axes) != 1:
            raise ValueError("channels that cross axes cannot be gathered out")
        keep = alive[recorder.space.find(layer.reshape(-1).numpy())]
        if keep.shape[0] != value.shape[axes[0]]:
            raise ValueError("several layers on one axis")
        value = value.index_select(axes[0], torch.from_numpy(np.flatnonzero(keep)))
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
    try:
        return bool(a == b)
    except Exception:  # an object that holds tensors, say
        return False
