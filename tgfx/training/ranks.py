"""Data parallel training: who else trains the same gates, and how all of them come to the same gates."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from tgfx.errors import InputError, TrainingError

if TYPE_CHECKING:
    from tgfx.gated import GatedModule


def check_sharding(gated: GatedModule) -> None:
    """Refuse FSDP2 on parts of a gated model: their forward is never called, so they would never be gathered."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    parts = [path for path, module in gated.named_modules() if path and isinstance(module, FSDPModule)]
    if parts:
        raise InputError(
            "parts of the gated model are sharded by themselves",
            expected="fully_shard(gated) on the gated model as a whole",
            found=", ".join(parts[:4]),
            fix="leave out fully_shard of submodules: the gated graph calls layers directly, not their parents",
        )


def refuse_many_processes(what: str) -> None:
    """Raise where several processes would each do all of it, with gradients of their own and the same files."""
    count = 1
    if distributed.is_available():
        if distributed.is_initialized():
            count = distributed.get_world_size()
        elif distributed.is_torchelastic_launched():
            count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        raise TrainingError(
            f"{what} is for one process: gradients are not averaged between processes",
            expected="one process",
            found=f"{count} (torchrun)",
            fix="wrap the gated model in DDP or FSDP2 and train with a loop of your own, as in examples/distributed",
        )


class Ranks:
    """The processes that hold a replica (DDP) or a shard (FSDP2) of one gated model.

    Gradients are averaged over them, so they are equal everywhere. Batch sizes need not be, and a machine of another
    kind may round another way: sizes are added up, and rank 0 of the group has the last word on the gates.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._looked = False

    def look(self) -> None:
        """Called inside the model's forward: there DDP says that it is at work."""
        self._looked = True
        around = DistributedDataParallel._get_active_ddp_module() if distributed.is_available() else None
        self._group = None if around is None else around.process_group

    def _groups(self, gated: GatedModule) -> list[Any]:
        """Process groups over which the batch is spread."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return []
        mesh = getattr(next(iter(gated.gates.values())).weight, "device_mesh", None)
        if mesh is not None:
            return mesh.get_all_groups()
        if self._group is not None:
            return [self._group]
        # a compiled model cannot tell; that all processes train one model is the rule then
        return [] if self._looked else [distributed.group.WORLD]

    def total(self, gated: GatedModule, samples: int) -> int:
        """Samples in the batch of all ranks together."""
        device = next(iter(gated.gates.values())).weight.device
        count = torch.tensor(samples, dtype=torch.int64, device=device)
        for group in self._groups(gated):
            distributed.all_reduce(count, group=group)
        return int(count)

    def agree(self, gated: GatedModule, weights: Tensor) -> Tensor:
        """The latent weights that rank 0 has."""
        for group in self._groups(gated):
            distributed.broadcast(weights, group=group, group_src=0)
        return weights
