"""The numbers of a run, checked before anything is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from tgfx.budget import Budget
from tgfx.errors import InputError, TrainingError
from tgfx.training.modes import Trained
from tgfx.training.schedule import Schedule

Rule = Literal["default", "paper"]


@dataclass(frozen=True)
class Settings:
    """See `tgfx.fit` for what they mean."""

    budget: Budget | None
    epochs: int | None
    steps: int | None
    train: Trained
    rule: Rule
    weight: float | None
    recalibrate: int
    accumulate: int
    amp: torch.dtype | None
    clip: float | None
    val_every: int | None
    checkpoint_every: int
    log_every: int | None
    seed: int | None
    compact_every: int | None = None
    patience: int = 1
    schedule: Schedule | None = None
    round_to: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "val_every", "log_every", "compact_every", "round_to"):
            _whole(name, getattr(self, name), least=1, optional=True)
        for name, least in (("accumulate", 1), ("checkpoint_every", 1), ("recalibrate", 0), ("patience", 0)):
            _whole(name, getattr(self, name), least=least)
        _whole("seed", self.seed, least=0, optional=True)
        if self.epochs is not None and self.steps is not None:
            raise InputError("two lengths of one run", expected="epochs or steps", found="both")
        _one_of("train", self.train, ("joint", "gates"))
        _one_of("rule", self.rule, ("default", "paper"))
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            raise InputError("this is no schedule", expected="tgfx.Schedule(steps, ...)", found=repr(self.schedule))
        self._check_rule()
        if self.amp not in (None, torch.bfloat16):
            raise InputError(
                "this dtype would need loss scaling", expected="amp=torch.bfloat16 or None", found=repr(self.amp)
            )
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise InputError("clip is a norm", expected="a number above 0, or None", found=repr(self.clip))

    def _check_rule(self) -> None:
        if self.budget is None and (self.rule == "paper" or self.train == "gates"):
            raise InputError(
                "nothing to train towards", expected='a budget, e.g. {"flops": 0.5}', found="budget=None", fix="set one"
            )
        if self.rule == "paper" and not (_is_number(self.weight) and self.weight > 0):  # type: ignore[operator]
            raise InputError(
                "the paper's rule needs the weight of its budget loss",
                expected="weight above 0, e.g. weight=4.0",
                found=f"weight={self.weight!r}",
            )
        if self.rule == "default" and self.weight is not None:
            raise InputError(
                "the default rule finds its own weight",
                expected="weight=None",
                found=f"weight={self.weight!r}",
                fix='leave it out, or pass rule="paper"',
            )

        if self.round_to is not None and (self.rule == "paper" or self.budget is None):
            raise InputError(
                "only the default rule moves gates from multiple to multiple",
                expected='rule="default", a budget, and round_to',
                found=f"rule={self.rule!r}, budget={self.budget!r}, round_to={self.round_to!r}",
                fix="leave it out here; tgfx.finish(gated, ..., round_to=...) rounds at the end",
            )

    def schedule_of(self, total: int) -> Schedule | None:
        """That of the default rule; there is none where nobody or the optimizer moves the gates."""
        if self.budget is None or self.rule == "paper":
            return None
        return self.schedule or (Schedule.for_gates if self.train == "gates" else Schedule)(total)

    def check_same_run(self, saved: Mapping[str, Any], total: int) -> None:
        """A checkpoint goes on only with what it was begun with; other settings may differ."""
        for name, own in self.identity(total).items():
            before = saved.get(name)  # checkpoints from before compact_every do not name it
            if name == "schedule" and name not in saved:
                continue  # nor do older ones say which schedule they followed
            if before != own:
                raise TrainingError(
                    f"the checkpoint is of a run with another {name}",
                    expected=f"{name}={before!r}",
                    found=f"{name}={own!r}",
                    fix="resume with the settings and the loader it was begun with, or pass resume=False",
                )

    def identity(self, total: int) -> dict[str, Any]:
        return {
            "budget": None if self.budget is None else dict(self.budget),
            "number of steps": total,
            "train": self.train,
            "rule": self.rule,
            "weight": self.weight,
            "accumulate": self.accumulate,
            "compact_every": self.compact_every,
            "patience": None if self.compact_every is None else self.patience,
            "round_to": self.round_to,
            "schedule": None if (schedule := self.schedule_of(total)) is None else asdict(schedule),
        }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value: object, *, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is out of range", expected=f"a whole number, at least {least}", found=repr(value))


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"unknown {name}", expected=" or ".join(map(repr, known)), found=repr(value))
