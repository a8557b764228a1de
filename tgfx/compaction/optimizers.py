"""Optimizer state cut along with its parameters: momentum, moments, whatever has the parameter's shape."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from tgfx.errors import InputError
from tgfx.ir.take import Positions, cuts_anything, take


class CannotCut(Exception):
    """State that does not follow the shape of its parameter."""


@dataclass
class OptimizerCut:
    """What to put into one optimizer, worked out before anything is changed."""

    optimizer: Optimizer
    gone: set[int]
    states: list[tuple[Tensor, dict[Any, Any]]] = field(default_factory=list)
    reset: list[Tensor] = field(default_factory=list)

    def apply(self) -> None:
        for group in self.optimizer.param_groups:
            stays = [id(p) not in self.gone for p in group["params"]]
            for key in ("params", "param_names"):  # in place: schedulers and the user hold these lists
                if key in group and not all(stays):
                    group[key][:] = [value for value, stay in zip(group[key], stays, strict=True) if stay]
        for parameter in [p for p in self.optimizer.state if id(p) in self.gone]:
            del self.optimizer.state[parameter]
        for parameter, state in self.states:
            self.optimizer.state[parameter] = state
        for parameter in self.reset:
            del self.optimizer.state[parameter]


def plan_optimizers(
    gated: nn.Module, optimizers: Sequence[Optimizer], positions: Mapping[str, Positions], gone: Collection[str]
) -> list[OptimizerCut]:
    """`positions`: name of a tensor -> what stays of its axes; `gone`: names of tensors that leave the model."""
    named = list(gated.named_parameters(remove_duplicate=False))
    cuts = {id(p): positions[name] for name, p in named if name in positions}
    leaving = {id(p) for name, p in named if name in gone} - set(cuts)
    return [plan_optimizer(one, cuts, leaving) for one in optimizers]


def plan_optimizer(optimizer: Optimizer, cuts: dict[int, Positions], gone: set[int]) -> OptimizerCut:
    """`cuts`: id of a parameter -> what stays of its axes; `gone`: ids of parameters that leave."""
    plan = OptimizerCut(optimizer, gone)
    for parameter, state in optimizer.state.items():
        positions = cuts.get(id(parameter))
        if positions is None or not cuts_anything(positions):
            continue
        try:
            plan.states.append((parameter, _cut_state(state, tuple(parameter.shape), positions)))
        except CannotCut:
            plan.reset.append(parameter)
    return plan


def _cut_state(state: dict[Any, Any], shape: tuple[int, ...], positions: Positions) -> dict[Any, Any]:
    smaller = {}
    for key, value in state.items():
        leaves, spec = pytree.tree_flatten(value)
        leaves = [_cut_leaf(str(key), leaf, shape, positions) for leaf in leaves]
        smaller[key] = pytree.tree_unflatten(leaves, spec)
    return smaller


def _cut_leaf(key: str, value: Any, shape: tuple[int, ...], positions: Positions) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.ndim == len(shape) and all(a in (b, 1) for a, b in zip(value.shape, shape, strict=True)):
        # the parameter's shape, or one number for a whole axis
        own = [None if size == 1 else kept for size, kept in zip(value.shape, positions, strict=True)]
        return take(value, own)
    if value.numel() == 1:
        return value  # a step count
    without = [a for a in range(len(shape)) if shape[:a] + shape[a + 1 :] == tuple(value.shape)]
    cut = [[kept for axis, kept in enumerate(positions) if axis != a] for a in without]
    if len(without) > 1:  # equal sizes: by the common names, rows lack the last axis and columns the one before
        named = {len(shape) - 1: "row", len(shape) - 2: "col"}
        cut = [own for a, own in zip(without, cut, strict=True) if named.get(a, "?") in key]
    if len(cut) != 1:
        raise CannotCut(key)
    return take(value, cut[0])


def as_optimizers(optimizer: Any) -> list[Optimizer]:
    """None, one, or several (one for the weights and one for the gates, say)."""
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer is not None else []
    for one in given:
        if not isinstance(one, Optimizer):
            raise InputError(
                "this is not an optimizer",
                expected="torch.optim.Optimizer, or a list of them",
                found=type(one).__name__,
            )
        if isinstance(one, torch.optim.LBFGS):
            raise InputError(
                "LBFGS keeps one flat vector over all parameters, which cannot be cut",
                expected="an optimizer with a state for each parameter",
                found="LBFGS",
                fix="make a new LBFGS after compact_(gated)",
            )
    return given


def check_covered(optimizers: Sequence[Optimizer], parameters: dict[str, nn.Parameter]) -> None:
    """A trainable parameter that no optimizer has belongs to another optimizer, whose state would be left behind."""
    known = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if p.requires_grad and id(p) not in known]
    if optimizers and missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise InputError(
            "trainable parameters of the model are not in the optimizer",
            expected="every parameter with requires_grad in one of the optimizers",
            found="without: " + ", ".join(missing[:5]) + more,
            fix="pass all optimizers as a list, or freeze these parameters with requires_grad_(False)",
        )


def check_scaler(scaler: Any, optimizers: Sequence[Optimizer]) -> None:
    """Between unscale_ and step the scaler has looked at gradients that would be cut."""
    if scaler is None:
        return
    if not hasattr(scaler, "unscale_") or not hasattr(scaler, "update"):
        raise InputError("this is not a GradScaler", expected="torch.amp.GradScaler", found=type(scaler).__name__)
    states = getattr(scaler, "_per_optimizer_states", {})
    for one in optimizers:
        stage = states[id(one)].get("stage") if id(one) in states else None
        if getattr(stage, "name", "") == "UNSCALED":
            raise InputError(
                "the GradScaler is in the middle of a step",
                expected="compact_ after scaler.step(optimizer) and scaler.update()",
                found="unscale_ was called and step was not",
            )


def warn_of_reset(names: Sequence[str], stacklevel: int) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        warnings.warn(
            "optimizer state that does not have the shape of its parameter was dropped and starts anew: "
            + ", ".join(names[:5]) + more,
            stacklevel=stacklevel + 1,
        )  # fmt: skip
