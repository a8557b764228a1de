"""Whether a controller's saved state is of this model, asked before any of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tgfx.errors import TrainingError


def check_fits(state: Mapping[str, Any], own: Mapping[str, Tensor], where: str = "") -> None:
    """Raise TrainingError unless `state` has a tensor of the same shape for each of `own`."""
    for name, tensor in own.items():
        saved = state.get(name)
        if not isinstance(saved, Tensor) or saved.shape != tensor.shape:
            found = f"{tuple(saved.shape)}" if isinstance(saved, Tensor) else "nothing of this name"
            raise misfit(f"{name} of shape {tuple(tensor.shape)}", found, where)


def misfit(expected: str, found: str, where: str = "") -> TrainingError:
    return TrainingError(
        "the controller's saved state is of another model, of a run that trained something else, or of another tgfx",
        expected=expected,
        found=found,
        where=where or None,
        fix="load it for the model, the granularity and the frozen weights that it was saved with, by the version of "
        "tgfx that wrote it; or begin anew (resume=False in tgfx.fit)",
    )
