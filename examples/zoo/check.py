"""What tgfx promises, checked on one model: identity, exact cut, exact price."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tgfx

CONV_AND_LINEAR = ("convolution", "mm", "addmm")


@dataclass
class Verdict:
    """Figures of one model; `failures` is empty when every promise held."""

    name: str
    seconds: float = 0.0
    identity: float = 0.0  # largest |gated - model| over the largest output
    exactness: float = 0.0  # largest |compact - gated| over the largest output
    removed: float = 0.0  # share of parameters gone with half of all atoms closed
    front_end: str = ""
    gates: int = 0
    frozen: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def check(
    name: str,
    model: nn.Module,
    example: Any,
    *,
    granularity: str | tuple[str, ...] = "channel",
    tolerance: float = 2e-4,
    seed: int = 0,
) -> Verdict:
    """Half of all atoms closed at random, on randomised statistics and biases."""
    verdict = Verdict(name)
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator)
    model.eval()
    args, kwargs = as_call(example)
    before = copy.deepcopy(model.state_dict())
    start = time.process_time()
    gated = tgfx.transform(model, example, granularity=granularity)
    verdict.seconds = time.process_time() - start
    verdict.front_end = gated.facts.source.front_end
    verdict.gates = sum(g.size for g in gated.facts.coupling.groups)
    verdict.frozen = [f"{g.name}: {g.frozen}" for g in gated.facts.coupling.frozen]
    if any(not torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)):
        verdict.failures.append("the input model changed")
    with torch.no_grad():
        whole = model(*args, **kwargs)
        verdict.identity = distance(whole, gated.eval()(*args, **kwargs))
    close_half(gated, generator)
    compact = tgfx.shrink(gated).eval()
    with torch.no_grad():
        closed = gated(*args, **kwargs)
        verdict.exactness = distance(closed, compact(*args, **kwargs))
    if not distance(whole, closed) > tolerance:
        verdict.failures.append("closing half of the gates changed nothing: the check is blind here")
    if not verdict.identity <= tolerance:
        verdict.failures.append(f"identity off by {verdict.identity:.2g}")
    if not verdict.exactness <= tolerance:
        verdict.failures.append(f"cut off by {verdict.exactness:.2g}")
    _check_price(gated, compact, args, kwargs, verdict)
    total = sum(p.numel() for p in model.parameters())
    verdict.removed = 1 - sum(p.numel() for p in compact.parameters()) / total
    return verdict


def _check_price(gated: Any, compact: nn.Module, args: tuple, kwargs: dict, verdict: Verdict) -> None:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        compact(*args, **kwargs)
    counted = counter.get_flop_counts().get("Global", {})
    real = sum(flops for op, flops in counted.items() if op.__name__.split(".")[0] in CONV_AND_LINEAR)
    batch = gated.facts.channels.batch
    promised = float(gated.cost("flops")) * batch
    if abs(promised - real) > 0.5:
        verdict.failures.append(f"FLOPs {promised:.0f} promised, {real} counted")
    params = sum(p.numel() for p in compact.parameters())
    if float(gated.cost("params")) != params:
        verdict.failures.append(f"params {float(gated.cost('params')):.0f} promised, {params} there")


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """No constant statistics, biases or scales: a zero-initialised layer would make the test blind."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.copy_(_like(module.running_mean, generator) * 0.2)
                module.running_var.copy_(_like(module.running_var, generator).abs() * 0.5 + 0.75)
        for parameter in model.parameters():
            if (
                parameter.is_floating_point()
                and parameter.numel() > 1
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                parameter.add_(_like(parameter, generator) * 0.2)


def _like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def close_half(gated: Any, generator: torch.Generator) -> None:
    """Each atom closed with probability one half; at least one of every group of channels stays."""
    for group in gated.facts.coupling.groups:
        gate = gated.gates[group.name]
        mask = torch.rand(gate.weight.shape, generator=generator) > 0.5
        if group.kind != "layer":
            mask[int(torch.randint(len(mask), (), generator=generator))] = True
        gate.set_open_(mask)


def distance(a: Any, b: Any) -> float:
    """Largest difference over the largest value, over all tensors of two equally built outputs."""
    left, right = _tensors(a), _tensors(b)
    if len(left) != len(right) or not left:  # nothing to compare is no proof
        return float("inf")
    worst = 0.0
    for x, y in zip(left, right, strict=True):
        if x.shape != y.shape:
            return float("inf")
        scale = max(float(x.abs().max()), 1e-12) if x.numel() else 1.0
        worst = max(worst, float((x - y).abs().max()) / scale if x.numel() else 0.0)
        if torch.isnan(y).any():
            return float("nan")
    return worst


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def as_call(example: Any) -> tuple[tuple, dict]:
    if isinstance(example, dict):
        return (), example
    return (example,) if isinstance(example, torch.Tensor) else tuple(example), {}
