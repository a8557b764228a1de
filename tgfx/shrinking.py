"""The second half of the pipeline: from gates to a smaller model, with a proof."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from tgfx.capture.parametrized import parametrised_tensors
from tgfx.errors import EmptyGroupError, VerificationError
from tgfx.gated import GatedModule, present
from tgfx.gated_check import check_gated
from tgfx.instruments import observed
from tgfx.ir.autocast_switch import refuse_autocast
from tgfx.ir.pickled_code import guard_pickle
from tgfx.ir.plain_attributes import plain_attributes_restored as _trial
from tgfx.ir.portable import make_portable
from tgfx.ir.rng import untouched_rng
from tgfx.ir.tree import has_module, named_tensors
from tgfx.ops.modules import SIZES
from tgfx.passes.cut import cut
from tgfx.passes.dead_branches import DeadBranches, dead_branches
from tgfx.passes.survivors import Survivors
from tgfx.rounded_drop_path import replace_rounded_drop_paths
from tgfx.rounding import checked_multiple, rounded_counts, rows_per_gate
from tgfx.sharding import refuse_sharded
from tgfx.verify import as_model_takes, compared, eval_mode, first_difference
from tgfx.weight.gated import WeightGatedModule
from tgfx.weight.shrinking import shrink_weights


def shrink(gated: GatedModule, *, round_to: int | None = None, verify: bool = True) -> fx.GraphModule:
    """The physically smaller model: plain torch modules, the same output as `gated.eval()`.

    round_to: keep group sizes (of heads, their rows) at multiples of this number, reviving the best of the dead; what
    compact_ removed cannot be revived, and such groups are rounded down, with a warning. The result is run against the
    gated model on the example before it is returned (verify=False skips that). Where single weights are gated, closed
    ones are exactly zero in the result; `tgfx.save_sparse` makes the file small.
    """
    check_gated(gated, "can be shrunk")
    if isinstance(gated, WeightGatedModule):
        return shrink_weights(gated, round_to=round_to, verify=verify)
    return cut_to(gated, shrink_slots(gated, round_to), verify=verify)


def shrink_slots(gated: GatedModule, round_to: int | None) -> np.ndarray:
    """Which slots of the gate bank stay."""
    return gated.open_slots() if round_to is None else _rounded(gated, round_to)


def cut_to(gated: GatedModule, opened: np.ndarray, *, verify: bool = True) -> fx.GraphModule:
    """Cut a gated model to these slots; its gates are not touched."""
    refuse_sharded(gated, "cutting")
    facts = gated.facts
    if facts.source.training is not None:
        warnings.warn(
            f"{facts.model_name} takes another path in train mode (an auxiliary output, say); "
            "the compact model keeps the eval path in both modes",
            stacklevel=3,
        )
    with untouched_rng(), torch.no_grad():
        survivors = Survivors(facts.channels, facts.coupling, opened)
        observed("survivors", survivors, facts.source, facts.channels)
        tensors = {**dict(named_tensors(gated)), **parametrised_tensors(gated)}
        refresh_settings(facts.source.module, gated)
        dead = observed("dead_branches", _dead(gated, survivors, opened), facts.source)
        compact = cut(facts.source, facts.channels, survivors, tensors, dead, present(gated))
        inputs = as_model_takes(facts.source.flat_inputs(), gated)
        replace_rounded_drop_paths(compact, inputs)
        refuse_autocast(compact)
        make_portable(compact, inputs)
        observed("cut", compact, facts.source)
        for name, module in gated.named_modules():
            if name and has_module(compact, name):
                compact.get_submodule(name).training = module.training
        compact.training = gated.training
        if verify:
            _verify(gated, compact, survivors, opened)
    guard_pickle(compact)
    compact.meta["kept"] = kept_channels(gated, opened)
    return compact


def kept_channels(gated: GatedModule, opened: np.ndarray) -> dict[str, tuple[int, int]]:
    """Group -> (how many stay, how many there were): what an exported file says about its cut."""
    groups = gated.facts.coupling.groups
    return {g.name: (int(opened[g.start : g.start + g.size].sum()), g.size) for g in groups}


def _verify(gated: GatedModule, compact: fx.GraphModule, survivors: Survivors, opened: np.ndarray) -> None:
    """Run both on the example; a cut that changes the output is never handed out."""
    source = gated.facts.source
    with _gates_at(gated, opened), eval_mode(gated), eval_mode(compact), _unwrapped(gated), _trial(gated):
        result = compared(gated, compact, *example_like(gated))
        if result.same:
            return
        inputs, nodes = as_model_takes(source.flat_inputs(), gated), gated.facts.channels.nodes
        place = first_difference(gated, compact, survivors, nodes, inputs, present(gated), draws=result.draws)
    raise VerificationError(
        "the cut model does not compute what the gated one does; it is not handed out",
        expected="equal outputs on the example",
        found=f"first difference at {place}",
        fix=result.fix,
    ) from result.cause


def _dead(gated: GatedModule, survivors: Survivors, opened: np.ndarray) -> DeadBranches:
    """Closed branches, and groups without an open gate: what they take along, or an error if it cannot go."""
    facts = gated.facts
    empty = [g for g in facts.coupling.groups if not g.can_be_empty and not opened[g.start : g.start + g.size].any()]
    closed = facts.switches.closed(opened)
    if not empty and not closed:
        return DeadBranches()
    dead = dead_branches(facts.source, facts.channels, survivors, closed)
    if dead.stuck is not None and not empty:
        raise AssertionError(f"closed branches left something behind: {dead.stuck}")
    if dead.stuck is not None:
        raise EmptyGroupError(
            f"all {empty[0].size} gates of group '{empty[0].name}' are closed",
            expected="at least one open channel, or a branch that can disappear as a whole",
            found=f"none, and {dead.stuck}",
            where=", ".join(str(m) for m in empty[0].members[:4]),
            fix="open the best one again, or use a weaker budget",
        )
    return dead


def _rounded(gated: GatedModule, multiple: int) -> np.ndarray:
    """Revive the best of the dead until every group's size is a multiple (or whole)."""
    checked_multiple(multiple)
    opened, short = gated.open_slots().copy(), []
    for group in gated.facts.coupling.groups:
        if group.can_be_empty or group.name not in gated.gates:
            continue
        slots = gated.gate_slots(group.name)
        count = int(opened[slots].sum())
        if count == 0:  # it goes with its branch, or is an error
            continue
        stops = rounded_counts(gated, group, multiple)
        target = next((stop for stop in stops if stop >= count), stops[-1])
        if target < count or (len(slots) < group.size and target * rows_per_gate(gated.facts, group) % multiple):
            short.append(
                f"{target} instead of {count} of '{group.name}'" if target < count else f"{count} of '{group.name}'"
            )
        weight = gated.gates[group.name].weight.detach().cpu().numpy()
        order = sorted(range(len(slots)), key=lambda i: (not opened[slots[i]], -weight[i], i))
        opened[slots] = False
        opened[slots[order[:target]]] = True
    if short:
        warnings.warn(
            f"round_to={multiple}: compact_ has removed what would make multiples, so {', '.join(short)} stay; "
            "a smaller round_to may fit, or round without compact_",
            stacklevel=4,  # whoever asked shrink or save_plan
        )
    return opened


def refresh_settings(module: nn.Module, gated: GatedModule) -> None:
    """Settings of layers as they are now (a dropout rate, a momentum), where the graph has layers of its own."""
    for name, live in gated.named_modules():
        if not name or not has_module(module, name):
            continue
        own = module.get_submodule(name)
        for key, value in live.__dict__.items():
            if own is not live and key in own.__dict__ and not key.startswith("_") and key not in SIZES:
                own.__dict__[key] = value


@contextmanager
def _gates_at(gated: GatedModule, opened: np.ndarray) -> Iterator[None]:
    """Hold the gates at an assignment for a while."""
    saved = {name: gate.weight.detach().clone() for name, gate in gated.gates.items()}
    try:
        for name, gate in gated.gates.items():
            wanted = torch.from_numpy(opened[gated.gate_slots(name)])
            if not torch.equal(gate.is_open().cpu(), wanted):
                gate.set_open_(wanted.to(gate.weight.device))
        yield
    finally:
        for name, weight in saved.items():
            gated.gates[name].weight.data.copy_(weight)


@contextmanager
def _unwrapped(gated: GatedModule) -> Iterator[None]:
    """Without mixed precision, of the caller's or of a wrapper that Accelerate has put over forward."""
    wrapper = gated.__dict__.pop("forward", None)
    try:
        with torch.autocast(next(gated.parameters()).device.type, enabled=False):
            yield
    finally:
        if wrapper is not None:
            gated.__dict__["forward"] = wrapper


def example_like(gated: GatedModule) -> Any:
    """The example's arguments, on the model's device and in its precision."""
    return as_model_takes((gated.facts.source.args, gated.facts.source.kwargs), gated)
