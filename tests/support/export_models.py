"""Small networks of every family that must leave torch in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
        self.b, self.nb = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or c_in != c_out:
            self.short = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + self.short(x))


class FlowNet(nn.Module):
    """Contracting, then transposed convolutions and concatenation; the flow at two scales, as FlowNetS gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.c3 = (
            nn.Conv2d(6, 8, 5, 2, 2),
            nn.Conv2d(8, 12, 3, 2, 1),
            nn.Conv2d(12, 16, 3, 2, 1),
        )
        self.flow3, self.up_flow = nn.Conv2d(16, 2, 3, padding=1), nn.ConvTranspose2d(2, 2, 4, 2, 1)
        self.up, self.flow2 = nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.Conv2d(22, 2, 3, padding=1)

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        x1 = F.leaky_relu(self.c1(torch.cat((first, second), 1)), 0.1)
        x2 = F.leaky_relu(self.c2(x1), 0.1)
        x3 = F.leaky_relu(self.c3(x2), 0.1)
        flow3 = self.flow3(x3)
        joined = torch.cat((x2, F.leaky_relu(self.up(x3), 0.1), self.up_flow(flow3)), 1)
        return {"flow2": self.flow2(joined), "flow3": flow3}


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(8, 8, 1), Residual(8, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def style_net() -> nn.Module:
    return nn.Sequential(
        nn.ReflectionPad2d(2), nn.Conv2d(3, 8, 5), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
        nn.Conv2d(8, 12, 3, 2, 1), nn.InstanceNorm2d(12, affine=True), nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="nearest"), nn.ReflectionPad2d(1), nn.Conv2d(12, 3, 3),
    )  # fmt: skip


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(x, x, x, need_weights=False)[0])


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 6, 3), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        n, c, h, w = y.shape
        return self.c(F.relu(self.b(y.view(n, 3, c // 3, h, w).transpose(1, 2).reshape(n, c, h, w))))


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Family:
    make: Callable[[], nn.Module]
    example: Any
    granularity: Any = "channel"
    any_size: bool = False  # runs at other heights and widths


FAMILIES = {
    "cnn": Family(cnn, images(1, 3, 12, 12)),
    "resnet": Family(resnet, images(1, 3, 12, 12), any_size=True),
    "flownet": Family(FlowNet, (images(1, 3, 16, 16), images(1, 3, 16, 16)), any_size=True),
    "style": Family(style_net, images(1, 3, 12, 12), any_size=True),
    "encoder": Family(Encoder, torch.arange(7).unsqueeze(0)),
    "heads": Family(Attention, images(1, 5, 16), granularity="head"),
    "taps": Family(resnet, images(1, 3, 12, 12), granularity=("tap", "connection"), any_size=True),
    "connections": Family(resnet, images(1, 3, 12, 12), granularity="connection", any_size=True),
    "shuffle": Family(Shuffled, images(1, 3, 8, 8), any_size=True),
}


def made(family: str) -> nn.Module:
    """In eval mode, with batch norms that do something."""
    torch.manual_seed(0)
    model = FAMILIES[family].make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d):
            for tensor, low, high in ((module.weight, 0.5, 1.5), (module.bias, -0.3, 0.3)):
                nn.init.uniform_(tensor, low, high)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()
