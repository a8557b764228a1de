"""scikit-learn's handwritten digits (they come with the package), split in two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Digits:
    train: Batch
    held_out: Batch

    def loader(self, size: int) -> DataLoader:
        """Random order; the last few images that fill no batch wait for the next epoch."""
        return DataLoader(TensorDataset(*self.train), batch_size=size, shuffle=True, drop_last=True)


def load(seed: int) -> Digits:
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(raw.target)
    indices = range(len(labels))
    train, held_out = train_test_split(indices, test_size=0.25, random_state=seed, stratify=raw.target)
    return Digits((images[train], labels[train]), (images[held_out], labels[held_out]))
