"""A run from its first step, or from a checkpoint, to its last: the loop, and what is kept along the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tgfx.compaction import compact_, is_compacted, restore_
from tgfx.errors import InputError, TrainingError
from tgfx.gated import GatedModule
from tgfx.training.checkpoint import Checkpoints
from tgfx.training.controller_for import Controller
from tgfx.training.device import device_of, to_device
from tgfx.training.feed import Feed
from tgfx.training.history import History, Value
from tgfx.training.interrupt import Interrupt
from tgfx.training.logs import Logs
from tgfx.training.modes import modes_kept, training_mode_
from tgfx.training.progress import Display
from tgfx.training.recalibrate import recalibrate
from tgfx.training.settings import Settings
from tgfx.training.stepping import Stepper
from tgfx.training.tally import exact_ratios, open_counts, weight_count

Validate = Callable[[nn.Module], Mapping[str, float]]
Stopped = Literal["finished", "interrupted"]


class Watcher(Protocol):
    """Whoever shows a run from outside."""

    def update(self, step: int, state: str = "running") -> None: ...


@dataclass
class Run:
    """All parts of one run; `go` it once."""

    gated: GatedModule
    settings: Settings
    total: int
    feed: Feed
    stepper: Stepper
    scheduler: LRScheduler | None
    controller: Controller | None
    validate: Validate | None
    val_every: int | None
    checkpoints: Checkpoints | None = field(default=None, init=False)
    logs: Logs | None = field(default=None, init=False)
    live: Watcher | None = field(default=None, init=False)
    history: History = field(init=False)
    step: int = field(default=0, init=False)
    _mark: dict[str, Any] | None = field(default=None, init=False)
    _losses: list[float] = field(default_factory=list, init=False)
    _lr: float = field(default=0.0, init=False)  # that the last step was taken with
    _began: float = field(default_factory=time.perf_counter, init=False)

    def __post_init__(self) -> None:
        self.history = History([group.name for group in self.gated.groups if group.frozen is None])

    # -- the loop -------------------------------------------------------------------------------------------

    def go(self, display: Display) -> Stopped:
        try:
            stopped = self._go(display)
        except BaseException:
            self._tell("failed")
            raise
        self._tell(stopped)
        return stopped

    def _tell(self, state: str) -> None:
        if self.live is not None:
            self.live.update(self.step, state)

    def _go(self, display: Display) -> Stopped:
        training_mode_(self.gated, self.settings.train, fixed_statistics=not self.settings.recalibrate)
        log_every = self.settings.log_every or max(1, self.total // 2000)
        with display, Interrupt() as interrupt:
            while self.step < self.total:
                if interrupt.wanted or not self._advance(interrupt):
                    self._save()
                    return "interrupted"
                removed = self._compact()
                last = self.step == self.total
                if last:
                    self._recalibrate()
                measured = self._validated(last)
                due = last or removed or bool(measured) or self.step % log_every == 0
                shown = display.wants(self.step)
                if due or shown:
                    row = {**self._row(), **measured}
                    if shown:
                        display.show(row)
                    if due:
                        self._keep(row)
                self._tell("running")
                self._mark = self.feed.mark()
                if last or self.step % self.settings.checkpoint_every == 0:
                    self._save()
        return "finished"

    def _advance(self, interrupt: Interrupt) -> bool:
        """One optimizer step; False if the loader's workers died of the same Ctrl-C."""
        try:
            batches = self.feed.take()
        except TrainingError as error:
            if interrupt.wanted:
                return False
            self._save()  # nothing of this step has touched the model
            raise self._placed(error)  # noqa: B904  it is the same error
        try:
            self._losses.append(self.stepper.step(batches))
        except TrainingError as error:
            raise self._placed(error)  # noqa: B904
        self._lr = float(self.stepper.optimizer.param_groups[0]["lr"])
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1
        return True

    def _placed(self, error: TrainingError) -> TrainingError:
        here = error.where or f"step {self.step + 1}, epoch {self.feed.epoch + 1}"
        kept = "" if self.checkpoints is None else f"; kept: {self.checkpoints}"
        error.where = f"{here}; the model is as after step {self.step}{kept}"
        return error

    # -- at certain steps -----------------------------------------------------------------------------------

    def _compact(self) -> bool:
        """Whether anything was removed."""
        every = self.settings.compact_every
        if every is None or self.step % every:
            return False
        return bool(compact_(self.gated, self.stepper.optimizer, patience=self.settings.patience))

    def _recalibrate(self) -> None:
        if self.settings.recalibrate:
            recalibrate(self.gated, islice(self._batches(), self.settings.recalibrate))

    def _batches(self) -> Iterator[Any]:
        feed, device = Feed(self.feed.loader), device_of(self.gated)
        while True:
            (batch,) = feed.take()
            if feed.epoch:
                return
            yield to_device(batch, device)

    def _validated(self, last: bool) -> dict[str, Value]:
        if self.validate is None or not (last or (self.val_every and self.step % self.val_every == 0)):
            return {}
        with modes_kept(self.gated), torch.no_grad():
            self.gated.eval()
            measured = self.validate(self.gated)
        if not isinstance(measured, Mapping):
            raise InputError(
                "val must name what it measured", expected='e.g. {"accuracy": 0.9}', found=type(measured).__name__
            )
        return {f"val_{name}": _number(name, value) for name, value in measured.items()}

    def _row(self) -> dict[str, Value]:
        row: dict[str, Value] = {
            "step": self.step,
            "epoch": self.feed.epoch + 1,
            "seconds": round(self.seconds, 3),
            "loss": sum(self._losses) / len(self._losses),
            "lr": self._lr,
            "phase": "train" if self.controller is None else self.controller.phase,
        }
        for kind, ratio in self.ratios().items():
            row[f"ratio_{kind}"] = ratio
        targets = self.settings.budget or {} if self.controller is None else self.controller.targets
        for kind, target in targets.items():
            row[f"target_{kind}"] = target
        row["open"] = sum(open_counts(self.gated))
        if self.settings.compact_every is not None:
            row["parameters"] = weight_count(self.gated)
        return row

    def _keep(self, row: dict[str, Value]) -> None:
        self.history.add(row, open_counts(self.gated))
        self._losses.clear()
        if self.logs is not None:
            self.logs.add(row)

    def ratios(self) -> dict[str, float]:
        """At gates of exactly 0 or 1."""
        return exact_ratios(self.gated, self.settings.budget or ("flops",))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.checkpoints is None or self._mark is None or self.checkpoints.step == self.step:
            return
        optimizer = self.stepper.optimizer
        state = {
            "settings": self.settings.identity(self.total),
            "tables": self._tables(),
            "optimizer class": type(optimizer).__name__,
            "gated": self.gated.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "controller": None if self.controller is None else self.controller.state_dict(),
            "feed": self._mark,
            "history": self.history.state_dict(),
            "losses": list(self._losses),
            "step": self.step,
            "seconds": self.seconds,
        }
        self.checkpoints.save(state, self.step)

    def restore(self, state: dict[str, Any] | None) -> None:
        """Everything as it was when the checkpoint was written; a run that was finished stays so."""
        if state is None:
            return
        self.settings.check_same_run(state["settings"], self.total)
        if state.get("tables", {}) != self._tables():  # checkpoints from before there were any do not name them
            raise TrainingError(
                "the checkpoint is of a run with another latency table",
                expected="the table that it was begun with: its budget is a share of what that says",
                found="a table with other times",
                fix="keep the table as a file (table.to_csv, tgfx.latency.read_csv), or pass resume=False",
            )
        optimizer = self.stepper.optimizer
        parts = {"optimizer": type(optimizer).__name__, "scheduler": self.scheduler is not None}
        saved = {"optimizer": state["optimizer class"], "scheduler": state["scheduler"] is not None}
        for name, own in parts.items():
            if saved[name] != own:
                raise TrainingError(
                    f"the checkpoint is of a run with another {name}", expected=str(saved[name]), found=str(own)
                )
        try:
            compacted = _compacted(state["gated"], self.gated)
            if self.controller is not None and not compacted:
                self.controller.load_state_dict(state["controller"])  # or it is refused, and no weight has changed
            self._load_model(state["gated"])
            optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            if self.controller is not None and compacted:  # its own size follows the model's
                self.controller.load_state_dict(state["controller"])
        except (KeyError, RuntimeError, ValueError) as error:  # a PlanError is a ValueError
            raise TrainingError(
                "the checkpoint does not fit this run",
                expected="the model, optimizer and scheduler that it was written with",
                found=f"{type(error).__name__}: {error}",
            ) from error
        self.history.load_state_dict(state["history"])
        self._losses = list(state["losses"])
        self.step, self._mark = state["step"], state["feed"]
        self._began = time.perf_counter() - state["seconds"]
        if self.step < self.total:
            self.feed.go_to(self._mark)

    def _tables(self) -> dict[str, str]:
        """Digests of the measured costs in the budget."""
        measured = getattr(self.gated.facts.cost, "measured", {})  # where single weights are gated, none
        return {kind: measured[kind].table.digest for kind in self.settings.budget or () if kind in measured}

    def _load_model(self, state: dict[str, Any]) -> None:
        """A model that was compacted on the way is cut to the same size first, and the optimizer with it."""
        if _compacted(state, self.gated):
            restore_(self.gated, state, self.stepper.optimizer)
        else:
            self.gated.load_state_dict(state)


def _compacted(state: Mapping[str, Any], gated: GatedModule) -> bool:
    return is_compacted(state) or is_compacted(gated.state_dict())


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"val gave something for {name!r} that is no number",
            expected='a number under each name, e.g. {"accuracy": 0.9}',
            found=f"{value!r}",
            fix="measure numbers only; print or log the rest yourself",
        ) from error
