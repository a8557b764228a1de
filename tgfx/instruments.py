"""Instruments around passes: the pipeline hands every pass's result through `observed`; passes know nothing of it.

TGFX_DUMP=folder python train.py      writes 010_capture.dot, 020_channels.dot, ... after every pass
"""

from __future__ import annotations

import os
import re
from functools import singledispatch
from pathlib import Path
from typing import Any, TypeVar

from torch import fx, nn

from tgfx.errors import InputError
from tgfx.ir.dot import DotNode, dot_text, edges_of
from tgfx.ir.facts import ChannelMap
from tgfx.ir.source import Source
from tgfx.ops.naming import op_name
from tgfx.passes.cost import CostModel
from tgfx.passes.couple import Coupling
from tgfx.passes.cut import CutModel
from tgfx.passes.dead_branches import DeadBranches
from tgfx.passes.insert_gates import GatedGraph
from tgfx.passes.place import Placement
from tgfx.passes.survivors import Survivors
from tgfx.passes.weight_uses import WeightUses

VARIABLE = "TGFX_DUMP"
_NUMBERED = re.compile(r"(\d{3,})_\w+\.dot")
Fact = TypeVar("Fact")
Notes = dict[str, list[str]]  # node -> lines that the fact adds to it


def observed(name: str, fact: Fact, source: Source, channels: ChannelMap | None = None) -> Fact:
    """What a pass found, handed on as it is; dumped first if TGFX_DUMP names a folder."""
    folder = os.environ.get(VARIABLE)
    if folder:
        _dump(Path(folder), name, fact, source, channels)
    return fact


def _dump(folder: Path, name: str, fact: Any, source: Source, channels: ChannelMap | None) -> None:
    module = fact.module if isinstance(fact, CutModel) else fact if isinstance(fact, fx.GraphModule) else source.module
    graph = fact.graph if isinstance(fact, GatedGraph) else fact if isinstance(fact, fx.Graph) else module.graph
    notes = notes_of(fact, source, channels)
    nodes = {
        node.name: DotNode(
            [node.name, _operator(node, module), *notes.get(node.name, [])],
            {"fillcolor": "#fff3c4"} if node.name in notes else {},
        )
        for node in graph.nodes
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(match[1]) for file in folder.iterdir() if (match := _NUMBERED.fullmatch(file.name))]
        path = folder / f"{max(taken, default=0) // 10 * 10 + 10:03}_{name}.dot"
        path.write_text(dot_text(name, nodes, edges_of(graph)), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{VARIABLE} cannot be written to", expected="a folder", found=str(error), where=str(folder)
        ) from error


def _operator(node: fx.Node, module: nn.Module) -> str:
    try:
        return op_name(node, module)
    except AttributeError:  # a layer that is put in place only after the pass: a gated twin, the bank
        return f"{node.op} {node.target}"


@singledispatch
def notes_of(fact: Any, source: Source, channels: ChannelMap | None) -> Notes:
    """What a fact says about nodes; facts that are graphs themselves say nothing more."""
    return {}


@notes_of.register
def _(fact: ChannelMap, source: Source, channels: ChannelMap | None) -> Notes:
    notes: Notes = {}
    for name, known in fact.nodes.items():
        for ids in known.tensors:
            if ids is not None:
                axes = [a for a in range(len(ids.shape)) if ids.covers(a)]
                notes.setdefault(name, []).append(f"{list(ids.shape)}, channels on axes {axes}")
    for read in fact.reads:
        notes.setdefault(read.node, []).append(f"reads channels: {read.op}, {read.kind}")
    return notes


@notes_of.register
def _(fact: Coupling, source: Source, channels: ChannelMap | None) -> Notes:
    notes: Notes = {}
    for group in (*fact.groups, *fact.frozen):
        for place in (*group.ties, *([group.frozen] if group.frozen else [])):
            if place.node:
                notes.setdefault(place.node, []).append(f"{group.name} ({group.size}): {place.reason} by {place.op}")
    return notes


@notes_of.register
def _(fact: Placement, source: Source, channels: ChannelMap | None) -> Notes:
    notes: Notes = {}
    for site in fact.sites:
        on = f" on {site.operand.name}" if site.operand is not None else ""
        notes.setdefault(site.node, []).append(f"gate: {site.kind}{on}")
    return notes


@notes_of.register
def _(fact: CostModel, source: Source, channels: ChannelMap | None) -> Notes:
    notes: Notes = {}
    for term in fact.terms["flops_all"]:
        sizes = " * ".join([f"{term.factor:,.0f}", *(f"n{axis}" for axis in term.axes)])
        notes.setdefault(term.origin, []).append(f"FLOPs {sizes}")
    return notes


@notes_of.register
def _(fact: Survivors, source: Source, channels: ChannelMap | None) -> Notes:
    notes: Notes = {}
    for name, known in (channels.nodes if channels is not None else {}).items():
        for ids in known.tensors:
            if ids is not None and fact.is_rectangular(ids):
                kept = [size if own is None else len(own) for size, own in zip(ids.shape, fact.kept(ids), strict=True)]
                if kept != list(ids.shape):
                    notes.setdefault(name, []).append(f"{list(ids.shape)} -> {kept}")
    return notes


@notes_of.register
def _(fact: DeadBranches, source: Source, channels: ChannelMap | None) -> Notes:
    notes = {name: ["goes"] for name in fact.nodes}
    notes.update({name: [f"becomes {other}"] for name, other in (fact.becomes or {}).items()})
    return notes


@notes_of.register
def _(fact: WeightUses, source: Source, channels: ChannelMap | None) -> Notes:
    owners = {str(node.target): node.name for node in source.module.graph.nodes if node.op == "call_module"}
    notes: Notes = {}
    for name, uses in fact.uses.items():
        owner = owners.get(name.rpartition(".")[0])
        if owner is not None:
            notes[owner] = [f"{name}: {sum(use.flops for use in uses):,.0f} FLOPs per entry"]
    return notes
