"""A compacted model against the uncompacted one whose dead gates are held at zero: step by step the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tgfx
from tests.support.promises import assert_close
from tgfx.bank import GONE
from tgfx.passes.survivors import Survivors

SAME = 1e-10  # float64, of the largest entry
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "rmsprop centered": lambda p: torch.optim.RMSprop(p, lr=1e-4, centered=True, momentum=0.5),
}


class Trainer:
    """A gated model, its optimizer, and gates that are held closed."""

    def __init__(self, gated: tgfx.GatedModule, make: Make) -> None:
        self.gated = gated.train()
        self.optimizer = make(list(gated.parameters()))
        self.held: dict[str, Tensor] = {}

    def copy(self) -> Trainer:
        """The same again, state and all."""
        twin = copy.deepcopy(self)
        assert twin.optimizer.param_groups[0]["params"][0] is next(twin.gated.parameters())
        return twin

    def step(self, x: Any) -> Tensor:
        y = self.gated(x)
        wanted = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        # the library's own budget_loss is in float32
        loss = (y - wanted).square().mean() + (0.5 - self.gated.ratio("flops")) ** 2
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.hold()
        return loss  # with its graph: a loop variable keeps it alive too

    def draws_random_numbers(self) -> bool:
        layers = [self.gated.get_submodule(str(n.target)) for n in self.gated.graph.nodes if n.op == "call_module"]
        called = [str(n.target) for n in self.gated.graph.nodes if n.op == "call_function"]
        return any("Dropout" in type(layer).__name__ for layer in layers) or any("dropout" in name for name in called)

    def hold(self) -> None:
        """Gates that the other model has not got any more are fixed at zero."""
        for name, gone in self.held.items():
            with torch.no_grad():
                self.gated.gates[name].weight[gone] = -1.0

    def hold_what_is_gone_in(self, other: tgfx.GatedModule) -> None:
        record = other.bank.recorded()
        for group in self.gated.facts.coupling.groups:
            self.held[group.name] = torch.from_numpy(record[group.start : group.start + group.size] == GONE)


def close_alike(small: Trainer, large: Trainer, keep: Callable[[str, int], Tensor], *, keep_one: bool = True) -> None:
    """Close all gates but `keep(group, size)` in both, at a weight where a closed gate is exactly zero."""
    for group in large.gated.facts.coupling.groups:
        mask = keep(group.name, group.size)
        if group.name not in small.gated.gates:
            continue
        left = torch.from_numpy(small.gated.gate_slots(group.name) - group.start)
        opened = small.gated.gates[group.name].is_open()
        if keep_one and not (mask[left] & opened).any():
            mask[left[opened.nonzero()[0]]] = True
        if keep_one and opened.sum() > 1 and mask[left][opened].all():
            mask[left[opened.nonzero()[-1]]] = False  # a round that closes nothing would show nothing
        for trainer, places in ((small, slice(None)), (large, left)):
            weight = trainer.gated.gates[group.name].weight
            with torch.no_grad():
                weight[places] = torch.where(mask[left], weight[places], -1.0)


def start(model: nn.Module, example: Any, make: Make) -> Trainer:
    """Gates at random weights: at round ones TG would stand exactly on a jump."""
    gated = tgfx.transform(model, example)
    generator = torch.Generator().manual_seed(5)
    for gate in gated.gates.values():
        with torch.no_grad():
            gate.weight.copy_(0.3 + 0.5 * torch.rand(gate.weight.shape, generator=generator, dtype=gate.weight.dtype))
    return Trainer(gated, make)


def random_keep(density: float, seed: int) -> Callable[[str, int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda name, size: torch.rand(size, generator=generator) < density


def same_weights(small: tgfx.GatedModule, large: tgfx.GatedModule) -> None:
    """All that is left in the small one equals its part of the large one."""
    facts = large.facts
    survivors = Survivors(facts.channels, facts.coupling, small.bank.recorded() != GONE)
    theirs = {
        **dict(large.named_parameters(remove_duplicate=False)),
        **dict(large.named_buffers(remove_duplicate=False)),
    }
    ours = {**dict(small.named_parameters(remove_duplicate=False)), **dict(small.named_buffers(remove_duplicate=False))}
    for name, ids in [*facts.channels.params.items(), *facts.channels.buffers.items()]:
        if name not in ours:
            continue
        part = theirs[name].detach()
        for axis, kept in enumerate(survivors.kept(ids)):
            if kept is not None:
                part = part.index_select(axis, torch.from_numpy(kept))
        assert_close(ours[name].detach().double(), part.double(), 1e-9, name)


def same_state(small: Trainer, large: Trainer) -> None:
    """Gates and the optimizer's state, as far as they are left."""
    parts = {}
    for name, gate in small.gated.gates.items():
        group = small.gated.groups[name]
        left = torch.from_numpy(small.gated.gate_slots(name) - group.start)
        parts[name] = (gate.weight, large.gated.gates[name].weight, left)
    for name, (ours, theirs, left) in parts.items():
        assert_close(ours.detach(), theirs.detach()[left], 1e-9, f"gates of {name}")
        own, other = small.optimizer.state[ours], large.optimizer.state[theirs]
        assert own.keys() == other.keys() and own
        for key, value in own.items():
            if isinstance(value, Tensor):
                expected = other[key][left] if value.ndim else other[key]
                assert_close(value, expected, 1e-9, f"{key} of {name}")
    for parameter, state in small.optimizer.state.items():
        shapes = {tuple(v.shape) for v in state.values() if isinstance(v, Tensor) and v.ndim}
        assert shapes == {tuple(parameter.shape)}, shapes


def same_price(small: tgfx.GatedModule, large: tgfx.GatedModule) -> None:
    for kind in ("flops", "flops_all", "params", "channels"):
        assert small.total(kind) == large.total(kind)
        # in train mode a closed gate is not exactly 0 or an open one 1: count open ones
        assert float(_eval_cost(small, kind)) == float(_eval_cost(large, kind)), kind
    assert np.array_equal(small.open_slots(), large.open_slots())


def _eval_cost(gated: tgfx.GatedModule, kind: str) -> Tensor:
    training = gated.training
    gated.eval()
    cost = gated.cost(kind).detach()
    gated.train(training)
    return cost
