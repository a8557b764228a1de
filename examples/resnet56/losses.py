"""What a model that is cut can learn from the model it was: its answers, besides the labels or in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[nn.Module, Any], Tensor]
TEMPERATURE = 4.0
TAUGHT = 0.9  # share of the original model's answers, where the labels count too


def matched(original: nn.Module) -> Step:
    """Half the squared distance to what the original model says, without labels.

    A trained model is right about nearly all it was trained on, so the labels tell little of what a channel is worth.
    """
    answers = _answers(original)

    def step(gated: nn.Module, batch: Any) -> Tensor:
        return (gated(batch[0]).float() - answers(batch[0])).square().sum(1).mean() / 2

    return step


def blurred(original: nn.Module) -> Step:
    """`matched`, with noise of deviation 1 on what the original model says.

    Half the squared distance is flat where the models agree, and so is what gradients tell of its curvature there. With
    the noise their variance over samples is that curvature itself (Gauss-Newton), at any distance; their mean stays.
    """
    answers = _answers(original)

    def step(gated: nn.Module, batch: Any) -> Tensor:
        wanted = answers(batch[0])
        return (gated(batch[0]).float() - wanted - torch.randn_like(wanted)).square().sum(1).mean() / 2

    return step


def softened(original: nn.Module) -> Step:
    """The distance of what the two models believe, rather than of what they say: a common scale of the answers is free.

    Divergence of the softmax at a temperature, times its square (Hinton et al., 2015).
    """
    answers = _answers(original)

    def step(gated: nn.Module, batch: Any) -> Tensor:
        return _divergence(gated(batch[0]).float(), answers(batch[0]))

    return step


def taught(original: nn.Module) -> Step:
    """Labels, and for the larger part the softened answers of the original model."""
    answers = _answers(original)

    def step(gated: nn.Module, batch: Any) -> Tensor:
        found = gated(batch[0]).float()
        return (1 - TAUGHT) * F.cross_entropy(found, batch[1]) + TAUGHT * _divergence(found, answers(batch[0]))

    return step


LOSSES: dict[str, Callable[[nn.Module], Step]] = {"match": matched, "blur": blurred, "soft": softened, "taught": taught}


def _answers(original: nn.Module) -> Callable[[Tensor], Tensor]:
    original = copy.deepcopy(original).eval().requires_grad_(False)

    def answers(images: Tensor) -> Tensor:
        with torch.no_grad():
            return original(images).float()

    return answers


def _divergence(found: Tensor, wanted: Tensor) -> Tensor:
    found, wanted = (found / TEMPERATURE).log_softmax(1), (wanted / TEMPERATURE).log_softmax(1)
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True) * TEMPERATURE**2
