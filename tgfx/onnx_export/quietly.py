"""Other people's tools print and log about themselves; what matters to us comes back as a value or an error."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly(level: int = logging.CRITICAL) -> Iterator[None]:
    """Without warnings, logs up to `level`, and what Python code writes to the terminal."""
    before = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(level)
        try:
            yield
        finally:
            logging.disable(before)
