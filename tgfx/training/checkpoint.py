"""Checkpoints on disk: written aside and renamed, the one before kept, read without unpickling any code."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from tgfx._version import __version__
from tgfx.errors import TrainingError

FORMAT = 1


class Checkpoints:
    """The last and the previous state of one run, at `path` and `path` + ".previous"."""

    def __init__(self, path: str | os.PathLike[str], architecture: str, model_name: str) -> None:
        """`architecture`: a fingerprint; checkpoints of another one are refused."""
        self.path = Path(path)
        if self.path.is_dir():
            raise TrainingError(
                "the checkpoint's place is taken", expected="a file or nothing", found="a folder", where=str(path)
            )
        self.previous = self.path.with_name(self.path.name + ".previous")
        self._aside = self.path.with_name(f".{self.path.name}.writing")
        self._head = {"format": FORMAT, "tgfx": __version__, "architecture": architecture, "model": model_name}
        self._proven = False
        self.step: int | None = None  # of the last one written or read

    def save(self, state: dict[str, Any], step: int) -> None:
        """All of it or nothing: a kill at any moment leaves a good file at one of the two places."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._aside, "wb") as file:
            torch.save({**self._head, "step": step, "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        if not self._proven:  # e.g. a scheduler whose state holds objects of its own
            try:
                _read(self._aside)
            except Exception as error:
                self._aside.unlink()
                raise TrainingError(
                    "the state of this run cannot be read back without unpickling code",
                    expected="tensors, numbers, text and containers of them in all state_dicts",
                    found=f"{type(error).__name__}: {error}",
                    fix="use a scheduler and an optimizer with a plain state_dict, or checkpoint=None",
                ) from error
            self._proven = True
        if self.step is not None and self.path.exists():
            os.replace(self.path, self.previous)
        os.replace(self._aside, self.path)
        if self.step is None:  # files of an earlier run, which this one did not go on from
            self.previous.unlink(missing_ok=True)
        self.step = step

    def load(self) -> dict[str, Any] | None:
        """The newest state that can be read, None if there is no file."""
        there = [path for path in (self.path, self.previous) if path.exists()]
        damage: list[str] = []
        for path in there:
            try:
                content = _read(path)
            except Exception as error:  # what a damaged file raises has many names
                damage.append(f"{path.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                cause = error
                continue
            self._check(content, path)
            if damage:
                warnings.warn(
                    f"{damage[0]} (a damaged checkpoint); going on from {path.name}, step {content['step']}",
                    stacklevel=4,
                )
            self.step = content["step"]
            return content["state"]
        if damage:
            raise TrainingError(
                "no checkpoint can be read",
                expected="a file as tgfx.fit writes it",
                found="; ".join(damage),
                where=str(self.path),
                fix="remove it to start from the beginning, or pass resume=False",
            ) from cause
        return None

    def _check(self, content: dict[str, Any], path: Path) -> None:
        for key in ("format", "architecture"):
            if content[key] != self._head[key]:
                raise TrainingError(
                    f"the checkpoint is of another {'model' if key == 'architecture' else key}",
                    expected=f"{self._head['model']}, {key} {str(self._head[key])[:12]}",
                    found=f"{content['model']}, {key} {str(content[key])[:12]}",
                    where=str(path),
                    fix="give every model a checkpoint of its own, or pass resume=False to write over it",
                )

    def __str__(self) -> str:
        return f"{self.path} (step {self.step})" if self.step is not None else "no checkpoint was written"


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:  # torch does not compare checksums
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"wrong checksum of {bad}")
    content = torch.load(path, map_location="cpu", weights_only=True)
    missing = {"format", "architecture", "model", "step", "state"} - set(content)
    if missing:
        raise ValueError(f"no {', '.join(sorted(missing))}")
    return content
