"""torch.no_grad() inside a forward, written into the graph.

    with torch.no_grad(): y = conv(x)      ->      y = conv(x.detach()).detach()

An operator that sees no tensor with a gradient records none. What has no gradient anyway (masks, position tables) stays
as it is, as does what only hands a tensor on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from tgfx.capture.not_in_graph import CannotRunError, NotInGraphError
from tgfx.ir.dead_code import has_effect
from tgfx.ir.fake_run import Tensors, run_on_example
from tgfx.ir.source import Source, tensors_in

MARK = "tgfx_no_grad"  # on nodes that ran where gradients were off: the module that switched them off


def write_detaches(module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Rewrite `module` (its nodes marked by the tracer) in place; `args` and `kwargs`: the example."""
    marked = [node for node in module.graph.nodes if MARK in node.meta and node.op.startswith("call")]
    if not marked:
        return
    inputs = Source(module, args, kwargs, "fx").flat_inputs()
    try:
        run = run_on_example(module, lambda tensors: _Gradients(module, tensors), inputs)
    except Exception as error:
        where = marked[0].meta[MARK]
        reason = f"runs under torch.no_grad, in a way that cannot be followed ({error})"
        raise CannotRunError(reason, where) from error
    for node in marked:
        if node.name in run.recording:
            _detach(module.graph, node, run)
    module.recompile()


class _Gradients(fx.Interpreter):
    """Runs the graph with a gradient wherever there may ever be one."""

    def __init__(self, module: fx.GraphModule, tensors: Tensors) -> None:
        super().__init__(module)
        self.tensors = tensors
        self.recording: dict[str, Any] = {}  # marked nodes that would record gradients if these were on, and results
        self.kept: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        with self.tensors.entered(), torch.set_grad_enabled(MARK not in n.meta):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            result = self._called(n, args, kwargs)
        if n.op in ("placeholder", "get_attr"):
            result = pytree.tree_map(self._with_gradient, result)
        self.kept[n] = result
        if MARK in n.meta and (_wanting(args, kwargs) or _holds_parameters(self.module, n)):
            hands_on = any(t.requires_grad for t in tensors_in(result))
            if not hands_on or has_effect(n, self.module):  # type: ignore[arg-type]
                self.recording[n.name] = result
        return result

    def _called(self, n: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        if n.op != "call_module":
            return getattr(self, n.op)(n.target, args, kwargs)
        layer = self.module.get_submodule(str(n.target))
        own = {name: self._with_gradient(p) for name, p in layer.named_parameters()}
        own |= {name: self._with_gradient(b) for name, b in layer.named_buffers()}
        return torch.func.functional_call(layer, own, args, kwargs)

    def _with_gradient(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        own = self.tensors.stand_in(value)
        buffer = not isinstance(value, nn.Parameter) and any(value is b for b in self.module.buffers())
        with torch.enable_grad():
            return own.requires_grad_().clone() if own.is_floating_point() and not buffer else own


def _wanting(args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))


def _holds_parameters(module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and any(True for _ in module.get_submodule(str(node.target)).parameters())


def _detach(graph: fx.Graph, node: fx.Node, run: _Gradients) -> None:
    def detached(arg: fx.Node) -> fx.Node:
        value = run.kept.get(arg)  # none of a detach that was put there for a layer before
        if not _wanting((value,), {}):
            return arg
        if not isinstance(value, torch.Tensor):
            raise NotInGraphError("hands several tensors at once to a function under torch.no_grad", node.meta[MARK])
        with graph.inserting_before(node):
            return _call(graph, arg, node)

    result, first = run.kept[node], next(iter(node.all_input_nodes), None)
    if first is not None and result is run.kept[first]:  # it acts in place, and gives what it was given
        node.replace_all_uses_with(first, propagate_meta=False)
    node.args, node.kwargs = map_arg(node.args, detached), map_arg(node.kwargs, detached)
    if not _holds_parameters(run.module, node):
        return
    if not isinstance(result, torch.Tensor):
        raise NotInGraphError("calls a layer with several outputs under torch.no_grad", node.meta[MARK])
    with graph.inserting_after(node):
        after = _call(graph, node, node)
    node.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after, propagate_meta=False)


def _call(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    node = graph.call_method("detach", (value,))
    node.meta = {key: item for key, item in like.meta.items() if key == "tgfx_source"}
    return node
