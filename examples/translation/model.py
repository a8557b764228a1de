"""An encoder-decoder Transformer, layer norm first, with one table of pieces for source, target and output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAD, START, END, UNKNOWN = 0, 1, 2, 3
KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """`heads` of each layer, for the three kinds of attention: they differ once heads were removed."""

    pieces: int
    width: int
    head_size: int
    inner: int
    encoder: Sequence[int]
    decoder: Sequence[int]
    cross: Sequence[int]
    dropout: float = 0.1
    longest: int = 128

    @staticmethod
    def alike(pieces: int, *, layers: int, width: int, heads: int, inner: int, dropout: float) -> Sizes:
        same = (heads,) * layers
        return Sizes(pieces, width, width // heads, inner, same, same, same, dropout)

    def of(self, weights: Mapping[str, Tensor]) -> Sizes:
        """The sizes of a cut model, read off its weights."""

        def heads(kind: str, layers: int) -> tuple[int, ...]:
            return tuple(len(weights[f"{kind % layer}.query.weight"]) // self.head_size for layer in range(layers))

        return replace(
            self,
            encoder=heads("encoder.%d.attention", len(self.encoder)),
            decoder=heads("decoder.%d.attention", len(self.decoder)),
            cross=heads("decoder.%d.cross", len(self.cross)),
        )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, head_size
        self.query, self.key, self.value = (nn.Linear(width, heads * head_size) for _ in range(3))
        self.out = nn.Linear(heads * head_size, width)

    def forward(self, x: Tensor, keys_values: KeysValues, mask: Tensor | None) -> Tensor:
        """`mask`: True where a key may be looked at."""
        mixed = F.scaled_dot_product_attention(self._by_head(self.query(x)), *keys_values, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def keys_values(self, x: Tensor) -> KeysValues:
        return self._by_head(self.key(x)), self._by_head(self.value(x))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, self.head_size)).transpose(1, 2)


class FeedForward(nn.Sequential):
    def __init__(self, sizes: Sizes) -> None:
        inner = nn.Dropout(sizes.dropout)
        super().__init__(nn.Linear(sizes.width, sizes.inner), nn.ReLU(), inner, nn.Linear(sizes.inner, sizes.width))


class EncoderLayer(nn.Module):
    def __init__(self, sizes: Sizes, heads: int) -> None:
        super().__init__()
        self.attention = Attention(sizes.width, heads, sizes.head_size)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.dropout(self.attention(y, self.attention.keys_values(y), mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderLayer(nn.Module):
    def __init__(self, sizes: Sizes, heads: int, cross_heads: int) -> None:
        super().__init__()
        self.attention = Attention(sizes.width, heads, sizes.head_size)
        self.cross = Attention(sizes.width, cross_heads, sizes.head_size)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm, self.cross_norm = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.feed_forward_norm = nn.LayerNorm(sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(
        self, x: Tensor, memory: KeysValues, memory_mask: Tensor, mask: Tensor | None, before: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """`before`: keys and values of earlier positions, when words are made one after the other."""
        y = self.attention_norm(x)
        keys, values = self.attention.keys_values(y)
        if before is not None:
            keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        x = x + self.dropout(self.attention(y, (keys, values), mask))
        x = x + self.dropout(self.cross(self.cross_norm(x), memory, memory_mask))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x))), (keys, values)


class Translator(nn.Module):
    positions: Tensor
    seen: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.pieces = nn.Embedding(sizes.pieces, sizes.width, padding_idx=PAD)
        self.register_buffer("positions", waves(sizes.longest, sizes.width), persistent=False)
        self.register_buffer("seen", torch.ones(sizes.longest, sizes.longest).tril().bool(), persistent=False)
        self.encoder = nn.ModuleList(EncoderLayer(sizes, heads) for heads in sizes.encoder)
        self.decoder = nn.ModuleList(
            DecoderLayer(sizes, *heads) for heads in zip(sizes.decoder, sizes.cross, strict=True)
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.pieces.weight, std=sizes.width**-0.5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Pieces (batch, length) of a sentence and of its translation so far; logits of the piece after each."""
        memory, memory_mask = self.encode(source)
        length = target.shape[1]
        x = self.embed(target, self.positions[:length])
        for layer in self.decoder:
            x, _ = layer(x, layer.cross.keys_values(memory), memory_mask, self.seen[:length, :length])
        return F.linear(self.decoder_norm(x), self.pieces.weight)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        mask = (source != PAD)[:, None, None, :]
        x = self.embed(source, self.positions[: source.shape[1]])
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def embed(self, pieces: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.pieces(pieces) * math.sqrt(self.sizes.width) + positions)


def waves(count: int, width: int) -> Tensor:
    """Positions as sines and cosines (Vaswani et al. 2017)."""
    angles = torch.arange(count)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
