"""The gates of one weight, as the search for a threshold sees them: in blocks, with what each gate costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tgfx.ops.weight_gate import row_blocks

Amounts = Mapping[str, float]


@dataclass(frozen=True)
class Candidates:
    """The gates of one weight, the weight itself, and what an open gate costs (broadcasts to the weight) by kind."""

    latent: Tensor
    weight: Tensor
    prices: Mapping[str, Tensor]

    @property
    def count(self) -> int:
        return self.latent.numel()

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their latent weights and their weights; in bfloat16 a threshold of float32 could not be compared to."""
        for rows in row_blocks(self.latent.shape):
            yield rows, precise(self.latent[rows]), precise(self.weight[rows])

    def price(self, kind: str, rows: slice) -> Tensor:
        """Of these rows' gates, or of size 1 if all cost the same."""
        price = self.prices[kind]
        return price[rows] if price.shape[0] > 1 else price

    def prices_at(self, kind: str, places: tuple[Tensor, ...]) -> Tensor:
        """Of single gates, by their indices along each axis."""
        return self.prices[kind].expand(self.latent.shape)[places]


def precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
