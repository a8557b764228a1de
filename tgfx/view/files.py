"""Pages and texts on disk."""

from __future__ import annotations

from pathlib import Path

from tgfx.errors import InputError
from tgfx.whole_file import whole_file


def write_whole(path: Path, text: str) -> Path:
    """Write aside, then put in place: whoever reads never sees half a file."""
    try:
        with whole_file(path) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            "the file cannot be written", expected="a path in a folder that exists", found=str(error), where=str(path)
        ) from error
    return path
