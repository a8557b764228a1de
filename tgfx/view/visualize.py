"""`tgfx.visualize`: a model as a page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tgfx.training.fit import FitResult
from tgfx.training.history import History
from tgfx.view.data import page_data
from tgfx.view.files import write_whole
from tgfx.view.page import page


def visualize(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    example_inputs: Any = None,
    compact: nn.Module | None = None,
    history: FitResult | History | None = None,
    budget: Mapping[str, float] | None = None,
) -> Path:
    """Write one self-contained HTML file that shows the graph, the groups, the gates and the price.

    model: gated, or any other (a compact one, too), which is analysed on a copy; that needs example_inputs where
    `tgfx.transform` would. compact: what `tgfx.shrink` gave, to be shown beside. history: what `tgfx.fit` returned.
    budget: to be drawn in the totals; default: that of the controller at work, or of the history.
    """
    data = page_data(model, example_inputs, compact=compact, history=history, budget=budget)
    return write_whole(Path(path), page(data))
