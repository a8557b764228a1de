"""Channels first: convolutions, and how their channels are parted, joined and shared."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.random_models.blocks import (
    ACTIVATIONS,
    BATCH_NORM,
    CHANNELED,
    CONV,
    DECONV,
    Block,
    block,
    conv,
)


@block(*CHANNELED, act=("relu", "silu", "gelu", "hardswish", "leaky", "tanh"), bias=(True, False))
class ConvNormAct(Block):
    def __init__(self, d: int, c: int, extent: int, act: str, bias: bool) -> None:
        super().__init__(d, c, extent)
        self.out = c + 4
        self.conv, self.norm = conv(d, c, self.out, bias=bias), BATCH_NORM[d](self.out)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.act](self.norm(self.conv(x)))


@block(*CHANNELED, act=("sigmoid", "softplus", "exp", "cos"))
class ConvConv(Block):
    """An activation with f(0) != 0 between two convolutions."""

    def __init__(self, d: int, c: int, extent: int, act: str) -> None:
        super().__init__(d, c, extent)
        self.first, self.second, self.act = conv(d, c, c + 4), conv(d, c + 4, c, 1), act

    def forward(self, x: Tensor) -> Tensor:
        return self.second(ACTIVATIONS[self.act](self.first(x)))


@block(*CHANNELED, affine=(True, False))
class PreActivation(Block):
    def __init__(self, d: int, c: int, extent: int, affine: bool) -> None:
        super().__init__(d, c, extent)
        self.norm, self.conv = BATCH_NORM[d](c, affine=affine), conv(d, c, c)

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
        self.conv1, self.norm1 = conv(d, c, c, bias=False), BATCH_NORM[d](c)
        self.conv2, self.norm2 = conv(d, c, self.out), BATCH_NORM[d](self.out)
        self.project = conv(d, c, self.out, 1) if project else nn.Identity()
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
        self.one, self.two = conv(d, c, 4), conv(d, c + 4, 4)
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
        self.conv = conv(d, c, c)
        self.left, self.right = conv(d, self.cut, 4), conv(d, c - self.cut, 4, 1)
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
        self.expand, self.norm = conv(d, c, c, 1), BATCH_NORM[d](wide)
        self.depthwise = conv(d, c, wide, groups=c)
        self.project, self.act = conv(d, wide, c, 1, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        y = ACTIVATIONS[self.act](self.depthwise(ACTIVATIONS[self.act](self.expand(x))))
        return x + self.project(self.norm(y))


@block(*CHANNELED, groups=(2, 4), widen=(1, 2))
class Grouped(Block):
    """More than one channel per group on both sides."""

    def __init__(self, d: int, c: int, extent: int, groups: int, widen: int) -> None:
        super().__init__(d, c, extent)
        self.out = c * widen
        self.first, self.norm = conv(d, c, c, 1), BATCH_NORM[d](c)
        self.conv = conv(d, c, self.out, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.conv(torch.relu(self.norm(self.first(x)))))


@block("line", "image", groups=(2, 4))
class GroupedTwice(Block):
    """Two grouped convolutions in a row, and a residual around them."""

    def __init__(self, d: int, c: int, extent: int, groups: int) -> None:
        super().__init__(d, c, extent)
        self.one, self.two = conv(d, c, c, groups=groups), conv(d, c, c, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.gelu(self.one(x)))


@block(*CHANNELED, groups=(1, 2, 4, 0), bias=(True, False))
class Transposed(Block):
    def __init__(self, d: int, c: int, extent: int, groups: int, bias: bool) -> None:
        super().__init__(d, c, extent)
        self.first = conv(d, c, c, 1)
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
        self.before, self.conv = conv(d, c, c, 1), conv(d, c, c)
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
