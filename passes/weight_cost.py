"""Analysis: what a model with gated weights costs, as a sum over the gates.

    cost = fixed + sum over weights of sum(factor · gate)

params: every open gate counts one. flops: two for each time the entry is multiplied and added, per sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, nn

from tgfx.passes.weight_uses import WeightUse, WeightUses

WEIGHT_KINDS = ("flops", "flops_all", "params")


@dataclass(frozen=True)
class WeightCost:
    """factors: kind -> weight -> price of an open gate (broadcasts to the weight); fixed: what no gate changes."""

    shapes: dict[str, torch.Size]
    factors: dict[str, dict[str, Tensor]]
    fixed: dict[str, float]

    def whole(self, kind: str, name: str) -> float:
        """The price of a weight with all its gates open."""
        factor, shape = self.factors[kind][name], self.shapes[name]
        return float(factor.sum()) * (shape.numel() / factor.numel())

    def total(self, kind: str) -> float:
        return self.fixed[kind] + sum(self.whole(kind, name) for name in self.shapes)

    def expression(self, kind: str) -> sympy.Expr:
        """In n[weight], the numbers of open gates; n[weight @ price] where entries have different prices."""
        terms: list[sympy.Expr] = [_number(self.fixed[kind])]
        for name, factor in self.factors[kind].items():
            prices = factor.unique().tolist()
            for price in prices:
                symbol = f"n[{name}]" if len(prices) == 1 else f"n[{name} @ {price:g}]"
                terms.append(_number(price) * sympy.Symbol(symbol, nonnegative=True))
        return sympy.Add(*terms)


def build_weight_cost(module: nn.Module, found: WeightUses, gated: Iterable[str]) -> WeightCost:
    parameters = dict(module.named_parameters())
    shapes = {name: parameters[name].shape for name in gated}
    factors: dict[str, dict[str, Tensor]] = {kind: {} for kind in WEIGHT_KINDS}
    fixed = dict(found.other)
    for name, uses in found.uses.items():
        for kind in ("flops", "flops_all"):
            factor = _factor(parameters[name], [u for u in uses if u.counted or kind == "flops_all"])
            if name in shapes:
                factors[kind][name] = factor
            else:
                fixed[kind] += float(factor.sum()) * (parameters[name].numel() / factor.numel())
    for name, shape in shapes.items():
        factors["params"][name] = torch.ones([1] * len(shape), dtype=torch.float64)
    fixed["params"] = float(sum(p.numel() for name, p in parameters.items() if name not in shapes))
    return WeightCost(shapes, factors, fixed)


def _factor(parameter: Tensor, uses: list[WeightUse]) -> Tensor:
    """FLOPs of each entry, of size 1 along the axes where all are alike."""
    factor = torch.full([1] * parameter.ndim, sum(u.flops for u in uses if u.region is None), dtype=torch.float64)
    if all(use.region is None for use in uses):
        return factor
    # laid out like the parameter, so that a view of one is the same view of the other
    dense = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.float64).copy_(factor)
    for use in uses:
        if use.region is not None:
            size, stride, offset = use.region
            dense.as_strided(size, stride, offset - parameter.storage_offset()).add_(use.flops)
    for axis in range(dense.ndim):
        if bool((dense == dense.narrow(axis, 0, 1)).all()):
            dense = dense.narrow(axis, 0, 1)
    return dense.clone()


def _number(value: float) -> sympy.Expr:
    return sympy.Integer(int(value)) if float(value).is_integer() else sympy.Float(value)
