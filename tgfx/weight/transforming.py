"""From a model to a copy with a gate for every weight entry."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from tgfx.capture import capture, copy_model, example_inputs_for, prepare
from tgfx.capture.attempts import by_any_front_end
from tgfx.choice import Choice
from tgfx.errors import GranularityError, NothingToGateError, StrictError
from tgfx.gates import GateSpec
from tgfx.instruments import observed
from tgfx.ir.draws import same_draws
from tgfx.ir.refusal import Refusal
from tgfx.ir.rng import untouched_rng
from tgfx.ir.source import Source
from tgfx.mirror import mirror
from tgfx.passes.insert_gates import BANK
from tgfx.passes.weight_cost import build_weight_cost
from tgfx.passes.weight_gates import insert_weight_gates
from tgfx.passes.weight_uses import WeightUses, find_weights, first_names
from tgfx.transforming import check_capture
from tgfx.weight.gate import WeightBank, WeightGate
from tgfx.weight.gated import WeightFacts, WeightGatedModule


def transform_weights(
    model: nn.Module, example_inputs: Any, *, gate: GateSpec, ignored: set[str], strict: bool
) -> WeightGatedModule:
    """What `tgfx.transform(model, granularity="weight")` does, its arguments checked."""
    _refuse_computed_weights(model)
    seed = torch.initial_seed()  # see tgfx/transforming.py
    with untouched_rng(), torch.no_grad():
        args, kwargs = example_inputs_for(model, example_inputs)
        mine = copy_model(model)
        modes = {name: module.training for name, module in mine.named_modules()}
        mine.eval()
        reference = prepare(mine, args, kwargs, rehearse=False)

        def understood(source: Source) -> tuple[Source, WeightUses]:
            observed("capture", source, source)
            with same_draws():
                uses = observed("weight_uses", find_weights(source), source)
            check_capture(source, reference)
            return source, uses

        source, uses = by_any_front_end(reference, capture, understood)
        kept = _kept(source, uses, ignored)
        if strict:
            _refuse_unknown(source, kept)
        names = [name for name, _ in source.module.named_parameters() if name not in kept]
        if not names:
            raise _nothing_to_gate(model, uses, kept)
        cost = build_weight_cost(source.module, uses, names)
        graph = observed("insert_weight_gates", insert_weight_gates(source, set(names)), source)
        training = source.training
        training_graph = insert_weight_gates(training, set(names)) if training is not None else None
        root = mirror(source.module, {})
        root.add_module(BANK, _bank(source.module, names, gate, seed))
    for name, module in root.named_modules():
        module.training = modes.get(name, modes[""])
    facts = WeightFacts(source, uses, kept, cost, type(model).__name__, tuple(sorted(ignored)))
    return WeightGatedModule(root, graph, facts, training_graph)


def _refuse_computed_weights(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise GranularityError(
                "a weight that is computed by a parametrization has no entries of its own to gate",
                expected="plain weights",
                found=f"{name or 'the model'} with {', '.join(module.parametrizations)} parametrised",
                fix="torch.nn.utils.parametrize.remove_parametrizations first, or gate channels",
            )
        if isinstance(module, Choice):
            raise GranularityError(
                "a tgfx.Choice decides over whole layers, which does not mix with gates over single weights",
                expected="a model without a Choice",
                found=f"tgfx.Choice at {name or 'the model itself'}",
                fix="shrink the model with its choices first",
            )


def _kept(source: Source, uses: WeightUses, ignored: set[str]) -> dict[str, Refusal]:
    """Parameters that get no gate, and why; tied ones under the first of their names."""
    names: dict[str, list[str]] = {}
    for name, first in first_names(source.module).items():
        names.setdefault(first, []).append(name)
    kept: dict[str, Refusal] = {}
    for first, own in names.items():
        if any(name == one or name.startswith(one + ".") for name in own for one in ignored):
            kept[first] = Refusal("is ignored, as asked", first, "ignore")
        elif first not in uses.uses:
            kept[first] = Refusal("is not the weight of a convolution or fully-connected layer", first)
        elif first in uses.kept:
            kept[first] = uses.kept[first]
    return kept


def _refuse_unknown(source: Source, kept: dict[str, Refusal]) -> None:
    unknown = [*source.refusals, *(refusal for refusal in kept.values() if refusal.limit)]
    if unknown:
        raise StrictError(
            "strict=True, and weights would have to be kept",
            expected="a model of which every convolution and fully-connected layer can be reached",
            found="; ".join(dict.fromkeys(map(str, unknown[:5]))),
            fix="leave strict out: the rest of the model is gated all the same",
        )


def _nothing_to_gate(model: nn.Module, uses: WeightUses, kept: dict[str, Refusal]) -> NothingToGateError:
    reasons = dict.fromkeys(str(kept[name]) for name in uses.uses if name in kept)
    return NothingToGateError(
        f"{type(model).__name__} has no weights that can be gated",
        expected="at least one convolution or fully-connected layer",
        found="; ".join(list(reasons)[:3]) or "none",
    )


def _bank(module: nn.Module, names: list[str], spec: GateSpec, seed: int) -> WeightBank:
    """Gates lie where their weights lie; in double precision only for weights that are."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(module.named_parameters())
    gates = {}
    for name in names:
        weight = parameters[name]
        gate = WeightGate(weight, spec, generator)
        gates[name] = gate.to(weight.device, dtype=weight.dtype if weight.dtype == torch.float64 else None)
    return WeightBank(gates)
