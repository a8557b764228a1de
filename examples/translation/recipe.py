"""The numbers of the experiment."""

from __future__ import annotations

from dataclasses import dataclass

from examples.translation.model import Sizes


@dataclass(frozen=True)
class Recipe:
    """`batch`: pieces in a batch, both languages and padding counted. Rates are the highest, after `warm_up` steps."""

    layers: int
    width: int
    heads: int
    inner: int
    dropout: float
    pieces: int
    batch: int
    base_steps: int
    further_steps: int
    base_rate: float
    further_rate: float
    warm_up: int
    keep: tuple[float, ...]
    speed_rounds: int

    def sizes(self, pieces: int) -> Sizes:
        return Sizes.alike(
            pieces, layers=self.layers, width=self.width, heads=self.heads, inner=self.inner, dropout=self.dropout
        )


# 6 layers of 8 heads as in the paper: 48 heads of each kind. Width and vocabulary are for 29,000 short sentences.
FULL = Recipe(
    layers=6, width=128, heads=8, inner=256, dropout=0.1, pieces=4000, batch=2048, base_steps=4000, further_steps=1600,
    base_rate=2e-3, further_rate=7e-4, warm_up=400, keep=(0.83, 0.39), speed_rounds=15,
)  # fmt: skip
QUICK = Recipe(
    layers=2, width=64, heads=4, inner=128, dropout=0.0, pieces=0, batch=512, base_steps=400, further_steps=150,
    base_rate=3e-3, further_rate=1e-3, warm_up=50, keep=(0.75, 0.5), speed_rounds=3,
)  # fmt: skip
