"""Gradient checkpoints inside a model are seen through when it is captured: noticed here, so that one can say so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from tgfx.ir.tree import named_modules

# how transformers and timm switch it on; they may ask for train mode before they use it
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
_INNER = "_checkpoint_without_reentrant_generator"  # what `checkpoint` calls, whoever has imported it by name


class Checkpoints:
    """Whether the model recomputes parts of itself in backward."""

    def __init__(self, model: nn.Module) -> None:
        self.found = any(getattr(module, flag, False) is True for _, module in named_modules(model) for flag in _FLAGS)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notice calls of torch.utils.checkpoint."""
        inner, reentrant = getattr(torch_checkpoint, _INNER, None), torch_checkpoint.CheckpointFunction

        def noticed(*args: Any, **kwargs: Any) -> Any:
            self.found = True
            return inner(*args, **kwargs)  # type: ignore[misc]

        class Noticed:
            @staticmethod
            def apply(*args: Any) -> Any:
                self.found = True
                return reentrant.apply(*args)

        try:
            if inner is not None:
                setattr(torch_checkpoint, _INNER, noticed)
            torch_checkpoint.CheckpointFunction = Noticed  # type: ignore[assignment, misc]
            yield
        finally:
            if inner is not None:
                setattr(torch_checkpoint, _INNER, inner)
            torch_checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]

    def warn(self, name: str, *, stacklevel: int) -> None:
        if self.found:
            warnings.warn(
                f"{name} uses gradient checkpointing, which its gated copy does not: it would keep all activations; "
                "gated.gradient_checkpointing_enable() recomputes in segments of the whole graph instead",
                stacklevel=stacklevel + 1,
            )
