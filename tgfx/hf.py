"""Training to a budget with the Trainer of Hugging Face transformers.

    gated = tgfx.transform(model, dict(input_ids=ids, attention_mask=mask, labels=labels))
    trainer = Trainer(model=gated, args=args, train_dataset=data, callbacks=[tgfx.hf.GateCallback({"flops": 0.5})])
    trainer.train()
    compact = tgfx.finish(gated, flops=0.5).model

The labels belong into the example: then the loss is part of the captured graph. Models that give back a cache need
`model.config.use_cache = False` before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tgfx.budget import Budget
from tgfx.errors import MissingPackageError, TrainingError
from tgfx.rounding import checked_multiple
from tgfx.training.attaching import attach_controller, figures, find_gated
from tgfx.training.compacting import Compacting, check_one_process
from tgfx.training.controller_for import Controller
from tgfx.training.optimizers import check_gates_held
from tgfx.training.schedule import Schedule
from tgfx.whole_file import whole_file

try:
    import accelerate  # noqa: F401  transformers' Trainer does not start without it
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingPackageError(
        "tgfx.hf needs transformers and accelerate",
        expected="transformers, accelerate",
        found=str(error),
        fix="pip install tgfx[hf]",
    ) from error

__all__ = ["GateCallback"]

STATE = "tgfx_controller.pt"


class GateCallback(TrainerCallback):
    """Moves the gates to the budget while the Trainer trains; nothing is to be added to the loss.

    steps: optimizer steps in which the budget is reached and settled (default: the Trainer's max_steps). Logged are
    ratio_<kind>, target_<kind>, channels (open gates) and phase (0 watch, 1 close, 2 settle, 3 hold). The state is
    saved in each of the Trainer's checkpoints; where they are not in output_dir, `resume_from` names the folder to
    resume from. compact_every=n: every n optimizer steps `tgfx.compact_` removes what has been closed for
    1 + `patience` of these moments, so that training gets faster (one process only); a checkpoint from there is loaded
    by a Trainer with such a callback. round_to: group sizes are multiples of it at every step.
    """

    def __init__(
        self,
        budget: Mapping[str, float],
        *,
        steps: int | None = None,
        schedule: Schedule | None = None,
        floor: float | None = None,
        batch_size: int | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        compact_every: int | None = None,
        patience: int = 1,
        round_to: int | None = None,
    ) -> None:
        self.budget = Budget.of(budget)
        self.round_to = None if round_to is None else checked_multiple(round_to)
        self.compacting = Compacting(compact_every, patience)
        self.steps, self.schedule = steps, schedule
        self.floor, self.batch_size = floor, batch_size
        self.resume_from = resume_from
        self.controller: Controller | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.compacting.every is not None:
            check_one_process(args.world_size, "the Trainer")
            self.compacting.watch(find_gated(kwargs["model"]))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.controller is not None:
            optimizers = list(_plain_optimizers(kwargs["optimizer"]))
            self.compacting.after(state.global_step, self.controller.gated, optimizers)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        gated = find_gated(kwargs["model"])
        check_gates_held(gated, _plain_optimizers(kwargs["optimizer"]))
        if args.load_best_model_at_end:
            warnings.warn(
                "load_best_model_at_end may bring back a model from before the budget was met; "
                "check gated.ratio() after training",
                stacklevel=2,
            )
        steps = self.steps or (self.schedule.steps if self.schedule is not None else state.max_steps)
        self.controller = attach_controller(
            gated,
            self.budget,
            steps=steps,
            schedule=self.schedule,
            floor=self.floor,
            batch_size=self.batch_size,
            round_to=self.round_to,
            state=self._resumed(args, state) if state.global_step else None,
        )

    def _resumed(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        places = [self.resume_from, args.resume_from_checkpoint, _checkpoint(args, state)]
        for place in places:
            if isinstance(place, str | os.PathLike) and (Path(place) / STATE).is_file():
                return torch.load(Path(place) / STATE, weights_only=True)
        raise TrainingError(
            f"training resumes at step {state.global_step}, and the controller's state is missing",
            expected=f"{STATE} in the checkpoint",
            found=f"none in {_checkpoint(args, state)}",
            fix="GateCallback(..., resume_from=folder of the checkpoint)",
        )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.controller is not None and state.is_world_process_zero:
            folder = _checkpoint(args, state)
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file(folder / STATE) as aside:
                torch.save(self.controller.state_dict(), aside)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.controller is None:
            return
        values = figures(self.controller)
        for place in (logs, *state.log_history[-1:]):  # the Trainer has written the history before it asks us
            if place is not None:
                place.update(values)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training that ended early is brought to the budget, unless `steps` says that more will come."""
        controller = self.controller
        if controller is None:
            return
        if controller.phase != "hold" and self.steps is None:
            warnings.warn(
                f"training ended after {controller.taken} of {controller.schedule.steps} steps, in the "
                f"{controller.phase} phase: gates are closed to the budget now, without training after it",
                stacklevel=2,
            )
            controller.land()
        controller.close()


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _plain_optimizers(optimizer: Any) -> Iterable[Any]:
    return [getattr(optimizer, "optimizer", optimizer)]
