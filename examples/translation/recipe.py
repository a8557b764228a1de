"""The numbers of the experiment."""

from __future__ import annotations

from dataclasses import dataclass

from examples.translation.model import Sizes


@dataclass(frozen=True)
class Recipe:
    """`batch`: pieces in a batch, both languages and padding counted. `rate` is the highest, after `warm_up` steps."""

    layers: int
    width: int
    heads: int
    inner: int
    dropout: float
    pieces: int
    batch: int
    steps: int
    rate: float
    warm_up: int
    close: float  # share of the steps after which the budget is reached
    taught: float  # share of the loss, where heads are to go, that is the answers of the model that has them all
    keep: tuple[float, ...]
    speed_rounds: int

    def sizes(self, pieces: int) -> Sizes:
        return Sizes.alike(
            pieces, layers=self.layers, width=self.width, heads=self.heads, inner=self.inner, dropout=self.dropout
        )


# 6 layers of 8 heads as in the paper: 48 heads of each kind. Width and vocabulary are for 29,000 short sentences.
FULL = Recipe(
    layers=6, width=128, heads=8, inner=256, dropout=0.1, pieces=4000, batch=2048, steps=4000, rate=2e-3,
    warm_up=400, close=0.3, taught=0.7, keep=(0.83, 0.39), speed_rounds=15,
)  # fmt: skip
QUICK = Recipe(
    layers=2, width=64, heads=4, inner=128, dropout=0.0, pieces=0, batch=512, steps=350, rate=3e-3, warm_up=50,
    close=0.4, taught=0.7, keep=(0.75, 0.5), speed_rounds=3,
)  # fmt: skip
