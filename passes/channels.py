"""Analysis: who is which channel.

Runs the captured graph once on its example, node by node, under a TorchDispatchMode, so that every Python
function, method and module is seen as the few ATen operators it becomes. The operator rules push identity
layers along; what they say is collected here and frozen into a ChannelMap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from tgfx.ir.facts import ChannelMap, NodeIds, Operand, Read, Shuffle, TensorIds
from tgfx.ir.ids import IdSpace, all_in
from tgfx.ir.kept_state import KeptState
from tgfx.ir.plain_attributes import plain_attributes_restored
from tgfx.ir.refusal import Refusal
from tgfx.ir.rehearsal import Rehearsal
from tgfx.ir.remembered import Remembered
from tgfx.ir.source import Source, tensors_in
from tgfx.ir.tree import named_tensors
from tgfx.ir.writes import has_memory, memory_of
from tgfx.ops import rule_for
from tgfx.ops.connection import connected, is_connection
from tgfx.ops.masked_call import masked_operand
from tgfx.ops.modules import reads_as_function
from tgfx.ops.naming import op_name
from tgfx.ops.pointwise import is_pointwise, pointwise
from tgfx.ops.registry import Call
from tgfx.ops.resize import RULES, can_resize
from tgfx.passes.attention import Attention, HeadRows
from tgfx.passes.demand import Demand
from tgfx.passes.free_sizes import FreeSizes
from tgfx.passes.freezing import FreezingRecorder
from tgfx.passes.gate_routes import GateRoutes
from tgfx.passes.joint_layers import settle_joint_layers
from tgfx.passes.own_tensors import OwnTensors, own_tensors
from tgfx.passes.recorder import Origin
from tgfx.passes.shuffles import find_shuffles
from tgfx.passes.undisturbed import undisturbed

_VIEWS_OR_COPIES = {"contiguous", "reshape", "reshape_as", "flatten", "ravel", "Flatten"}


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


class ChannelRecorder(FreezingRecorder, fx.Interpreter):
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
        FreezingRecorder.__init__(self, source, like.space if like else space or IdSpace(), attention)
        fx.Interpreter.__init__(self, source.module)
        self.shuffles: tuple[Shuffle, ...] = ()
        self.reads: list[Read] = []
        self.const_nodes: set[str] = set()
        self.seen_args: dict[str, tuple[tuple, dict]] = {}
        self.containers: set[str] = set()
        self.copies: set[str] = set()
        self._given: set[int] = set()  # tensors (by id) that the node that runs has as arguments
        self._makers: list[tuple[torch.Tensor, list[int]]] = []
        self.state = KeptState(())
        self._watch = _Watch(self)
        self._by_name = {node.name: node for node in source.module.graph.nodes}
        self.routes = GateRoutes(source, self.space, self.nodes)
        self._free = FreeSizes(self.nodes, self.const_nodes, lambda node: self.env.get(node))
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
            with plain_attributes_restored(self.source.module):  # of modules that are kept as they are
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
        elif self._op_of(n) in _VIEWS_OR_COPIES and not self._shares_memory(n, result):
            self.copies.add(n.name)
        self._leave(n, result)
        return result

    def _run(self, n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self, n.op)(n.target, args, kwargs)

    def _enter(self, n: fx.Node) -> None:
        self._node, self._live, self._pending, self._sized = n, {}, [], []
        self._makers, self._place = [], None
        self._given = {id(tensor) for tensor in self._inputs(n)}
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
        if closed is not None and not self._passes_probe(n, result, self._inputs(n)):
            self._freeze_opaque(n, result, closed)
        else:
            self._check_sizes(n)
            self._keep_as_long_as_the_input(n)
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
            self._free.note(n, result)
            self.nodes[n.name] = NodeIds(tuple(self._snapshot(t) for t in tensors_in(result)))
        self._live = {}

    def _inputs(self, n: fx.Node) -> list[torch.Tensor]:
        return [tensor for arg in n.all_input_nodes for tensor in tensors_in(self.env[arg])]

    def _shares_memory(self, n: fx.Node, result: torch.Tensor) -> bool:
        inputs = [tensor for tensor in self._inputs(n) if has_memory(tensor)]
        return not has_memory(result) or memory_of(result) in map(memory_of, inputs)

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
            if kind == "masked":  # the masked form works on the node's own input
                x, line = masked_operand(n, self.source.module), operands[0][1]
                operands = [(tensor, line) for tensor in tensors_in(self.env[x])[:1]] if x else []
            found = [own for tensor, line in operands if (own := self._operands(n, tensor, line))]
            if not found:
                self._freeze_ids(layer.numpy(), "is summed up inside a call that has no masked form", limit=True)
                continue
            clear = tuple(own[0] for own in found if len(own) == 1)
            if not clear and kind == "masked":
                self._freeze_ids(layer.numpy(), "lies along several axes of what is normalised", limit=True)
                continue
            # where nobody knows which axis of an operand is summed up a dead channel is zero on all of them
            settled = [self._at_every_batch(one) for one in ([clear] if clear else [(own,) for own in found[0]])]
            if not all(settled):
                reason = "shares an axis with samples or positions where it is summed up"
                self._freeze_ids(layer.numpy(), reason, limit=True)
                continue
            self.reads.extend(Read(n.name, self._op_of(n), kind, layer, options) for options in settled)

    def _operands(self, n: fx.Node, tensor: torch.Tensor, layer: torch.Tensor) -> list[Operand]:
        """Where a gate can be multiplied to this operand: one place, or more if its origin has the ids repeatedly."""
        origin = self.origin(tensor)
        if origin is None:
            return []
        if origin[0] == "param" and n.op == "call_module" and not reads_as_function(self._module(n), n):
            return []
        if layer.ndim == tensor.ndim > 1 and self._is_as_given(tensor):
            return [Operand(origin[0], origin[1], layer, origin[2])]
        return [Operand(origin[0], origin[1], own, origin[2]) for own in self._locate(origin, layer.reshape(-1))]

    def _is_as_given(self, tensor: torch.Tensor) -> bool:
        """Whether it is the value of an argument itself, and not what the node has made of one."""
        return id(tensor) in self._given

    def _at_every_batch(self, options: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """Operands that a gate fits at any batch, those that need no route to it first."""
        if any(option.kind == "param" for option in options):
            return options
        free, routed = [], []
        for option in options:
            node = self._by_name.get(option.name) if option.kind == "node" else None
            if node is None or self.routes.is_free(node, option.layer):
                free.append(option)
            elif (route := self.routes.route(node, option.layer)) is not None:
                routed.append(replace(option, route=route))
        return (*free, *routed)

    def _locate(self, origin: Origin, layer: torch.Tensor) -> list[torch.Tensor]:
        """The layers of the origin that carry these very ids, or else what they are tied to: one for each axis."""
        kind, name, index = origin
        known = (
            (self.params.get(name) or self.buffers.get(name)) if kind == "param" else self.nodes[name].tensors[index]
        )
        if known is None:
            return []
        wanted = layer.numpy()
        layers = [*known.layers, *([self.taps_of[name]] if kind == "param" and name in self.taps_of else [])]
        lines = [own.reshape(-1).numpy() for own in layers]
        found = [own for own, line in zip(layers, lines, strict=True) if all_in(wanted, line)]
        if not found:
            roots = self.space.find(wanted)
            found = [own for own, line in zip(layers, lines, strict=True) if all_in(roots, self.space.find(line))]
        by_shape: dict[tuple[int, ...], torch.Tensor] = {}
        for own in found:
            by_shape.setdefault(tuple(own.shape), own)
        return list(by_shape.values())

    def _keep_as_long_as_the_input(self, n: fx.Node) -> None:
        for axis in self._free.axes(n):
            for layer in self.ids(self.env[n.args[0]]).on_axis(axis):
                self._free.long.update(layer.reshape(-1).tolist())
                self.freeze(layer, "is sliced by a size of the input", limit=True)

    def _check_sizes(self, n: fx.Node) -> None:
        if not self._sized or can_resize(n, self.source.module):
            return
        for tensor in (*self._sized, *self._inputs(n)):
            for layer in self.ids(tensor).layers:
                self.freeze(layer, f"goes through {self._op_of(n)}, which cannot be resized", limit=True)

    # -- end of the run ------------------------------------------------------------------------------------------

    def settle_joint_layers(self) -> bool:
        return settle_joint_layers(self.space, self.nodes, self.shuffles)

    # -- helpers ---------------------------------------------------------------------------------------------------

    @cached_property
    def _demand(self) -> Demand:
        return Demand(self.source.module)

    def is_written_later(self) -> bool:
        """Whether something after the node that runs writes into the memory of its value."""
        return self._node is not None and self._demand.is_written_after(self._node, self._node)

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
            copies=frozenset(self.copies),
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
        try:
            self.recorder.observe(func, args, kwargs, out)
        except Exception:
            if not self.recorder.is_in_closed_box():
                raise
            self.recorder.keep_all(args, kwargs, out)
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
