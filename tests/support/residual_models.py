"""Small nets of residual blocks of every make, to be chained at random."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class PostActivation(nn.Module):
    """ResNet's block, with or without a projection on the shortcut."""

    def __init__(self, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(WIDTH, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, WIDTH, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(WIDTH)
        self.relu = nn.ReLU(inplace=True)
        project_layers = (nn.Conv2d(WIDTH, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH))
        self.downsample = nn.Sequential(*project_layers) if project else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(WIDTH)
        self.branch = nn.Sequential(nn.Conv2d(WIDTH, 5, 1), nn.GELU(), nn.Conv2d(5, WIDTH, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(torch.relu(self.bn(x)))


class Inverted(nn.Module):
    """MobileNet's, with squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(WIDTH, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(inplace=True))
        self.depth = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.BatchNorm2d(12), nn.SiLU())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, 3, 1), nn.ReLU(), nn.Conv2d(3, 12, 1))
        self.project = nn.Sequential(nn.Conv2d(12, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        return x + self.project(y * torch.sigmoid(self.squeeze(y)))


class Nested(nn.Module):
    """A branch in a branch, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(WIDTH, 6, 1)
        self.inner = nn.Conv2d(6, 6, 3, padding=1)
        self.leave = nn.Conv2d(6, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.enter(x))
        z = self.inner(y)
        z += y
        return x + self.leave(torch.tanh(z))


class Parallel(nn.Module):
    """Two branches from one normalisation, summed up before the identity comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(WIDTH)
        self.a = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.b = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return self.a(n) + torch.relu(self.b(n)) + x


class Shared(nn.Module):
    """One layer in two branches: its parameters stay while either is open."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.conv(x))
        return x + torch.relu(self.conv(x))


class Twice(nn.Module):
    """One branch added in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        y = self.conv(x)
        return (x + y) * torch.sigmoid(x + y)


class Hourglass(nn.Module):
    """Down and up again beside the identity, with a scale per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(WIDTH, 6, 2, stride=2)
        self.up = nn.ConvTranspose2d(6, WIDTH, 2, stride=2)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.up(F.silu(self.down(x)))


class Attention(nn.Module):
    """A transformer block over the pixels, norm first or last."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        t = x.flatten(2).transpose(1, 2)
        if self.first:
            n = self.norm1(t)
            t = t + self.attention(n, n, n, need_weights=False)[0]
            t = t + self.mlp(self.norm2(t))
        else:
            t = self.norm1(t + self.attention(t, t, t, need_weights=False)[0])
            t = self.norm2(t + self.mlp(t))
        return t.transpose(1, 2).reshape(x.shape)


# block -> (how to make it, how many branches it has)
BLOCKS = {
    "post": (lambda: PostActivation(False), 1),
    "projected": (lambda: PostActivation(True), 1),
    "pre": (PreActivation, 1),
    "inverted": (Inverted, 1),
    "nested": (Nested, 2),
    "parallel": (Parallel, 2),
    "shared": (Shared, 2),
    "twice": (Twice, 1),
    "hourglass": (Hourglass, 1),
    "attention, norm first": (lambda: Attention(True), 2),
    "attention, norm last": (lambda: Attention(False), 2),
}


class Net(nn.Module):
    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(BLOCKS[name][0]() for name in blocks)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@dataclass(frozen=True)
class ResidualCase:
    """A chain of blocks, in the form that tests.support.promises takes."""

    names: tuple[str, ...]
    seed: int = 0
    blocks: tuple = ()

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = Net(self.names).double()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.running_mean.normal_(std=0.2)
                    module.running_var.uniform_(0.5, 1.5)
            for parameter in model.parameters():
                if bool((parameter == parameter.flatten()[0]).all()):
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model

    def example(self, batch: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(batch, 3, 4, 4, generator=generator, dtype=torch.float64)

    @property
    def branches(self) -> int:
        return sum(BLOCKS[name][1] for name in self.names)


def trained_once(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one training step, on a copy."""
    model = copy.deepcopy(model).train()
    torch.manual_seed(3)
    y = model(x)
    loss = (y - torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
