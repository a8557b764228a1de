"""A part of an experiment that runs for long: what it was begun with, and the result it leaves.

    asked.json      settings and what it begins with, written when it begins
    result.json     its figures, written when it is done

Whoever starts it again gets the result, or goes on from its checkpoint; but not with other settings, since the result
would then stand for what it is not.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tgfx
from tgfx.whole_file import whole_file


class Stage:
    """`asked`: all that the result depends on. `prefix`: for several stages in one folder."""

    def __init__(self, folder: Path, asked: Mapping[str, Any], *, prefix: str = "") -> None:
        self.folder = folder
        self.asked: dict[str, Any] = json.loads(json.dumps(asked))  # as a file has it: lists for tuples
        self.result, self.noted = folder / f"{prefix}result.json", folder / f"{prefix}asked.json"
        self._trained, self._since = 0.0, time.time()

    def begin(self) -> dict[str, Any] | None:
        """The result if there is one; else None, and the settings are noted. Other settings are refused."""
        if self.noted.is_file():
            self._check(read_json(self.noted))
        elif self.result.is_file():
            raise SystemExit(f"{self.result} does not say what it was begun with: choose another --out, or remove it")
        if self.result.is_file():
            return read_json(self.result)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.noted, self.asked)
        self._since = time.time()
        return None

    def _check(self, noted: dict[str, Any]) -> None:
        differ = ", ".join(_differences(noted, self.asked))
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


@contextmanager
def without_traceback() -> Iterator[None]:
    """A file that is missing is for the user to mend, and its error says how."""
    try:
        yield
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from error


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
