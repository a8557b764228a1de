"""scikit-learn's digits, nets that are trained on them, and runs over them that are killed and gone on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tgfx

Digits = tuple[Tensor, Tensor]


def load() -> Digits:
    raw = load_digits()
    return torch.tensor(raw.data, dtype=torch.float32) / 16, torch.tensor(raw.target)


def trained_(model: nn.Module, digits: Digits) -> nn.Module:
    x, y = digits
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(300):
        chosen = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return model.eval()


def trained_net(seed: int, digits: Digits) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return trained_(net, digits)


def batches(digits: Digits, size: int) -> DataLoader:
    return DataLoader(TensorDataset(*digits), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(0))


def resumed_exactly(
    gated: Callable[[], tgfx.GatedModule],
    loader: Callable[[], DataLoader],
    step: Callable[..., Any],
    killed_at: int,
    checkpoint: Path,
    **options: Any,
) -> tgfx.GatedModule:
    """Runs `tgfx.fit` in one go, and killed at a step and gone on with; both must end alike, bit for bit."""

    def run(until: int | None, file: Path | None) -> tgfx.GatedModule:
        model, seen = gated(), 0

        def counted(model: nn.Module, batch: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen - 1 == until:
                raise RuntimeError("killed")
            return step(model, batch)

        try:
            tgfx.fit(model, loader(), training_step=counted, checkpoint=file, checkpoint_every=10, **options)
        except RuntimeError:
            assert until is not None
        return model

    whole = run(None, None)
    run(killed_at, checkpoint)
    resumed = run(None, checkpoint)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    return resumed
