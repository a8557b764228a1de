"""Averaged copies of a model: modules like it (or that hold one as `.module`), or tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tgfx.bank import GONE, RECORD
from tgfx.compaction.adopt import adopt
from tgfx.compaction.choose import Choice
from tgfx.compaction.rebuild import Rebuilt, rebuild, tensors_of
from tgfx.errors import InputError
from tgfx.gated import GatedModule
from tgfx.ir.take import take
from tgfx.passes.insert_gates import BANK

Commit = Callable[[], None]


def plan_ema(ema: Any, gated: GatedModule, choice: Choice, rebuilt: Rebuilt | None) -> list[Commit]:
    """What to do to the averages, worked out before anything is changed. `rebuilt` is None if nothing is removed."""
    commits: list[Commit] = []
    for one in ema if isinstance(ema, list | tuple) else [ema] if ema is not None else []:
        if isinstance(one, Mapping):
            commits.append(_plan_mapping(one, gated, choice, rebuilt))
        else:
            commits.append(_plan_module(_averaged(one), gated, choice, rebuilt is not None))
    return commits


def _averaged(ema: Any) -> GatedModule:
    inner = ema
    while not isinstance(inner, GatedModule) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    if not isinstance(inner, GatedModule):
        raise InputError(
            "this is no average of the gated model",
            expected="a copy of it, an object that holds one as .module (AveragedModel), or a dict of tensors by name",
            found=type(ema).__name__,
        )
    return inner


def _plan_module(average: GatedModule, gated: GatedModule, choice: Choice, removes: bool) -> Commit:
    if average is gated:
        raise InputError("the average is the model itself", expected="a copy of it", found="the same object")
    mine, other = tensors_of(gated), tensors_of(average)
    own, theirs = _gone(gated), _gone(average)
    if {n: t.shape for n, t in mine.items()} != {n: t.shape for n, t in other.items()} or not np.array_equal(
        own, theirs
    ):
        raise InputError(
            "the average does not fit the model",
            expected="a copy of the gated model, compacted together with it from then on",
            found="other tensors, or other channels removed",
            fix="copy the gated model again, or pass the average at every compact_",
        )
    if not removes:
        return lambda: average.bank.set_record(choice.record)
    smaller = rebuild(average, choice)
    return lambda: adopt(average, smaller)


def _gone(gated: GatedModule) -> np.ndarray:
    record = gated.bank.recorded()
    return np.zeros(gated.facts.coupling.slots, dtype=bool) if record is None else record == GONE


def _plan_mapping(tensors: Mapping[str, Any], gated: GatedModule, choice: Choice, rebuilt: Rebuilt | None) -> Commit:
    if not isinstance(tensors, MutableMapping):
        raise InputError("averages are cut in place", expected="a dict", found=type(tensors).__name__)
    mine, record = tensors_of(gated), f"{BANK}.{RECORD}"
    known = [name for name in tensors if name in mine]
    if not known:
        raise InputError(
            "nothing in this mapping belongs to the model",
            expected="tensors under the names of gated.state_dict()",
            found=", ".join(map(str, list(tensors)[:3])) or "an empty mapping",
        )
    for name in known:
        if not isinstance(tensors[name], Tensor) or tensors[name].shape != mine[name].shape:
            raise InputError(
                f"the average of {name} does not fit",
                expected=f"a tensor {tuple(mine[name].shape)}",
                found=str(tuple(tensors[name].shape)) if isinstance(tensors[name], Tensor) else repr(tensors[name]),
            )
    new: dict[str, Tensor] = {}
    gone = [name for name in known if rebuilt is not None and name in rebuilt.gone]
    if rebuilt is not None:
        stay = [name for name in known if name in rebuilt.positions]
        new = {name: take(tensors[name], rebuilt.positions[name]) for name in stay}
    if set(gated.state_dict()) - {record} <= set(known):  # a whole state_dict: loads into the compacted model too
        new[record] = torch.from_numpy(choice.record.copy())

    def commit() -> None:
        for name in gone:
            del tensors[name]
        tensors.update(new)

    return commit
