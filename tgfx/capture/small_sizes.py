"""Free sizes of 0 and 1, which torch.export never asks about.

A size that it keeps free it takes to be 2 or more, so the answer to `x.shape[1] == 1` is baked in without a word. Model
and graph are run with each free size at 0 and at 1, and with all of them: where they differ, the graph refuses.
"""

from __future__ import annotations

import copy
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from tgfx.capture.assumed import AssumedSizes
from tgfx.capture.quiet import quiet
from tgfx.capture.reference import run_kept
from tgfx.ir.compare import all_close
from tgfx.ir.draws import same_draws
from tgfx.ir.remembered import Remembered


def refuse_small_sizes(model: nn.Module, graph: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the exported graph refuse what it does not do as `model` does."""
    assumed = AssumedSizes(graph.graph)
    free = list(assumed.free)
    for symbols in [(symbol,) for symbol in free] + ([tuple(free)] if len(free) > 1 else []):
        for size in (0, 1):
            small = _narrowed(assumed, symbols, size, args, kwargs)
            if small is None or not _agree(model, graph, *small):
                assumed.refuse(symbols, size)
    graph.recompile()


def _narrowed(
    assumed: AssumedSizes, symbols: tuple[sympy.Symbol, ...], size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The example with these sizes; None if another size is computed from one of them."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    place = {node: index for index, node in enumerate(assumed.inputs)}
    for axis in assumed.axes:
        if axis.size in symbols:
            index = place[axis.node]
            leaves[index] = leaves[index].narrow(axis.axis, 0, size)
        elif isinstance(axis.size, sympy.Basic) and axis.size.free_symbols.intersection(symbols):
            return None
    return pytree.tree_unflatten([v.clone() if isinstance(v, torch.Tensor) else v for v in leaves], spec)


def _agree(model: nn.Module, graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the graph gives what the model gives, or nothing."""
    seen = []
    for program in (graph, model):
        own = copy.deepcopy((args, kwargs))
        try:
            with quiet(), same_draws():
                seen.append([tensor.clone() for tensor in run_kept(program, *own, Remembered())])
        except Exception:
            return not seen  # without a graph that answers there is nothing to be wrong
    return all_close(*seen)
