"""A gated model against the model it was made from: outputs, gradients and state, step for step in both modes."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from torch import Tensor, nn

import tgfx
from tests.support import promises
from tgfx.ir.source import tensors_in

MODES = (True, True, False, True)


def _history(model: nn.Module, inputs: list[Tensor], own: list[str]) -> list[tuple[str, list[Tensor | None]]]:
    """What each step gave; `own`: names of the parameters that are trained."""
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD([parameters[name] for name in own], lr=0.01)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    found: list[tuple[str, list[Tensor | None]]] = []
    for step, (training, x) in enumerate(zip(MODES, inputs, strict=True)):
        outputs = tensors_in(model.train(training)(x))
        optimizer.zero_grad()
        sum(y.square().mean() for y in outputs).backward()  # type: ignore[union-attr]
        gradients = [parameters[name].grad for name in own]
        optimizer.step()
        found.append((f"output of step {step}, training={training}", [y.detach() for y in outputs]))
        found.append((f"gradient of step {step}", copy.deepcopy(gradients)))
        state = model.state_dict()
        kept = [state[name] for name in state if not name.startswith(("gate_bank.", "gate_index."))]
        found.append((f"state after step {step}", copy.deepcopy(kept)))
    return found


def same_step_for_step(model: nn.Module, gated: tgfx.GatedModule, inputs: list[Tensor]) -> None:
    """Both are trained, in place. A model that gets no gradient anywhere cannot be compared so."""
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in gated.named_parameters():
        if name.startswith("gate_bank."):
            parameter.requires_grad_(False)
    both = (_history(model, inputs, names), _history(gated, inputs, names))
    for (what, expected), (_, found) in zip(*both, strict=True):
        assert len(expected) == len(found), what
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            place = f"{what}, {names[index] if 'gradient' in what else index}"
            if mine is None or theirs is None:
                assert (mine is None or not bool(mine.any())) and (theirs is None or not bool(theirs.any())), place
                continue
            promises.assert_close(mine.double(), theirs.double(), promises.TRAINED, place)


def exact_cut(gated: tgfx.GatedModule, x: Tensor) -> nn.Module:
    """Half of the gates closed: the cut model against the gated one, in eval mode."""
    promises.gate_at_random(gated, 0.5, 0)
    gated.eval()
    compact = tgfx.shrink(gated)
    with torch.no_grad():
        for mine, theirs in zip(tensors_in(compact(x)), tensors_in(gated(x)), strict=True):
            promises.assert_close(mine, theirs, promises.EXACT, "compact output")
    promises.only_torch_modules(compact)
    return compact
