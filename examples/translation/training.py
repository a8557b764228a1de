"""One training from random weights: with all heads, or towards a share of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import tgfx
from examples.stage import Stage
from examples.translation.data import Batches
from examples.translation.losses import smoothed, taught
from examples.translation.model import PAD, Translator
from examples.translation.recipe import Recipe
from examples.translation.tasks import Task


def train(
    task: Task,
    recipe: Recipe,
    *,
    keep: float | None,
    teacher: Translator | None,
    stage: Stage,
    seed: int,
    quiet: bool,
) -> tuple[Translator, dict[str, Any]]:
    """The trained model, cut if `keep` says so, and what is to be said about it.

    keep=None: gates are there and stay open, which computes what the model without them does, bit for bit. So both
    are trained by the same code. `teacher`: a trained model whose answers count besides the right ones.
    """
    torch.manual_seed(seed)
    model = Translator(recipe.sizes(task.pieces))
    loader = Batches(task.train, recipe.batch, seed=seed)
    example, _ = next(iter(loader))
    loader.generator.manual_seed(seed)  # that was a look only
    gated = tgfx.transform(model, example, granularity="head")
    optimizer = torch.optim.Adam(tgfx.param_groups(gated, lr=recipe.rate), betas=(0.9, 0.98))
    result = tgfx.fit(
        gated,
        loader,
        smoothed if teacher is None else None,
        training_step=None if teacher is None else taught(teacher, recipe.taught),
        budget=None if keep is None else {"heads": keep},
        steps=recipe.steps,
        schedule=tgfx.Schedule(recipe.steps, watch=recipe.close / 4, close=recipe.close, hold=recipe.close + 0.1),
        optimizer=optimizer,
        scheduler=lambda own: warmed_up(own, recipe.warm_up, recipe.steps),
        clip=1.0,
        checkpoint=stage.folder / "checkpoint.pt",
        checkpoint_every=100,
        log=stage.folder / "log",
        log_every=50,
        progress=not quiet,
        seed=seed,
    )
    stage.trained(result)
    small = tgfx.shrink(gated) if keep is None else tgfx.finish(gated, heads=keep).model
    # The cut model as an object of our own class, which can keep keys and values while it writes.
    own = Translator(model.sizes.of(small.state_dict()))
    own.load_state_dict(small.state_dict())
    gated.eval(), own.eval()  # in training mode, prices follow the trainable gate and are not quite whole numbers
    return own, {
        "steps": result.steps,
        "heads": gated.ratio("heads").item(),
        "params": sum(p.numel() for p in own.parameters()) / sum(p.numel() for p in model.parameters()),
        "flops": gated.ratio("flops").item(),
        "kept": kept(own),
        "difference": difference(gated, own, example),
        "held_out_loss": held_out_loss(own, task, recipe.batch),
        "seconds": round(result.seconds),
    }


def warmed_up(optimizer: Optimizer, warm_up: int, steps: int) -> LambdaLR:
    """The rate rises over the first steps and then falls to 0 along a cosine."""

    def share(step: int) -> float:
        falling = max(0, step - warm_up) / max(1, steps - warm_up)
        return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * falling)))

    return LambdaLR(optimizer, share)


def kept(model: Translator) -> dict[str, int]:
    """Heads that really are in the weights, of each kind."""
    return {
        "En": sum(model.sizes.encoder),
        "De": sum(model.sizes.decoder),
        "En-De": sum(model.sizes.cross),
    }


@torch.no_grad()
def difference(gated: tgfx.GatedModule, small: Translator, example: tuple[Tensor, Tensor]) -> float:
    """Largest difference of the logits, as a share of the largest logit."""
    wanted, found = gated(*example), small(*example)
    return ((wanted - found).abs().max() / wanted.abs().max()).item()


@torch.no_grad()
def held_out_loss(model: Translator, task: Task, batch: int) -> float:
    """Cross entropy of a piece, without smoothing, on sentences that were not trained on."""
    total, count = 0.0, 0
    for inputs, target in Batches(task.held_out, batch):
        logits = model(*inputs).flatten(0, 1)
        total += F.cross_entropy(logits, target.flatten(), ignore_index=PAD, reduction="sum").item()
        count += int((target != PAD).sum())
    return total / count
