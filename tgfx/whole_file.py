"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A place beside the target to write to: it takes the target's place when all went well, and is gone when not."""
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.writing")
    try:
        yield aside
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
