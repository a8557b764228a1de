"""The proof with every cut: both models on the example, and where they part if they do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from tgfx.ir.compare import Precision, all_close, close
from tgfx.ir.draws import StillDraws, generators, same_draws
from tgfx.ir.source import tensors_in
from tgfx.ir.tree import named_tensors
from tgfx.passes.insert_gates import BANK
from tgfx.passes.survivors import Survivors

DRAWS = (
    "the model draws random numbers in eval mode, and other ones where it is smaller: draw them outside of it and "
    "pass them in, or leave the comparison out where that can be done (shrink: verify=False)"
)
REPORT = "please report this model: a rule of tgfx is wrong"


@dataclass(frozen=True)
class Compared:
    """Whether two programs gave the same; whether the first drew random numbers; why the second gave nothing."""

    same: bool
    draws: bool
    cause: Exception | None

    @property
    def fix(self) -> str:
        return DRAWS if self.draws and self.cause is None else REPORT


def compared(first: Callable, second: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compared:
    """Run both with the same random numbers; where they need not be as many in both, with all of them alike."""
    result = _compared(first, second, args, kwargs)
    if result.same or not result.draws or result.cause is not None:
        return result
    with StillDraws():
        still = _compared(first, second, args, kwargs)
    return Compared(still.same, True, still.cause)


def _compared(first: Callable, second: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compared:
    with same_draws():
        before = generators()
        expected = tensors_in(first(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
        draws = not all(map(torch.equal, before, generators()))
    precision = Precision(_tensors_of(second))
    with same_draws():
        try:
            with precision:
                found = tensors_in(second(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
        except Exception as error:
            return Compared(False, draws, error)
    return Compared(all_close(expected, found, precision.coarsest), draws, None)


def _tensors_of(program: Callable) -> Iterator[Tensor]:
    """Parameters and buffers, but not those of gates, which are float32 everywhere."""
    if isinstance(program, nn.Module):
        yield from (tensor for name, tensor in named_tensors(program) if not name.startswith(BANK))


class _Tape(fx.Interpreter):
    """Runs a graph and remembers every node's value by name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n.name] = torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, torch.Tensor) else v, result
        )
        return result


def first_difference(
    gated: fx.GraphModule,
    compact: fx.GraphModule,
    survivors: Survivors,
    nodes: dict[str, Any],
    inputs: list[Any],
    present: Survivors | None = None,
    *,
    draws: bool = False,
) -> str:
    """The first node of the compact graph whose value is not the surviving part of the gated one's.

    draws: with random numbers held still.
    """
    tapes = []
    for module in (gated, compact):
        tape = _Tape(module)
        tapes.append(tape)
        try:
            with same_draws(), StillDraws() if draws else nullcontext():
                tape.run(*inputs, enable_io_processing=False)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}, after {list(tape.values)[-1:]}"
    for name, found in tapes[1].values.items():
        expected, known = tapes[0].values.get(name), nodes.get(name)
        if expected is None or known is None:
            continue
        for left, right, ids in zip(tensors_in(expected), tensors_in(found), known.tensors, strict=False):
            kept = _gathered(left, survivors.kept_of(ids, present)) if ids is not None else left
            if not close(kept, right):
                return f"{name}: {tuple(kept.shape)} expected, {tuple(right.shape)} found, or other values"
    return "at the output only"


def _gathered(tensor: Tensor, kept: list[np.ndarray | None]) -> Tensor:
    for axis, positions in enumerate(kept):
        if positions is not None and axis < tensor.ndim and tensor.shape[axis] > int(positions.max(initial=0)):
            tensor = tensor.index_select(axis, torch.from_numpy(positions))
    return tensor


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


def as_model_takes(values: Any, model: nn.Module) -> Any:
    """An example's values (nested as they may be) on the model's device, and in its precision if it has changed.

    In a model of several precisions the example was made for it, and stays.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    own = [p for name, p in named if not name.startswith(BANK)] or [p for _, p in named]  # gates have their own
    if not own:
        return values
    known, first = {p.dtype for p in own}, own[0]

    def converted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        keep = not value.is_floating_point() or value.dtype in known
        return value.to(device=first.device, dtype=None if keep else first.dtype)

    return torch.utils._pytree.tree_map(converted, values)
