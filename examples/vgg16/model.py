"""VGG-16 for images of 32 x 32: the 13 convolutions, each with batch norm, and one or three fully-connected layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

FULLY = (4096, 4096)  # of the published net: nine tenths of its parameters
SIDE = 7  # of the features that its fully-connected layers read
WIDTHS = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")


class VGG(nn.Module):
    """As people use it on CIFAR: five times halved, an image of 32 x 32 ends as one vector.

    fully: fully-connected layers before the last, on features that are brought to 7 x 7, as torchvision's vgg16 does.
    """

    def __init__(self, widths: Sequence[int | str] = WIDTHS, classes: int = 10, *, fully: Sequence[int] = ()) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in widths:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(SIDE if fully else 1)
        if fully:
            channels *= SIDE**2
        head: list[nn.Module] = []
        for width in fully:
            head += [nn.Linear(channels, width), nn.ReLU(inplace=True), nn.Dropout()]
            channels = width
        self.classifier = nn.Sequential(*head, nn.Linear(channels, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def load_convolutions_(model: VGG, state: Mapping[str, Tensor]) -> None:
    """Fill in the convolutions of torchvision's vgg16, which has no batch norm: they come in the same order."""
    names = sorted({name.rpartition(".")[0] for name in state if name.startswith("features.")}, key=_index)
    own = [layer for layer in model.features if isinstance(layer, nn.Conv2d)]
    if len(names) != len(own):
        raise ValueError(f"the file has {len(names)} convolutions, the model {len(own)}: expected torchvision's vgg16")
    with torch.no_grad():
        for name, layer in zip(names, own, strict=True):
            layer.weight.copy_(state[f"{name}.weight"])
            assert layer.bias is not None
            layer.bias.copy_(state[f"{name}.bias"])


@torch.no_grad()
def start_batch_norm_(model: VGG, images: Tensor) -> None:
    """Start batch norm so that it changes nothing but the scale of whole layers: the loaded features survive.

    Per channel it gives back the mean and deviation that it takes away, over `images`. One factor per layer makes the
    deviations about 1, as training rates expect; the bias of the next layer is scaled by it, as its input is.
    """
    x, scale = images, 1.0
    for layer in model.features:
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            layer.bias.mul_(scale)
        if isinstance(layer, nn.BatchNorm2d):
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
            deviation = (variance + layer.eps).sqrt()
            layer.running_mean.copy_(mean)  # type: ignore[union-attr]
            layer.running_var.copy_(variance)  # type: ignore[union-attr]
            layer.weight.copy_(deviation / deviation.mean())
            layer.bias.copy_(mean / deviation.mean())
            scale /= float(deviation.mean())
            x = nn.functional.batch_norm(x, mean, variance, layer.weight, layer.bias, eps=layer.eps)
        else:
            x = layer(x)


def _index(name: str) -> int:
    return int(name.removeprefix("features."))
