"""What the channel analysis keeps whole: closed boxes and what they read, outputs, residual sums, what nobody uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from tgfx.ir.containers import builds_container
from tgfx.ir.facts import NodeIds
from tgfx.ir.ids import IdSpace
from tgfx.ir.refusal import Refusal
from tgfx.ir.rehearsal import Rehearsal, RehearsalEndedError
from tgfx.ir.remembered import Remembered
from tgfx.ir.source import Source, source_line, tensors_in
from tgfx.ir.tree import find, named_modules, named_tensors
from tgfx.ops.modules import has_hooks, has_state, is_resizable_module
from tgfx.ops.naming import is_torch_function, op_name
from tgfx.passes.attention import Attention
from tgfx.passes.probe import survives_cut
from tgfx.passes.recorder import RuleRecorder


class FreezingRecorder(RuleRecorder):
    """Freezes identities, with the reason, where the operator rules do not see what is done with them."""

    def __init__(self, source: Source, space: IdSpace, attention: Attention) -> None:
        super().__init__(space, attention)
        self.source = source
        self.nodes: dict[str, NodeIds] = {}
        self.calls: Rehearsal | Remembered = Remembered()
        self._sums: list[tuple[fx.Node, torch.Tensor]] = []  # connections into sums, and the channels they give
        self._modules = dict(named_modules(source.module, repeat=True))

    # -- closed boxes ----------------------------------------------------------------------------------------

    def _closed_box(self, n: fx.Node) -> str | None:
        """Why the callee of this node is a closed box to us, if it is one."""
        if n.op == "call_module":
            if str(n.target) in self.source.opaque:
                return "goes into a module that could not be traced"
            module = self._module(n)
            if not is_resizable_module(module):
                return f"goes into {type(module).__name__}, which tgfx cannot cut"
            if has_hooks(module):
                return f"goes into {type(module).__name__}, on which hooks are registered (remove them to gate it)"
        if n.op == "call_function" and not is_torch_function(n) and not builds_container(n):
            return f"goes into the Python function {op_name(n)}"
        return None

    def _passes_probe(self, n: fx.Node, result: Any, inputs: list[torch.Tensor]) -> bool:
        """A closed box without tensors of its own that gives the same on cut operands may stay in the way."""
        if n.op == "call_module" and (str(n.target) in self.source.opaque or has_state(self._module(n))):
            return False
        if self._sized or self._pending:
            return False
        if isinstance(self.calls, Rehearsal) and any(map(self.calls.is_hollow, inputs)):
            raise RehearsalEndedError(f"{op_name(n)} has to be tried on numbers")
        return survives_cut(self, n, result)

    def _freeze_opaque(self, n: fx.Node, result: Any, reason: str) -> None:
        for arg in n.all_input_nodes:
            known = self.nodes.get(arg.name)
            for ids in known.tensors if known else ():
                for layer in ids.layers if ids else ():
                    self.freeze(layer, reason, limit=True)
        if n.op == "call_module":
            for name, _ in self._module(n).named_parameters():
                for layer in self.params[f"{n.target}.{name}"].layers:
                    self.freeze(layer, "belongs to a module that stays as it is", limit=True)
            for name, _ in self._module(n).named_buffers():
                for layer in self.buffers[f"{n.target}.{name}"].layers:
                    self.freeze(layer, "belongs to a module that stays as it is", limit=True)
        for tensor in tensors_in(result):
            for layer in self.ids(tensor).layers:
                self.freeze(layer, reason, limit=True)

    # -- at the end of the run -------------------------------------------------------------------------------

    def is_in_closed_box(self) -> bool:
        """Where torch.func may run operators on tensors of its own, the axes of which no rule knows."""
        node = self._node
        return node is not None and node.op == "call_module" and str(node.target) in self.source.opaque

    def keep_all(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Whatever meets in a call that its rule does not understand."""
        for tensor in tensors_in((args, kwargs)):
            self.freeze_all(tensor, "goes into a module that could not be traced", limit=True)
        for tensor in tensors_in(out):
            self._live.pop(id(tensor), None)

    def _freeze_outputs(self) -> None:
        output = next(node for node in self.source.module.graph.nodes if node.op == "output")
        for arg in _given_out(output):
            self._node, self._op = arg, "output"
            for ids in self.nodes[arg.name].tensors:
                for layer in ids.layers if ids else ():
                    refusal = Refusal("makes the model's output", arg.name, "output", source_line(arg))
                    self.space.freeze(layer.reshape(-1).numpy(), refusal)

    def _freeze_sums(self) -> None:
        """Where connections are gated, what they lead into stays whole."""
        for n, ids in self._sums:
            reason = "is part of a residual sum, whose connections have gates of their own"
            self.space.freeze(ids.numpy(), Refusal(reason, n.name, "connect", source_line(n)))

    def touched(self) -> set[int]:
        """Tensors (by id) that this graph names or whose layer it calls."""
        nodes = self.source.module.graph.nodes
        reached = {id(find(self.source.module, str(n.target))) for n in nodes if n.op == "get_attr"}
        for n in nodes:
            if n.op == "call_module":
                for module in self._module(n).modules():
                    reached.update(map(id, (*module._parameters.values(), *module._buffers.values())))
        return reached - {id(None)}

    def freeze_untouched(self, touched: set[int]) -> None:
        tensors = dict(named_tensors(self.source.module))
        for name, known in [*self.params.items(), *self.buffers.items()]:
            if known.layers and id(tensors[name]) not in touched:
                for layer in known.layers:
                    self.space.freeze(layer.reshape(-1).numpy(), Refusal("is not used in this mode", name, "unused"))

    # -- helpers ---------------------------------------------------------------------------------------------

    def _module(self, n: fx.Node) -> nn.Module:
        return self._modules[str(n.target)]

    def _op_of(self, n: fx.Node) -> str:
        return type(self._module(n)).__name__ if n.op == "call_module" else op_name(n)


def _given_out(output: fx.Node) -> list[fx.Node]:
    """What makes up the output, seen through the containers that it is handed out in."""
    found: list[fx.Node] = []
    for arg in output.all_input_nodes:
        found.extend(_given_out(arg) if builds_container(arg) else [arg])
    return found
