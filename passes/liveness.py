"""Analysis: under which switches a node, or a parameter, is needed at all.

    y = x + f(g(x))      f and g are needed while the branch's gate is open, x always

A node is needed if its value reaches the output along operands that are not switched off. What is found is a formula
per node: an "or" of "and"s of bank slots. It is exact: at any assignment it says what the cut leaves.
"""

from __future__ import annotations

from torch import fx, nn

from tgfx.ir.dead_code import has_effect
from tgfx.ir.source import Source
from tgfx.ir.switches import Edge, Switches
from tgfx.ops.naming import op_name

# an "or" of "and"s: the node is needed if, of one of these sets, all slots are open
Condition = frozenset[frozenset[int]]
ALWAYS: Condition = frozenset({frozenset()})
NEVER: Condition = frozenset()


def node_conditions(source: Source, switches: Switches) -> dict[str, Condition]:
    """When each node of the graph is needed."""
    graph = source.module.graph
    switched = {edge.node for edge in switches.edges}
    found: dict[fx.Node, Condition] = dict.fromkeys(graph.nodes, NEVER)
    found.update(dict.fromkeys(roots(source.module), ALWAYS))
    for node in reversed(graph.nodes):
        own = found[node]
        if node.name not in switched:
            for arg in node.all_input_nodes:
                found[arg] = either(found[arg], own, switches)
            continue
        for position, arg in enumerate(node.args):
            if isinstance(arg, fx.Node):
                slot = switches.edges.get(Edge(node.name, position))
                through = own if slot is None else frozenset(product | {slot} for product in own)
                found[arg] = either(found[arg], through, switches)
    return {node.name: condition for node, condition in found.items()}


def roots(module: fx.GraphModule) -> list[fx.Node]:
    """Nodes that are needed for their own sake: output, inputs, and what changes a tensor that others look at later."""
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    return [
        node for node in order
        if node.op in ("output", "placeholder") or (_acts(node, module) and _is_seen_elsewhere(node, order))
    ]  # fmt: skip


def changes_in_place(value: fx.Node, module: fx.GraphModule) -> bool:
    """Whether some later node writes into the memory of `value`, directly or through a view."""
    stack, seen = [value], set()
    while stack:
        for user in stack.pop().users:
            if _acts(user, module):
                return True
            if user not in seen and op_name(user, module) in _SAME_MEMORY:
                seen.add(user)
                stack.append(user)
    return False


def _acts(node: fx.Node, module: fx.GraphModule) -> bool:
    return node.op.startswith("call") and not is_check(node) and has_effect(node, module)


def _is_seen_elsewhere(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    if not node.users:
        return True
    value = node.args[0] if node.args else None
    while isinstance(value, fx.Node):
        if any(order[user] > order[node] for user in value.users):
            return True
        value = value.args[0] if op_name(value) in _SAME_MEMORY and value.args else None
    return False


_SAME_MEMORY = {
    "view", "reshape", "flatten", "Flatten", "unflatten", "Unflatten", "transpose", "permute", "movedim", "squeeze",
    "unsqueeze", "expand", "contiguous", "getitem", "select", "slice", "narrow", "chunk", "split", "unbind", "detach",
    "alias", "Identity", "to", "float", "t", "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "dropout", "unfold",
    "split_with_sizes", "view_as", "expand_as", "type_as", "diagonal", "real", "imag", "_to_copy", "T", "mT",
}  # fmt: skip


def is_check(node: fx.Node) -> bool:
    """An assertion: kept where the values that it looks at are there anyway."""
    return node.op == "call_function" and getattr(node.target, "__name__", "").startswith(("_assert", "sym_constrain"))


def either(a: Condition, b: Condition, switches: Switches) -> Condition:
    """a or b, without what is said twice."""
    if a == b or not b:
        return a
    if not a or ALWAYS in (a, b):
        return ALWAYS if ALWAYS in (a, b) else b
    products = {p for p in a | b if all(len(p.intersection(slots)) < 2 for slots in switches.one_of)}
    for slots in switches.one_of:  # one of them is open in any case
        for rest in {p.difference(slots) for p in products if p.intersection(slots)}:
            whole = {rest | {slot} for slot in slots}
            if whole <= products:
                products = products - whole | {rest}
    return frozenset(p for p in products if not any(q < p for q in products))


def parameter_conditions(source: Source, nodes: dict[str, Condition], switches: Switches) -> dict[str, Condition]:
    """When each parameter is needed: while any node that uses it is. One that no node uses stays."""
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
