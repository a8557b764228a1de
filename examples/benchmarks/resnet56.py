"""ResNet-56 for CIFAR (He et al., section 4.2), option-A shortcuts: subsample and pad with zero channels.

Parameters are named as in the common public implementation: conv1, bn1, layer1.0.conv1, ..., linear.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class PadShortcut(nn.Module):
    """Every second pixel, and as many zero channels before as after."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra // 2))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = nn.Sequential() if same else PadShortcut(outputs - inputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = F.avg_pool2d(x, x.size()[3])
        return self.linear(x.view(x.size(0), -1))


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    rest = [BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
    return nn.Sequential(BasicBlock(inputs, outputs, stride), *rest)


def resnet56(classes: int = 10) -> ResNet:
    return ResNet(9, classes)
