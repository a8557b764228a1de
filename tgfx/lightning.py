"""Training to a budget with Lightning.

gated = tgfx.transform(model, example)
trainer = lightning.Trainer(callbacks=[tgfx.lightning.GateCallback({"flops": 0.5})])
trainer.fit(MyLightningModule(gated), loader)
compact = tgfx.finish(gated, flops=0.5).model
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from tgfx.budget import Budget
from tgfx.errors import InputError, MissingPackageError
from tgfx.rounding import checked_multiple
from tgfx.training.attaching import attach_controller, figures, find_gated
from tgfx.training.compacting import Compacting, check_one_process
from tgfx.training.controller_for import Controller
from tgfx.training.optimizers import check_gates_held
from tgfx.training.schedule import Schedule

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingPackageError(
        "tgfx.lightning needs Lightning", expected="lightning", found=str(error), fix="pip install tgfx[lightning]"
    ) from error

__all__ = ["GateCallback"]


class GateCallback(Callback):
    """Moves the gates to the budget while Lightning trains; nothing is to be added to the loss.

    steps: optimizer steps in which the budget is reached and settled (default: all that the trainer will take).
    gated: name of the attribute that holds the gated model, where there are several. Logged are ratio_<kind>,
    target_<kind>, channels (open gates) and phase (0 watch, 1 close, 2 settle, 3 hold). The controller's state is
    saved in Lightning's checkpoints. A checkpoint chosen by a metric may be from before the budget was met: monitor
    only after the hold phase has begun. compact_every=n: every n optimizer steps `tgfx.compact_` removes what has been
    closed for 1 + `patience` of these moments, so that training gets faster (one process only); a checkpoint from there
    is loaded by a trainer with such a callback. round_to: group sizes are multiples of it at every step.
    """

    def __init__(
        self,
        budget: Mapping[str, float],
        *,
        steps: int | None = None,
        gated: str | None = None,
        schedule: Schedule | None = None,
        floor: float | None = None,
        batch_size: int | None = None,
        compact_every: int | None = None,
        patience: int = 1,
        round_to: int | None = None,
    ) -> None:
        self.budget = Budget.of(budget)
        self.round_to = None if round_to is None else checked_multiple(round_to)
        self.compacting = Compacting(compact_every, patience)
        self.steps, self.gated = steps, gated
        self.schedule, self.floor, self.batch_size = schedule, floor, batch_size
        self.controller: Controller | None = None
        self._saved: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.compacting.every is not None:
            check_one_process(trainer.world_size, "Lightning")
            self.compacting.watch(find_gated(pl_module, self.gated))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gated = find_gated(pl_module, self.gated)
        check_gates_held(gated, trainer.optimizers)
        saved, self._saved = self._saved, None
        self.controller = attach_controller(
            gated,
            self.budget,
            steps=self._steps(trainer),
            schedule=self.schedule,
            floor=self.floor,
            batch_size=self.batch_size,
            round_to=self.round_to,
            state=saved,
        )

    def _steps(self, trainer: Trainer) -> int:
        if self.steps is not None:
            return self.steps
        if self.schedule is not None:
            return self.schedule.steps
        steps = trainer.estimated_stepping_batches
        if steps == float("inf"):
            raise InputError(
                "the trainer has no end, so no schedule can be made",
                expected="Trainer(max_epochs=...) or Trainer(max_steps=...), or GateCallback(steps=...)",
                found=f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}",
            )
        return int(steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.controller is None:
            return
        self.compacting.after(trainer.global_step, self.controller.gated, trainer.optimizers)
        if trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
            self.log_dict(figures(self.controller), batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training that ended early is brought to the budget, unless `steps` says that more will come."""
        controller = self.controller
        if controller is not None and controller.phase != "hold" and self.steps is None:
            warnings.warn(
                f"training ended after {controller.taken} of {controller.schedule.steps} steps, in the "
                f"{controller.phase} phase: gates are closed to the budget now, without training after it",
                stacklevel=2,
            )
            controller.land()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.compacting.close()
        if self.controller is not None:
            self.controller.close()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.controller is None else {"controller": self.controller.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("controller")
