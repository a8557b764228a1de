"""What the model itself does on the example: what a graph of it is measured by."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tgfx.capture.drop_path import replace_drop_paths, watch_ranks
from tgfx.capture.examples import told_apart
from tgfx.errors import InputError
from tgfx.ir.compare import all_close
from tgfx.ir.draws import generators, same_draws
from tgfx.ir.kept_state import KeptState
from tgfx.ir.plain_attributes import plain_attributes_restored
from tgfx.ir.rehearsal import Rehearsal
from tgfx.ir.remembered import Remembered
from tgfx.ir.source import tensors_in
from tgfx.ir.tree import named_tensors


@dataclass
class Reference:
    """`outputs` of `model` on the example, and how a second program gets through the same calls without computing.

    At first nothing is computed: a graph that makes the very same calls is the same program. Where there is no such
    graph, `compute` the outputs.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    calls: Rehearsal | Remembered
    draws: bool = False  # whether random numbers were drawn; who compares draws the same ones, see tgfx/ir/draws.py

    def compute(self) -> None:
        """The true outputs."""
        self.calls = Remembered()
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        with same_draws():
            before = generators()
            result = run_kept(self.model, args, kwargs, self.calls)
            self.draws = not all(map(torch.equal, before, generators()))
        self.outputs = [tensor.clone() for tensor in result]  # the tensors themselves may be used again

    def rehearse(self) -> None:
        """The calls alone, on the very tensors of the example."""
        self.calls = Rehearsal()
        tensors = tensors_in((self.args, self.kwargs))
        args, kwargs = copy.deepcopy((self.args, self.kwargs), {id(tensor): tensor for tensor in tensors})
        self.outputs = run_kept(self.model, args, kwargs, self.calls, tensors)

    @property
    def rehearsed(self) -> bool:
        return isinstance(self.calls, Rehearsal)

    def is_met_apart(self, graph: nn.Module) -> bool:
        """Whether `graph` tells inputs apart that hold the same numbers in the example."""
        example = None if self.rehearsed else told_apart(self.args, self.kwargs)
        if example is None:
            return True
        seen = []
        for program in (self.model, graph):
            args, kwargs = copy.deepcopy(example)
            try:
                with same_draws():
                    seen.append([tensor.clone() for tensor in run_kept(program, args, kwargs, Remembered())])
            except Exception:
                return not seen  # where the model itself does not take such numbers, nothing can be said
        return all_close(*seen)

    def is_met_by(self, outputs: list[torch.Tensor]) -> bool:
        """Whether a program that ran with `calls` and gave this does what the model does."""
        if isinstance(self.calls, Rehearsal):
            return self.calls.ends_with(self.outputs, outputs)
        return all_close(self.outputs, outputs)


def prepare(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rehearse: bool = True) -> Reference:
    """Run `model` (our copy) on the example; recognised drop paths become torch's own layers."""
    ranks, handles = watch_ranks(model)
    reference = Reference(model, args, kwargs, [], Remembered())
    try:
        if not (rehearse and _rehearsed(reference)):
            ranks.clear()
            reference.compute()
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} does not run on the example inputs",
            expected="arguments the model accepts",
            found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            fix="pass example_inputs=... the way you call the model",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    replace_drop_paths(model, ranks)
    return reference


def _rehearsed(reference: Reference) -> bool:
    try:
        reference.rehearse()
    except Exception:  # whatever it is: the model may be at fault, or our numbers, which computing will tell
        return False
    return True


def run_kept(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    calls: Rehearsal | Remembered,
    inputs: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """What it gives, with parameters, buffers and `inputs` as before afterwards."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    state = KeptState([*(tensor for _, tensor in named_tensors(model)), *(inputs or ())])
    try:
        with plain_attributes_restored(model), calls.recording(state):
            return tensors_in(model(*args, **kwargs))
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        state.restore()
