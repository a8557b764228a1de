"""End-point error: to train on, at all scales, and to report, at full size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.flownet.model import FlowNetSimple
from examples.flownet.pairs import Pairs

SCALE_WEIGHTS = (0.005, 0.01, 0.02, 0.08, 0.32)  # finest first; as published


def multiscale_error(flows: Sequence[Tensor], truth: Tensor) -> Tensor:
    """Weighted sum over the scales of the end-point errors of all their pixels, for a sample in the mean."""
    losses = []
    for weight, flow in zip(SCALE_WEIGHTS, flows, strict=True):
        wanted = F.adaptive_avg_pool2d(truth, flow.shape[-2:]) / FlowNetSimple.SCALE
        losses.append(weight * _distance(flow.float(), wanted).sum() / len(truth))
    return torch.stack(losses).sum()


def full_size(flow: Tensor, size: Sequence[int]) -> Tensor:
    """The finest flow of the net in pixels, at the size of the images."""
    return FlowNetSimple.SCALE * F.interpolate(flow, tuple(size), mode="bilinear", align_corners=False)


def end_point_errors(model: nn.Module, pairs: Pairs) -> list[float]:
    """Of each pair, the mean over its pixels of the distance between found and true flow, in pixels, in eval mode."""
    was, errors = model.training, []
    model.eval()
    with torch.no_grad():
        for images, truth in (pairs.batch(slice(index, index + 1)) for index in range(len(pairs))):
            errors.append(_distance(full_size(model(images), truth.shape[-2:]), truth).mean().item())
    model.train(was)
    return errors


def still_error(pairs: Pairs) -> float:
    """The error of saying that nothing moves: what any net must beat."""
    return sum(_distance(truth, 0 * truth).mean().item() for truth in _flows(pairs)) / len(pairs)


def _flows(pairs: Pairs) -> list[Tensor]:
    return [pairs.batch(slice(index, index + 1))[1] for index in range(len(pairs))]


def _distance(flow: Tensor, truth: Tensor) -> Tensor:
    return torch.linalg.vector_norm(flow - truth, dim=1)
