"""Hand-written attention in the many ways people write it, for tests of head gates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH = 12, 6


@dataclass(frozen=True)
class Variant:
    """One way to write attention.

    layout: how projections are laid out; product: how softmax(q k^T) v is spelled; position: what is added or applied;
    norm: of queries and keys inside of heads; repeat: how fewer key heads serve all queries.
    """

    heads: int = 4
    size: int = 3
    key_heads: int = 4
    layout: str = "separate"  # "fused" (3, heads, size), "by head" (heads, 3 * size), "conv"
    product: str = "sdpa"  # "matmul", "bmm", "einsum", "einsum length first", "softmax layer"
    position: str = "none"  # "table", "slopes", "rotary", "shared bias"
    norm: str = "none"  # "layer", "rms", "l2 with scale"
    repeat: str = "expand"  # "interleave", "gqa flag"
    causal: bool = False
    bias: bool = True


class HeadAttention(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        v = self.v = variant
        inner, keys = v.heads * v.size, v.key_heads * v.size
        if v.layout == "separate":
            self.q, self.k, self.values = (nn.Linear(WIDTH, n) for n in (inner, keys, keys))
        elif v.layout == "conv":
            self.q, self.k, self.values = (nn.Conv1d(WIDTH, n, 1) for n in (inner, keys, keys))
        else:
            self.qkv = nn.Linear(WIDTH, 3 * inner)
        self.out = nn.Linear(inner, WIDTH, bias=v.bias)
        if v.norm == "layer":
            self.q_norm, self.k_norm = nn.LayerNorm(v.size), nn.LayerNorm(v.size)
        elif v.norm == "rms":
            self.q_norm, self.k_norm = nn.Parameter(torch.rand(v.size)), nn.Parameter(torch.rand(v.size))
        elif v.norm == "l2 with scale":
            self.scale = nn.Parameter(torch.rand(v.heads, 1, 1))
        if v.position == "table":
            self.table = nn.Parameter(torch.randn(2 * LENGTH - 1, v.heads))
            steps = torch.arange(LENGTH)
            self.register_buffer("where", steps[:, None] - steps[None] + LENGTH - 1, persistent=False)
        elif v.position == "slopes":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1, v.heads + 1.0))
        elif v.position == "rotary":
            angles = torch.arange(LENGTH)[:, None] * 10.0 ** -torch.arange(v.size // 2)
            angles = torch.cat([angles, angles], -1)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, values = self.projected(x)
        q, k = self.positioned(self.normed(q, "q_norm")), self.positioned(self.normed(k, "k_norm"))
        if self.v.key_heads != self.v.heads and self.v.repeat != "gqa flag":
            k, values = self.repeated(k), self.repeated(values)
        mixed = self.mixed(q, k, values, self.added(x))
        return self.out(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, v = x.shape[0], x.shape[1], self.v
        if v.layout == "fused":
            q, k, values = self.qkv(x).reshape(b, n, 3, v.heads, v.size).permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, values
        if v.layout == "by head":
            q, k, values = self.qkv(x).view(b, n, v.heads, 3 * v.size).transpose(1, 2).chunk(3, dim=-1)
            return q, k, values
        if v.layout == "conv":
            rows = [layer(x.transpose(1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.values)]
        else:
            rows = [layer(x) for layer in (self.q, self.k, self.values)]
        q, k, values = (y.reshape(b, n, -1, v.size).transpose(1, 2) for y in rows)
        return q, k, values

    def normed(self, x: Tensor, name: str) -> Tensor:
        if self.v.norm == "layer":
            return getattr(self, name)(x)
        if self.v.norm == "rms":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * getattr(self, name)
        if self.v.norm == "l2 with scale":
            return F.normalize(x, dim=-1)
        return x

    def positioned(self, x: Tensor) -> Tensor:
        if self.v.position != "rotary":
            return x
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def repeated(self, x: Tensor) -> Tensor:
        v, times = self.v, self.v.heads // self.v.key_heads
        if v.repeat == "interleave":
            return x.repeat_interleave(times, dim=1)
        b, h, n, d = x.shape
        return x[:, :, None].expand(b, h, times, n, d).reshape(b, h * times, n, d)

    def added(self, x: Tensor) -> Tensor | None:
        bias = None
        if self.v.position == "table":
            bias = self.table[self.where.view(-1)].view(LENGTH, LENGTH, -1).permute(2, 0, 1)[None]
        elif self.v.position == "slopes":
            steps = torch.arange(LENGTH)
            bias = self.slopes[:, None, None] * (steps[None] - steps[:, None])
        if self.v.causal:
            blocked = torch.full((LENGTH, LENGTH), -1e9, dtype=x.dtype).triu(1)
            bias = blocked if bias is None else bias + blocked
        return bias

    def mixed(self, q: Tensor, k: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        v = self.v
        if v.norm == "l2 with scale":
            q = q * self.scale
        if v.product == "sdpa":
            return F.scaled_dot_product_attention(q, k, values, attn_mask=bias, enable_gqa=v.repeat == "gqa flag")
        scale = 1 / math.sqrt(v.size)
        if v.product == "einsum":
            scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
        elif v.product == "einsum length first":
            scores = torch.einsum("bihd,bjhd->bhij", q.transpose(1, 2), k.transpose(1, 2)) * scale
        elif v.product == "bmm":
            b, h, n, d = q.shape
            q, k, values = (y.reshape(b * h, n, d) for y in (q, k, values))
            scores = torch.bmm(q, k.transpose(1, 2)).view(b, h, n, n) * scale
        else:
            scores = (q * scale) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if bias is None else scores + bias, dim=-1)
        if v.product == "einsum":
            return torch.einsum("bhij,bhjd->bhid", weights, values)
        if v.product == "einsum length first":
            return torch.einsum("bhij,bjhd->bihd", weights, values.transpose(1, 2)).transpose(1, 2)
        if v.product == "bmm":
            return torch.bmm(weights.view(b * h, n, n), values).view(b, h, n, d)
        return weights @ values


class Model(nn.Module):
    """x + attention(norm(x)), then a small head; two blocks."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(HeadAttention(variant) for _ in range(2))
        self.end = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.end(x)
