"""What head gates promise, as one function: used on hand-written attention and on the libraries' models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tgfx
from examples.zoo.check import as_call, distance, randomise

EXACT = 1e-10  # float64; of the largest entry
CONV_AND_LINEAR = {"convolution", "mm", "addmm"}


def close_some(gated: tgfx.GatedModule, seed: int = 0) -> None:
    """In every group at least one gate closed and one open."""
    generator = torch.Generator().manual_seed(seed)
    for gate in gated.gates.values():
        order = torch.randperm(len(gate.weight), generator=generator)
        mask = torch.rand(len(order), generator=generator) < 0.5
        mask[order[0]], mask[order[1]] = True, False
        gate.set_open_(mask)


def keep_promises(
    model: nn.Module, example: Any, *others: Any, granularity: Any = "head", seed: int = 0
) -> tuple[tgfx.GatedModule, fx.GraphModule]:
    """Identity, exact cut, exact price; `others`: inputs of other sizes. Gives the gated and the compact model."""
    model = model.double().eval()
    randomise(model, torch.Generator().manual_seed(seed))
    inputs = [as_call(double(one)) for one in (example, *others)]
    gated = tgfx.transform(model, double(example), granularity=granularity).eval()
    with torch.no_grad():
        for args, kwargs in inputs:
            assert distance(model(*args, **kwargs), gated(*args, **kwargs)) <= EXACT, "identity"
        close_some(gated, seed)
        compact = tgfx.shrink(gated).eval()
        for args, kwargs in inputs:
            closed = gated(*args, **kwargs)
            assert distance(closed, compact(*args, **kwargs)) <= EXACT, "exact cut"
            assert distance(model(*args, **kwargs), closed) > 1e-6, "closing heads changed nothing: the test is blind"
    exact_price(gated, compact, *inputs[0])
    heads_are_gone(gated, compact)
    return gated, compact


def double(example: Any) -> Any:
    def convert(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return torch.utils._pytree.tree_map(convert, example)


def exact_price(gated: tgfx.GatedModule, compact: nn.Module, args: tuple, kwargs: dict) -> None:
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        compact(*args, **kwargs)
    counted = {str(op).split(".")[-1]: n for op, n in counter.get_flop_counts().get("Global", {}).items()}
    batch = gated.facts.channels.batch
    assert float(gated.cost("flops")) * batch == sum(n for op, n in counted.items() if op in CONV_AND_LINEAR)
    assert float(gated.cost("flops_all")) * batch == sum(counted.values())
    assert float(gated.cost("params")) == sum(p.numel() for p in compact.parameters())


def heads_are_gone(gated: tgfx.GatedModule, compact: nn.Module) -> None:
    """Every parameter axis of a head group is shorter by the share of closed heads."""
    before = dict(gated.facts.source.module.named_parameters(remove_duplicate=False))
    after = dict(compact.named_parameters(remove_duplicate=False))
    heads = [group for group in gated.facts.coupling.groups if group.kind == "head"]
    assert heads
    for group in heads:
        opened = gated.gates[group.name].open_count()
        assert 0 < opened < group.size
        for member in group.members:
            old, new = before[member.name].shape[member.axis], after[member.name].shape[member.axis]
            assert new * group.size == old * opened, (group.name, str(member), old, new)
