"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from tgfx.errors import InputError


def write_whole(path: Path, text: str) -> Path:
    """Write aside, then put in place: whoever reads never sees half a file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise InputError(
            "the file cannot be written", expected="a path in a folder that exists", found=str(error), where=str(path)
        ) from error
    return path
