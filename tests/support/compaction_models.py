"""Small networks, one for each way in which channels hang together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Basic(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.down = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Basic(width, width, 1), Basic(width, 2 * width, 2), Basic(2 * width, 2 * width, 1))
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.bn(self.stem(x)))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.randn(1, 4, width))
        self.blocks = nn.Sequential(Attention(width, 4), Attention(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


class Grouped(nn.Module):
    """A grouped and a depthwise convolution; 4 groups of 4 can be cut within or across groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(4, 16)
        self.depthwise, self.point = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 12, 1)
        self.bn, self.head = nn.BatchNorm2d(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.grouped(F.relu(self.stem(x)))))
        return self.head(F.silu(self.bn(self.point(self.depthwise(x)))).mean((2, 3)))


class Dense(nn.Module):
    def __init__(self, growth: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(growth * (i + 1)) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(growth * (i + 1), growth, 3, padding=1) for i in range(3))
        self.head = nn.Linear(4 * growth, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return self.head(x.mean((2, 3)))


class Shared(nn.Module):
    """One block under two names, called three times; two layers tied by their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.again = self.block
        self.tied, self.other, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.other.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.block(self.block(self.stem(x)))).mean((2, 3))
        return self.head(torch.tanh(self.other(torch.tanh(self.tied(x)))))


class Branched(nn.Module):
    """A branch that can go as a whole (no shift at its end), and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.b0, self.c1 = nn.BatchNorm2d(8), nn.Conv2d(8, 12, 3, padding=1, bias=False)
        self.b1, self.c2 = nn.BatchNorm2d(12), nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.c3, self.c4 = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.c2(F.relu(self.b1(self.c1(F.relu(self.b0(x))))))
        x = x + self.c4(F.relu(self.c3(x)))
        return self.head(F.relu(x).mean((2, 3)))


MODELS: dict[str, type[nn.Module]] = {
    "resnet": ResNet, "vit": ViT, "grouped": Grouped, "dense": Dense, "shared": Shared, "branched": Branched,
}  # fmt: skip


def images(batch: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).double()


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()
