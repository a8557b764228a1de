"""A quick part of the zoo (`make zoo` runs all): real models of three libraries keep every promise."""

from __future__ import annotations

import warnings

import pytest
import torch

from examples.zoo.check import check, close_half, distance
from examples.zoo.models import hugging_face_models, timm_models, torchvision_models

QUICK_TORCHVISION = {
    "resnet18", "shufflenet_v2_x0_5", "mobilenet_v3_small", "squeezenet1_1", "mnasnet0_5", "densenet121", "googlenet",
    "lraspp_mobilenet_v3_large", "swin_t",
}  # fmt: skip
QUICK_TIMM = ["ghostnet_100", "vit_tiny_patch16_224", "mobilenetv4_conv_small", "levit_128s", "mixer_s16_224"]


def _quick() -> list:
    chosen = [(n, b) for n, b in torchvision_models() if n.partition("/")[2] in QUICK_TORCHVISION]
    return [*chosen, *timm_models(QUICK_TIMM), *hugging_face_models()]


@pytest.mark.parametrize(("name", "build"), [pytest.param(n, b, id=n) for n, b in _quick()])
def test_promises_hold(name: str, build) -> None:
    with warnings.catch_warnings():  # the libraries' own, and ours about a path that only train mode takes
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, example = build()
        verdict = check(name, model, example)
    assert not verdict.failures, verdict
    assert verdict.removed > 0.3, verdict


@pytest.mark.parametrize(
    ("granularity", "name", "removed"),
    [
        *(("connection", n, 0.5) for n in ("torchvision/resnet18", "timm/vit_tiny_patch16_224", "hf/llama")),
        *(("tap", n, 0.3) for n in ("torchvision/resnet18", "torchvision/googlenet", "torchvision/densenet121")),
    ],
)
def test_promises_hold_for_finer_gates(granularity: str, name: str, removed: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model, example = dict(_quick())[name]()
        verdict = check(name, model, example, granularity=granularity)
    assert not verdict.failures, verdict
    assert verdict.removed > removed, verdict


def test_batch_and_sequence_length_stay_free() -> None:
    import tgfx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = dict(hugging_face_models())
        for name in ("hf/bert", "hf/llama"):
            model, example = models[name]()
            model.eval()
            gated = tgfx.transform(model, example).eval()
            other = {**example, "input_ids": torch.randint(1, 90, (3, 7))}
            with torch.no_grad():
                expected = model(**other)
                assert type(gated(**other)) is type(expected)  # the caller's own output structure
                assert distance(expected, gated(**other)) < 1e-5
                close_half(gated, torch.Generator().manual_seed(0))
                assert distance(gated(**other), tgfx.shrink(gated).eval()(**other)) < 1e-5
