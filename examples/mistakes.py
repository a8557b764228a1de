"""What a user can mend is told in a sentence, and the exit code is 1; whatever else happens keeps its traceback."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from tarfile import TarError

from safetensors import SafetensorError

from tgfx import TgfxError

# what readers of archives, weights and images raise where a file is broken or of another kind
UNREADABLE = (
    EOFError, zlib.error, TarError, UnpicklingError, SafetensorError,
    ValueError, LookupError, RuntimeError, AttributeError, TypeError,
)  # fmt: skip


@contextmanager
def without_traceback() -> Iterator[None]:
    """Around `main`: `@without_traceback()`."""
    try:
        yield
    except TgfxError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, TgfxError | OSError | ImportError):
            raise  # the loader or the model broke: that is for whoever wrote them
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error


@contextmanager
def reading(file: Path, wanted: str) -> Iterator[None]:
    """Around the lines that read a file of the user's: what goes wrong there is the file's fault."""
    try:
        yield
    except UNREADABLE as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SystemExit(f"{file} cannot be read: expected {wanted} ({first})") from error
