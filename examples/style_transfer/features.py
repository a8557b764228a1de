"""What losses look at: four layers of VGG-16, or of a small random net that takes its place in --quick."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.mistakes import reading

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512))  # up to relu4_3
NARROW = ((16,), (32,), (48,), (64,))
FILES = "vgg16_features_fp16.safetensors, vgg16-397923af.pth (https://download.pytorch.org/models/vgg16-397923af.pth)"


class Features(nn.Module):
    """Images in [0, 1] -> the last ReLU of each stage: relu1_2, relu2_2, relu3_3 and relu4_3. Never trained."""

    mean: Tensor
    std: Tensor

    def __init__(self, stages: Sequence[Sequence[int]] = STAGES) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(STD).view(1, 3, 1, 1))
        layers: list[nn.Module] = []
        self.ends = []
        inputs = 3
        for stage in stages:
            if layers:
                layers.append(nn.MaxPool2d(2))
            for outputs in stage:
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = outputs
            self.ends.append(len(layers))
        self.features = nn.Sequential(*layers)
        self.requires_grad_(False).eval()
        self.to(memory_format=torch.channels_last)  # a fifth less time on a CPU

    def forward(self, images: Tensor, stages: int | None = None) -> list[Tensor]:
        """`stages`: how many, where the later ones are not needed."""
        x, found, start = (images - self.mean) / self.std, [], 0
        for end in self.ends[:stages]:
            for layer in self.features[start:end]:
                x = layer(x)
            found.append(x)
            start = end
        return found


def vgg16(folder: Path) -> Features:
    """ImageNet's VGG-16 from a file with torchvision's names; what is behind relu4_3 is left out."""
    files = sorted(path for path in folder.glob("*") if path.suffix in (".safetensors", ".pth"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights of VGG-16: expected one of {FILES}")
    net = Features()
    with reading(files[0], f"weights of VGG-16 with torchvision's names, as {FILES}"):
        state = _read(files[0])
        wanted = net.features.state_dict()
        net.features.load_state_dict({name: state[f"features.{name}"].float() for name in wanted})
    return net


def random_features(seed: int = 0) -> Features:
    """Random filters tell textures and colours apart well enough for a trial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Features(NARROW)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state
