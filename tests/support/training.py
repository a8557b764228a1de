"""Small models and data to train on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tgfx


class SmallNet(nn.Module):
    """Convolutions, batch norm, dropout: all that a resume has to bring back."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        return self.fc(self.drop(torch.relu(self.norm2(self.conv2(x))).mean((2, 3))))


def images(count: int = 96) -> tuple[Tensor, Tensor]:
    """Four classes: which quarter of the picture is bright."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % 4
    pictures = 0.3 * torch.randn(count, 1, 6, 6, generator=generator)
    for index, label in enumerate(labels.tolist()):
        row, column = 3 * (label // 2), 3 * (label % 2)
        pictures[index, :, row : row + 3, column : column + 3] += 1
    return pictures, labels


def loader(batch: int = 16, *, seed: int | None = 3, count: int = 96) -> DataLoader:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(*images(count)), batch_size=batch, shuffle=True, generator=generator)


def small_gated(width: int = 12) -> tgfx.GatedModule:
    torch.manual_seed(0)
    return tgfx.transform(SmallNet(width), images(2)[0])


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names that differ, bit by bit."""
    assert list(a) == list(b)
    return [name for name in a if not torch.equal(a[name], b[name])]


def is_gate(name: str, gated: tgfx.GatedModule) -> bool:
    gates = [gate.weight for gate in gated.gates.values()]
    return any(dict(gated.named_parameters()).get(name) is gate for gate in gates)
