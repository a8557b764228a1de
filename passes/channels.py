"""Analysis: who is which channel.

Runs the captured graph once on its example, node by node, under a TorchDispatchMode, so that every Python
function, method and module is seen as the few ATen operators it becomes. The operator rules push identity
layers along; what they say is collected here and frozen into a ChannelMap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tgfx.ir.facts import ChannelMap, NodeIds, Operand, Read, Shuffle, TensorIds
from tgfx.ir.ids import IdSpace, all_in
from tgfx.ir.kept_state import KeptState
from tgfx.ir.refusal import Refusal
from tgfx.ir.rehearsal import Rehearsal, RehearsalEndedError
from tgfx.ir.remembered import Remembered
from tgfx.ir.source import Source, source_line, tensors_in
from tgfx.ir.tree import find, named_modules, named_tensors
from tgfx.ops import rule_for
from tgfx.ops.connection import connected, is_connection
from tgfx.ops.masked import MASKED_FUNCTIONS, MASKED_MODULES
from tgfx.ops.modules import has_hooks, has_state, is_lowerable, is_resizable_module
from tgfx.ops.naming import is_torch_function, op_name
from tgfx.ops.pointwise import is_pointwise, pointwise
from tgfx.ops.registry import Call
from tgfx.ops.resize import RULES, can_resize
from tgfx.passes.attention import Attention, HeadRows
from tgfx.passes.joint_layers import settle_joint_layers
from tgfx.passes.own_tensors import OwnTensors, own_tensors
from tgfx.passes.probe import survives_cut
from tgfx.passes.recorder import Origin, RuleRecorder
from tgfx.passes.shuffles import find_shuffles
from tgfx.passes.undisturbed import undisturbed


def analyse_channels(
    source: Source,
    heads: HeadRows | None = None,
    *,
    calls: Rehearsal | Remembered | None = None,
    tapped: Iterable[str] = (),
) -> ChannelMap:
    """Identities of every node of `source`, the reads, the FLOPs and what had to be frozen.

    heads: found by passes.heads where channels of one attention head are to be one atom. calls: those of an earlier run
    of the same model, so as not to compute again what costly operators give. tapped: weights of convolutions whose taps
    have identities of their own (tgfx.capture.taps).
    """
    heads = heads or HeadRows()
    recorder = ChannelRecorder(source, heads.attention, tapped=tapped)
    if calls is not None:
        recorder.calls = calls
    others = [ChannelRecorder(source.training, heads.in_training, like=recorder)] if source.training else []
    recorder.tie_heads(heads.rows)
    with undisturbed():
        for one in (recorder, *others):
            one.run_example()
        settle([recorder, *others])
    return replace(recorder.facts(), training=others[0].facts() if others else None)


def settle(recorders: list[ChannelRecorder]) -> None:
    """What needs all graphs of a model: layers that cross axes, and parameters that none of them uses."""
    while any([recorder.settle_joint_layers() for recorder in recorders]):
        pass
    touched = set().union(*(recorder.touched() for recorder in recorders))
    recorders[0].freeze_untouched(touched)


class ChannelRecorder(RuleRecorder, fx.Interpreter):
    """Executes the graph node by node and settles, after each, what the operator rules said."""

    def __init__(
        self,
        source: Source,
        attention: Attention,
        space: IdSpace | None = None,
        *,
        like: ChannelRecorder | None = None,
        tapped: Iterable[str] = (),
    ) -> None:
        RuleRecorder.__init__(self, like.space if like else space or IdSpace(), attention)
        fx.Interpreter.__init__(self, source.module)
        self.source = source
        self.nodes: dict[str, NodeIds] = {}
        self.shuffles: tuple[Shuffle, ...] = ()
        self.reads: list[Read] = []
        self.const_nodes: set[str] = set()
        self.seen_args: dict[str, tuple[tuple, dict]] = {}
        self.containers: set[str] = set()
        self._sums: list[tuple[fx.Node, torch.Tensor]] = []  # connections into sums, and the channels they give
        self._makers: list[tuple[torch.Tensor, list[int]]] = []
        self._modules = dict(named_modules(source.module, repeat=True))
        self.calls: Rehearsal | Remembered = Remembered()
        self.state = KeptState(())
        self._watch = _Watch(self)
        # another graph of a model is over the same tensors
        self.own: OwnTensors = like.own if like else own_tensors(source.module, self.space, tapped)
        self.params, self.buffers, self._owned = self.own.params, self.own.buffers, self.own.entries
        self.taps_of = self.own.taps

    # -- starting points -------------------------------------------------------------------------------------

    def tie_heads(self, rows: tuple[np.ndarray, ...]) -> None:
        place = Refusal("tied", "", "attention heads")
        for ids in rows:
            self.space.unite(ids, ids[:, :1], place)

    def run_example(self) -> None:
        flat = self.source.flat_inputs()
        if not isinstance(self.calls, Rehearsal):  # in which nothing is written
            own = (tensor for _, tensor in named_tensors(self.source.module))
            self.state = KeptState([*own, *self.source.example_tensors()])
        try:
            self.source.result = self.run(*flat, enable_io_processing=False)
        finally:
            self.state.restore()  # a train-mode graph moves running statistics
        self._freeze_outputs()
        self._freeze_sums()
        self.shuffles = find_shuffles(self.source.module, self.nodes)

    # -- fx.Interpreter --------------------------------------------------------------------------------------

    def run_node(self, n: fx.Node) -> Any:
        self._enter(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op in ("call_function", "call_method") and op_name(n) in RULES:
            self.seen_args[n.name] = (args, kwargs)
        with self._watch:  # only the user's operators: our own bookkeeping is not to be watched
            result = self._module(n)(*args, **kwargs) if n.op == "call_module" else self._run(n, args, kwargs)
        if not isinstance(result, torch.Tensor):
            self.containers.add(n.name)
        self._leave(n, result)
        return result

    def _run(self, n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self, n.op)(n.target, args, kwargs)

    def _enter(self, n: fx.Node) -> None:
        self._node, self._live, self._pending, self._sized = n, {}, [], []
        self._makers, self._place = [], None
        for arg in n.all_input_nodes:
            known = self.nodes.get(arg.name)
            if known is None:
                continue
            for index, tensor in enumerate(tensors_in(self.env[arg])):
                ids = known.tensors[index]
                if ids is not None and id(tensor) not in self._owned:
                    self._live[id(tensor)] = (tensor, ids, ("node", arg.name, index))

    def _leave(self, n: fx.Node, result: Any) -> None:
        if is_connection(n):
            x, axis, into = self.fetch_args_kwargs_from_env(n)[0]
            fresh = connected(self, x, axis, result)
            if into:
                self._sums.append((n, fresh))
        closed = self._closed_box(n)
        if closed is not None and not self._passes_probe(n, result):
            self._freeze_opaque(n, result, closed)
        else:
            self._check_sizes(n)
            self._settle_reads(n)
            for tensor, ids in self._makers:
                if self._has_channels(n) and can_resize(n, self.source.module):
                    continue  # a helper of an operator that takes its sizes from its operands
                if any(tensor is out for out in tensors_in(result)):
                    self.const_nodes.add(n.name)
                else:
                    self._freeze_ids(np.array(ids), "is made inside a call", limit=True)
        if n.op == "placeholder":
            self.nodes[n.name] = NodeIds(tuple(TensorIds(tuple(t.shape)) for t in tensors_in(result)))
        elif n.op != "output":
            self.nodes[n.name] = NodeIds(tuple(self._snapshot(t) for t in tensors_in(result)))
        self._live = {}

    def _inputs(self, n: fx.Node) -> list[torch.Tensor]:
        return [tensor for arg in n.all_input_nodes for tensor in tensors_in(self.env[arg])]

    def _has_channels(self, n: fx.Node) -> bool:
        known = [self.nodes.get(arg.name) for arg in n.all_input_nodes]
        return any(ids is not None and ids.layers for node in known if node for ids in node.tensors)

    def _snapshot(self, tensor: torch.Tensor) -> TensorIds:
        return self.ids(tensor)

    # -- end of a node -----------------------------------------------------------------------------------------

    def _settle_reads(self, n: fx.Node) -> None:
        for kind, layer, operands in self._pending:
            if self.space.all_frozen(layer.numpy()):
                continue
            if kind == "masked" and self._has_masked_form(n):  # the masked form works on the node's own input
                operands = tensors_in(self.env[n.all_input_nodes[0]])[:1]
            options = tuple(o for o in (self._operand(n, t, layer) for t in operands) if o is not None)
            if not options or (kind == "masked" and not self._has_masked_form(n)):
                self._freeze_ids(layer.numpy(), "is summed up inside a call that has no masked form", limit=True)
                continue
            self.reads.append(Read(n.name, self._op_of(n), kind, layer, options))

    def _operand(self, n: fx.Node, tensor: torch.Tensor, layer: torch.Tensor) -> Operand | None:
        origin = self.origin(tensor)
        if origin is None:
            return None
        if origin[0] == "param" and n.op == "call_module" and not is_lowerable(self._module(n)):
            return None
        located = self._locate(origin, layer)
        return None if located is None else Operand(origin[0], origin[1], located, origin[2])

    def _locate(self, origin: Origin, layer: torch.Tensor) -> torch.Tensor | None:
        """The layer of the origin that carries these very ids."""
        kind, name, index = origin
        known = (
            (self.params.get(name) or self.buffers.get(name)) if kind == "param" else self.nodes[name].tensors[index]
        )
        if known is None:
            return None
        wanted = layer.numpy()
        layers = [*known.layers, *([self.taps_of[name]] if kind == "param" and name in self.taps_of else [])]
        lines = [own.reshape(-1).numpy() for own in layers]
        for own, line in zip(layers, lines, strict=True):
            if all_in(wanted, line):
                return own
        roots = self.space.find(wanted)
        for own, line in zip(layers, lines, strict=True):
            if all_in(roots, self.space.find(line)):
                return own
        return None

    def _has_masked_form(self, n: fx.Node) -> bool:
        return self._op_of(n) in (MASKED_MODULES if n.op == "call_module" else MASKED_FUNCTIONS)

    def _check_sizes(self, n: fx.Node) -> None:
        if not self._sized or can_resize(n, self.source.module):
            return
        for tensor in self._sized:
            for layer in self.ids(tensor).layers:
                self.freeze(layer, f"goes through {self._op_of(n)}, which cannot be resized", limit=True)

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
        if n.op == "call_function" and not is_torch_function(n):
            return f"goes into the Python function {op_name(n)}"
        return None

    def _passes_probe(self, n: fx.Node, result: Any) -> bool:
        """A closed box without tensors of its own that gives the same on cut operands may stay in the way."""
        if n.op == "call_module" and (str(n.target) in self.source.opaque or has_state(self._module(n))):
            return False
        if self._sized or self._pending:
            return False
        if isinstance(self.calls, Rehearsal) and any(map(self.calls.is_hollow, self._inputs(n))):
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

    # -- end of the run ------------------------------------------------------------------------------------------

    def _freeze_outputs(self) -> None:
        output = next(node for node in self.source.module.graph.nodes if node.op == "output")
        for arg in output.all_input_nodes:
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

    def settle_joint_layers(self) -> bool:
        return settle_joint_layers(self.space, self.nodes, self.shuffles)

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

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _module(self, n: fx.Node) -> nn.Module:
        return self._modules[str(n.target)]

    def _op_of(self, n: fx.Node) -> str:
        return type(self._module(n)).__name__ if n.op == "call_module" else op_name(n)

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One ATen call happened: let its family's rule speak."""
        schema = func._schema.name
        name = schema.removeprefix("aten::")
        bare = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        self._op, self._place = bare, None
        rule = rule_for(bare) if schema.startswith("aten::") else None
        if rule is None and is_pointwise(func, name, bare):
            rule = pointwise
        call = Call(self, bare, func, args, kwargs, out)
        if rule is None:
            self._unknown(call)
            return
        rule(call)
        if not call.tensors() or bare.startswith("new_"):
            made = [t for t in call.outputs() if self.ids(t).layers]
            for tensor in made:
                ids = [i for layer in self.ids(tensor).layers for i in layer.reshape(-1).tolist()]
                self._makers.append((tensor, ids))

    def _unknown(self, call: Call) -> None:
        for tensor in call.tensors():
            self.freeze_all(tensor, f"goes through {call.name}, which tgfx has no rule for", limit=True)
        for tensor in call.outputs():
            self.give(tensor, [])

    def facts(self) -> ChannelMap:
        tensors = self.source.example_tensors()
        return ChannelMap(
            space=self.space,
            params=self.params,
            buffers=self.buffers,
            nodes=self.nodes,
            reads=tuple(self.reads),
            work=tuple(self.works),
            heads=tuple(self.head_works.values()),
            layers=tuple(self.layer_calls),
            taps=self.taps_of,
            channels=self.channels,
            const_nodes=frozenset(self.const_nodes),
            grouping=dict(self.grouping_modes),
            seen_args={name: _without_tensors(args) for name, args in self.seen_args.items()},
            containers=frozenset(self.containers),
            shuffles=self.shuffles,
            refusals=tuple(self.source.refusals),
            batch=tensors[0].shape[0] if tensors and tensors[0].ndim else 1,
        )


class _Watch(TorchDispatchMode):
    def __init__(self, recorder: ChannelRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs more than the call

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.recorder.state.before(func, args, kwargs)
        out = self.recorder.calls.call(func, args, kwargs)
        self.recorder.observe(func, args, kwargs, out)
        return out


def _without_tensors(args: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """Sizes and flags as they were seen; tensors by shape and type only."""

    def empty(value: Any) -> Any:
        return (
            torch.empty(0, dtype=value.dtype).reshape((0,) * max(value.ndim, 1))
            if isinstance(value, torch.Tensor)
            else value
        )

    return torch.utils._pytree.tree_map(empty, args)
