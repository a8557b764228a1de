"""The smaller gated model, built beside the one that is trained; nothing is changed yet.

Every compaction cuts the model that was transformed, whose graph and analysis are kept without their weights. So
prices, plans and explanations speak of that model for ever, and a cut after a cut is one cut.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from tgfx.bank import GateBank
from tgfx.compaction.choose import Choice
from tgfx.gated import Facts, GatedModule, present
from tgfx.gated_copy import holder, source_module
from tgfx.gates import TrainableGate
from tgfx.instruments import observed
from tgfx.ir.graph_state import pack_graph
from tgfx.ir.source import Source
from tgfx.ir.take import Positions, take
from tgfx.mirror import mirror
from tgfx.passes.carry import carry_gates
from tgfx.passes.cut import cut_with_places
from tgfx.passes.dead_branches import parameters_of
from tgfx.passes.insert_gates import BANK, INDEX, insert_gates
from tgfx.passes.survivors import Survivors
from tgfx.shrinking import refresh_settings


@dataclass(frozen=True)
class Rebuilt:
    """module: the smaller gated model, over tensors of its own; positions: tensor of the old model -> what stays of
    each axis; gone: tensors that leave altogether."""

    module: GatedModule
    positions: dict[str, Positions]
    gone: frozenset[str]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return tensors


def rebuild(gated: GatedModule, choice: Choice) -> Rebuilt:
    facts = gated.facts
    source = _without_weights(facts.source)
    refresh_settings(source.module, gated)
    before = present(gated)
    cut = cut_with_places(
        source, facts.channels, choice.survivors, tensors_of(gated), choice.dead, before, keep_connections=True
    )
    observed("cut", cut, source)
    placement = carry_gates(
        facts.placement, facts.channels, facts.coupling, choice.survivors, cut.node_of, cut.reader_of
    )
    observed("carry", placement, replace(source, module=cut.module))
    graph = insert_gates(replace(source, module=cut.module), placement)
    observed("insert_gates", graph, replace(source, module=cut.module))
    positions = _positions(gated, choice, before)
    root = mirror(cut.module, graph.twins)
    root.add_module(BANK, _bank(gated, choice.record, positions))
    root.add_module(INDEX, graph.indices.to(next(gated.parameters()).device))
    modes = {name: module.training for name, module in gated.named_modules()}
    for name, module in root.named_modules():
        module.training = modes.get(name, gated.training)
    smaller = GatedModule(root, graph.graph, replace(facts, source=source))
    gone = frozenset(_model_tensors(facts)) | {f"{BANK}.{GateBank.key(n)}.weight" for n in gated.gates}
    return Rebuilt(smaller, positions, gone - set(positions))


def _model_tensors(facts: Facts) -> list[str]:
    return [*facts.channels.params, *facts.channels.buffers]


def _positions(gated: GatedModule, choice: Choice, before: Survivors | None) -> dict[str, Positions]:
    facts = gated.facts
    gone = parameters_of(facts.source, choice.dead.nodes) if choice.dead.nodes else set()
    found: dict[str, Positions] = {}
    for table in (facts.channels.params, facts.channels.buffers):
        for name, ids in table.items():
            if name not in gone:
                found[name] = choice.survivors.kept_of(ids, before)
    for name in gated.gates:
        going = choice.going[gated.gate_slots(name)]
        if not going.all():
            found[f"{BANK}.{GateBank.key(name)}.weight"] = [np.flatnonzero(~going) if going.any() else None]
    return found


def _bank(gated: GatedModule, record: np.ndarray, positions: dict[str, Positions]) -> GateBank:
    gates: dict[str, TrainableGate] = {}
    for name, gate in gated.gates.items():
        kept = positions.get(f"{BANK}.{GateBank.key(name)}.weight")
        if kept is not None:
            gates[name] = copy.copy(gate)
            weight = nn.Parameter(take(gate.weight, kept), gate.weight.requires_grad)
            gates[name]._parameters = {"weight": weight}
    bank = GateBank(gates)
    bank.set_record(record)
    return bank


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _without_weights(source: Source) -> Source:
    """The captured model with layers of its own, of the original sizes, whose tensors take no memory."""
    if all(tensor.is_meta for tensor in tensors_of(source.module).values()):
        return source
    memo: dict[int, object] = {}
    for tensor in tensors_of(source.module).values():
        empty = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    for module in source.module.modules():  # hooks are the trained model's
        memo.update({id(module.__dict__[key]): OrderedDict() for key in _HOOKS if key in module.__dict__})
    root = copy.deepcopy(holder(source.module), memo)
    return replace(source, module=source_module(root, pack_graph(source.module.graph)))


__all__ = ["Rebuilt", "rebuild", "tensors_of"]
