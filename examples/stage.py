"""A part of an experiment that runs for long: what it was begun with, and the result it leaves.

    asked.json      settings and what it begins with, written when it begins
    checkpoint.pt   written on the way
    result.json     its figures, written when it is done

Whoever starts it again gets the result, or goes on from its checkpoint; but not with other settings, since the result
would then stand for what it is not. Where there is neither, the settings may be others.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tgfx
from tgfx.whole_file import whole_file

CHECKPOINT = "checkpoint.pt"


class Stage:
    """`asked`: all that the result depends on. `prefix`, `checkpoint`: for several stages in one folder.

    `later`: names in `asked` that were not noted at first. A stage that was begun before then holds for any value.
    """

    def __init__(
        self,
        folder: Path,
        asked: Mapping[str, Any],
        *,
        prefix: str = "",
        checkpoint: str | None = None,
        later: Sequence[str] = (),
    ) -> None:
        self.folder, self.later = folder, later
        self.asked: dict[str, Any] = json.loads(json.dumps(asked))  # as a file has it: lists for tuples
        self.result, self.noted = folder / f"{prefix}result.json", folder / f"{prefix}asked.json"
        self.checkpoint = folder / (checkpoint or f"{prefix}{CHECKPOINT}")
        self._trained, self._since = 0.0, time.time()

    def begin(self) -> dict[str, Any] | None:
        """The result if there is one; else None, and the settings are noted. Something left refuses others."""
        left = self._left()
        if left is not None:
            self._check(left)
        if self.result.is_file():
            return read_json(self.result)
        make_folder(self.folder)
        write_json(self.noted, self.asked)
        self._since = time.time()
        return None

    def _left(self) -> Path | None:
        """What its settings stand for: the result, or the checkpoint to go on from (or the one before that)."""
        before = self.checkpoint.with_name(f"{self.checkpoint.name}.previous")
        return next((file for file in (self.result, self.checkpoint, before) if file.is_file()), None)

    def _check(self, left: Path) -> None:
        if not self.noted.is_file():
            raise SystemExit(f"{left} does not say what it was begun with: choose another --out, or remove it")
        noted = read_json(self.noted)
        asked = {name: own for name, own in self.asked.items() if name in noted or name not in self.later}
        differ = ", ".join(_differences(noted, asked))
        if differ:
            raise SystemExit(
                f"{self.folder} was begun with other settings ({differ}): choose another --out, or remove {self.folder}"
            )

    def trained(self, fitted: tgfx.FitResult) -> None:
        """Leaves the program if Ctrl-C ended the training: nothing is measured of a run that is to go on."""
        if fitted.stopped != "finished":
            raise SystemExit(f"stopped at step {fitted.steps}; start it again to go on from there")
        self.lasted(fitted.seconds)

    def lasted(self, seconds: float) -> None:
        """Of training, in all calls."""
        self._trained += seconds
        self._since = time.time()

    def write(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The figures with what was asked for and the wall time: of training, in all calls, and what came after."""
        found = {**self.asked, **figures, "wall": round(self._trained + time.time() - self._since)}
        write_json(self.result, found)
        for spare in self.folder.glob("*.previous"):  # the checkpoint before the last
            spare.unlink()
        return found


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{folder} cannot be made a folder ({error.strerror}): choose another --out") from error


def digest(*tensors: Tensor | nn.Module | Mapping[str, Tensor]) -> str:
    """A few letters that tell weights or images from others."""
    hashed = hashlib.sha256()
    for own in tensors:
        if isinstance(own, Tensor):
            own = {"": own}
        for name, value in (own.state_dict() if isinstance(own, nn.Module) else own).items():
            hashed.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            hashed.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:12]


def read_json(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise SystemExit(f"{file} holds no JSON ({error}): remove it, or restore it") from error
    return found


def write_json(file: Path, found: Any) -> None:
    with whole_file(file) as aside:
        aside.write_text(json.dumps(found, indent=1))


def _differences(noted: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[str]:
    for name in {**asked, **noted}:
        own, other = noted.get(name), asked.get(name)
        if isinstance(own, dict) and isinstance(other, dict):
            yield from _differences(own, other)
        elif own != other:
            yield f"{name} {own!r} there, {other!r} asked for"
