"""Analysis: what a closed branch, or a group without a single open gate, takes along.

    y = x + conv2(relu(conv1(x)))      the branch's gate closed, or conv1's channels all closed and conv2 without bias
    y = x                              the branch goes with its add

A sum over no channels is exactly zero if no bias is added. The zero runs through operators that keep it and ends at an
addition, which becomes the other side. Where it ends elsewhere (a bias, a batch norm's shift, something that is written
into it) nothing can be removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from tgfx.ir.facts import ChannelMap
from tgfx.ir.source import Source
from tgfx.ir.switches import Edge
from tgfx.ir.tree import find, named_tensors
from tgfx.ops.connection import is_connection
from tgfx.ops.naming import is_torch_function, op_name
from tgfx.passes.demand import Demand, is_check
from tgfx.passes.survivors import Survivors

_ZERO_STAYS = {
    "relu", "ReLU", "ReLU6", "relu6", "gelu", "GELU", "silu", "SiLU", "tanh", "Tanh", "hardswish", "Hardswish",
    "Dropout", "leaky_relu", "LeakyReLU", "dropout", "Identity", "contiguous", "view", "reshape", "permute",
    "transpose", "flatten", "MaxPool2d", "max_pool2d", "AvgPool2d", "avg_pool2d", "AdaptiveAvgPool2d",
    "adaptive_avg_pool2d", "unsqueeze", "squeeze", "expand", "clone", "Dropout1d", "Dropout2d", "Dropout3d", "PReLU",
    "ELU", "Mish", "connect", "mul", "imul", "matmul", "bmm",
}  # fmt: skip
_SUMS_UP = {"linear", "Linear", "Conv1d", "Conv2d", "Conv3d", "conv1d", "conv2d", "conv3d"}
_PRODUCTS = {"matmul", "bmm"}


@dataclass(frozen=True)
class DeadBranches:
    """nodes that are not needed any more; additions that became one of their operands; stuck: why it cannot be."""

    nodes: frozenset[str] = frozenset()
    becomes: dict[str, str] | None = None
    stuck: str | None = None

    def same_as(self, name: str) -> str | None:
        return (self.becomes or {}).get(name)


def dead_branches(
    source: Source, channels: ChannelMap, survivors: Survivors, closed: frozenset[Edge] = frozenset()
) -> DeadBranches:
    """What closed groups and closed operands of additions make superfluous. Ask only when there are some."""
    zeros: set[fx.Node] = set()
    becomes: dict[fx.Node, fx.Node] = {}
    stuck: dict[fx.Node, str] = {}
    demand = Demand(source.module)

    def is_zero(node: fx.Node, arg: fx.Node) -> bool:
        """Whether a node reads zeros: as the argument was made, and after all that was written into it since."""
        return _end(arg, becomes) in zeros and all(write in zeros for write in demand.operand(node, arg)[1:])

    for node in source.module.graph.nodes:
        name = op_name(node, source.module)
        operands = _operands(node, name)
        left = [
            arg for position, arg in enumerate(operands)
            if not is_zero(node, arg) and Edge(node.name, position) not in closed
        ]  # fmt: skip
        if len(left) < len(operands) and _same_shape(node, left, channels):
            if left:
                becomes[node] = left[0]
            else:
                zeros.add(node)
        elif _is_empty_sum(node, name, source, channels, survivors, is_zero):
            zeros.add(node)
        elif not any(is_zero(node, arg) for arg in node.all_input_nodes):
            continue
        elif name in _ZERO_STAYS and (node.op == "call_module" or is_torch_function(node)):
            zeros.add(node)
        else:
            stuck[node] = f"{node.name} [{name}] makes something else of zero"
    needed = _needed(demand, becomes, channels)
    for node in filter(needed.__contains__, demand.order):  # in order: the same reason every time
        if node in zeros or node in stuck:
            return DeadBranches(stuck=stuck.get(node, f"{node.name} would be zero throughout"))
        if _is_empty(node, channels, survivors):
            return DeadBranches(stuck=f"{node.name} would have no channel left")
    passed_on = {a: b for a, b in becomes.items() if _end(a, becomes) in needed}
    dead = frozenset(n.name for n in source.module.graph.nodes if n not in needed and n not in passed_on)
    return DeadBranches(dead, {a.name: b.name for a, b in passed_on.items()})


def _operands(node: fx.Node, name: str) -> list[fx.Node]:
    """Both sides of a plain addition; nothing for other nodes."""
    if name not in ("add", "iadd") or len(node.args) != 2 or node.kwargs:
        return []
    found = [arg for arg in node.args if isinstance(arg, fx.Node)]
    return found if len(found) == 2 else []


def _end(node: fx.Node, becomes: dict[fx.Node, fx.Node]) -> fx.Node:
    while node in becomes:
        node = becomes[node]
    return node


def _needed(demand: Demand, becomes: dict[fx.Node, fx.Node], channels: ChannelMap) -> set[fx.Node]:
    needed = _reach(demand, demand.roots, becomes)
    for check in filter(is_check, demand.order):  # checks stay where the tensors that they look at do
        cone = _reach(demand, [check], becomes)
        known = [channels.nodes.get(node.name) for node in cone - needed]
        if not any(ids.tensors for ids in known if ids is not None):
            needed |= cone
    return needed


def _reach(demand: Demand, start: list[fx.Node], becomes: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node in becomes:
            stack.extend(demand.operand(node, becomes[node]))
        elif node not in reached:
            reached.add(node)
            stack.extend(demand.inputs(node))
    return reached


def _is_empty_sum(
    node: fx.Node,
    name: str,
    source: Source,
    channels: ChannelMap,
    survivors: Survivors,
    is_zero: Callable[[fx.Node, fx.Node], bool],
) -> bool:
    """A contraction over channels that are gone or zero, with nothing added to it, or a connection of them."""
    if _adds_nothing(node, channels, survivors):
        return True
    if name in _SUMS_UP:
        if node.op == "call_module":
            bias = source.module.get_submodule(str(node.target)).bias
        else:
            bias = node.kwargs.get("bias", node.args[2] if len(node.args) > 2 else None)
        x = node.args[0] if node.args else node.kwargs.get("input")
        if bias is not None or not isinstance(x, fx.Node):
            return False
        axis = -1 if name in ("linear", "Linear") else 1
        return is_zero(node, x) or _is_empty(x, channels, survivors, axis)
    if name in _PRODUCTS and len(node.args) == 2 and isinstance(node.args[0], fx.Node):
        return _is_empty(node.args[0], channels, survivors, -1)
    return False


def _adds_nothing(node: fx.Node, channels: ChannelMap, survivors: Survivors) -> bool:
    """A connection into a sum, of a branch that has no channel left."""
    return is_connection(node) and bool(node.args[2]) and _is_empty(node.args[0], channels, survivors)


def _is_empty(node: fx.Node, channels: ChannelMap, survivors: Survivors, axis: int | None = None) -> bool:
    known = channels.nodes.get(node.name)
    for ids in known.tensors if known else ():
        if ids is None or not survivors.is_rectangular(ids):  # ragged: some live
            continue
        kept = survivors.kept(ids)
        wanted = kept if axis is None else ([kept[axis]] if kept else [])
        if any(k is not None and len(k) == 0 for k in wanted):
            return True
    return False


def _same_shape(node: fx.Node, left: list[fx.Node], channels: ChannelMap) -> bool:
    """What is left must have the sum's own shape, or the addition also broadcasts."""
    own = channels.nodes[node.name].single
    others = [channels.nodes[arg.name].single for arg in left]
    return own is not None and all(o is not None and o.shape == own.shape for o in others)


def parameters_of(source: Source, nodes: frozenset[str]) -> set[str]:
    """Parameters and buffers that only these nodes use."""
    used: dict[bool, set[int]] = {True: set(), False: set()}
    root = source.module
    for node in root.graph.nodes:
        gone = node.name in nodes
        if node.op == "get_attr":
            gone = all(user.name in nodes for user in node.users) and bool(node.users)
            used[gone].add(id(find(root, str(node.target))))
        elif node.op == "call_module":
            module = root.get_submodule(str(node.target))
            used[gone].update(id(t) for t in (*module.parameters(), *module.buffers()))
    only = used[True] - used[False]
    return {name for name, tensor in named_tensors(root) if id(tensor) in only}
