"""One small model per way that channels hang together, each wide enough that a channel costs less than 1%."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PICTURE, VECTOR = (3, 6, 6), (20,)


class Residual(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.a, self.b = nn.Conv2d(width, 128, 3, padding=1), nn.Conv2d(128, width, 3, padding=1)
        self.norm_a, self.norm_b = nn.BatchNorm2d(128), nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.norm_b(self.b(torch.relu(self.norm_a(self.a(x))))))
        return self.fc(x.mean((2, 3)))


class Inverted(nn.Module):
    """MobileNet's block: expand, depthwise, project."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.expand, self.norm1 = nn.Conv2d(width, 128, 1, bias=False), nn.BatchNorm2d(128)
        self.depth, self.norm2 = nn.Conv2d(128, 128, 3, padding=1, groups=128, bias=False), nn.BatchNorm2d(128)
        self.project, self.norm3 = nn.Conv2d(128, width, 1, bias=False), nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.relu6(self.norm2(self.depth(F.relu6(self.norm1(self.expand(x))))))
        return self.fc((x + self.norm3(self.project(y))).mean((2, 3)))


class Dense(nn.Module):
    """DenseNet's way: every layer reads all before it, normalised first."""

    def __init__(self, growth: int = 56) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(growth * (i + 1)) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(growth * (i + 1), growth, 3, padding=1) for i in range(3))
        self.fc = nn.Linear(4 * growth, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(torch.relu(norm(torch.cat(features, 1)))))
        return self.fc(torch.cat(features, 1).mean((2, 3)))


class Transformer(nn.Module):
    """A ViT of one block on patches of 3x3."""

    def __init__(self, width: int = 64, heads: int = 8) -> None:
        super().__init__()
        self.patch, self.heads = nn.Conv2d(3, width, 3, stride=3), heads
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 160), nn.Linear(160, width)
        self.fc = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.fc(self.norm3(x).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4))


def plain() -> nn.Module:
    first = (nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    second = (nn.Conv2d(64, 80, 3, padding=1), nn.BatchNorm2d(80), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(80, 4))


def grouped() -> nn.Module:
    first = (nn.Conv2d(3, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1, groups=2), nn.ReLU())
    return nn.Sequential(
        *first, nn.Conv2d(128, 96, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 4)
    )


BUDGET_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, VECTOR),
    "plain": (plain, PICTURE),
    "residual": (Residual, PICTURE),
    "depthwise": (Inverted, PICTURE),
    "dense": (Dense, PICTURE),
    "transformer": (Transformer, PICTURE),
    "grouped": (grouped, PICTURE),
}


def data(shape: tuple[int, ...], count: int = 256) -> tuple[Tensor, Tensor]:
    """The label says which of the first four inputs, in the mean over pixels, is largest."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, *shape, generator=generator)
    means = x.flatten(2).mean(2) if len(shape) > 1 else x[:, :4]
    return x, means.argmax(1)
