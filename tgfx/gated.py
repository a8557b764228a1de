"""The gated model: an fx.GraphModule with gates in it, a price, and answers to "why"."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _forward_from_src

from tgfx.bank import GateBank
from tgfx.errors import BudgetError, InputError
from tgfx.gates import TrainableGate
from tgfx.ir.facts import ChannelMap
from tgfx.ir.graph_state import pack_graph, unpack_graph
from tgfx.ir.lazy_module import LazyGraphModule
from tgfx.ir.source import Source
from tgfx.passes.cost import KINDS, CostModel
from tgfx.passes.couple import Coupling, Groups
from tgfx.passes.dead_branches import dead_branches, parameters_of
from tgfx.passes.insert_gates import BANK, INDEX
from tgfx.passes.place import Placement
from tgfx.passes.survivors import Survivors
from tgfx.report import Report, explain


@dataclass
class Facts:
    """Everything the passes found out, kept with the gated model for shrink, cost and explanations."""

    source: Source
    channels: ChannelMap
    coupling: Coupling
    placement: Placement
    cost: CostModel
    model_name: str
    ignored: tuple[str, ...] = ()


class GatedModule(LazyGraphModule):
    """Runs like the model it was made from; its gates are trained along and decide what `tgfx.shrink` cuts."""

    def __init__(self, root: nn.Module, graph: fx.Graph, facts: Facts, training_graph: fx.Graph | None = None) -> None:
        super().__init__(root, graph, class_name="GatedModule")
        for table in (
            "_modules",
            "_parameters",
            "_buffers",
        ):  # whole layers in their order, not only what the graph names
            getattr(self, table).clear()
            getattr(self, table).update(getattr(root, table))
        self._non_persistent_buffers_set = set(root._non_persistent_buffers_set)
        self.training = root.training
        self.facts = facts
        self.training_graph = training_graph

    def _write_code(self) -> None:
        written = "forward" in type(self).__dict__
        super()._write_code()
        if not written and self.training_graph is not None:
            self._switch_by_mode(self.training_graph)

    def _switch_by_mode(self, training_graph: fx.Graph) -> None:
        """In train mode run the train-mode graph, over the same layers."""
        code = training_graph.python_code("self")
        in_training = _forward_from_src(code.src, code.globals)
        in_eval = type(self).forward

        def forward(module: GatedModule, *args: Any, **kwargs: Any) -> Any:
            return (in_training if module.training else in_eval)(module, *args, **kwargs)

        type(self).forward = forward  # the class is this instance's own (fx makes one per GraphModule)

    # -- gates and groups ------------------------------------------------------------------------------------

    @property
    def bank(self) -> GateBank:
        return self._modules[BANK]  # type: ignore[return-value]

    @property
    def gates(self) -> dict[str, TrainableGate]:
        """Group name -> its gates."""
        return self.bank.gates()

    @property
    def groups(self) -> Groups:
        """Every Group, also by name; the frozen ones (with their reason) after those that have gates."""
        return Groups((*self.facts.coupling.groups, *self.facts.coupling.frozen))

    def open_slots(self) -> np.ndarray:
        return self.bank.is_open().cpu().numpy()

    def explain(self, name: str) -> str:
        """Readable text: which group a layer or group belongs to, tied to whom by what, prunable or why not."""
        return explain(self, name)

    def report(self) -> Report:
        """A table of all groups; print it."""
        return Report(self)

    # -- price ----------------------------------------------------------------------------------------------

    def cost(self, kind: str = "flops") -> Tensor:
        """What the model costs with the gates as they are (0-dim, differentiable).

        flops: 2 * multiply-adds per sample in convolutions and fully-connected layers (ATen convolution, mm, addmm),
        as torch's FlopCounterMode counts them; flops_all adds attention matmuls; params; channels.
        """
        return self.facts.cost.evaluate(_known_kind(kind), self.bank(), self._gone())

    def _gone(self) -> frozenset[str]:
        """Nodes and parameters of branches that disappear as a whole with the gates as they are."""
        opened = self.open_slots()
        facts = self.facts
        if all(opened[g.start : g.start + g.size].any() for g in facts.coupling.groups):
            return frozenset()
        survivors = Survivors(facts.channels, facts.coupling, opened)
        dead = dead_branches(facts.source, facts.channels, survivors)
        return dead.nodes | parameters_of(facts.source, dead.nodes)

    def total(self, kind: str = "flops") -> float:
        """The cost with all gates open."""
        return self.facts.cost.total(_known_kind(kind))

    def ratio(self, kind: str = "flops") -> Tensor:
        return self.cost(kind) / self.total(kind)

    def cost_expr(self, kind: str = "flops") -> sympy.Expr:
        """The cost as a polynomial in n[group], the number of open gates of each group."""
        return self.facts.cost.expression(_known_kind(kind))

    def marginal(self, kind: str = "flops") -> dict[str, Tensor]:
        """Per gate: how much the cost changes with each of its channels."""
        bank = self.bank().detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.facts.cost.evaluate(_known_kind(kind), bank), bank)
        return {g.name: gradient[g.start : g.start + g.size] for g in self.facts.coupling.groups}

    def cheapest(self, kind: str = "flops") -> float:
        """The smallest ratio that can be reached: one channel left in every group."""
        bank = torch.zeros(self.facts.coupling.slots + 1, dtype=torch.float64)
        bank[-1] = 1
        for group in self.facts.coupling.groups:
            bank[group.start] = 1
        return float(self.facts.cost.evaluate(_known_kind(kind), bank)) / self.total(kind)

    def budget_loss(self, *, weight: float = 1.0, **budgets: float) -> Tensor:
        """weight * sum over kinds of (rho - C / C_tot)^2 (paper eq. 8)."""
        if not budgets:
            raise BudgetError("no budget given", expected="e.g. budget_loss(flops=0.5)", found="nothing")
        loss = torch.zeros((), device=self.bank.is_open().device)
        for kind, rho in budgets.items():
            _known_kind(kind)
            if not isinstance(rho, int | float) or isinstance(rho, bool) or not 0 < rho <= 1:
                raise BudgetError(
                    f"budget {kind}={rho!r} cannot be met",
                    expected="a share of the whole, more than 0 and at most 1",
                    found=repr(rho),
                    fix=f"budget_loss({kind}=0.5) keeps half",
                )
            loss = loss + (rho - self.ratio(kind).float()) ** 2
        return weight * loss

    # -- copies ---------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        return _from_state, (self._state(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> GatedModule:
        twin = _from_state(copy.deepcopy(self._state(), memo))
        memo[id(self)] = twin
        return twin

    def _state(self) -> dict[str, Any]:
        source = self.facts.source
        holder = nn.Module()
        for key in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training"):
            holder.__dict__[key] = self.__dict__[key]
        extra = {k: v for k, v in self.__dict__.items() if k not in holder.__dict__ and k not in _OWN}
        return {
            "root": holder,
            "graph": pack_graph(self.graph),
            "source_root": _holder(source.module),
            "source_graph": pack_graph(source.module.graph),
            "training_graph": pack_graph(self.training_graph) if self.training_graph is not None else None,
            "source": replace(source, module=None, training=None),  # type: ignore[arg-type]
            "facts": replace(self.facts, source=None),  # type: ignore[arg-type]
            "extra": {k: v for k, v in extra.items() if not k.startswith("_")},
        }


_OWN = {"facts", "training_graph", "_graph", "_code"}


def _holder(module: nn.Module) -> nn.Module:
    holder = nn.Module()
    for key in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training"):
        holder.__dict__[key] = module.__dict__[key]
    return holder


def _from_state(state: dict[str, Any]) -> GatedModule:
    source_module = LazyGraphModule(state["source_root"], unpack_graph(state["source_graph"]))
    for table in ("_modules", "_parameters", "_buffers"):
        source_module.__dict__[table].update(state["source_root"].__dict__[table])
    source_module._non_persistent_buffers_set = set(state["source_root"]._non_persistent_buffers_set)
    source_module.training = state["source_root"].training
    source = replace(state["source"], module=source_module)
    packed = state["training_graph"]
    training_graph = unpack_graph(packed) if packed is not None else None
    facts = replace(state["facts"], source=source)
    gated = GatedModule(state["root"], unpack_graph(state["graph"]), facts, training_graph)
    for key, value in state["extra"].items():
        if not hasattr(gated, key):
            setattr(gated, key, value)
    return gated


def _known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise BudgetError(f"unknown cost kind {kind!r}", expected=", ".join(KINDS), found=repr(kind))
    return kind


__all__ = ["BANK", "INDEX", "Facts", "GatedModule", "InputError"]
