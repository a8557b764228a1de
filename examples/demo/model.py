"""An ordinary residual network for 8x8 grey images. Nothing in it knows about tgfx."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions and a shortcut; a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """Three stages of two blocks on 8x8, 4x4 and 2x2 pixels."""

    def __init__(self, width: int = 20, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.stage1 = nn.Sequential(Block(width, width), Block(width, width))
        self.stage2 = nn.Sequential(Block(width, 2 * width, stride=2), Block(2 * width, 2 * width))
        self.stage3 = nn.Sequential(Block(2 * width, 4 * width, stride=2), Block(4 * width, 4 * width))
        self.classifier = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return self.classifier(x.mean((2, 3)))
