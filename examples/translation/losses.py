"""What a translator learns from: the right pieces, and besides them what a trained model says of all pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.translation.model import PAD, Translator


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy with label smoothing (Vaswani et al. 2017)."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, label_smoothing=0.1)


def taught(teacher: Translator, share: float) -> Callable[[nn.Module, Any], Tensor]:
    """`smoothed`, and for a share of the loss the divergence from the teacher's answers (Kim and Rush 2016)."""
    teacher = teacher.eval().requires_grad_(False)

    def step(model: nn.Module, batch: Any) -> Tensor:
        inputs, target = batch
        logits = model(*inputs)
        with torch.no_grad():
            wanted = teacher(*inputs)
        there = target != PAD
        apart = F.kl_div(
            logits[there].log_softmax(1), wanted[there].log_softmax(1), reduction="batchmean", log_target=True
        )
        return (1 - share) * smoothed(logits, target) + share * apart

    return step
