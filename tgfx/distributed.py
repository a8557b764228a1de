"""Gated models that are spread over many processes. The engine is torch.distributed; DDP needs nothing from here.

torch.distributed.fsdp.fully_shard(gated)          # the whole model: the graph calls layers, not their parents
... train ...
compact = tgfx.shrink(tgfx.distributed.gather(gated))    # on every rank
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import nn

from tgfx.gated import GatedModule
from tgfx.gated_copy import from_state, state_of
from tgfx.sharding import is_sharded, whole

__all__ = ["fingerprint_of_gates", "gather"]


@torch.no_grad()
def gather(gated: GatedModule) -> GatedModule:
    """An unsharded copy of a gated model under FSDP2, the same on each rank. All ranks must call it."""
    reshard = getattr(gated, "reshard", None)
    if reshard is not None:
        reshard()
    memo: dict[int, Any] = {}
    for parameter in gated.parameters():
        if is_sharded(parameter):
            memo[id(parameter)] = nn.Parameter(whole(parameter).clone(), requires_grad=parameter.requires_grad)
    return from_state(copy.deepcopy(state_of(gated), memo))


def fingerprint_of_gates(gated: GatedModule) -> str:
    """A hash of which gates are open: compare it between ranks before you cut on each of them."""
    return hashlib.sha256(gated.open_slots().tobytes()).hexdigest()
