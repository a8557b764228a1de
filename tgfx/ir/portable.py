"""A model that is the same after pickle.

torch pickles an fx.GraphModule as code, which fx traces again when it is loaded. What that trace would lose:

    a += b                   becomes a = a + b: other names of `a` would not see it    ->  a.add_(b)
    len(x), not x            cannot be traced                                          ->  marked, as fx.wrap does
    n = self.n; n.view(3)    a buffer is no traced value: the result becomes a constant ->  n = self.n.to(weight.device)
    self.pos[:, : x.size(1)] a buffer takes no traced index                             ->  the same
    self.p @ x               what is a buffer's own to do is written down otherwise      ->  the same
    torch.zeros(3)           nothing traced goes in: the result becomes a constant      ->  device=weight.device
"""

from __future__ import annotations

import operator
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import _is_from_torch, inplace_methods, magic_methods

from tgfx.ir.fake_run import Tensors, run_on_example

_IN_PLACE = {
    operator.iadd: ("add_", operator.add),
    operator.isub: ("sub_", operator.sub),
    operator.imul: ("mul_", operator.mul),
    operator.itruediv: ("div_", operator.truediv),
    operator.ifloordiv: ("floor_divide_", operator.floordiv),
    operator.imod: ("remainder_", operator.mod),
    operator.ipow: ("pow_", operator.pow),
    operator.iand: ("bitwise_and_", operator.and_),
    operator.ior: ("bitwise_or_", operator.or_),
    operator.ixor: ("bitwise_xor_", operator.xor),
    operator.ilshift: ("bitwise_left_shift_", operator.lshift),
    operator.irshift: ("bitwise_right_shift_", operator.rshift),
}


def make_portable(module: fx.GraphModule, inputs: list[Any]) -> None:
    """Rewrite the graph of `module` in place. `inputs`: an example, one value for each placeholder."""
    _spell_changes_in_place(module, inputs)
    device = _Device(module)
    untraced: set[fx.Node] = set()  # values that are no traced ones when the code is loaded
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not isinstance(_attribute(module, node), nn.Parameter):
            alone = any(_only(untraced | {node}, user) or _is_led_by(node, user) for user in node.users)
            if alone and device.after(node):
                continue
            untraced.add(node)
        elif node.op == "call_function":
            if is_pythons(node.target):
                node.meta["is_wrapped"] = True
            elif _only(untraced, node) and not device.given_to(node):
                untraced.add(node)
        elif node.op == "call_method" and _only(untraced, node):
            untraced.add(node)
    module.graph.lint()
    module.recompile()


def _only(untraced: set[fx.Node], node: fx.Node) -> bool:
    """Whether a call would be given nothing traced. Layers are always written down."""
    return node.op in ("call_function", "call_method") and all(arg in untraced for arg in node.all_input_nodes)


def _is_led_by(first: fx.Node, node: fx.Node) -> bool:
    """Whether a call asks its first argument what to do (buffer[i], buffer @ x), or is code that looks at it alone."""
    if node.op != "call_function" or not node.args or node.args[0] is not first or len(node.all_input_nodes) == 1:
        return False
    return getattr(node.target, "__module__", "") == "_operator" or isinstance(node.target, FunctionType)


def is_pythons(target: Any) -> bool:
    """A function of Python's own that fx can trace as a marked one only."""
    if getattr(target, "__module__", "") == "_operator":
        return target.__name__ not in magic_methods and target.__name__ not in inplace_methods
    return target is not getattr and not _is_from_torch(target)


def _attribute(module: nn.Module, node: fx.Node) -> Any:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


class _Device:
    """The device of the model's first parameter, as a node at the graph's beginning."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.node: fx.Node | None = None
        self.name = next((name for name, _ in module.named_parameters()), None)

    def after(self, buffer: fx.Node) -> bool:
        """The buffer itself, as a traced value; False where the model has no parameters."""
        if self.name is None or not isinstance(_attribute(self.module, buffer), torch.Tensor):
            return False
        graph = self.module.graph
        with graph.inserting_after(buffer):
            same = graph.call_method("to", (buffer,))
        buffer.replace_all_uses_with(same, delete_user_cb=lambda user: user is not same, propagate_meta=False)
        same.args = (buffer, self._placed_before(buffer))
        same.meta = {key: value for key, value in buffer.meta.items() if key == "tgfx_source"}
        return True

    def given_to(self, factory: fx.Node) -> bool:
        """Whether a function that makes tensors of numbers alone could be told to make them there."""
        if self.name is None or not _takes_device(factory.target):
            return False
        factory.kwargs = {**factory.kwargs, "device": self._placed_before(factory)}
        return True

    def _placed_before(self, node: fx.Node) -> fx.Node:
        if self.node is None:
            graph = self.module.graph
            first = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(first):
                weight = graph.get_attr(str(self.name))
                self.node = graph.call_function(getattr, (weight, "device"))
        return self.node


def _takes_device(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return any(argument.name == "device" for argument in target._schema.arguments)
    name = getattr(target, "__name__", "")
    overloads = getattr(torch.ops.aten, name, None) if getattr(torch, name, None) is target else None
    return overloads is not None and any(
        argument.name == "device"
        for each in overloads.overloads()
        for argument in getattr(overloads, each)._schema.arguments
    )


# -- changes in place ----------------------------------------------------------------------------------------------


def _spell_changes_in_place(module: fx.GraphModule, inputs: list[Any]) -> None:
    changes = [node for node in module.graph.nodes if node.op == "call_function" and node.target in _IN_PLACE]
    if not changes:
        return
    run = run_on_example(module, lambda tensors: _Kinds(module, tensors), inputs)
    for node in changes:
        method, function = _IN_PLACE[node.target]
        if node in run.plain:
            node.target = function
        else:
            node.op, node.target = "call_method", method


class _Kinds(fx.Interpreter):
    """Notes which nodes give no tensor: a change of a number is none in place."""

    def __init__(self, module: fx.GraphModule, tensors: Tensors) -> None:
        super().__init__(module)
        self.tensors = tensors
        self.plain: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        with self.tensors.entered(), torch.no_grad():
            result = super().run_node(n)
        if not isinstance(result, torch.Tensor):
            self.plain.add(n)
        is_given = n.op in ("placeholder", "get_attr") and isinstance(result, torch.Tensor)
        return self.tensors.stand_in(result) if is_given else result
