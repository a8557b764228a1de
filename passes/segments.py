"""Analysis: stretches of a graph that may be computed again in the backward pass, instead of keeping what they made.

    a = conv(x); b = relu_(a); c = conv(b); y = b + c      a cut after relu_ is fine, one before it is not:
                                                           by the time of backward a has been written over

A stretch may run a second time if all it reads is as it was, and if running it leaves nothing behind (but statistics of
norms, which can be put back). There are about as many stretches as nodes in each: the square root of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from torch import fx, nn
from torch.nn.utils import parametrize

from tgfx.ops.modules import is_instance_norm
from tgfx.passes.demand import Demand

WINDOW = 0.5  # of a stretch: how far from the even spacing a better place is looked for


@dataclass(frozen=True)
class Segment:
    """Nodes in a row. inputs, outputs: what crosses its ends, by name; norms: layers that keep statistics."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    repeatable: bool
    norms: tuple[str, ...]


def find_segments(module: fx.GraphModule, graph: fx.Graph) -> tuple[Segment, ...]:
    """All of the graph between its placeholders and its output, in order; what the output reads crosses into the last.

    The last is not worth a second run: what it makes is needed at once.
    """
    demand = _Demand(module, graph)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    last_use = {node: max((demand.order[user] for user in node.users), default=-1) for node in demand.order}
    cuts = [0, *_cuts(nodes, graph, demand, last_use), len(nodes)]
    once = {node for node in nodes if _only_once(module, node)} | {n for n in demand.roots if n.op.startswith("call")}
    found = []
    for start, end in pairwise(cuts):
        own, ends = tuple(nodes[start:end]), end == len(nodes)
        readers = (*own, *([output] if ends else []))
        read = dict.fromkeys(arg for node in readers for arg in node.all_input_nodes if arg not in set(own))
        before = _placed_before(nodes, start, graph)
        as_before = not any(before is not None and demand.is_written_after(arg, before) for arg in read)
        found.append(
            Segment(
                own,
                tuple(arg.name for arg in read),
                () if ends else tuple(node.name for node in own if last_use[node] > demand.order[own[-1]]),
                as_before and not ends and not once.intersection(own),
                tuple(dict.fromkeys(str(node.target) for node in own if _keeps_statistics(module, node))),
            )
        )
    return tuple(found)


def _cuts(nodes: list[fx.Node], graph: fx.Graph, demand: Demand, last_use: dict[fx.Node, int]) -> list[int]:
    """Places (before nodes[place]) over which few values go, none of which is written to later."""
    varying = _varying(graph)
    crossing = [0] * len(nodes)
    allowed = [place > 0 for place in range(len(nodes))]
    position = {node: place for place, node in enumerate(nodes)}
    order = {demand.order[node]: place for place, node in enumerate(nodes)}
    for node in graph.nodes:
        if node.op == "output" or last_use[node] < 0:
            continue
        first = position.get(node, -1) + 1
        until = order.get(last_use[node], len(nodes) - 1)  # the output reads what is there at the end
        for place in range(max(first, 1), until + 1):
            crossing[place] += node in varying
            if allowed[place] and demand.is_written_after(node, nodes[place - 1]):
                allowed[place] = False
    step = math.sqrt(len(nodes))
    cuts: list[int] = []
    for number in range(1, round(len(nodes) / step)):
        middle = number * step
        reach = [place for place in range(len(nodes)) if allowed[place] and abs(place - middle) <= WINDOW * step]
        if reach:
            cuts.append(min(reach, key=lambda place: (crossing[place], abs(place - middle))))
    return sorted(set(cuts))


def _varying(graph: fx.Graph) -> set[fx.Node]:
    """What depends on the input; gates and weights are there anyhow."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _placed_before(nodes: list[fx.Node], start: int, graph: fx.Graph) -> fx.Node | None:
    return nodes[start - 1] if start else next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)


class _Demand(Demand):
    """tgfx's own layers act on no argument in place."""

    def writes(self, node: fx.Node) -> bool:
        if node.op == "call_module" and _is_ours(self.module.get_submodule(str(node.target))):
            return False
        return super().writes(node)


def _is_ours(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("tgfx.")


def _keeps_statistics(module: nn.Module, node: fx.Node) -> bool:
    """Whether a layer moves statistics that its output does not depend on while it moves them."""
    if node.op != "call_module":
        return False
    layer = module.get_submodule(str(node.target))
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) or is_instance_norm(layer)


def _only_once(module: nn.Module, node: fx.Node) -> bool:
    """Whether buffers that a second run would find changed may have a say in the result."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return not _keeps_statistics(module, node) and next(layer.buffers(), None) is not None
    if node.op == "get_attr":
        owner = module.get_submodule(str(node.target).rpartition(".")[0])
        return parametrize.is_parametrized(owner) and next(owner.parametrizations.buffers(), None) is not None
    return False
