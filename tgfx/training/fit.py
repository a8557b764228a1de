"""`tgfx.fit`: the whole training of a gated model in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.optim import SGD, Optimizer

from tgfx.budget import Budget
from tgfx.compaction.check import check_compactable
from tgfx.errors import InputError
from tgfx.gated import GatedModule
from tgfx.gated_check import check_gated
from tgfx.plan import fingerprint
from tgfx.training.checkpoint import Checkpoints
from tgfx.training.controlling import controlled
from tgfx.training.feed import Feed
from tgfx.training.history import History
from tgfx.training.logs import Logs
from tgfx.training.losses import Step, step_of
from tgfx.training.modes import Trained, frozen, modes_kept
from tgfx.training.optimizers import check_optimizer, param_groups
from tgfx.training.progress import display
from tgfx.training.random_state import seed_all
from tgfx.training.ranks import refuse_many_processes
from tgfx.training.rates import Scheduler, scheduler_of
from tgfx.training.run import Run, Stopped, Validate
from tgfx.training.schedule import Schedule
from tgfx.training.settings import Rule, Settings
from tgfx.training.stepping import Stepper
from tgfx.training.tally import gate_count


@dataclass(frozen=True)
class FitResult:
    """How a run ended. `ratios` are those of the gates as they are now; `steps` counts optimizer steps in all."""

    stopped: Stopped
    steps: int
    seconds: float
    ratios: dict[str, float]
    history: History
    checkpoint: Path | None

    def __str__(self) -> str:
        ratios = ", ".join(f"{kind} {ratio:.2%}" for kind, ratio in self.ratios.items())
        return f"{self.stopped} after {self.steps} steps, {self.seconds:.1f} s: {ratios}"


def fit(
    gated: GatedModule,
    train_loader: Iterable[Any],
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    budget: Mapping[str, float] | None,
    epochs: int | None = None,
    steps: int | None = None,
    training_step: Step | None = None,
    train: Trained = "joint",
    rule: Rule = "default",
    weight: float | None = None,
    schedule: Schedule | None = None,
    optimizer: Optimizer | None = None,
    lr: float = 0.01,
    gate_lr: float | None = None,
    weight_decay: float = 5e-4,
    scheduler: Scheduler = "cosine",
    accumulate: int = 1,
    amp: torch.dtype | None = None,
    clip: float | None = None,
    recalibrate: int = 0,
    compact_every: int | None = None,
    patience: int = 1,
    round_to: int | None = None,
    val: Validate | None = None,
    val_every: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 500,
    resume: bool = True,
    log: str | os.PathLike[str] | None = None,
    log_every: int | None = None,
    live: str | os.PathLike[str] | None = None,
    progress: bool | Console = True,
    seed: int | None = None,
) -> FitResult:
    """Train a gated model to a budget: `tgfx.fit(gated, loader, F.cross_entropy, budget={"flops": 0.5}, epochs=10)`.

    Data. Batches are moved to the model's device. (x, target) gives loss_fn(gated(x), target); a dict gives
    gated(**batch) and, without loss_fn, its output.loss; tgfx/training/losses.py has the whole table.
    `training_step(gated, batch) -> loss` takes the place of it all; with train="gates" it may return a tgfx.Probed,
    a loss with a probe of its curvature.

    Length. `epochs` (default 1), or `steps`: optimizer steps in all, needed for a loader without a length.
    `accumulate`: batches per optimizer step.

    What is trained. train="joint": weights and gates, from a pretrained model or from scratch. train="gates": the
    weights stay as they are, bit by bit, and the model runs as in eval, so batch norm keeps its statistics. With
    `recalibrate=n` it takes those of each batch, and they are measured anew at the end, over n batches.
    budget=None: the weights, gates held.
    rule="default" meets the budget by itself, along `schedule` (see tgfx.Schedule); rule="paper" descends on
    loss + weight * eq. 7 and ends where that ends.

    Optimizer. Default: SGD with momentum 0.9 over `tgfx.param_groups(gated, lr, gate_lr=..., weight_decay=...)`; your
    own must hold all that is trained. `scheduler`: "cosine" over all steps, None, a torch scheduler or a function
    from optimizer to one; it is stepped after every optimizer step. `clip`: largest gradient norm of the weights.
    `amp=torch.bfloat16`: autocast.

    Smaller on the way. `compact_every=n`: every n steps `tgfx.compact_(gated, optimizer, patience=patience)` removes
    channels that were closed at the last 1 + patience of these moments, for good; `gated` and its parameters stay the
    same objects. The history has a row wherever something was removed, and a column "parameters" (gates not counted).
    `round_to=8`: sizes of groups are multiples of 8, or whole, at every step. Kernels are fast there, and nothing is
    left to be rounded at the end.

    Kept on the way. `val(gated) -> {"accuracy": ...}` runs in eval mode every `val_every` steps (default: every
    epoch) and at the end. `checkpoint`: a file, written every `checkpoint_every` steps and at the end, with the one
    before as <file>.previous. If it exists, the run goes on from there, bit by bit as if never stopped (resume=False
    begins anew): the loader is begun again in the order of that epoch and its used batches are passed over. `log`: a
    folder for metrics.csv and TensorBoard events, a row every `log_every` steps. `live`: a folder for a page
    that shows gates as they close; `tgfx view FOLDER` serves it on this machine. `seed` seeds Python, numpy, torch and
    the loader's generators first.

    Ends. Ctrl-C finishes the step, writes a checkpoint and returns with stopped="interrupted" (a second one raises
    KeyboardInterrupt at once). A loss or gradient that is not finite raises TrainingError and applies nothing of that
    step. A loader that raises: TrainingError, chained, after a checkpoint of the last step. Modes and requires_grad
    are put back in any case. Several processes (torchrun): TrainingError; examples/distributed has the loop for that.
    """
    check_gated(gated, "can be fitted", compiled="compile it in place, gated.compile(), and pass gated")
    settings = Settings(
        None if budget is None else Budget.of(budget),
        epochs, steps, train, rule, weight, recalibrate, accumulate, amp, clip, val_every, checkpoint_every, log_every,
        seed, compact_every, patience, schedule, round_to,
    )  # fmt: skip
    refuse_many_processes("tgfx.fit")
    if compact_every is not None:
        check_compactable(gated)
    loss_of = step_of(loss_fn, training_step)
    feed = Feed(train_loader, accumulate)
    per_epoch = feed.steps_per_epoch()
    total = _total(settings, per_epoch)
    with ExitStack() as stack:
        stack.enter_context(modes_kept(gated))
        stack.enter_context(frozen(gated, weights=train == "gates", gates=budget is None))
        if optimizer is None:
            groups = param_groups(gated, lr, gate_lr=gate_lr, weight_decay=weight_decay)
            optimizer = SGD(groups, lr=lr, momentum=0.9)
        check_optimizer(gated, optimizer)
        controller = stack.enter_context(controlled(gated, settings, total))
        penalty = None if settings.budget is None or weight is None else (settings.budget, weight)
        stepper = Stepper(gated, optimizer, loss_of, amp, clip, penalty)
        rates = scheduler_of(scheduler, optimizer, total)
        run = Run(gated, settings, total, feed, stepper, rates, controller, val, val_every or per_epoch)
        if seed is not None:
            seed_all(seed, feed.generators)
        if checkpoint is not None:
            run.checkpoints = Checkpoints(checkpoint, fingerprint(gated), gated.facts.model_name)
            run.restore(run.checkpoints.load() if resume else None)
        if log is not None:
            run.logs = stack.enter_context(closing(Logs(log, run.history, step=run.step)))
        if live is not None:
            from tgfx.view.live import Live  # a page shows histories, which are made here

            run.live = Live(live, gated, run.history, total)
        stopped = run.go(display(progress, total, run.step, gate_count(gated)))
        where = None if checkpoint is None else Path(checkpoint)
        return FitResult(stopped, run.step, run.seconds, run.ratios(), run.history, where)


def _total(settings: Settings, per_epoch: int | None) -> int:
    if settings.steps is not None:
        return settings.steps
    if per_epoch is None:
        raise InputError(
            "the loader does not say how long it is",
            expected="steps=..., the number of optimizer steps",
            found="a loader without len()",
            fix="pass steps= in place of epochs=",
        )
    return (settings.epochs or 1) * per_epoch
