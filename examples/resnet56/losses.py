"""What a model that is cut can learn from the model it was: its answers, besides the labels or in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx

Step = Callable[[nn.Module, Any], Any]  # a loss, or one with a probe
TEMPERATURE = 4.0
TAUGHT = 0.9  # share of the original model's answers, where the labels count too


def matched(original: nn.Module) -> Step:
    """Half the squared distance to what the original model says, without labels.

    A trained model is right about nearly all it was trained on, so the labels tell little of what a channel is worth.
    """
    distance = _distance(original)
    return lambda gated, batch: distance(gated, batch).square().sum(1).mean() / 2


def blurred(original: nn.Module) -> Step:
    """`matched`, with noise of deviation 1 on what the original model says.

    Half the squared distance is flat where the models agree, and so is what gradients tell of its curvature there. With
    the noise their variance over samples is that curvature itself (Gauss-Newton), at any distance; their mean stays.
    """
    distance = _distance(original)

    def step(gated: nn.Module, batch: Any) -> Tensor:
        apart = distance(gated, batch)
        return (apart - torch.randn_like(apart)).square().sum(1).mean() / 2

    return step


def probed(original: nn.Module) -> Step:
    """`matched`, and the noise of `blurred` beside it: the gradients of the distance itself stay clean."""
    distance = _distance(original)

    def step(gated: nn.Module, batch: Any) -> tgfx.Probed:
        apart = distance(gated, batch)
        return tgfx.Probed(apart.square().sum(1).mean() / 2, (apart * torch.randn_like(apart)).sum(1).mean())

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
    return _taught(_answers(original))


def mirrored(original: nn.Module) -> Step:
    """`taught`, by the mean of what the original model says to an image and to its mirror image.

    The mean is right more often than the model itself, so there is more to learn than what the model was.
    """
    answers = _answers(original)
    return _taught(lambda images: (answers(images) + answers(images.flip(3))) / 2)


LOSSES: dict[str, Callable[[nn.Module], Step]] = {
    "match": matched,
    "blur": blurred,
    "probe": probed,
    "soft": softened,
    "taught": taught,
    "mirrored": mirrored,
}
PLAIN = tuple(name for name in LOSSES if name != "probe")  # the probe is for gates over channels, and for gates alone


def _taught(answers: Callable[[Tensor], Tensor]) -> Step:
    def step(gated: nn.Module, batch: Any) -> Tensor:
        found = gated(batch[0]).float()
        return (1 - TAUGHT) * F.cross_entropy(found, batch[1]) + TAUGHT * _divergence(found, answers(batch[0]))

    return step


def _answers(original: nn.Module) -> Callable[[Tensor], Tensor]:
    original = copy.deepcopy(original).eval().requires_grad_(False)
    original = original.to(memory_format=torch.channels_last)  # as the images come: a fifth faster

    def answers(images: Tensor) -> Tensor:
        with torch.no_grad():
            return original(images).float()

    return answers


def _distance(original: nn.Module) -> Step:
    """What a gated model says less what the original one does, where both take batch norm's statistics alike.

    What the statistics of a batch do to the answers is no fault of the gates.
    """
    original = copy.deepcopy(original).requires_grad_(False)
    norms = [module for module in original.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 0.0

    def distance(gated: nn.Module, batch: Any) -> Tensor:
        by_batch = any(m.training for m in gated.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        original.eval()
        for norm in norms:
            norm.train(by_batch)
        with torch.no_grad():
            wanted = original(batch[0]).float()
        return gated(batch[0]).float() - wanted

    return distance


def _divergence(found: Tensor, wanted: Tensor) -> Tensor:
    found, wanted = (found / TEMPERATURE).log_softmax(1), (wanted / TEMPERATURE).log_softmax(1)
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True) * TEMPERATURE**2
