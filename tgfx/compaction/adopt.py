"""The trained model takes over the smaller structure and stays the same object, with the same parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgfx.bank import GateBank
from tgfx.compaction.rebuild import Rebuilt, tensors_of
from tgfx.gated import GatedModule
from tgfx.ir.take import cuts_anything, take
from tgfx.ops.modules import SIZES
from tgfx.passes.insert_gates import GateIndex

BANKED = ("names", "record", "places", "constants")  # what a bank knows besides its gates


def adopt(gated: GatedModule, rebuilt: Rebuilt) -> None:
    """Nothing here can fail half way: all new tensors exist already, they are only put in place."""
    gradients = _cut_gradients(gated, rebuilt)
    old, new = tensors_of(gated), tensors_of(rebuilt.module)
    done: set[int] = set()
    for name, positions in rebuilt.positions.items():
        tensor = old[name]
        if id(tensor) not in done and cuts_anything(positions):
            _exchange(tensor, new[name].detach(), gradients.get(name))
        done.add(id(tensor))
    merger = _Merger(gated, {name: old[name] for name in rebuilt.positions})
    merger.merge("", gated, rebuilt.module)
    gated.facts = rebuilt.module.facts
    gated.graph = rebuilt.module.graph


def _cut_gradients(gated: GatedModule, rebuilt: Rebuilt) -> dict[str, Tensor]:
    found = {}
    for name, parameter in gated.named_parameters(remove_duplicate=False):
        if name in rebuilt.positions and parameter.grad is not None:
            found[name] = take(parameter.grad, rebuilt.positions[name])
    return found


def _exchange(tensor: Tensor, smaller: Tensor, gradient: Tensor | None) -> None:
    tensor.grad = None
    # A loss that is still around keeps the gradient's old shape alive; a change of type makes torch forget it.
    other = torch.float32 if tensor.dtype != torch.float32 else torch.float64
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = smaller
    tensor.grad = gradient


class _Merger:
    """Old module objects with the new ones' tables; hooks and settings stay with them."""

    def __init__(self, gated: GatedModule, tensors: dict[str, Tensor]) -> None:
        self.modules = dict(gated.named_modules(remove_duplicate=False))
        self.tensors = tensors
        self.taken: set[int] = set()

    def merge(self, path: str, old: nn.Module, new: nn.Module) -> nn.Module:
        self.taken.add(id(old))
        prefix = f"{path}." if path else ""
        children: dict[str, nn.Module | None] = {}
        for name, child in new._modules.items():
            children[name] = (
                None if child is None else self.merge(prefix + name, self._home(prefix + name, child), child)
            )
        for table in ("_parameters", "_buffers"):
            tensors = getattr(new, table).items()
            old.__dict__[table] = {name: self.tensors.get(prefix + name, tensor) for name, tensor in tensors}
        old.__dict__["_modules"] = children
        old.__dict__["_non_persistent_buffers_set"] = new._non_persistent_buffers_set
        for key in (*SIZES, *(BANKED if isinstance(new, GateBank) else ())):
            if key in new.__dict__:
                old.__dict__[key] = new.__dict__[key]
        return old

    def _home(self, path: str, new: nn.Module) -> nn.Module:
        """The module object to go on with: the one the user may know, where it is of the same kind."""
        old = self.modules.get(path)
        usable = old is not None and type(old) is type(new) and not isinstance(new, GateIndex)
        return old if usable and id(old) not in self.taken else new  # type: ignore[return-value]
