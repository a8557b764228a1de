"""Batches for one optimizer step after the other, over as many epochs as it takes, at a place that can be found again.

A loader is anything that can be iterated more than once. Its order is random by way of torch, numpy, Python or a
DataLoader's own generators; their states at the start of an epoch are kept, so that the epoch can be begun again in the
same order and the batches that were used be passed over. (Persistent workers keep random states of their own, which no
one can save: let them only read.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tgfx.errors import InputError, TrainingError
from tgfx.training.random_state import generators_of, random_state, set_random_state


class Feed:
    def __init__(self, loader: Iterable[Any], accumulate: int = 1) -> None:
        """`accumulate`: batches per optimizer step; the last step of an epoch may have fewer."""
        if not hasattr(loader, "__iter__"):
            raise InputError("the loader cannot be iterated", expected="a DataLoader", found=type(loader).__name__)
        self.loader = loader
        self.accumulate = accumulate
        self.generators = generators_of(loader)
        self.epoch = 0
        self._used = 0
        self._began: dict[str, Any] | None = None
        self._iterator: Iterator[Any] | None = None

    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None for a loader without a length."""
        try:
            length = len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None
        if not length:
            raise self._empty()
        return -(-length // self.accumulate)

    def take(self) -> list[Any]:
        """The batches of the next step; never none."""
        while True:
            if self._iterator is None:
                self._began = random_state(self.generators)
                self._iterator = self._begin()
            batches = self._next(self.accumulate)
            self._used += len(batches)
            if batches:
                return batches
            if not self._used:
                raise self._empty()
            self.epoch, self._used, self._iterator = self.epoch + 1, 0, None

    def mark(self) -> dict[str, Any]:
        """Where we are: take it when a step is done."""
        return {
            "epoch": self.epoch,
            "used": self._used,
            "began": self._began,
            "now": random_state(self.generators),
        }

    def go_to(self, mark: dict[str, Any]) -> None:
        """Begin the epoch of the mark again and pass over what was used of it."""
        self.epoch, self._used, self._began = mark["epoch"], 0, mark["began"]
        if len(mark["now"]["generators"]) != len(self.generators):
            raise TrainingError(
                "the loader is not the one of the checkpoint",
                expected=f"{len(mark['now']['generators'])} generators of its own",
                found=str(len(self.generators)),
            )
        set_random_state(mark["began"], self.generators)
        self._iterator = self._begin()
        while self._used < mark["used"]:
            if not self._next(1):
                raise TrainingError(
                    "the loader is shorter than at the checkpoint",
                    expected=f"at least {mark['used']} batches",
                    found=str(self._used),
                    fix="resume with the loader that the run was begun with",
                )
            self._used += 1
        set_random_state(mark["now"], self.generators)

    def _begin(self) -> Iterator[Any]:
        for holder in (self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            if callable(getattr(holder, "set_epoch", None)):
                holder.set_epoch(self.epoch)  # type: ignore[union-attr]
        try:
            return iter(self.loader)
        except Exception as error:
            raise self._failed(error) from error

    def _next(self, count: int) -> list[Any]:
        assert self._iterator is not None
        try:
            return list(islice(self._iterator, count))
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> TrainingError:
        up_to = f" to {self._used + self.accumulate}" if self.accumulate > 1 else ""
        return TrainingError(
            "the loader failed",
            expected="a batch",
            found=f"{type(error).__name__}: {error}",
            where=f"batch {self._used + 1}{up_to} of epoch {self.epoch + 1}",
        )

    def _empty(self) -> TrainingError:
        return TrainingError(
            "the loader gives no batches",
            expected="at least one batch in every epoch",
            found="none" + (f" in epoch {self.epoch + 1}" if self.epoch else ""),
            fix="pass something that can be iterated again and again, not an iterator"
            if self.epoch
            else "is the dataset empty, or smaller than one batch with drop_last=True?",
        )
