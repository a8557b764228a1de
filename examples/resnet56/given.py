"""The trained model and the images that a command line names."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from examples.benchmarks.resnet56 import resnet56
from examples.cifar10 import data
from examples.mistakes import reading


def given(options: argparse.Namespace) -> tuple[nn.Module, data.Images, data.Images]:
    """The model, images to train with and images to test with; a word on what is missing ends the program."""
    if options.data is None or options.weights is None:
        raise SystemExit("--data and --weights are needed (README.md says where people get them), or --quick")
    if not options.weights.is_file():
        raise SystemExit(f"no file {options.weights}: --weights takes the state dict of a trained ResNet-56")
    train, test = data.load(options.data)
    return whole_model(options.weights), train, test


def whole_model(weights: Path) -> nn.Module:
    """ResNet-56 with a public checkpoint, which was saved from a wrapper: it shows in the names."""
    with reading(weights, "the state dict of a ResNet-56 for CIFAR-10"):
        state = torch.load(weights, map_location="cpu", weights_only=True)
        state = state.get("state_dict", state)
        model = resnet56()
        model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return model
