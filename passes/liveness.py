"""Analysis: under which switches a node, or a parameter, is needed at all.

    y = x + f(g(x))      f and g are needed while the branch's gate is open, x always

A node is needed if its value reaches the output along operands that are not switched off. What is found is a formula
per node: an "or" of "and"s of bank slots. It is exact: at any assignment it says what the cut leaves.
"""

from __future__ import annotations

from torch import fx, nn

from tgfx.ir.source import Source
from tgfx.ir.switches import Edge, Switches
from tgfx.passes.demand import Demand

# an "or" of "and"s: the node is needed if, of one of these sets, all slots are open
Condition = frozenset[frozenset[int]]
ALWAYS: Condition = frozenset({frozenset()})
NEVER: Condition = frozenset()


def node_conditions(source: Source, switches: Switches) -> dict[str, Condition]:
    """When each node of the graph is needed; no word about a graph without switches."""
    if not switches.edges:
        return {}
    graph = source.module.graph
    switched = {edge.node for edge in switches.edges}
    found: dict[fx.Node, Condition] = dict.fromkeys(graph.nodes, NEVER)
    demand = Demand(source.module)
    found.update(dict.fromkeys(demand.roots, ALWAYS))
    for node in reversed(graph.nodes):
        own = found[node]
        if node.name not in switched:
            for arg in demand.inputs(node):
                found[arg] = either(found[arg], own, switches)
            continue
        for position, arg in enumerate(node.args):
            slot = switches.edges.get(Edge(node.name, position))
            through = own if slot is None else frozenset(product | {slot} for product in own)
            for needed in demand.operand(node, arg) if isinstance(arg, fx.Node) else ():
                found[needed] = either(found[needed], through, switches)
    return {node.name: condition for node, condition in found.items()}


def either(a: Condition, b: Condition, switches: Switches) -> Condition:
    """a or b, without what is said twice."""
    if a == b or not b:
        return a
    if not a or ALWAYS in (a, b):
        return ALWAYS if ALWAYS in (a, b) else b
    products = {p for p in a | b if all(len(p.intersection(slots)) < 2 for slots in switches.one_of)}
    for slots in reversed(switches.one_of):  # one of them is open in any case; choices in choices come later
        for rest in {p.difference(slots) for p in products if p.intersection(slots)}:
            whole = {rest | {slot} for slot in slots}
            if whole <= products:
                products = products - whole | {rest}
    return frozenset(p for p in products if not any(q < p for q in products))


def parameter_conditions(source: Source, nodes: dict[str, Condition], switches: Switches) -> dict[str, Condition]:
    """When each parameter is needed: while any node that uses it is. One that no node uses stays."""
    if not nodes:
        return {}
    root = source.module
    used: dict[int, Condition] = {}
    for node in root.graph.nodes:
        for tensor in tensors_of(node, root):
            used[id(tensor)] = either(used.get(id(tensor), NEVER), nodes[node.name], switches)
    named = root.named_parameters(remove_duplicate=False)
    return {name: used.get(id(parameter), ALWAYS) for name, parameter in named}


def tensors_of(node: fx.Node, root: nn.Module) -> list[object]:
    """Parameters and buffers that a node names or whose layer it calls."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    if node.op == "get_attr":
        value: object = root
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return [value]
    return []
