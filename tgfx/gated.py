"""The gated model: an fx.GraphModule with gates in it, a price, and answers to "why"."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import networkx as nx
import numpy as np
import sympy
import torch
from torch import Tensor, fx, nn

from tgfx.bank import GONE, Gate, GateBank
from tgfx.budget import Budget
from tgfx.capture.parametrized import parametrizations_at_rest
from tgfx.gated_copy import from_state, state_of
from tgfx.ir.facts import ChannelMap
from tgfx.ir.graph_function import function_of
from tgfx.ir.lazy_module import LazyGraphModule
from tgfx.ir.source import Source
from tgfx.ir.switches import Switches
from tgfx.passes.cost import CostModel
from tgfx.passes.couple import Coupling, Groups
from tgfx.passes.insert_gates import BANK
from tgfx.passes.place import Placement
from tgfx.passes.survivors import Survivors
from tgfx.pricing import cheapest_cost, gone_at, kinds_of, known_kind, marginal_costs
from tgfx.recomputing import Recomputed, checked_options, may_recompute
from tgfx.report import Report, explain
from tgfx.training.asking import ask_controller, ask_descent, check_weight, refuse_rounded_descent
from tgfx.training.controller import BudgetController
from tgfx.training.descent import Descent
from tgfx.training.feasible import check_feasible
from tgfx.training.watcher import StepWatcher

if TYPE_CHECKING:
    from tgfx.latency.table import LatencyTable

Controller = TypeVar("Controller")


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
    granularity: frozenset[str] = frozenset({"channel"})
    switches: Switches = field(default_factory=Switches)


class GatedModule(LazyGraphModule):
    """Runs like the model it was made from; its gates are trained along and decide what `tgfx.shrink` cuts."""

    facts: Facts

    def __init__(self, root: nn.Module, graph: fx.Graph, facts: Facts, training_graph: fx.Graph | None = None) -> None:
        with parametrizations_at_rest(root):  # fx looks at every tensor that the graph names
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
        if not written and self.is_gradient_checkpointing:
            self._recompute_in_segments()

    def _switch_by_mode(self, training_graph: fx.Graph) -> None:
        """In train mode run the train-mode graph, over the same layers."""
        in_training, in_eval = function_of(training_graph), type(self).forward

        @functools.wraps(in_eval)
        def forward(module: GatedModule, *args: Any, **kwargs: Any) -> Any:
            return (in_training if module.training else in_eval)(module, *args, **kwargs)

        type(self).forward = forward  # the class is this instance's own (fx makes one per GraphModule)

    # -- memory ---------------------------------------------------------------------------------------------

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Train in less memory: segments of the graph are computed again in backward (torch.utils.checkpoint).

        Losses, gradients and statistics stay the same; a step takes about a third longer. Checkpoints inside of the
        model that was transformed are not kept, this takes their place. The arguments are those that transformers'
        Trainer hands over; of the first, use_reentrant must be False.
        """
        options = checked_options(gradient_checkpointing_kwargs, every_n_layers, offload)
        self.gradient_checkpointing = {"preserve_rng_state": True, **options}
        self.recompile()

    def gradient_checkpointing_disable(self) -> None:
        """Keep all that backward needs, as at first."""
        self.__dict__.pop("gradient_checkpointing", None)
        self.recompile()

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether segments are computed again in backward."""
        return bool(self.__dict__.get("gradient_checkpointing"))

    def _recompute_in_segments(self) -> None:
        options = self.__dict__["gradient_checkpointing"]
        plain = type(self).forward
        in_eval = Recomputed(self, self.graph, options)
        in_training = in_eval if self.training_graph is None else Recomputed(self, self.training_graph, options)

        @functools.wraps(plain)
        def forward(module: GatedModule, *args: Any, **kwargs: Any) -> Any:
            if not may_recompute():
                return plain(module, *args, **kwargs)
            return (in_training if module.training else in_eval)(module, *args, **kwargs)

        type(self).forward = forward

    # -- gates and groups ------------------------------------------------------------------------------------

    @property
    def bank(self) -> GateBank:
        return self._modules[BANK]  # type: ignore[return-value]

    @property
    def gates(self) -> dict[str, Gate]:
        """Group name -> its gates."""
        return self.bank.gates()

    @property
    def groups(self) -> Groups:
        """Every Group, also by name; the frozen ones (with their reason) after those that have gates."""
        return Groups((*self.facts.coupling.groups, *self.facts.coupling.frozen))

    def open_slots(self) -> np.ndarray:
        """Which slots are open, counted as in the model that was transformed; removed ones are not."""
        return self.bank.is_open().cpu().numpy()

    def gate_slots(self, name: str) -> np.ndarray:
        """The slots that the gates of a group stand for: all of the group's, or what compact_ left of them."""
        group = self.groups[name]
        record = self.bank.recorded()
        own = np.arange(group.start, group.start + group.size)
        return own if record is None else own[record[own] != GONE]

    def explain(self, name: str) -> str:
        """Readable text: which group a layer or group belongs to, tied to whom by what, prunable or why not."""
        return explain(self, name)

    def report(self) -> Report:
        """A table of all groups; print it."""
        return Report(self)

    # -- pictures -------------------------------------------------------------------------------------------
    # tgfx.view looks at gated models and is imported when someone wants to look.

    def to_dot(self) -> str:
        """The graph for Graphviz, in the colours of its groups; see tgfx.to_dot."""
        from tgfx.view import to_dot

        return to_dot(self)

    def to_networkx(self) -> nx.DiGraph:
        """The graph for networkx, with shapes, prices and groups; see tgfx.to_networkx."""
        from tgfx.view import to_networkx

        return to_networkx(self)

    def _repr_html_(self) -> str:
        """In a notebook: the page of tgfx.visualize."""
        from tgfx.view.data import page_data
        from tgfx.view.page import notebook

        return notebook(page_data(self))

    # -- price ----------------------------------------------------------------------------------------------

    def cost(self, kind: str = "flops") -> Tensor:
        """What the model costs with the gates as they are (0-dim, differentiable).

        flops: 2 * multiply-adds per sample in convolutions and fully-connected layers (ATen convolution, mm, addmm),
        as torch's FlopCounterMode counts them; flops_all adds attention matmuls; params; channels; heads: open query
        heads of all attentions (where heads are gated); latency: ms by the table of `use_latency`, whose gradient
        is a slope along fast channel counts.
        """
        return self.facts.cost.evaluate(self._known_kind(kind), self.bank(), self._gone())

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of cost that this model has."""
        return kinds_of(self)

    def use_latency(self, table: LatencyTable) -> GatedModule:
        """Price layers by a table of `tgfx.latency.measure`: "latency" is then a kind of cost like "flops"."""
        from tgfx.latency.attaching import attach  # which needs gated models itself

        return attach(self, table)

    def _known_kind(self, kind: str) -> str:
        return known_kind(self, kind)

    def _gone(self) -> frozenset[str]:
        """Nodes and parameters of branches that disappear as a whole with the gates as they are."""
        return gone_at(self, self.open_slots())

    def total(self, kind: str = "flops") -> float:
        """The cost with all gates open in the model that was transformed (before any compact_): of a choice, all."""
        return self.facts.cost.total(self._known_kind(kind))

    def ratio(self, kind: str = "flops") -> Tensor:
        return self.cost(kind) / self.total(kind)

    def cost_expr(self, kind: str = "flops") -> sympy.Expr:
        """The cost as a polynomial in n[group], the number of open gates of each group (choice[i]: one alternative).

        Of the latency, a sum of functions ms[layer](input channels, output channels).
        """
        return self.facts.cost.expression(self._known_kind(kind))

    def marginal(self, kind: str = "flops") -> dict[str, Tensor]:
        """Per gate: how much the cost changes with each of its channels."""
        return marginal_costs(self, self._known_kind(kind))

    def cheapest(self, kind: str = "flops") -> float:
        """The smallest ratio that can be reached: one channel per group, no branch, the cheapest alternatives.

        Gates whose weights ask for no gradient are held, and count as they are.
        """
        return cheapest_cost(self, self._known_kind(kind)) / self.total(kind)

    def budget_loss(
        self,
        *,
        weight: float | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        round_to: int | None = None,
        **budgets: float,
    ) -> Tensor:
        """Add this to your loss, once a step and with all kinds: sum over kinds of (rho - C / C_tot)^2 (paper eq. 7).

        With `weight`, it is the paper's rule: weight * eq. 7, and the optimizer moves the gates. Without, a controller
        moves them after each step of the optimizer that holds them (one holds all), to the budget within `steps`
        (default 1,000) optimizer steps and exactly there from then on; the value is then for the log. The shares may
        follow a schedule of your own: the controller goes along. Another budget after `steps` steps begins anew.

        batch_size: samples in an optimizer step (of this process), which the controller weighs gradients by. It counts
        them itself, but cannot see into torch.compile: there it assumes 32 unless you say it.

        round_to: groups close in steps, so that their sizes are multiples of it all the time (or whole).

        Where the gates are in eval mode, or without gradients, it is a number and starts nothing.
        """
        budget = Budget.of(budgets)
        factor = 1.0 if weight is None else check_weight(weight)
        if not (self.bank.training and torch.is_grad_enabled()):
            return factor * self._distance(budget)
        if weight is not None:
            refuse_rounded_descent(round_to)
            ask_descent(self, budget)
            return factor * self._distance(budget)
        controller = ask_controller(self, budget, steps, batch_size, round_to)
        distance = self._distance(budget)
        return self._for_the_log(distance) if controller.driving else distance

    def _check_feasible(self, budget: Budget) -> None:
        """Refuse a budget that no assignment of the gates can meet."""
        check_feasible(self, budget)

    def _for_the_log(self, distance: Tensor) -> Tensor:
        """Without a gradient: the controller reads that of the task, and adds to choices what is theirs."""
        return distance.detach() + 0 * distance  # but seen by all gates, as DistributedDataParallel wants

    def _distance(self, budget: Budget) -> Tensor:
        """Equation 7."""
        bank = self.bank()
        loss = torch.zeros((), device=bank.device)
        gone = self._gone()
        for kind, rho in budget.items():
            cost = self.facts.cost.evaluate(self._known_kind(kind), bank, gone)
            loss = loss + (rho - cost.float() / self.total(kind)) ** 2
        return loss

    def _new_controller(self, budget: Budget, steps: int | None, round_to: int | None) -> StepWatcher:
        return BudgetController(self, budget, **({} if steps is None else {"steps": steps}), round_to=round_to)

    def attach(self, controller: Controller) -> Controller:
        """Let this controller move the gates from now on, and no other."""
        if self._watch is not controller:
            self._unwatched()
        self.__dict__["_controller"] = controller
        return controller

    def _unwatched(self) -> None:
        """Whoever sees the steps stops."""
        if self._watch is not None:
            self._watch.close()
        self.__dict__["_controller"] = None

    @property
    def _watch(self) -> Any:
        """What sees the steps since a budget was asked for: a controller, or a Descent, which moves nothing."""
        return self.__dict__.get("_controller")

    @property
    def controller(self) -> Any:
        """What moves the gates, if `budget_loss` without a weight has been asked for, or a callback is at work."""
        return None if isinstance(self._watch, Descent) else self._watch

    # -- copies ---------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        return from_state, (state_of(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> GatedModule:
        twin = from_state(copy.deepcopy(state_of(self), memo))
        memo[id(self)] = twin
        return twin


def present(gated: GatedModule) -> Survivors | None:
    """What compact_ left of a gated model; None if it is whole."""
    record = gated.bank.recorded()
    if record is None or (record != GONE).all():
        return None
    return Survivors(gated.facts.channels, gated.facts.coupling, record != GONE)


__all__ = ["Facts", "GatedModule", "present"]
