"""A compacted model from its state_dict: checkpoints without pickle.

torch.save(gated.state_dict(), "checkpoint.pt")                          # of a compacted model
gated = tgfx.transform(MyModel(), example)
optimizer = torch.optim.Adam(gated.parameters())
tgfx.compaction.restore_(gated, torch.load("checkpoint.pt"), optimizer)  # as it was, the optimizer cut along
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tgfx.bank import GONE, RECORD
from tgfx.compaction.adopt import adopt
from tgfx.compaction.check import check_compactable
from tgfx.compaction.choose import choice_of
from tgfx.compaction.optimizers import as_optimizers, plan_optimizers
from tgfx.compaction.rebuild import rebuild
from tgfx.errors import PlanError
from tgfx.gated import GatedModule
from tgfx.gated_check import check_gated
from tgfx.ir.rng import untouched_rng
from tgfx.passes.insert_gates import BANK
from tgfx.weight.gated import WeightGatedModule


def is_compacted(state: Mapping[str, Any]) -> bool:
    """Whether a state_dict is of a model that compact_ was called on, whether or not anything has left it yet."""
    return f"{BANK}.{RECORD}" in state


def restore_(gated: GatedModule, state: Mapping[str, Any], optimizer: Any = None) -> GatedModule:
    """Remove from `gated`, in place, what had been removed when `state` was taken, and load it.

    `gated` is a transform of the same architecture, compacted less far or not at all; its parameters stay the same
    objects. optimizer: one or a list, made over `gated` before; it is cut along and takes the state_dict of the
    optimizer that the compacted model was trained with. On any error nothing is changed.
    """
    check_gated(gated, "can be restored")
    optimizers = as_optimizers(optimizer)
    record = state.get(f"{BANK}.{RECORD}")
    own = None if isinstance(gated, WeightGatedModule) else gated.bank.recorded()
    if record is None and own is None:
        _check_shapes(gated, state)
        gated.load_state_dict(dict(state))
        return gated
    check_compactable(gated)
    slots = gated.facts.coupling.slots
    if not isinstance(record, Tensor) or record.shape != (slots,):
        raise _other(f"a record of {slots} channels", "none" if record is None else str(tuple(record.shape)))
    wanted = record.cpu().numpy()
    if own is not None and ((own == GONE) & (wanted != GONE)).any():
        raise _other("a model from which no more was removed", "channels that the model has not got any more")
    with untouched_rng(), torch.no_grad():
        choice = choice_of(gated, wanted)
        if choice.dead.stuck is not None:
            raise _other("channels that this model can do without", choice.dead.stuck)
        rebuilt = rebuild(gated, choice)
        _check_shapes(rebuilt.module, state)
        for cut in plan_optimizers(gated, optimizers, rebuilt.positions, rebuilt.gone):
            cut.apply()
        adopt(gated, rebuilt)
        gated.load_state_dict(dict(state))
    return gated


def _check_shapes(gated: GatedModule, state: Mapping[str, Any]) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in gated.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in state.items() if isinstance(tensor, Tensor)}
    wrong = [name for name in {**own, **given} if own.get(name) != given.get(name)]
    if wrong:
        first = wrong[0]
        raise _other(f"{first} {own.get(first, 'absent')}", f"{given.get(first, 'absent')}")


def _other(expected: str, found: str) -> PlanError:
    return PlanError(
        "the state is of another model",
        expected=expected,
        found=found,
        fix="transform a model of the same class and settings as when the state was taken",
    )
