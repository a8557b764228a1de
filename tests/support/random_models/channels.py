"""Channels first: norms, gates, writes in place, and what moves or mixes channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.random_models.blocks import (
    CHANNELED,
    INSTANCE_NORM,
    Block,
    block,
    conv,
)


@block(*CHANNELED, groups=(1, 2, 4, 0), affine=(True, False))
class GroupNorm(Block):
    def __init__(self, d: int, c: int, extent: int, groups: int, affine: bool) -> None:
        super().__init__(d, c, extent)
        self.conv, self.norm = conv(d, c, c), nn.GroupNorm(groups or c, c, affine=affine)
        self.last = conv(d, c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))))


@block(*CHANNELED, affine=(True, False, False), stats=(False, True, False))
class InstanceNorm(Block):
    def __init__(self, d: int, c: int, extent: int, affine: bool, stats: bool) -> None:
        super().__init__(d, c, extent)
        self.conv = conv(d, c, c)
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
        self.conv, self.how, self.glu = conv(d, c, 2 * c), how, nn.GLU(1)
        self.last = conv(d, c, c, 1)

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
