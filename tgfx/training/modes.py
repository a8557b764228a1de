"""What a run changes about a model besides its tensors, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from torch import nn

if TYPE_CHECKING:
    from tgfx.gated import GatedModule

Trained = Literal["joint", "gates"]


def training_mode_(gated: GatedModule, train: Trained) -> None:
    """`gates`: the model runs as in eval (no dropout, batch norm fixed), only its gates are trainable."""
    if train == "joint":
        gated.train()
    else:
        gated.eval()
        gated.bank.train()


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    whole, modes = model.training, {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module in {*modes, *model.modules()}:  # compact_ may have exchanged some of its own
            module.training = modes.get(module, whole)


@contextmanager
def frozen(gated: GatedModule, *, weights: bool, gates: bool) -> Iterator[None]:
    """No gradient for the weights, or for the gates, for a while."""
    own = {id(gate.weight) for gate in gated.gates.values()}
    saved = [(p, p.requires_grad) for p in gated.parameters()]
    try:
        for parameter, _ in saved:
            if (gates if id(parameter) in own else weights) and parameter.requires_grad:
                parameter.requires_grad_(False)
        yield
    finally:
        for parameter, needed in saved:
            parameter.requires_grad_(needed)
