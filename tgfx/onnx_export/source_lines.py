"""From a stack trace as torch records it to the user's own line."""

from __future__ import annotations

import re

from tgfx.ir.source import is_machinery

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def user_line(trace: str) -> str:
    """`file:line` of the innermost frame outside torch, Python and tgfx; empty if there is none."""
    own = [f"{path}:{line}" for path, line in _FRAME.findall(trace) if not is_machinery(path)]
    return own[-1] if own else ""
