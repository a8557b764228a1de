"""Optional packages, imported when they are needed and not before."""

from __future__ import annotations

import importlib
from typing import Any

from tgfx.errors import MissingPackageError


def needed(name: str, *, extra: str = "onnx", purpose: str = "this") -> Any:
    """The package `name`, or an error that says which extra brings it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs {name.partition('.')[0]}",
            expected=name,
            found=str(error),
            fix=f"pip install tgfx[{extra}]",
        ) from error


def need_all(*names: str, purpose: str) -> None:
    """Ask for everything first: nobody wants to wait for an export that cannot be checked."""
    for name in names:
        needed(name, purpose=purpose)
