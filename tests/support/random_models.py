"""Random small models: every construct that the coupling analysis has to follow, chained at random.

A `Case` is plain data. Its repr can be pasted into a reproducer: `build(Case(...))` gives that model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
DECONV = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
DIMS = {"line": 1, "image": 2, "volume": 3, "sequence": 0, "tokens": 0}
EXTENT = {"line": 8, "image": 8, "volume": 4, "sequence": 6, "tokens": 6}
CHANNELED = ("line", "image", "volume")
TOKENED = ("sequence", "tokens")
VOCABULARY, CLASSES, FEATURES = 11, 3, 5

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "hardswish": F.hardswish,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "tanh": torch.tanh,
    # f(0) != 0: a dead channel does not stay zero behind these
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "exp": lambda x: torch.exp(0.2 * torch.tanh(x)),
    "cos": torch.cos,
}


class Block(nn.Module):
    """Keeps the shape unless it says otherwise through `out` (channels) and `extent` (positions per axis)."""

    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__()
        self.out, self.extent = c, extent


@dataclass(frozen=True)
class Blueprint:
    make: Callable[..., Block]
    families: tuple[str, ...]
    options: dict[str, tuple[Any, ...]]
    halves: bool  # needs, and halves, an extent of at least 4

    def variants(self) -> list[dict[str, Any]]:
        """One setting of the options each, so that every value of every option appears."""
        longest = max([len(v) for v in self.options.values()] or [1])
        return [{k: v[i % len(v)] for k, v in self.options.items()} for i in range(longest)]


BLOCKS: dict[str, Blueprint] = {}


def block(*families: str, halves: bool = False, **options: tuple[Any, ...]) -> Callable[[type[Block]], type[Block]]:
    def register(cls: type[Block]) -> type[Block]:
        BLOCKS[cls.__name__] = Blueprint(cls, families, options, halves)
        return cls

    return register


def _conv(d: int, c_in: int, c_out: int, kernel: int = 3, **options: Any) -> nn.Module:
    return CONV[d](c_in, c_out, kernel, padding=kernel // 2, **options)


# -- channels first: convolutions --------------------------------------------------------------------------


@block(*CHANNELED, act=("relu", "silu", "gelu", "hardswish", "leaky", "tanh"), bias=(True, False))
class ConvNormAct(Block):
    def __init__(self, d: int, c: int, extent: int, act: str, bias: bool) -> None:
        super().__init__(d, c, extent)
        self.out = c + 4
        self.conv, self.norm = _conv(d, c, self.out, bias=bias), BATCH_NORM[d](self.out)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.act](self.norm(self.conv(x)))


@block(*CHANNELED, act=("sigmoid", "softplus", "exp", "cos"))
class ConvConv(Block):
    """An activation with f(0) != 0 between two convolutions."""

    def __init__(self, d: int, c: int, extent: int, act: str) -> None:
        super().__init__(d, c, extent)
        self.first, self.second, self.act = _conv(d, c, c + 4), _conv(d, c + 4, c, 1), act

    def forward(self, x: Tensor) -> Tensor:
        return self.second(ACTIVATIONS[self.act](self.first(x)))


@block(*CHANNELED, affine=(True, False))
class PreActivation(Block):
    def __init__(self, d: int, c: int, extent: int, affine: bool) -> None:
        super().__init__(d, c, extent)
        self.norm, self.conv = BATCH_NORM[d](c, affine=affine), _conv(d, c, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.relu(self.norm(x)))


@block("image", stats=(True, False), momentum=(0.1, None))
class PlainNorm(Block):
    """BatchNorm without affine, and without running statistics."""

    def __init__(self, d: int, c: int, extent: int, stats: bool, momentum: float | None) -> None:
        super().__init__(d, c, extent)
        self.conv = nn.Conv2d(c, c, 3, padding=1)
        self.norm = nn.BatchNorm2d(c, affine=False, track_running_stats=stats, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


@block(*CHANNELED, project=(False, True), inplace=(False, True))
class Residual(Block):
    def __init__(self, d: int, c: int, extent: int, project: bool, inplace: bool) -> None:
        super().__init__(d, c, extent)
        self.out = c + 4 if project else c
        self.conv1, self.norm1 = _conv(d, c, c, bias=False), BATCH_NORM[d](c)
        self.conv2, self.norm2 = _conv(d, c, self.out), BATCH_NORM[d](self.out)
        self.project = _conv(d, c, self.out, 1) if project else nn.Identity()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        if self.inplace:
            y += self.project(x)
            return y.relu_()
        return torch.relu(y + self.project(x))


@block("image", halves=True, both=(True, False))
class OptionA(Block):
    """CIFAR ResNet's parameter-free shortcut: subsample and pad the channels with zeros."""

    def __init__(self, d: int, c: int, extent: int, both: bool) -> None:
        super().__init__(d, c, extent)
        self.out, self.extent, self.both = c + 8, extent // 2, both
        self.conv, self.norm = nn.Conv2d(c, c + 8, 3, 2, 1, bias=False), nn.BatchNorm2d(c + 8)

    def forward(self, x: Tensor) -> Tensor:
        widths = (0, 0, 0, 0, 4, 4) if self.both else (0, 0, 0, 0, 0, 8)
        return torch.relu(self.norm(self.conv(x)) + F.pad(x[:, :, ::2, ::2], widths))


@block(*CHANNELED, norm=(False, True))
class Dense(Block):
    def __init__(self, d: int, c: int, extent: int, norm: bool) -> None:
        super().__init__(d, c, extent)
        self.out = c + 8
        self.one, self.two = _conv(d, c, 4), _conv(d, c + 4, 4)
        self.norm = BATCH_NORM[d](c + 8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, torch.relu(self.one(x))], 1)
        return F.relu(self.norm(torch.cat((self.two(x), x), dim=1)))


@block(*CHANNELED, how=("split", "chunk", "slice", "narrow", "tensor_split", "method"))
class Parts(Block):
    """The channels go separate, unequal ways."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.how, self.cut = how, c // 2 if how == "chunk" else c // 4
        self.conv = _conv(d, c, c)
        self.left, self.right = _conv(d, self.cut, 4), _conv(d, c - self.cut, 4, 1)
        self.out = c + 4

    def forward(self, x: Tensor) -> Tensor:
        y, rest = self.conv(x), x.shape[1] - self.cut
        if self.how == "split":
            a, b = torch.split(y, [self.cut, rest], dim=1)
        elif self.how == "chunk":
            a, b = y.chunk(2, 1)
        elif self.how == "slice":
            a, b = y[:, : self.cut], y[:, self.cut :]
        elif self.how == "narrow":
            a, b = y.narrow(1, 0, self.cut), torch.narrow(y, 1, self.cut, rest)
        elif self.how == "tensor_split":
            a, b = torch.tensor_split(y, [self.cut], dim=1)
        else:
            a, b = y.split((self.cut, rest), 1)
        return torch.cat([self.left(torch.sigmoid(a)) + self.right(b), x], 1)


@block("image", how=("reshape", "view", "module", "function", "last", "unflatten", "layers"), groups=(2, 4))
class Shuffle(Block):
    def __init__(self, d: int, c: int, extent: int, how: str, groups: int) -> None:
        super().__init__(d, c, extent)
        self.how, self.groups = how, groups
        self.conv = nn.Conv2d(c, c, 1, groups=groups)
        self.norm = nn.BatchNorm2d(c)
        self.depthwise = nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.mix = nn.ChannelShuffle(groups)
        self.apart, self.together = nn.Unflatten(1, (groups, c // groups)), nn.Flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        if self.how == "module":
            y = self.mix(y)
        elif self.how == "function":
            y = F.channel_shuffle(y, self.groups)
        elif self.how == "last":
            y = y.permute(0, 2, 3, 1)
            y = y.reshape(*y.shape[:3], self.groups, -1).movedim(-1, -2)
            y = y.flatten(3).permute(0, 3, 1, 2)
        elif self.how == "unflatten":
            y = y.unflatten(1, (self.groups, -1)).swapaxes(1, 2).flatten(1, 2)
        elif self.how == "layers":
            y = self.together(self.apart(y).transpose(2, 1))
        else:
            b, c, h, w = y.size()
            y = y.view(b, self.groups, c // self.groups, h, w).transpose(1, 2).contiguous()
            y = y.view(b, -1, h, w) if self.how == "view" else y.reshape(b, c, h, w)
        return self.depthwise(y)


@block("image")
class ShuffleUnit(Block):
    """ShuffleNetV2: half of the channels pass by, then all are shuffled."""

    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__(d, c, extent)
        self.conv, self.norm = nn.Conv2d(c // 2, c // 2, 1, bias=False), nn.BatchNorm2d(c // 2)
        self.depthwise = nn.Conv2d(c // 2, c // 2, 3, padding=1, groups=c // 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        y = torch.cat((a, self.depthwise(torch.relu(self.norm(self.conv(b))))), dim=1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


@block("image", act=("relu", "sigmoid"))
class PixelUp(Block):
    """PixelShuffle up, a strided convolution down again."""

    def __init__(self, d: int, c: int, extent: int, act: str) -> None:
        super().__init__(d, c, extent)
        self.conv, self.up, self.down = nn.Conv2d(c, 4 * c, 1), nn.PixelShuffle(2), nn.Conv2d(c, c, 2, 2)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(ACTIVATIONS[self.act](self.up(self.conv(x))))


@block("image", halves=True, module=(True, False))
class PixelDown(Block):
    def __init__(self, d: int, c: int, extent: int, module: bool) -> None:
        super().__init__(d, c, extent)
        self.extent, self.module = extent // 2, module
        self.down, self.conv = nn.PixelUnshuffle(2), nn.Conv2d(4 * c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.down(x) if self.module else F.pixel_unshuffle(x, 2))


@block(*CHANNELED, multiplier=(1, 2), act=("relu", "sigmoid"))
class Depthwise(Block):
    def __init__(self, d: int, c: int, extent: int, multiplier: int, act: str) -> None:
        super().__init__(d, c, extent)
        wide = c * multiplier
        self.expand, self.norm = _conv(d, c, c, 1), BATCH_NORM[d](wide)
        self.depthwise = _conv(d, c, wide, groups=c)
        self.project, self.act = _conv(d, wide, c, 1, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        y = ACTIVATIONS[self.act](self.depthwise(ACTIVATIONS[self.act](self.expand(x))))
        return x + self.project(self.norm(y))


@block(*CHANNELED, groups=(2, 4), widen=(1, 2))
class Grouped(Block):
    """More than one channel per group on both sides."""

    def __init__(self, d: int, c: int, extent: int, groups: int, widen: int) -> None:
        super().__init__(d, c, extent)
        self.out = c * widen
        self.first, self.norm = _conv(d, c, c, 1), BATCH_NORM[d](c)
        self.conv = _conv(d, c, self.out, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.conv(torch.relu(self.norm(self.first(x)))))


@block("line", "image", groups=(2, 4))
class GroupedTwice(Block):
    """Two grouped convolutions in a row, and a residual around them."""

    def __init__(self, d: int, c: int, extent: int, groups: int) -> None:
        super().__init__(d, c, extent)
        self.one, self.two = _conv(d, c, c, groups=groups), _conv(d, c, c, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.gelu(self.one(x)))


@block(*CHANNELED, groups=(1, 2, 4, 0), bias=(True, False))
class Transposed(Block):
    def __init__(self, d: int, c: int, extent: int, groups: int, bias: bool) -> None:
        super().__init__(d, c, extent)
        self.first = _conv(d, c, c, 1)
        self.up = DECONV[d](c, 2 * c, 2, stride=2, groups=groups or c, bias=bias)
        self.down = CONV[d](2 * c, c, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.softplus(self.up(self.first(x))))


@block("image", gate=("sigmoid", "hardsigmoid"), flavour=("conv", "linear", "mean"))
class SqueezeExcite(Block):
    def __init__(self, d: int, c: int, extent: int, gate: str, flavour: str) -> None:
        super().__init__(d, c, extent)
        self.conv, self.norm, self.flavour = nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), flavour
        self.gate = F.hardsigmoid if gate == "hardsigmoid" else torch.sigmoid
        layer = nn.Linear if flavour == "linear" else lambda i, o: nn.Conv2d(i, o, 1)
        self.reduce, self.expand = layer(c, 4), layer(4, c)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.conv(x)))
        if self.flavour == "linear":
            s = self.expand(torch.relu(self.reduce(F.adaptive_avg_pool2d(x, 1).flatten(1))))
            return x * self.gate(s)[:, :, None, None]
        s = x.mean((2, 3), keepdim=True) if self.flavour == "mean" else F.adaptive_avg_pool2d(x, 1)
        return x * self.gate(self.expand(torch.relu(self.reduce(s))))


@block(*CHANNELED, norm=(False, True))
class CalledTwice(Block):
    """One module, two call sites."""

    def __init__(self, d: int, c: int, extent: int, norm: bool) -> None:
        super().__init__(d, c, extent)
        self.before, self.conv = _conv(d, c, c, 1), _conv(d, c, c)
        self.norm = BATCH_NORM[d](c) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(self.before(x))))
        return torch.relu(self.norm(self.conv(x)))


@block("image")
class TiedConvs(Block):
    """Two layers, one weight; their biases differ."""

    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__(d, c, extent)
        self.one, self.two = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.cos(self.one(x)))


@block(*CHANNELED, groups=(1, 2, 4, 0), affine=(True, False))
class GroupNorm(Block):
    def __init__(self, d: int, c: int, extent: int, groups: int, affine: bool) -> None:
        super().__init__(d, c, extent)
        self.conv, self.norm = _conv(d, c, c), nn.GroupNorm(groups or c, c, affine=affine)
        self.last = _conv(d, c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))))


@block(*CHANNELED, affine=(True, False, False), stats=(False, True, False))
class InstanceNorm(Block):
    def __init__(self, d: int, c: int, extent: int, affine: bool, stats: bool) -> None:
        super().__init__(d, c, extent)
        self.conv = _conv(d, c, c)
        self.norm = INSTANCE_NORM[d](c, affine=affine, track_running_stats=stats)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.norm(self.conv(x)))


class _LayerNorm2d(nn.Module):
    def __init__(self, c: int, by_hand: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.by_hand = (
            nn.Parameter(torch.ones(c)),
            nn.Parameter(torch.zeros(c)),
            by_hand,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            mean = x.mean(1, keepdim=True)
            var = (x - mean).pow(2).mean(1, keepdim=True)
            x = (x - mean) / torch.sqrt(var + 1e-6)
        else:
            x = (x - x.mean(dim=1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@block("image", norm=("by_hand", "var", "permuted", "group"))
class ConvNext(Block):
    """Depthwise convolution, LayerNorm over channels, MLP, layer scale."""

    def __init__(self, d: int, c: int, extent: int, norm: str) -> None:
        super().__init__(d, c, extent)
        self.kind = norm
        self.depthwise = nn.Conv2d(c, c, 3, padding=1, groups=c)
        kinds = {"permuted": lambda: nn.LayerNorm(c), "group": lambda: nn.GroupNorm(1, c)}
        self.norm = kinds[norm]() if norm in kinds else _LayerNorm2d(c, norm == "by_hand")
        self.fc1, self.fc2 = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)
        self.gamma = nn.Parameter(torch.full((c,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x)
        if self.kind == "permuted":
            y = self.norm(y.permute(0, 2, 3, 1))
        else:
            y = self.norm(y).permute(0, 2, 3, 1)
        y = self.gamma * self.fc2(F.gelu(self.fc1(y)))
        return x + y.permute(0, 3, 1, 2)


@block(*CHANNELED, how=("glu", "chunk", "module"))
class Gated(Block):
    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.conv, self.how, self.glu = _conv(d, c, 2 * c), how, nn.GLU(1)
        self.last = _conv(d, c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.how == "chunk":
            a, b = torch.chunk(y, 2, dim=1)
            y = a * torch.sigmoid(b)
        else:
            y = F.glu(y, 1) if self.how == "glu" else self.glu(y)
        return self.last(y)


@block("image", how=("zeros", "zeros_like", "empty_like"))
class SetItem(Block):
    """Channels written into a tensor made in forward."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.conv, self.how, self.last = nn.Conv2d(c, 4, 3, padding=1), how, nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "zeros":
            y = torch.zeros(x.shape, dtype=x.dtype)
        else:
            y = torch.zeros_like(x) if self.how == "zeros_like" else torch.empty_like(x)
        y[:, :4] = self.conv(x)
        y[:, 4:] = x[:, 4:] * 0.5
        return self.last(torch.sigmoid(y))


@block("image")
class StaleAlias(Block):
    """A view that is read after its base was written."""

    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__(d, c, extent)
        self.one, self.two = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 1)
        self.last = nn.Conv2d(4, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        view = y[:, :4]
        y.copy_(self.two(x))
        return self.last(view) + y


@block("image", how=("relu_", "add_", "mul_", "sigmoid_", "clamp_"))
class InPlace(Block):
    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.one, self.two, self.how = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        if self.how in ("add_", "mul_"):
            getattr(y, self.how)(self.two(x))
        elif self.how == "clamp_":
            y.clamp_(-0.5, 0.5)
        else:
            getattr(y, self.how)()
        return self.two(y)


@block("image", how=("normalize", "sum", "norm", "softmax", "max", "cbam"))
class OverChannels(Block):
    """Reductions over the channel axis."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.conv, self.last, self.how = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 1), how
        self.spatial = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.how == "normalize":
            y = F.normalize(y, dim=1)
        elif self.how == "sum":
            y = y * torch.tanh(y.sum(1, keepdim=True))
        elif self.how == "norm":
            y = y / (y.norm(dim=1, keepdim=True) + 1)
        elif self.how == "softmax":
            y = torch.softmax(y, dim=1)
        elif self.how == "max":
            y = y - y.amax(dim=1, keepdim=True)
        else:
            seen = torch.cat([y.mean(1, keepdim=True), y.max(1, keepdim=True)[0]], 1)
            y = y * torch.sigmoid(self.spatial(seen))
        return self.last(y)


@block("image", how=("sort", "cumsum", "fft", "roll", "cdist"))
class Unknown(Block):
    """Operators over channels that nobody could cut: the channels are kept."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.first, self.conv, self.how = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1), how
        self.last = nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(torch.relu(self.first(x)))
        if self.how == "sort":
            y = torch.sort(y, dim=1)[0]
        elif self.how == "cumsum":
            y = torch.cumsum(y, 1)
        elif self.how == "fft":
            y = torch.fft.fft(y, dim=1).real
        elif self.how == "roll":
            y = torch.roll(y, 1, 1)
        else:
            flat = y.flatten(2)
            y = y + torch.cdist(flat, flat).mean((1, 2))[:, None, None, None]
        return self.last(y)


@block("image", how=("power", "floor", "size", "numel"))
class ShapeReads(Block):
    """Sizes used as numbers keep their meaning after the cut."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.conv, self.last, self.how = nn.Conv2d(c, c + 4, 3, padding=1), nn.Conv2d(c + 4, c, 1), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.how == "power":
            y = y * y.shape[1] ** -0.5
        elif self.how == "floor":
            y = y / (y.shape[1] // 4)
        elif self.how == "size":
            b, c, h, w = y.size()
            y = y.reshape(b, c, h * w).reshape(b, c, h, w) * (c / 10)
        else:
            y = y / (y.numel() / y.shape[0])
        return self.last(torch.sigmoid(y))


@block("image", mode=("reflect", "replicate", "circular", "constant", "layer", "conv"))
class Padding(Block):
    def __init__(self, d: int, c: int, extent: int, mode: str) -> None:
        super().__init__(d, c, extent)
        self.first, self.mode, self.pad = nn.Conv2d(c, c, 1), mode, nn.ReflectionPad2d(1)
        self.conv = nn.Conv2d(c, c, 3, padding=1 if mode == "conv" else 0,
                              padding_mode="reflect" if mode == "conv" else "zeros")  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.first(x))
        if self.mode == "layer":
            y = self.pad(y)
        elif self.mode == "constant":
            y = F.pad(y, (1, 1, 1, 1), value=0.5)
        elif self.mode != "conv":
            y = F.pad(y, (1, 1, 1, 1), mode=self.mode)
        return self.conv(y)


@block("line")
class Causal(Block):
    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__(d, c, extent)
        self.conv, self.last = nn.Conv1d(c, c, 3, dilation=2), nn.Conv1d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.tanh(self.conv(F.pad(x, (4, 0)))))


@block("image", how=("nearest", "bilinear", "module", "transposed"))
class UNet(Block):
    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.how = how
        self.enter, self.inner = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * c, 2 * c, 2, 2) if how == "transposed" else nn.Upsample(scale_factor=2)
        self.leave = nn.Conv2d(3 * c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.enter(x))
        y = torch.sigmoid(self.inner(F.max_pool2d(skip, 2)))
        if self.how in ("nearest", "bilinear"):
            y = F.interpolate(y, size=skip.shape[-2:], mode=self.how)
        else:
            y = self.up(y)
        return self.leave(torch.cat([skip, y], dim=1))


@block("image", how=("arange", "zeros", "ones", "full", "buffer", "mask", "eye"))
class Constants(Block):
    """Tensors of channel size that are no parameters."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.conv, self.last, self.how = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1), how
        self.register_buffer("scale", torch.linspace(0.5, 2, c).view(1, -1, 1, 1))
        self.register_buffer("mask", torch.arange(c).view(1, -1, 1, 1) % 3 > 0, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.how == "arange":
            y = y + 0.1 * torch.arange(y.shape[1], dtype=y.dtype).view(1, -1, 1, 1)
        elif self.how == "zeros":
            y = torch.cat([y, torch.zeros(1, 2, 1, 1, dtype=y.dtype).expand(y.shape[0], 2, *y.shape[2:])], 1)
            y = y[:, :-2] + y[:, -2:].sum(1, keepdim=True)
        elif self.how == "ones":
            y = y * torch.ones(self.out, 1, 1, dtype=y.dtype)
        elif self.how == "full":
            y = y + torch.full((1, self.out, 1, 1), 0.3, dtype=y.dtype)
        elif self.how == "eye":
            y = torch.einsum("bchw,cd->bdhw", y, torch.eye(self.out, dtype=y.dtype) * 0.5)
        else:
            y = y * self.scale if self.how == "buffer" else y.masked_fill(self.mask, 0.7)
        return self.last(torch.sigmoid(y))


@block("image")
class Dropouts(Block):
    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__(d, c, extent)
        self.one, self.two = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 1)
        self.drop, self.drop2d = nn.Dropout(0.2), nn.Dropout2d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.drop(torch.relu(self.one(x))))
        return F.dropout(self.drop2d(x), 0.1, self.training)


@block("image", many=(True, False))
class Prelu(Block):
    def __init__(self, d: int, c: int, extent: int, many: bool) -> None:
        super().__init__(d, c, extent)
        self.conv, self.act, self.last = nn.Conv2d(c, c, 1), nn.PReLU(c if many else 1), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.conv(x)))


@block("image", how=("flip", "index", "stack", "where", "maximum", "repeat", "unfold", "bottleneck", "tile"))
class Moves(Block):
    """Other ways to move channels about."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        wide = {"repeat": 2 * c, "tile": 2 * c, "unfold": 9 * c, "bottleneck": 1}.get(how, c)
        self.one, self.two, self.how = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1), how
        self.narrow, self.last = nn.Conv2d(c, 1, 1), nn.Conv2d(wide, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, z = torch.sigmoid(self.one(x)), self.two(x)
        if self.how == "flip":
            y = y.flip(1) + z
        elif self.how == "index":
            y = y[:, [*range(1, self.out), 0]] + z
        elif self.how == "stack":
            y = torch.stack([y, z], 1).sum(1)
        elif self.how == "where":
            y = torch.where(z > 0, y, z)
        elif self.how == "maximum":
            y = torch.maximum(y, z)
        elif self.how in ("repeat", "tile"):
            y = y.repeat(1, 2, 1, 1) if self.how == "repeat" else torch.repeat_interleave(y, 2, dim=1)
        elif self.how == "unfold":
            y = F.unfold(y, 3, padding=1).view(y.shape[0], -1, y.shape[2], y.shape[3])
        else:
            y = torch.sigmoid(self.narrow(y))  # one channel: nothing to cut, and no depthwise convolution
        return self.last(y)


@block("image", shift=(False, True), table=("index", "free"))
class WindowAttention(Block):
    """Swin: windows by view and permute, fused qkv, relative-position table."""

    def __init__(self, d: int, c: int, extent: int, shift: bool, table: str) -> None:
        super().__init__(d, c, extent)
        self.shift, self.heads, self.window = shift, 2, 2
        self.norm, self.qkv, self.proj = nn.LayerNorm(c), nn.Linear(c, 3 * c), nn.Linear(c, c)
        n = self.window**2
        rows = 9 if table == "index" else n * n
        self.table = nn.Parameter(torch.zeros(rows, self.heads))
        steps = torch.arange(self.window)
        at = torch.stack(torch.meshgrid(steps, steps, indexing="ij")).flatten(1)
        away = at[:, :, None] - at[:, None, :] + self.window - 1
        index = away[0] * 3 + away[1] if table == "index" else torch.arange(n * n).view(n, n)
        self.register_buffer("index", index.flatten())

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.permute(0, 2, 3, 1))
        if self.shift:
            y = torch.roll(y, shifts=(-1, -1), dims=(1, 2))
        b, h, w, c = y.shape
        s = self.window
        y = y.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        qkv = self.qkv(y).reshape(y.size(0), y.size(1), 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index].view(s * s, s * s, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        y = (torch.softmax(scores + bias, -1) @ v).transpose(1, 2).reshape(-1, s * s, c)
        y = self.proj(y).view(b, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        if self.shift:
            y = torch.roll(y, shifts=(1, 1), dims=(1, 2))
        return x + y.permute(0, 3, 1, 2)


@block("image")
class NonLocal(Block):
    """Attention over positions with 1x1 convolutions and bmm."""

    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__(d, c, extent)
        self.q, self.k, self.v = nn.Conv2d(c, 4, 1), nn.Conv2d(c, 4, 1), nn.Conv2d(c, c, 1)
        self.gamma = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.size()
        q = self.q(x).view(b, -1, h * w).permute(0, 2, 1)
        weights = torch.softmax(torch.bmm(q, self.k(x).view(b, -1, h * w)), dim=-1)
        out = torch.bmm(self.v(x).view(b, -1, h * w), weights.permute(0, 2, 1))
        return self.gamma * out.view(b, c, h, w) + x


# -- channels last: attention and its relatives ------------------------------------------------------------


class _RMSNorm(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "plain": lambda c: nn.LayerNorm(c, elementwise_affine=False),
    "rms": nn.RMSNorm,
    "by_hand": _RMSNorm,
    "none": lambda c: nn.Identity(),
}


@block(*TOKENED, norm=tuple(NORMS), act=("gelu", "sigmoid", "relu"))
class Mlp(Block):
    def __init__(self, d: int, c: int, extent: int, norm: str, act: str) -> None:
        super().__init__(d, c, extent)
        self.norm, self.act, self.drop = NORMS[norm](c), act, nn.Dropout(0.1)
        self.fc1, self.fc2 = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(ACTIVATIONS[self.act](self.fc1(self.norm(x)))))


@block(*TOKENED, bias=(True, False))
class Widen(Block):
    def __init__(self, d: int, c: int, extent: int, bias: bool) -> None:
        super().__init__(d, c, extent)
        self.out = c + 4
        self.linear = nn.Linear(c, c + 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.linear(x))


@block(*TOKENED, how=("glu", "chunk", "swiglu"))
class GatedMlp(Block):
    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.how, self.up, self.gate = how, nn.Linear(c, 2 * c if how != "swiglu" else c), nn.Linear(c, c)
        self.down = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "glu":
            y = F.glu(self.up(x), dim=-1)
        elif self.how == "chunk":
            a, b = self.up(x).chunk(2, dim=-1)
            y = a * torch.sigmoid(b)
        else:
            y = F.silu(self.gate(x)) * self.up(x)
        return x + self.down(y)


@block(*TOKENED, batch_first=(True, False), weights=(False, True), heads=(2, 4), dropout=(0.0, 0.2))
class TorchAttention(Block):
    def __init__(
        self, d: int, c: int, extent: int, batch_first: bool, weights: bool, heads: int, dropout: float
    ) -> None:
        super().__init__(d, c, extent)
        self.norm, self.batch_first, self.weights = nn.LayerNorm(c), batch_first, weights
        self.attention = nn.MultiheadAttention(c, heads, dropout=dropout, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if not self.batch_first:
            y = y.transpose(0, 1)
        y, _ = self.attention(y, y, y, need_weights=self.weights)
        return x + (y if self.batch_first else y.transpose(0, 1))


@block("sequence", first=(True, False))
class TorchEncoder(Block):
    def __init__(self, d: int, c: int, extent: int, first: bool) -> None:
        super().__init__(d, c, extent)
        self.layer = nn.TransformerEncoderLayer(c, 2, 2 * c, dropout=0.1, batch_first=True, norm_first=first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class _Attention(Block):
    """Three projections, heads and an output; `mix` is what the kinds differ in."""

    def __init__(self, d: int, c: int, extent: int, heads: int = 2, kv_heads: int | None = None) -> None:
        super().__init__(d, c, extent)
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, c // heads
        self.q, self.proj = nn.Linear(c, c), nn.Linear(c, c)
        self.k, self.v = nn.Linear(c, self.kv_heads * self.size), nn.Linear(c, self.kv_heads * self.size)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x), self.heads)
        k, v = self.split(self.k(x), self.kv_heads), self.split(self.v(x), self.kv_heads)
        y = self.mix(q, k, v).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
        return x + self.proj(y)


@block(*TOKENED, how=("plain", "causal", "mask", "scaled"), heads=(2, 4))
class Sdpa(_Attention):
    def __init__(self, d: int, c: int, extent: int, how: str, heads: int) -> None:
        super().__init__(d, c, extent, heads)
        self.how = how
        self.register_buffer("mask", torch.ones(extent, extent, dtype=torch.bool).tril())

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = self.mask if self.how == "mask" else None
        scale = 0.7 if self.how == "scaled" else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.how == "causal", scale=scale)


@block(*TOKENED, how=("matmul", "einsum", "cosine", "shape"), heads=(2, 4))
class ByHand(_Attention):
    def __init__(self, d: int, c: int, extent: int, how: str, heads: int) -> None:
        super().__init__(d, c, extent, heads)
        self.how, self.drop = how, nn.Dropout(0.1)
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), 1.5))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.how == "einsum":
            scores = torch.einsum("bhnd,bhsd->bhns", q, k) / math.sqrt(self.size)
            return torch.einsum("bhns,bhse->bhne", torch.softmax(scores, -1), v)
        if self.how == "cosine":
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.logit_scale.exp()
        elif self.how == "shape":
            scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.size)
        return self.drop(scores.softmax(dim=-1)) @ v


@block(*TOKENED, how=("repeat", "enable", "expand"))
class GroupedQuery(_Attention):
    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent, 4, 2)
        self.how = how

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.how == "enable":
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        if self.how == "repeat":
            k, v = k.repeat_interleave(2, dim=1), torch.repeat_interleave(v, 2, dim=1)
        else:
            b, h, n, s = k.shape
            k = k[:, :, None].expand(b, h, 2, n, s).reshape(b, h * 2, n, s)
            v = v[:, :, None].expand(b, h, 2, n, s).reshape(b, h * 2, n, s)
        return F.scaled_dot_product_attention(q, k, v)


@block(*TOKENED, repeat=(False, True))
class Rope(_Attention):
    """Rotary position embedding: inverse frequencies in a buffer, rotate_half."""

    def __init__(self, d: int, c: int, extent: int, repeat: bool) -> None:
        super().__init__(d, c, extent, 2)
        self.size = c // 2 - c // 2 % 2  # even
        self.q, self.k, self.v = (nn.Linear(c, 2 * self.size) for _ in range(3))
        self.proj, self.repeat = nn.Linear(2 * self.size, c), repeat
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(0, self.size, 2) / self.size), persistent=False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2], dtype=q.dtype)
        angle = torch.outer(at, self.inv_freq.to(q.dtype))
        angle = angle.repeat(1, 2) if self.repeat else torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos(), angle.sin()
        q, k = q * cos + self.half_turned(q) * sin, k * cos + self.half_turned(k) * sin
        return F.scaled_dot_product_attention(q, k, v)

    def half_turned(self, x: Tensor) -> Tensor:
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-b, a), dim=-1)


@block(*TOKENED, how=("permute", "chunk", "unbind", "einsum"), heads=(2, 4), norm=(True, False))
class FusedQkv(Block):
    def __init__(self, d: int, c: int, extent: int, how: str, heads: int, norm: bool) -> None:
        super().__init__(d, c, extent)
        self.how, self.heads = how, heads
        self.norm, self.qkv, self.proj = nn.LayerNorm(c), nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.q_norm = nn.LayerNorm(c // heads) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(self.norm(x))
        if self.how == "chunk":
            q, k, v = (t.view(b, n, self.heads, c // self.heads).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        else:
            qkv = qkv.reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0) if self.how == "unbind" else (qkv[0], qkv[1], qkv[2])
        q = self.q_norm(q)
        if self.how == "einsum":
            weights = torch.einsum("bhnd,bhsd->bhns", q, k).softmax(-1)
            y = torch.einsum("bhns,bhsd->bnhd", weights, v).reshape(b, n, c)
        else:
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        return x + self.proj(y)


@block(*TOKENED, how=("table", "bias", "talking"))
class RelativeAttention(_Attention):
    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent, 2)
        self.how = how
        self.table = nn.Embedding(2 * extent, self.heads)
        self.bias = nn.Parameter(torch.zeros(self.heads, extent, extent))
        self.talk = nn.Linear(self.heads, self.heads)
        at = torch.arange(extent)
        self.register_buffer("away", at[:, None] - at[None, :] + extent)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * 0.3
        if self.how == "table":
            scores = scores + self.table(self.away).permute(2, 0, 1)
        elif self.how == "bias":
            scores = scores + self.bias
        else:
            scores = self.talk(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return scores.softmax(-1) @ v


@block(*TOKENED, how=("parameter", "sinus", "token", "buffer"))
class Positions(Block):
    """Positional parameters and class tokens."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.how = how
        self.extent = extent + 1 if how == "token" else extent
        self.positions = nn.Parameter(torch.zeros(1, self.extent, c))
        self.token = nn.Parameter(torch.zeros(1, 1, c))
        self.register_buffer("fixed", torch.linspace(-1, 1, extent * c).view(extent, c))
        self.linear = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.how == "token":
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        elif self.how == "parameter":
            x = x + self.positions
        elif self.how == "buffer":
            x = x + self.fixed
        else:
            place = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(1)
            speed = torch.exp(torch.arange(0, self.out, 2, dtype=x.dtype) * -0.2)
            x = x + torch.stack([torch.sin(place * speed), torch.cos(place * speed)], -1).flatten(1)
        return torch.sigmoid(x)


@block(*TOKENED)
class LayerScale(Block):
    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__(d, c, extent)
        self.linear, self.gamma = nn.Linear(c, c), nn.Parameter(torch.full((c,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.linear(x)


@block("sequence")
class Mixer(Block):
    """Linear layers over tokens and over channels."""

    def __init__(self, d: int, c: int, extent: int) -> None:
        super().__init__(d, c, extent)
        self.norm = nn.LayerNorm(c)
        self.in_tokens, self.out_tokens = nn.Linear(extent, 2 * extent), nn.Linear(2 * extent, extent)
        self.fc1, self.fc2 = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out_tokens(F.gelu(self.in_tokens(self.norm(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.fc2(F.gelu(self.fc1(x)))


@block("sequence", how=("lstm", "cumsum", "tokens", "argsort"))
class Frozen(Block):
    """Unknown to the analysis (but a cumsum over tokens leaves the channels alone)."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.first, self.how = nn.Linear(c, c), how
        self.lstm = nn.LSTM(c, c, batch_first=True) if how == "lstm" else nn.Identity()
        self.last = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.how == "lstm":
            y, _ = self.lstm(y)
        elif self.how == "argsort":
            y = y + 0.1 * torch.argsort(y, dim=-1)
        else:
            y = torch.cumsum(y, dim=-1 if self.how == "cumsum" else 1)
        return self.last(y)


@block("sequence", how=("batch_norm", "conv", "group_norm"))
class Turned(Block):
    """Channels first for a while."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        made = {"batch_norm": nn.BatchNorm1d, "group_norm": lambda c: nn.GroupNorm(2, c)}
        self.layer = nn.Conv1d(c, c, 3, padding=1) if how == "conv" else made[how](c)
        self.linear = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.sigmoid(self.layer(x.transpose(1, 2))).transpose(1, 2))


@block(*TOKENED, how=("module", "weight", "transposed"))
class Shared(Block):
    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.one, self.two, self.how = nn.Linear(c, c), nn.Linear(c, c, bias=False), how
        if how == "weight":
            self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.one(x))
        if self.how == "transposed":
            return F.linear(y, self.one.weight.t())
        return self.two(y) if self.how == "weight" else self.one(y)


@block(*TOKENED, how=("parameter", "einsum", "bilinear"))
class BareWeight(Block):
    """Weights that no layer holds."""

    def __init__(self, d: int, c: int, extent: int, how: str) -> None:
        super().__init__(d, c, extent)
        self.one, self.how = nn.Linear(c, c), how
        self.weight, self.bias = nn.Parameter(torch.randn(c, c) / math.sqrt(c)), nn.Parameter(torch.zeros(c))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x))
        if self.how == "parameter":
            return y @ self.weight + self.bias
        if self.how == "einsum":
            return torch.einsum("bnc,cd->bnd", y, self.weight)
        return x + torch.tanh((y @ self.weight * y).sum(-1, keepdim=True))


# -- whole models ------------------------------------------------------------------------------------------

HEADS = {
    **dict.fromkeys(CHANNELED, ("pool", "mean", "flatten", "view", "conv", "relu_flatten")),
    **dict.fromkeys(TOKENED, ("mean", "first", "all", "norm")),
    "tokens": ("mean", "first", "all", "norm", "tied"),
}


class Head(nn.Module):
    """The layer that makes the output: its channels are never cut."""

    def __init__(self, kind: str, d: int, c: int, extent: int) -> None:
        super().__init__()
        self.kind, self.d = kind, d
        if kind == "conv":
            self.last = CONV[d](c, CLASSES, 1)
        elif "flatten" in kind or kind == "view":
            self.last = nn.Linear(c * extent**d, CLASSES)
        else:
            self.last = nn.Linear(c, CLASSES)
        self.norm = nn.LayerNorm(c) if kind == "norm" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "pool":
            x = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[self.d](x, 1)
            x = torch.flatten(x, 1)
        elif self.kind == "mean":
            x = x.mean(list(range(2, 2 + self.d)) if self.d else 1)
        elif self.kind in ("flatten", "relu_flatten"):
            x = x.flatten(1).sigmoid() if self.kind == "flatten" else torch.relu(x).flatten(1)
        elif self.kind == "view":
            x = x.view(x.size(0), -1) if self.d == 1 else x.reshape(x.shape[0], -1)
        elif self.kind == "first":
            x = x[:, 0]
        return self.last(self.norm(x))


class Model(nn.Module):
    def __init__(self, stem: nn.Module, blocks: list[Block], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x)


class TiedModel(Model):
    """Language model: the embedding is also the output layer's weight."""

    def __init__(self, stem: nn.Embedding, blocks: list[Block], width: int) -> None:
        super().__init__(stem, blocks, nn.Linear(width, VOCABULARY, bias=False))
        self.back = nn.Linear(blocks[-1].out, width)
        self.head.weight = stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for each in self.blocks:
            x = each(x)
        return self.head(self.back(x))


@dataclass(frozen=True)
class Case:
    """A recipe for a model: a family, blocks with their options, a head."""

    family: str
    blocks: tuple[tuple[str, dict[str, Any]], ...]
    head: str
    width: int = 8
    seed: int = 0
    channels_in: int = 3

    def example(self, batch: int = 2) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + batch)
        d, extent = DIMS[self.family], EXTENT[self.family]
        if self.family == "tokens":
            return torch.randint(VOCABULARY, (batch, extent), generator=generator)
        if self.family == "sequence":
            return torch.randn(batch, extent, FEATURES, generator=generator, dtype=torch.float64)
        return torch.randn(batch, self.channels_in, *(extent,) * d, generator=generator, dtype=torch.float64)


def build(case: Case) -> nn.Module:
    """The model of a case, in float64 and eval mode, with no constant parameters or statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        d, extent, c = DIMS[case.family], EXTENT[case.family], case.width
        if case.family == "tokens":
            stem: nn.Module = nn.Embedding(VOCABULARY, c)
        elif case.family == "sequence":
            stem = nn.Linear(FEATURES, c)
        else:
            stem = CONV[d](case.channels_in, c, 3, padding=1)
        made = []
        for name, options in case.blocks:
            one = BLOCKS[name].make(d, c, extent, **options)
            c, extent = one.out, one.extent
            made.append(one)
        if case.head == "tied":
            model: nn.Module = TiedModel(stem, made, case.width)  # type: ignore[arg-type]
        else:
            model = Model(stem, made, Head(case.head, d, c, extent))
        return randomised(model.double()).eval()


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """A constant parameter or statistic would make a test blind to whatever it multiplies."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def single_cases() -> list[tuple[str, Case]]:
    """Every block by itself, with every value of every option, in each of its families."""
    found = []
    for name, blueprint in BLOCKS.items():
        for family in blueprint.families:
            for i, options in enumerate(blueprint.variants()):
                head = HEADS[family][i % len(HEADS[family])]
                tag = "-".join([family, name, *(f"{k}={v}" for k, v in options.items())])
                found.append((tag, Case(family, ((name, options),), head)))
    return found


@st.composite
def cases(draw: st.DrawFn, families: tuple[str, ...] = tuple(DIMS), longest: int = 3) -> Case:
    """Chains of up to `longest` blocks."""
    family = draw(st.sampled_from(families))
    names = [name for name, blueprint in BLOCKS.items() if family in blueprint.families]
    blocks, halved, marked = [], False, False
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=longest)):
        blueprint = BLOCKS[name]
        if blueprint.halves and halved:
            continue
        options = {key: draw(st.sampled_from(values)) for key, values in blueprint.options.items()}
        if options.get("how") == "token" and marked:
            continue
        halved, marked = halved or blueprint.halves, marked or options.get("how") == "token"
        blocks.append((name, options))
    head = draw(st.sampled_from(HEADS[family]))
    width = draw(st.sampled_from((8, 12, 16)))
    channels_in = draw(st.sampled_from((3, 1))) if family in CHANNELED else 3
    return Case(family, tuple(blocks), head, width, draw(st.integers(0, 3)), channels_in)
