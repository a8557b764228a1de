"""What a run changes about a model besides its tensors, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from torch import nn

if TYPE_CHECKING:
    from tgfx.gated import GatedModule

Trained = Literal["joint", "gates"]


def training_mode_(gated: GatedModule, train: Trained, *, fixed_statistics: bool = True) -> None:
    """`gates`: the model runs as in eval (no dropout, batch norm fixed), only its gates are trainable.

    Without `fixed_statistics`, batch norm takes those of each batch: what it will do once they are measured anew.
    """
    if train == "joint":
        gated.train()
        return
    gated.eval()
    gated.bank.train()
    if not fixed_statistics:
        for module in gated.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train()


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
