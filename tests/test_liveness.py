"""When a node is needed: formulas over switches, and the in-place changes that a value has seen."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, fx, nn

import tgfx
from tgfx.ir.source import Source
from tgfx.ir.switches import Edge, Switches
from tgfx.passes.demand import Demand
from tgfx.passes.liveness import ALWAYS, either, node_conditions


def clauses(*products: tuple[int, ...]) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(product) for product in products)


def test_either_says_nothing_twice() -> None:
    plain = Switches()
    assert either(clauses((0,)), clauses((0, 1)), plain) == clauses((0,))
    assert either(clauses((0,)), clauses((1,)), plain) == clauses((0,), (1,))
    assert either(clauses((0,)), ALWAYS, plain) == ALWAYS
    assert either(frozenset(), clauses((3,)), plain) == clauses((3,))
    choice = Switches(one_of=((0, 1),))
    assert either(clauses((0,)), clauses((1,)), choice) == ALWAYS
    assert either(clauses((0, 5)), clauses((1, 5)), choice) == clauses((5,))


def test_conditions_are_reachability() -> None:
    """Against a walk back from the output, at every assignment."""

    def forward(x: Tensor) -> Tensor:
        a = torch.relu(x)
        b = torch.tanh(a)
        c = torch.add(b, torch.sin(b))  # edges 0 and 1 switched
        d = torch.cos(a)
        return torch.add(torch.add(a, c), d)  # c and d switched

    module = fx.symbolic_trace(forward)
    switches = Switches({Edge("add", 0): 0, Edge("add", 1): 1, Edge("add_1", 1): 2, Edge("add_2", 1): 3})
    found = node_conditions(Source(module, (torch.ones(2),), {}, "fx"), switches)
    for opened in itertools.product((False, True), repeat=4):
        reached, stack = set(), [next(n for n in module.graph.nodes if n.op == "output")]
        while stack:
            node = stack.pop()
            reached.add(node.name)
            for position, arg in enumerate(node.args):
                slot = switches.edges.get(Edge(node.name, position))
                if isinstance(arg, fx.Node) and (slot is None or opened[slot]):
                    stack.append(arg)
        for node in module.graph.nodes:
            if node.op != "placeholder":
                needed = any(all(opened[s] for s in product) for product in found[node.name])
                assert needed == (node.name in reached), (node.name, opened)


def test_changes_are_needed_by_who_looks_later() -> None:
    def forward(x: Tensor) -> Tensor:
        buffer = torch.zeros_like(x)
        early = torch.sin(buffer)
        view = buffer[:, :1]
        view.add_(1)
        late = torch.cos(buffer)
        return early + late

    module = fx.symbolic_trace(forward)
    demand = Demand(module)
    nodes = {node.name: node for node in module.graph.nodes}
    assert nodes["add_"] in set(demand.inputs(nodes["cos"]))
    assert nodes["add_"] not in set(demand.inputs(nodes["sin"]))
    assert nodes["add_"] not in demand.roots
    assert demand.is_written_after(nodes["zeros_like"], nodes["sin"])
    assert not demand.is_written_after(nodes["zeros_like"], nodes["cos"])


class Stream(nn.Module):
    """The identity is written into, by the branch's first layer or after the sum."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.stem, self.f, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.where == "branch":  # the identity sees it too
            return self.out(x + self.f(torch.relu_(x)))
        y = x + self.f(x)
        if self.where == "sum":  # x must not see it
            return self.out(y.relu_() + torch.sin(x))
        x.relu_()  # y must not see it
        return self.out(y + torch.sin(x))


def test_no_write_is_lost_or_spread() -> None:
    for where in ("branch", "sum", "identity"):
        torch.manual_seed(0)
        x = torch.randn(5, 4).double()
        gated = tgfx.transform(Stream(where).double(), x, granularity="layer").eval()
        inner = next(group for group in gated.groups if group.kind == "layer")
        gated.gates[inner.name].set_open_(torch.tensor([False]))
        compact = tgfx.shrink(gated).eval()
        torch.testing.assert_close(compact(x), gated(x), rtol=1e-12, atol=1e-12)
        assert float(gated.cost("params")) == sum(p.numel() for p in compact.parameters())
