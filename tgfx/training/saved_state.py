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
            raise TrainingError(
                "the controller's saved state is of another model, or of a run that trained something else",
                expected=f"{name} of shape {tuple(tensor.shape)}",
                found=found,
                where=where or None,
                fix="load it for the model, the granularity and the frozen weights that it was saved with",
            )
