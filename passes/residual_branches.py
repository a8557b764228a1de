"""Analysis: residual branches, which a model can do without one by one.

    y = x + f(x)                   f is a branch: without it y = x
    y = shortcut(x) + f(x)         f, the longer side: the shortcut brings x to the right shape
    y = x + attention(n) + mlp(n)  with n = norm(x): two branches
    y = word(ids) + position(i)    none: neither side goes on from what the other starts from

A branch is a summand whose way from the fork nobody else uses (it post-dominates that part of the graph) and that
does some work. The other summands must have the shape of the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import networkx as nx
from torch import fx

from tgfx.ir.facts import ChannelMap
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source, source_line
from tgfx.ir.switches import Branch, Edge, SwitchGroup
from tgfx.ops.naming import op_name
from tgfx.passes.demand import Demand
from tgfx.passes.liveness import tensors_of

Taken = tuple[Iterable[Edge], Iterable[Edge]]
_ADDITIONS = ("add", "iadd")
# results that take a tensor's shape, not its content
_SHAPED_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")


def residual_branches(source: Source, channels: ChannelMap, taken: Taken = ((), ())) -> tuple[SwitchGroup, ...]:
    """One group of a single branch each, in the order of the graph.

    `taken`: operands that other gates switch already, in the graph for eval and in the one for train mode.
    """
    found = _Finder(source, channels, taken[0]).branches()
    if source.training is not None and channels.training is not None:
        found = _paired(found, _Finder(source.training, channels.training, taken[1]).branches())
    names = _names(found)
    return tuple(SwitchGroup(name, "layer", (branch,)) for name, branch in zip(names, found, strict=True))


def _paired(found: list[Branch], others: list[Branch]) -> list[Branch]:
    """Branches that the graphs of both modes have: told by the parameters they use, in the order met."""
    partners: dict[tuple[str, ...], list[Branch]] = {}
    for other in others:
        partners.setdefault(other.parameters, []).append(other)
    pairs = [(branch, partners.get(branch.parameters, [])) for branch in found]
    return [replace(branch, training_edges=rest.pop(0).edges) for branch, rest in pairs if rest]


@dataclass(frozen=True)
class _Summand:
    edge: Edge
    value: fx.Node


class _Finder:
    def __init__(self, source: Source, channels: ChannelMap, taken: Iterable[Edge]) -> None:
        self.root, self.channels = source.module, channels
        self.taken = {edge.node for edge in taken}
        self.order = {node: index for index, node in enumerate(self.root.graph.nodes)}
        self.working = {work.node for work in channels.work}
        self.names = {id(p): name for name, p in reversed(list(self.root.named_parameters()))}
        self.after = _Dominators(self._backwards(), "end")
        self.before = _Dominators(self._forwards(), "start")
        self.edges: dict[fx.Node, list[Edge]] = {}  # summand -> where it is added

    def branches(self) -> list[Branch]:
        sums = self._sums()
        for summand in (summand for summands in sums for summand in summands):
            self.edges.setdefault(summand.value, []).append(summand.edge)
        going = Counter(value for summands in sums for value in self._going(summands))
        found = sorted((v for v, edges in self.edges.items() if going[v] == len(edges)), key=self.order.__getitem__)
        return [self._branch(value, self.edges[value]) for value in found]

    def _branch(self, value: fx.Node, edges: list[Edge]) -> Branch:
        region = self.after.below(value)
        tensors = [t for n in sorted(region, key=self.order.__getitem__) for t in tensors_of(n, self.root)]
        own = dict.fromkeys(self.names[id(t)] for t in tensors if id(t) in self.names)
        addition = next(user for user in value.users if user.name == edges[0].node)
        place = Refusal("added", addition.name, op_name(addition, self.root), source_line(addition))
        return Branch(tuple(edges), tuple(own), place)

    # -- sums ------------------------------------------------------------------------------------------------

    def _sums(self) -> list[list[_Summand]]:
        """Summands of every sum; a sum that is only an operand of another one is part of it."""
        additions = {n for n in self.order if self._is_plain_addition(n)}
        inner = {n for n in additions if len(n.users) == 1 and _uses(n) == 1 and next(iter(n.users)) in additions}
        sums = []
        for outer in sorted(additions - inner, key=self.order.__getitem__):
            summands, stack = [], [outer]
            while stack:
                node = stack.pop()
                for position, arg in enumerate(node.args):
                    if arg in inner:
                        stack.append(arg)  # type: ignore[arg-type]
                    else:
                        summands.append(_Summand(Edge(node.name, position), arg))  # type: ignore[arg-type]
            sums.append(summands)
        return sums

    def _is_plain_addition(self, node: fx.Node) -> bool:
        if op_name(node, self.root) not in _ADDITIONS or node.op == "call_module" or node.name in self.taken:
            return False
        both = len(node.args) == 2 and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args)
        if not both or node not in self.after:
            return False
        shapes = [self._shape(n) for n in (node, *node.args)]
        return shapes[0] is not None and shapes[0] == shapes[1] == shapes[2]

    def _shape(self, node: object) -> tuple[int, ...] | None:
        known = self.channels.nodes.get(node.name) if isinstance(node, fx.Node) else None
        return known.single.shape if known is not None and known.single is not None else None

    # -- which summands may go -------------------------------------------------------------------------------

    def _going(self, summands: list[_Summand]) -> list[fx.Node]:
        values = [s.value for s in summands if s.value in self.before]
        work = {value: self._work(value) for value in values}
        staying = [value for value in values if not work[value]]
        if staying:
            return [v for v in values if work[v] and any(self._forked(v, other) for other in staying)]
        least = min(work.values(), default=0)
        shortest = [value for value in values if work[value] == least]
        if len(shortest) != 1:
            return []
        start = self._entries(shortest[0])
        return [v for v in values if v is not shortest[0] and self._entries(v) & start]

    def _work(self, value: fx.Node) -> int:
        """How many layers with work of their own only this summand uses; none, if it is used elsewhere itself."""
        if _uses(value) > len(self.edges[value]):
            return 0
        return sum(self._works(node) for node in self.after.below(value))

    def _works(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            module = self.root.get_submodule(str(node.target))
            return any(parameter.ndim > 0 for parameter in module.parameters())
        return node.name in self.working

    def _entries(self, value: fx.Node) -> set[fx.Node]:
        """Values from outside that the summand is made of."""
        region = set(self.after.below(value))
        found = {arg for node in region for arg in node.all_input_nodes if arg not in region and arg in self.before}
        return found | ({n for n in region if n.op == "placeholder"})

    def _forked(self, value: fx.Node, other: fx.Node) -> bool:
        return any(self.before.covers(e, other) or self.before.covers(other, e) for e in self._entries(value))

    # -- graphs ----------------------------------------------------------------------------------------------

    def _backwards(self) -> nx.DiGraph:
        """From the end to everything that is needed."""
        graph = nx.DiGraph()
        demand = Demand(self.root)
        ends = [node for node in demand.roots if node.op != "placeholder"]
        graph.add_edges_from(("end", node) for node in ends)
        graph.add_edges_from((node, arg) for node in demand.reach(ends) for arg in demand.inputs(node))
        return graph

    def _forwards(self) -> nx.DiGraph:
        """From the inputs along tensors; sizes and constants carry nothing on."""
        graph = nx.DiGraph()
        graph.add_node("start")
        for node in self.order:
            known = self.channels.nodes.get(node.name)
            if known is None or not known.tensors or op_name(node, self.root) in _SHAPED_LIKE:
                continue
            if node.op == "placeholder":
                graph.add_edge("start", node)
            graph.add_edges_from((arg, node) for arg in node.all_input_nodes if arg in graph)
        return graph


class _Dominators:
    """What lies on every way from `start`: a tree, with quick answers about who is below whom."""

    def __init__(self, graph: nx.DiGraph, start: str) -> None:
        above = nx.immediate_dominators(graph, start)
        self.tree = nx.DiGraph((parent, node) for node, parent in above.items() if node != start)
        self.tree.add_node(start)
        self.enter: dict[object, int] = {}
        self.leave: dict[object, int] = {}
        self.line = list(nx.dfs_preorder_nodes(self.tree, start))
        sizes = dict.fromkeys(self.line, 1)
        for node in reversed(self.line):
            for parent in self.tree.predecessors(node):
                sizes[parent] += sizes[node]
        for index, node in enumerate(self.line):
            self.enter[node], self.leave[node] = index, index + sizes[node]

    def __contains__(self, node: object) -> bool:
        return node in self.enter

    def below(self, node: object) -> list[fx.Node]:
        """The node and all that it dominates."""
        return self.line[self.enter[node] : self.leave[node]]

    def covers(self, a: object, b: object) -> bool:
        """Whether every way to b leads through a (or b is a)."""
        return a in self.enter and b in self.enter and self.enter[a] <= self.enter[b] < self.leave[a]


def _uses(node: fx.Node) -> int:
    """How often a value is used, counting twice where a user takes it twice."""
    uses = 0
    for user in node.users:
        found: list[fx.Node] = []
        fx.node.map_arg((user.args, user.kwargs), found.append)
        uses += sum(arg is node for arg in found)
    return uses


def _names(branches: list[Branch]) -> list[str]:
    """The module that holds just this branch, or else the last layer in it."""
    shared = [_shared_path(branch.parameters) for branch in branches]
    count = Counter(shared)
    names: list[str] = []
    for branch, path in zip(branches, shared, strict=True):
        last = branch.parameters[-1].rpartition(".")[0] or branch.parameters[-1] if branch.parameters else ""
        base = (path if path and count[path] == 1 else last) or branch.place.node
        name, number = base, 1
        while name in names:
            number += 1
            name = f"{base}#{number}"
        names.append(name)
    return names


def _shared_path(parameters: tuple[str, ...]) -> str:
    paths = [name.split(".")[:-1] for name in parameters]
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
