"""Measured times on disk: one JSON file per machine, runtime version and number of threads.

Where: the argument, else $TGFX_CACHE, else $XDG_CACHE_HOME/tgfx, else ~/.cache/tgfx.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import warnings
from pathlib import Path
from typing import Any

from tgfx.whole_file import whole_file

FORMAT = 1


def machine() -> str:
    """This machine, as far as its speed goes."""
    return f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
    first: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        first.setdefault(key.strip(), value.strip())
    name = first.get("model name") or platform.processor()
    digest = hashlib.sha256("|".join(first.get(key, "") for key in wanted).encode()).hexdigest()[:8]
    return f"{name} ({digest})"


def folder_for(cache: str | os.PathLike[str] | None) -> Path:
    if cache is not None:
        return Path(cache)
    if os.environ.get("TGFX_CACHE"):
        return Path(os.environ["TGFX_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tgfx"


class Cache:
    """Times by key (text), for one description of the circumstances."""

    def __init__(self, folder: Path | None, about: dict[str, str]) -> None:
        """folder None: nothing is read or written."""
        self.about = about
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"latency-{name}.json"
        self.times: dict[str, float] = self._read()

    def _read(self) -> dict[str, float]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text())
            return _checked(content, self.about)
        except (OSError, ValueError) as error:
            warnings.warn(f"the latency cache {self.path} cannot be used and is measured anew: {error}", stacklevel=4)
            return {}

    def save(self) -> None:
        """Written aside and renamed. What another process has added in the meantime stays."""
        if self.path is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged file has been spoken of
            self.times = {**self._read(), **self.times}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "about": self.about, "ms": self.times}
        with whole_file(self.path) as aside:
            aside.write_text(json.dumps(content), encoding="utf-8")


def _checked(content: Any, about: dict[str, str]) -> dict[str, float]:
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("about") != about:
        raise ValueError("another format, or another machine's")
    times = content.get("ms")
    if not isinstance(times, dict):
        raise ValueError("no times")
    for key, value in times.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{value!r} ms for {key}")
    return times
