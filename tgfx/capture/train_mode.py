"""Train mode: what the model does there, whether a graph does the same, and where none does."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from tgfx.capture.quiet import quiet
from tgfx.capture.sizes import widened
from tgfx.ir.buffers import buffers_restored
from tgfx.ir.compare import all_close
from tgfx.ir.draws import same_draws
from tgfx.ir.plain_attributes import plain_attributes_restored
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source, tensors_in

_OWN = (str(Path(__file__).parents[1]) + os.sep, contextlib.__file__)  # transform is decorated by the latter


@dataclass(frozen=True)
class TrainModeLost(Refusal):
    """Train mode has no graph, or has one for batches of the example's size alone.

    where: the submodule in which it could not be followed ("": the model's own forward, or not known); cause: what
    happened there; has_graph: whether there is one for the example's size.
    """

    where: str = ""
    cause: str = ""
    has_graph: bool = False


def lost_train_mode(source: Source) -> TrainModeLost | None:
    return next((refusal for refusal in source.refusals if isinstance(refusal, TrainModeLost)), None)


def leaves_channels(source: Source) -> bool:
    """Whether channels can still be gated beside the closed modules; where that cannot be said, no."""
    from tgfx.passes.channels import analyse_channels  # passes build on what is captured
    from tgfx.passes.couple import couple

    try:
        with same_draws(), quiet():
            return bool(couple(analyse_channels(source)).groups)
    except Exception:
        return False
    finally:
        source.result = None


def tell_lost_mode(model: nn.Module, source: Source) -> None:
    """Warn that the eval path will be trained; nothing where train mode has a graph."""
    lost = lost_train_mode(source)
    if lost is None:
        return
    if lost.has_graph:  # other sizes are an error there, as they are wherever a graph has fixed them
        source.refusals.remove(lost)
        return
    warnings.warn(
        f"{type(model).__name__} could not be captured in train mode ({lost.cause}): its gated copy takes the eval "
        "path there too, without what only train mode does (noise, dropout, masks). Move that part into a submodule, "
        "which tgfx keeps as it is; strict=True raises instead",
        stacklevel=_frames_of_tgfx(),
    )


def _frames_of_tgfx() -> int:
    """How far up whoever called tgfx is: the warning is about that line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    return level


@contextlib.contextmanager
def train_mode(model: nn.Module) -> Iterator[None]:
    """Train mode for a while; flags and buffers as before afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    with buffers_restored(model):
        model.train()
        try:
            yield
        finally:
            for module, was in modes:
                module.training = was


def behaves_alike(model: nn.Module, graph: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether model and graph do the same in train mode: outputs, gradients, statistics and random numbers drawn."""
    expected = _step(model, model, args, kwargs)
    found = None if expected is None else _step(model, graph, args, kwargs)
    return expected is not None and found is not None and _same(expected, found)


def takes_other_batches(model: nn.Module, graph: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the graph does in train mode what the model does with twice the batch, if it takes that."""
    wider = widened(args, kwargs)
    expected = _step(model, model, *wider)
    if expected is None:
        return True
    found = _step(model, graph, *wider)
    return found is not None and _same(expected, found)


_Step = tuple[list[torch.Tensor], Any]


def _same(expected: _Step, found: _Step) -> bool:
    return expected[1] == found[1] and all_close(expected[0], found[0])


def _step(model: nn.Module, one: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Step | None:
    """What a train step of `one`, over the tensors of `model`, gives and moves, and the form of its output."""
    try:
        with train_mode(model), plain_attributes_restored(model), same_draws(), torch.enable_grad(), quiet():
            one.train()
            result = one(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            outputs = tensors_in(result)
            gradients = _gradients(outputs, list(model.parameters()))
            buffers = [buffer.detach().clone() for buffer in model.buffers()]
            seen = [*(output.detach() for output in outputs), *gradients, *buffers, torch.get_rng_state()]
            return seen, torch.utils._pytree.tree_structure(result)
    except Exception:
        return None
    finally:
        if one is not model:
            one.eval()


def _gradients(outputs: list[torch.Tensor], parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Of the sum of all outputs, as one tensor: some are nothing but rounding. Zero where there is none."""
    total = [y.sum() for y in outputs if y.requires_grad]
    trained = [p for p in parameters if p.requires_grad]
    if not total or not trained:
        return []
    found = torch.autograd.grad(total, trained, allow_unused=True)
    both = zip(trained, found, strict=True)
    return [torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in both])]
