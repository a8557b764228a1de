"""Channels last: attention and its relatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.random_models.blocks import (
    ACTIVATIONS,
    TOKENED,
    Block,
    block,
)


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
            y = y + 0.1 * torch.argsort(y, dim=-1).to(y.dtype)
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
