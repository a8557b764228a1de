"""A cut on disk without pickle: a JSON plan and the weights as safetensors, rebuilt from the model's own class.

    tgfx.save_plan(gated, "small")                      # small/plan.json, small/weights.safetensors
    compact = tgfx.load_plan("small", MyModel(), example_inputs)

The plan says which positions of which group stay. Loading captures a fresh model, checks that it is the same
architecture, cuts it and fills in the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

from tgfx._version import __version__
from tgfx.errors import GranularityError, IgnoreError, NothingToGateError, PlanError
from tgfx.gated import GatedModule
from tgfx.gated_check import check_gated
from tgfx.granularity import parse
from tgfx.shrinking import cut_to, shrink_slots
from tgfx.transforming import transform
from tgfx.weight.gated import WeightGatedModule

FORMAT = 2
READABLE = (1, FORMAT)  # format 1 knew channels only
PLAN, WEIGHTS = "plan.json", "weights.safetensors"


def save_plan(gated: GatedModule, folder: str | os.PathLike[str], *, round_to: int | None = None) -> Path:
    """Write the cut that `tgfx.shrink(gated)` makes. Written aside and moved into place: all of it or nothing."""
    check_gated(gated, "has a plan")
    if isinstance(gated, WeightGatedModule):
        raise GranularityError(
            "a plan says which channels stay; here single weights are gated",
            expected='a model gated with granularity="channel"',
            found='granularity="weight"',
            fix="tgfx.save_sparse(tgfx.shrink(gated), path) writes a small file",
        )
    opened = shrink_slots(gated, round_to)
    compact = cut_to(gated, opened)
    plan = {
        "format": FORMAT,
        "tgfx": __version__,
        "model": gated.facts.model_name,
        "architecture": fingerprint(gated),
        "granularity": sorted(gated.facts.granularity),
        "ignore": list(gated.facts.ignored),
        "kept": {
            group.name: np.flatnonzero(opened[group.start : group.start + group.size]).tolist()
            for group in gated.facts.coupling.groups
        },
        "sizes": {group.name: group.size for group in gated.facts.coupling.groups},
    }
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        save_file(_unshared(compact.state_dict()), aside / WEIGHTS)
        (aside / PLAN).write_text(json.dumps(plan, indent=1))
        _move(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def load_plan(folder: str | os.PathLike[str], model: nn.Module, example_inputs: Any = None) -> fx.GraphModule:
    """The compact model: `model` is a fresh instance of the original class (its weights do not matter)."""
    plan, weights = _read(Path(folder))
    try:
        gated = transform(
            model,
            example_inputs,
            granularity=plan.get("granularity", "channel"),
            ignore=[name for name in plan.get("ignore", []) if name],
        )
    except (IgnoreError, NothingToGateError) as error:
        raise PlanError(
            "the plan is for another architecture",
            expected=f"{plan['model']}, which has the layers that the plan names",
            found=type(model).__name__,
            where=str(folder),
            fix="build the model with the same class and settings as when the plan was saved",
        ) from error
    if fingerprint(gated) != plan["architecture"]:
        groups = {group.name: group.size for group in gated.facts.coupling.groups}
        raise PlanError(
            "the plan is for another architecture",
            expected=f"{plan['model']} with groups {_brief(plan['sizes'])}",
            found=f"{gated.facts.model_name} with groups {_brief(groups)}",
            where=str(folder),
            fix="build the model with the same class and settings (and example sizes) as when the plan was saved",
        )
    for group in gated.facts.coupling.groups:
        if group.kind == "choice" and len(plan["kept"][group.name]) != 1:
            raise PlanError(
                "the plan chooses no single alternative",
                expected=f"one of the {group.size} alternatives of '{group.name}'",
                found=f"{plan['kept'][group.name]}",
                where=str(folder),
                fix="save it again",
            )
    opened = np.zeros(gated.facts.coupling.slots, dtype=bool)
    for group in gated.facts.coupling.groups:
        opened[group.start + np.array(plan["kept"][group.name], dtype=np.int64)] = True
    compact = cut_to(gated, opened, verify=False)
    own = compact.state_dict()
    _check_weights(own, weights, Path(folder))
    compact.load_state_dict(weights)
    return compact


def fingerprint(gated: GatedModule) -> str:
    """Parameters with shapes, and groups with members: equal for equal architectures only."""
    if isinstance(gated, WeightGatedModule):
        shapes = sorted((name, list(shape)) for name, shape in gated.facts.cost.shapes.items())
        return hashlib.sha256(json.dumps(["weight", shapes]).encode()).hexdigest()
    named = [*gated.facts.channels.params.items(), *gated.facts.channels.buffers.items()]
    shapes = sorted((name, list(ids.shape)) for name, ids in named)
    groups = [
        (g.name, g.size, [str(m) for m in g.members], *([g.kind] if g.kind != "channel" else []))
        for g in gated.facts.coupling.groups
    ]
    return hashlib.sha256(json.dumps([shapes, groups]).encode()).hexdigest()


def _unshared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors are written under every name; safetensors wants separate memory."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def _move(aside: Path, target: Path) -> None:
    if not target.exists():
        os.replace(aside, target)
        return
    if not target.is_dir():
        raise PlanError("the plan's place is taken", expected="a folder or nothing", found="a file", where=str(target))
    for name in (WEIGHTS, PLAN):  # the plan last: a reader sees either the old pair or the new one
        os.replace(aside / name, target / name)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    def damaged(found: str, cause: Exception | None = None) -> PlanError:
        error = PlanError(
            "the plan cannot be read",
            expected=f"a folder with {PLAN} and {WEIGHTS}, as tgfx.save_plan writes it",
            found=found,
            where=str(folder),
            fix="save it again",
        )
        error.__cause__ = cause
        return error

    if not folder.is_dir():
        raise damaged("no such folder")
    try:
        plan = json.loads((folder / PLAN).read_text())
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise damaged(f"{type(error).__name__}: {error}", error) from error
    if not isinstance(plan, dict) or plan.get("format") not in READABLE:
        raise damaged(f"format {plan.get('format') if isinstance(plan, dict) else type(plan).__name__}")
    try:
        parse(plan.get("granularity", "channel"))
    except GranularityError as error:
        raise damaged(f"granularity {plan['granularity']!r}", error) from error
    kept, sizes = plan.get("kept"), plan.get("sizes")
    if not isinstance(kept, dict) or not isinstance(sizes, dict) or set(kept) != set(sizes):
        raise damaged("groups and sizes that do not belong together")
    for name, positions in kept.items():
        whole = isinstance(positions, list) and all(isinstance(p, int) and 0 <= p < sizes[name] for p in positions)
        if not whole or positions != sorted(set(positions)):
            raise damaged(f"positions of group '{name}' that make no sense")
    return plan, weights


def _check_weights(own: dict[str, Tensor], weights: dict[str, Tensor], folder: Path) -> None:
    wrong = [n for n in own if n not in weights or weights[n].shape != own[n].shape] + [
        n for n in weights if n not in own
    ]
    if wrong:
        first = wrong[0]
        raise PlanError(
            "the weights do not fit the plan",
            expected=f"{first} {tuple(own[first].shape) if first in own else 'absent'}",
            found=f"{tuple(weights[first].shape) if first in weights else 'absent'}",
            where=str(folder / WEIGHTS),
            fix="save the plan again: one of its two files is not of the same cut",
        )


def _brief(sizes: dict[str, int], most: int = 4) -> str:
    shown = ", ".join(f"{name}: {size}" for name, size in list(sizes.items())[:most])
    return "{" + shown + (", ..." if len(sizes) > most else "") + "}"


__all__ = ["fingerprint", "load_plan", "save_plan"]
