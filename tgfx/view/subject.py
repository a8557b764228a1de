"""What is shown: a gated model, or the analysis of one in which nothing can be gated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from tgfx.capture import capture, copy_model, example_inputs_for, prepare
from tgfx.capture.attempts import by_any_front_end
from tgfx.errors import AlreadyGatedError, InputError, NothingToGateError
from tgfx.gated import GatedModule
from tgfx.ir.facts import ChannelMap
from tgfx.ir.rng import untouched_rng
from tgfx.ir.source import Source
from tgfx.passes.cost import CostModel, build_cost
from tgfx.passes.couple import Coupling, Group, couple
from tgfx.passes.dead_branches import dead_branches, parameters_of
from tgfx.passes.survivors import Survivors
from tgfx.passes.weight_cost import WeightCost
from tgfx.transforming import analysed, transform
from tgfx.weight.gated import WeightGatedModule


@dataclass
class Subject:
    """A captured model with everything that is known about it.

    gated: None where no channel can go; channels and coupling: None where single weights are gated.
    """

    name: str
    source: Source
    gated: GatedModule | None
    channels: ChannelMap | None
    coupling: Coupling | None
    cost: CostModel | WeightCost

    @property
    def graph(self) -> fx.Graph:
        return self.source.module.graph

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return list(self.graph.nodes)

    @cached_property
    def groups(self) -> list[Group]:
        """Those with gates first."""
        if self.gated is not None:
            return list(self.gated.groups)
        return [] if self.coupling is None else [*self.coupling.groups, *self.coupling.frozen]

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return self.gated.kinds if self.gated is not None else ("flops", "flops_all", "params", "channels")

    # -- the gates as they are now ----------------------------------------------------------------------------

    def open_slots(self) -> np.ndarray:
        """Of a model whose channels are gated."""
        if self.gated is not None:
            return self.gated.open_slots()
        return np.ones(0 if self.coupling is None else self.coupling.slots, dtype=bool)

    def bank(self, opened: np.ndarray) -> Tensor:
        """The values of all gates at exactly 0 or 1, and the constant one."""
        return torch.from_numpy(np.append(opened, True)).double()

    def gone(self, opened: np.ndarray) -> frozenset[str]:
        """Nodes and parameters that closed branches, and groups without an open gate, take along."""
        if self.gated is None or self.channels is None or self.coupling is None:
            return frozenset()
        closed = self.gated.facts.switches.closed(opened)
        empty = [g for g in self.coupling.groups if not g.can_be_empty and not opened[g.start : g.start + g.size].any()]
        if not closed and not empty:
            return frozenset()
        dead = dead_branches(self.source, self.channels, Survivors(self.channels, self.coupling, opened), closed)
        return dead.nodes | parameters_of(self.source, dead.nodes)

    def survivors(self, opened: np.ndarray) -> Survivors | None:
        if self.channels is None or self.coupling is None:
            return None
        return Survivors(self.channels, self.coupling, opened)


def subject_of(model: nn.Module, example_inputs: Any = None) -> Subject:
    """A gated model as it is; any other is analysed first, on a copy."""
    if not isinstance(model, nn.Module):
        raise InputError("this cannot be shown", expected="a model, gated or not", found=type(model).__name__)
    if isinstance(model, WeightGatedModule):
        facts = model.facts
        return Subject(facts.model_name, facts.source, model, None, None, facts.cost)
    if isinstance(model, GatedModule):
        own = model.facts
        return Subject(own.model_name, own.source, model, own.channels, own.coupling, own.cost)
    if any(isinstance(part, GatedModule) for part in model.modules()):
        raise AlreadyGatedError(
            "the gated model is inside another one",
            expected="the gated model itself",
            found=type(model).__name__,
            fix="pass the part that tgfx.transform returned",
        )
    name = model._get_name() if isinstance(model, fx.GraphModule) else type(model).__name__
    try:
        shown = subject_of(transform(model, example_inputs))
    except NothingToGateError:
        shown = _without_gates(model, example_inputs)
    shown.name = name
    return shown


def _without_gates(model: nn.Module, example_inputs: Any) -> Subject:
    with untouched_rng(), torch.no_grad():
        args, kwargs = example_inputs_for(model, example_inputs)
        mine = copy_model(model).eval()
        reference = prepare(mine, args, kwargs)
        source, channels = by_any_front_end(reference, capture, lambda source: (source, analysed(source, reference)))
        coupling = couple(channels)
        sizes = {name: tuple(parameter.shape) for name, parameter in source.module.named_parameters()}
        cost = build_cost(channels, coupling, sizes)
    return Subject(type(model).__name__, source, None, channels, coupling, cost)
