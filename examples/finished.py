"""A run that Ctrl-C ended has no result yet."""

from __future__ import annotations

import tgfx


def check_finished(result: tgfx.FitResult) -> None:
    """Leave at once, so that nothing is measured or written down of a run that is to go on."""
    if result.stopped != "finished":
        raise SystemExit(f"stopped at step {result.steps}; start it again to go on from there")
