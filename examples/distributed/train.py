"""Train a gated model on several processes, with checkpoints: DDP, or FSDP2 with --shard.

torchrun --nproc-per-node 2 -m examples.distributed.train --quick

README.md here has the launch line for many machines and what stays to do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tgfx
import tgfx.distributed
from examples.demo import data
from examples.demo.model import DigitsNet
from examples.distributed.ranks import process_group
from tgfx.compaction import is_compacted, restore_

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Settings:
    width: int = 20  # of the network
    steps: int = 1000
    batch: int = 32  # of each process
    flops: float = 0.5
    rate: float = 0.05
    shard: bool = False
    folder: Path | None = None  # of the checkpoint
    every: int = 100  # steps between checkpoints
    compact_every: int | None = None  # steps between removals of closed channels, DDP only


@dataclass
class Run:
    """One process's part of the training."""

    settings: Settings
    model: nn.Module  # what is called: the gated model in its wrapper
    gated: tgfx.GatedModule
    optimizer: torch.optim.Optimizer
    controller: tgfx.BudgetController
    step: int = 0


Between = Callable[[Run], None]


def start(settings: Settings) -> Run:
    """The same model on all ranks; wrap first, then the optimizer (FSDP2 exchanges the parameters)."""
    torch.manual_seed(0)
    gated = tgfx.transform(DigitsNet(settings.width), torch.zeros(1, 1, 8, 8)).train()
    model = wrap(gated, settings)
    optimizer = torch.optim.SGD(
        tgfx.param_groups(gated, lr=settings.rate, weight_decay=5e-4), lr=settings.rate, momentum=0.9
    )
    controller = tgfx.BudgetController(gated, {"flops": settings.flops}, steps=settings.steps)
    return Run(settings, model, gated, optimizer, gated.attach(controller))


def wrap(gated: tgfx.GatedModule, settings: Settings) -> nn.Module:
    device = next(gated.parameters()).device
    if settings.shard:
        mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (distributed.get_world_size(),))
        return fully_shard(gated, mesh=mesh)
    return DistributedDataParallel(gated, device_ids=[device] if device.type == "cuda" else None)


def rewrap(run: Run, change: Between) -> None:
    """Change the gated model between two steps, on every rank: out of DDP, `change`, and into it again.

    DDP keeps buckets of the sizes that the parameters had, and hooks on them. What changes them, as cutting dead
    channels in the middle of training does, belongs between two wraps.
    """
    run.model = run.gated
    change(run)
    run.model = wrap(run.gated, run.settings)


def compact(run: Run) -> None:
    """All ranks have the same gates, and so remove the same channels."""
    tgfx.compact_(run.gated, run.optimizer)


def train(run: Run, between: Between | None = None) -> None:
    """From where the run is to its end; `between` is called after each step."""
    images, labels = data.load(0).train
    while run.step < run.settings.steps:
        batch = batch_of(run, len(images))
        loss = nn.functional.cross_entropy(run.model(images[batch]), labels[batch])
        loss.backward()
        run.optimizer.step()  # and the controller moves the gates
        run.optimizer.zero_grad()
        run.step += 1
        if run.settings.compact_every is not None and run.step % run.settings.compact_every == 0:
            rewrap(run, compact)
        if run.settings.folder is not None and run.step % run.settings.every == 0:
            save(run)
        if between is not None:
            between(run)


def batch_of(run: Run, total: int) -> Tensor:
    """Another batch on each rank and at each step, from the step alone: a resumed run sees the same data."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(run.step))
    mine = order[distributed.get_rank() :: distributed.get_world_size()]
    return mine[: run.settings.batch]


def save(run: Run) -> None:
    """All ranks gather; rank 0 writes aside and moves into place, so that a crash leaves the old one or the new one."""
    assert run.settings.folder is not None
    weights, optimizer = get_state_dict(run.model, run.optimizer, options=WHOLE)
    if distributed.get_rank() == 0:
        state = {
            "step": run.step,
            "weights": weights,
            "optimizer": optimizer,
            "controller": run.controller.state_dict(),
        }
        run.settings.folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, run.settings.folder / "new.pt")
        os.replace(run.settings.folder / "new.pt", checkpoint(run.settings.folder))
    distributed.barrier()


def resume(run: Run) -> bool:
    """Go on from the checkpoint, if there is one. On many machines the folder is on a file system they share."""
    folder = run.settings.folder
    if folder is None or not checkpoint(folder).is_file():
        return False
    state = torch.load(checkpoint(folder), map_location="cpu", weights_only=True)
    if is_compacted(state["weights"]):
        rewrap(run, lambda run: restore_(run.gated, state["weights"], run.optimizer))
    else:
        set_model_state_dict(run.model, state["weights"], options=WHOLE)
    # gates take a plain step and have no state in the optimizer, which torch would call missing
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=replace(WHOLE, strict=False))
    run.controller.load_state_dict(state["controller"])
    run.step = state["step"]
    return True


def checkpoint(folder: Path) -> Path:
    return folder / "checkpoint.pt"


def finished(run: Run) -> tgfx.Finished:
    """The compact model, the same on each rank."""
    gated = tgfx.distributed.gather(run.gated) if run.settings.shard else run.gated
    return tgfx.finish(gated, flops=run.settings.flops)


def accuracy(model: nn.Module) -> float:
    images, labels = data.load(0).held_out
    with torch.no_grad():
        return (model.eval()(images).argmax(1) == labels).float().mean().item()


def options() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--flops", type=float, default=Settings.flops, help="share of the FLOPs that may stay")
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--folder", type=Path, help="of the checkpoint; a run that finds one goes on from there")
    parser.add_argument("--compact-every", type=int, help="steps between removals of closed channels, DDP only")
    parser.add_argument("--quick", action="store_true", help="a small network, 60 steps")
    given: dict[str, Any] = vars(parser.parse_args())
    quick = given.pop("quick")
    if given["shard"] and given["compact_every"] is not None:
        parser.error("--compact-every works with DDP only: shards would have to be gathered, cut and made anew")
    settings = Settings(**given)
    return replace(settings, width=8, steps=min(settings.steps, 60), every=20) if quick else settings


def main() -> None:
    settings = options()
    torch.set_num_threads(1)
    with process_group("gloo"):  # "nccl" on GPUs, with torch.cuda.set_device(local rank) before
        trained(settings)


def trained(settings: Settings) -> None:
    run = start(settings)
    resumed = resume(run)
    if distributed.get_rank() == 0 and resumed:
        print(f"resumed at step {run.step}")
    train(run)
    result = finished(run)
    if distributed.get_rank() == 0:
        print(result)
        print(f"accuracy {accuracy(result.model):.3f}")


if __name__ == "__main__":
    main()
