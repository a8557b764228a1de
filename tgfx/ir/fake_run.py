"""A graph run on fake tensors; where these cannot say what happens, on true ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tgfx.ir.buffers import buffers_restored
from tgfx.ir.draws import same_draws
from tgfx.ir.plain_attributes import plain_attributes_restored


class Tensors:
    """How a run stands for the tensors of a model and its example: fake ones, or copies."""

    def __init__(self, *, fake: bool) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=_sizes_of_numbers()) if fake else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        if self._mode is None:
            yield
        else:
            with self._mode:
                yield

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without a gradient history; writing to it changes nothing else."""
        if self._mode is None:
            return tensor.detach().clone()
        return self._mode.from_tensor(tensor.detach(), static_shapes=True)


def _sizes_of_numbers() -> ShapeEnv:
    """`x.nonzero()` has a size and `x.max().item()` a value that nobody knows, and that is all right."""
    return ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)


Run = TypeVar("Run", bound=fx.Interpreter)


def run_on_example(module: fx.GraphModule, made: Callable[[Tensors], Run], inputs: list[Any]) -> Run:
    """The interpreter, after its run: on fake tensors, or where code decides by numbers, on true ones."""
    run = made(Tensors(fake=True))
    try:
        run.run(*inputs, enable_io_processing=False)
    except Exception:
        run = made(Tensors(fake=False))
        with buffers_restored(module), plain_attributes_restored(module), same_draws():
            run.run(*copy.deepcopy(inputs), enable_io_processing=False)
    return run
