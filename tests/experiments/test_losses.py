"""What a model that is cut learns from the model it was."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.benchmarks.resnet56 import ResNet
from examples.resnet56.losses import LOSSES, TAUGHT


class _Says(nn.Module):
    """A model that has the answers already."""

    def __init__(self, answers: Tensor) -> None:
        super().__init__()
        self.answers = answers

    def forward(self, images: Tensor) -> Tensor:
        return self.answers


def test_mirrored_teaches_the_mean_of_what_is_said_to_an_image_and_its_mirror_image() -> None:
    torch.manual_seed(0)
    original = ResNet(1).eval()
    original.linear.weight.data *= 30  # an untrained net says nearly the same to all
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    with torch.no_grad():
        seen, mirrored = original(images), original(images.flip(3))
    mean = (seen + mirrored) / 2
    step = LOSSES["mirrored"](original)
    labels_only = (1 - TAUGHT) * F.cross_entropy(mean, labels)  # where the answers are right, nothing else is left
    for taught in (images, images.flip(3)):  # alike
        torch.testing.assert_close(step(_Says(mean), (taught, labels)), labels_only, rtol=1e-4, atol=1e-4)
    assert step(_Says(seen), (images, labels)) > (1 - TAUGHT) * F.cross_entropy(seen, labels) + 0.01
