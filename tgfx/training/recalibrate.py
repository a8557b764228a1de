"""Batch norm statistics of a model whose gates (or weights) have just changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tgfx.errors import TrainingError
from tgfx.training.batches import call_model


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any], *, limit: int = 50) -> int:
    """Measure running mean and variance of every batch norm anew, over up to `limit` batches; the number used.

    Modes are restored; other layers run in eval mode, so dropout draws nothing. If the batches fail, the old statistics
    are put back.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not norms:
        return 0
    modes = [(m, m.training) for m in model.modules()]
    saved = [(m.momentum, {k: v.clone() for k, v in m.named_buffers(recurse=False)}) for m in norms]
    used = 0
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over the batches
            norm.training = True
        for batch in batches:
            if used == limit:
                break
            call_model(model, batch)
            used += 1
        if not used:
            raise TrainingError("nothing to recalibrate with", expected="at least one batch", found="none")
        for norm, (_, buffers) in zip(norms, saved, strict=True):
            if not norm.num_batches_tracked:  # no data passes here (an auxiliary head): nothing was measured
                _restore(norm, buffers)
    except BaseException:
        for norm, (_, buffers) in zip(norms, saved, strict=True):
            _restore(norm, buffers)
        raise
    finally:
        for norm, (momentum, _) in zip(norms, saved, strict=True):
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
    return used


def _restore(norm: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    for name, value in buffers.items():
        norm.get_buffer(name).copy_(value)
