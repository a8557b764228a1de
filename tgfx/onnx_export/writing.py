"""A file appears complete or not at all: written beside its place, proven there, then moved over."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tgfx.errors import ExportError, InputError


def checked_target(path: str | os.PathLike[str], suffix: str = ".onnx") -> Path:
    """The file to write; said before anything is computed if it cannot be."""
    if not isinstance(path, str | os.PathLike):
        raise InputError("this is no path", expected=f"a path that ends in {suffix}", found=repr(path))
    target = Path(path)
    if target.is_symlink():
        target = target.resolve()  # what it points to is written, as `open` would
    problem = None
    if target.suffix != suffix:
        problem = f"the ending {target.suffix or '(none)'}, expected {suffix}"
    elif target.is_dir():
        problem = "a folder"
    elif not target.absolute().parent.is_dir():
        problem = f"no folder {target.absolute().parent}"
    elif not os.access(target.absolute().parent, os.W_OK) or not _takes_files(target.absolute().parent):
        problem = "a folder that you may not write to"
    if problem is not None:
        raise ExportError(
            "the file cannot be written",
            expected=f"a path that ends in {suffix}, in a folder that is there and writable",
            found=problem,
            where=str(path),
        )
    return target


def _takes_files(folder: Path) -> bool:
    """Root may write anywhere by its rights, and still not to every file system."""
    try:
        with tempfile.TemporaryDirectory(prefix=".tgfx-", dir=folder):
            return True
    except OSError:
        return False


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """A place in a new folder next to the target, under its name; gone afterwards, whatever happens."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.absolute().parent))
    except OSError as error:
        raise ExportError(
            "the file cannot be written", expected="a writable folder", found=str(error), where=str(target)
        ) from error
    try:
        yield folder / target.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def move_into_place(aside: Path, target: Path) -> None:
    """The model last: whoever opens it meanwhile finds the old one with its weights, or the new one with its own."""
    weights = [file for file in aside.parent.iterdir() if file != aside]
    try:
        for file in weights:
            os.replace(file, target.parent / file.name)
        os.replace(aside, target)
    except OSError as error:
        raise ExportError(
            "the file cannot be written", expected="a writable place", found=str(error), where=str(target)
        ) from error
    _remove_older_weights(target, {file.name for file in weights})


def _remove_older_weights(target: Path, current: set[str]) -> None:
    """Weights beside an earlier version of this file (models over 2 GB), which nothing refers to any more."""
    pattern = re.compile(re.escape(target.name) + r"\.[0-9a-f]{16}\.data")
    for file in target.absolute().parent.iterdir():
        if pattern.fullmatch(file.name) and file.name not in current:
            file.unlink(missing_ok=True)
