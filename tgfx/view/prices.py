"""What every node costs: FLOPs and parameters, with all gates open and with the gates as they are."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import fx

from tgfx.passes.cost import CostModel
from tgfx.passes.weight_cost import WeightCost
from tgfx.view.subject import Subject


def prices(subject: Subject, opened: np.ndarray | None, gone: frozenset[str]) -> dict[str, list[float]]:
    """kind -> a number per node: "flops", "params", and "uncounted" (FLOPs outside of the budget: attention).

    opened: which slots are open, None for all.
    """
    if isinstance(subject.cost, CostModel):
        by_origin = _by_origin(subject, subject.cost, opened, gone)
    else:
        by_origin = _by_weight(subject, subject.cost, opened is None)
    flops, params, extra = by_origin["flops"], by_origin["params"], by_origin["flops_all"]
    of_nodes = parameter_homes(subject)
    found: dict[str, list[float]] = {"flops": [], "params": [], "uncounted": []}
    for node in subject.nodes:
        own = sum(params.get(name, 0.0) for name in of_nodes[node.name])
        counted = flops.get(node.name, 0.0) + sum(flops.get(name, 0.0) for name in of_nodes[node.name])
        whole = extra.get(node.name, 0.0) + sum(extra.get(name, 0.0) for name in of_nodes[node.name])
        found["flops"].append(counted)
        found["params"].append(own)
        found["uncounted"].append(whole - counted)
    return found


def parameter_homes(subject: Subject) -> dict[str, list[str]]:
    """Node -> parameters that are counted there: the first call of the layer, or the look-up of the parameter."""
    homes: dict[str, list[str]] = defaultdict(list)
    calls = calls_of_parameters(subject)
    for name, _ in subject.source.module.named_parameters():
        if calls.get(name):
            homes[calls[name][0].name].append(name)
    return homes


def calls_of_parameters(subject: Subject) -> dict[str, list[fx.Node]]:
    """Parameter (under each of its names) -> nodes that use it: calls of its layer, and look-ups of it."""
    module = subject.source.module
    calls: dict[str, list[fx.Node]] = defaultdict(list)
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    aliases = {name: own for own in names.values() for name in own}
    for node in subject.nodes:
        if node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            inside = [f"{node.target}.{name}" for name, _ in layer.named_parameters()]
        elif node.op == "get_attr":
            inside = [str(node.target)]
        else:
            continue
        for name in dict.fromkeys(alias for own in inside for alias in aliases.get(own, [own])):
            calls[name].append(node)
    return calls


def _by_origin(
    subject: Subject, cost: CostModel, opened: np.ndarray | None, gone: frozenset[str]
) -> dict[str, dict[str, float]]:
    slots = cost.coupling.slots
    now = np.ones(slots, dtype=bool) if opened is None else opened
    with torch.no_grad():
        return {kind: cost.by_origin(kind, subject.bank(now), gone) for kind in ("flops", "flops_all", "params")}


def _by_weight(subject: Subject, cost: WeightCost, whole: bool) -> dict[str, dict[str, float]]:
    """Where single weights are gated, the price of a weight stands for the layer that uses it."""
    assert subject.gated is not None
    gates = subject.gated.gates
    found: dict[str, dict[str, float]] = {}
    for kind, factors in cost.factors.items():
        own = {
            name: cost.whole(kind, name) if whole else float((factor * gates[name].is_open().cpu()).sum())
            for name, factor in factors.items()
        }
        if kind == "params":
            own.update({n: p.numel() for n, p in subject.source.module.named_parameters() if n not in factors})
        found[kind] = own
    return found
