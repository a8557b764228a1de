"""What examples do with runs of `tgfx.fit` that were stopped, or finished on another day."""

from __future__ import annotations

from pathlib import Path

import torch

import tgfx


def check_finished(result: tgfx.FitResult) -> None:
    """Leave at once, so that nothing is measured or written down of a run that Ctrl-C ended and that is to go on."""
    if result.stopped != "finished":
        raise SystemExit(f"stopped at step {result.steps}; start it again to go on from there")


def load_finished_(gated: tgfx.GatedModule, checkpoint: Path) -> None:
    """The gated model as a finished run left it, whether it ran now or on another day."""
    gated.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["state"]["gated"])
