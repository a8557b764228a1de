"""Real models of two libraries: all their residual branches are found, and random ones go exactly."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tgfx
from examples.zoo.check import check
from examples.zoo.models import hugging_face_models


def _torchvision(name: str, size: int, **options: Any) -> tuple[nn.Module, Any]:
    import torchvision

    torch.manual_seed(0)
    return getattr(torchvision.models, name)(weights=None, **options), torch.randn(2, 3, size, size)


def _small_vit() -> tuple[nn.Module, Any]:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(32, 8, 3, 4, 24, 48, num_classes=5), torch.randn(2, 3, 32, 32)


def _small_swin() -> tuple[nn.Module, Any]:
    from torchvision.models import SwinTransformer

    torch.manual_seed(0)
    model = SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=5, stochastic_depth_prob=0.1)
    return model, torch.randn(2, 3, 32, 32)


# name -> how to build it, how many residual branches it has
ZOO = {
    "resnet18": (lambda: _torchvision("resnet18", 64), 8),
    "resnet50": (lambda: _torchvision("resnet50", 64), 16),
    "mobilenet_v2": (lambda: _torchvision("mobilenet_v2", 64), 10),
    "convnext_tiny": (lambda: _torchvision("convnext_tiny", 64), 18),
    "vit": (_small_vit, 6),
    "swin": (_small_swin, 8),
    "bert": (lambda: dict(hugging_face_models())["hf/bert"](), 4),
    "gpt2": (lambda: dict(hugging_face_models())["hf/gpt2"](), 4),
    "t5": (lambda: dict(hugging_face_models())["hf/t5"](), 10),
}


SLOW = {"gpt2": ["layer"], "t5": ["layer"], "resnet50": [("channel", "layer")]}  # to capture: once is enough
PAIRS = [(name, granularity) for name in ZOO for granularity in SLOW.get(name, ["layer", ("channel", "layer")])]


@pytest.mark.parametrize(("name", "granularity"), PAIRS, ids=str)
def test_promises_hold(name: str, granularity: str | tuple[str, ...]) -> None:
    build, branches = ZOO[name]
    with warnings.catch_warnings():  # the libraries' own, and ours about a path that only train mode takes
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, example = build()
        verdict = check(name, model, example, granularity=granularity, seed=1)
        assert not verdict.failures, verdict
        if granularity == "layer":
            assert verdict.gates == branches, verdict
        assert verdict.removed > 0.1, verdict


def test_dense_blocks_have_no_residual_branch() -> None:
    model, example = _torchvision("densenet121", 64)
    with pytest.raises(tgfx.TgfxError, match="no residual branch"):
        tgfx.transform(model, example, granularity="layer")
