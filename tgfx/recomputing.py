"""Less memory in training: the forward of a gated model in segments that are computed again in the backward pass.

torch.utils.checkpoint segment by segment (tgfx/passes/segments.py): what crosses from one to the next is kept, what is
made inside is not. Random numbers are drawn alike both times; statistics of norms move once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen, _PyTreeCodeGen
from torch.fx.graph_module import _forward_from_src
from torch.utils.checkpoint import checkpoint

from tgfx.errors import InputError
from tgfx.ir.buffers import buffers_restored
from tgfx.passes.segments import Segment, find_segments

_OPTIONS = ("preserve_rng_state", "determinism_check", "debug")


def checked_options(options: Mapping[str, Any] | None, every_n_layers: int, offload: bool) -> dict[str, Any]:
    """What is handed on to torch.utils.checkpoint."""
    given = dict(options or {})
    if given.pop("use_reentrant", False):
        raise InputError(
            "segments of a gated model cannot be recomputed in the reentrant way",
            expected="use_reentrant=False, torch's own advice",
            found="use_reentrant=True",
            fix='gradient_checkpointing_kwargs={"use_reentrant": False}',
        )
    unknown = [name for name in given if name not in _OPTIONS]
    if unknown or every_n_layers != 1 or offload:
        found = unknown or [f"every_n_layers={every_n_layers}, offload={offload}"]
        raise InputError(
            "a gated model is recomputed in segments of its graph, and has no such option",
            expected="use_reentrant=False, " + ", ".join(_OPTIONS),
            found=", ".join(found),
        )
    return given


@dataclass(frozen=True)
class _Piece:
    """A segment as a function of the module and its inputs; over: values that nobody needs after it."""

    segment: Segment
    function: Callable[..., Any]
    over: tuple[str, ...]


class Recomputed:
    """Runs a graph over the layers of a module, segment by segment."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.codegen = graph._codegen
        self.names = tuple(node.name for node in graph.nodes if node.op == "placeholder")
        self.entry = _function(_entry(graph))
        segments = find_segments(module, graph)
        self.pieces = []
        for index, segment in enumerate(segments):
            later = {name for other in segments[index + 1 :] for name in other.inputs}
            ends = index == len(segments) - 1
            over = tuple(name for name in (*segment.inputs, *segment.outputs) if name not in later)
            self.pieces.append(_Piece(segment, _function(_part(graph, segment, ends)), over))

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(self.names, self.entry(module, *args, **kwargs), strict=True))
        result: tuple = ()
        for piece in self.pieces:
            own = [values[name] for name in piece.segment.inputs]
            if piece.segment.repeatable:
                norms = [module.get_submodule(name) for name in piece.segment.norms]
                once = partial(_statistics_move_once, norms)
                run = partial(piece.function, module)
                result = checkpoint(run, *own, use_reentrant=False, context_fn=once, **self.options)
            else:
                result = piece.function(module, *own)
            del own
            if piece is not self.pieces[-1]:
                values.update(zip(piece.segment.outputs, result, strict=True))
                for name in piece.over:
                    values.pop(name, None)
        return self.codegen.process_outputs(result)


def _statistics_move_once(norms: list[nn.Module]) -> tuple[Any, Any]:
    """Contexts of the first run and of the others: there is one for each backward through the same forward."""
    return nullcontext(), _Restored(norms)


class _Restored:
    """May be entered again and again."""

    def __init__(self, norms: list[nn.Module]) -> None:
        self.norms = nn.ModuleList(norms)
        self.entered: list[AbstractContextManager] = []

    def __enter__(self) -> None:
        self.entered.append(buffers_restored(self.norms))
        self.entered[-1].__enter__()

    def __exit__(self, *failure: Any) -> None:
        self.entered.pop().__exit__(*failure)


def _entry(graph: fx.Graph) -> fx.Graph:
    """The arguments of the forward, as the graph's placeholders."""
    entry = fx.Graph()
    copies = [entry.node_copy(node) for node in graph.nodes if node.op == "placeholder"]
    entry.output(tuple(copies))
    codegen = copy.copy(graph._codegen)
    if isinstance(codegen, _PyTreeCodeGen):  # arguments are taken apart, but nothing is put together
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=None)
    entry._codegen = codegen
    return entry


def _part(graph: fx.Graph, segment: Segment, ends: bool) -> fx.Graph:
    """One segment; the one that `ends` the graph gives its output as it stands there."""
    part = fx.Graph()
    part._codegen = CodeGen()
    copies = {name: part.placeholder(name) for name in segment.inputs}
    for node in segment.nodes:
        copies[node.name] = part.node_copy(node, lambda arg: copies[arg.name])
    if ends:
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        part.output(fx.node.map_arg(output.args[0], lambda arg: copies[arg.name]))
    else:
        part.output(tuple(copies[name] for name in segment.outputs))
    return part


def _function(graph: fx.Graph) -> Callable[..., Any]:
    code = graph.python_code("self")
    return _forward_from_src(code.src, code.globals)


def may_recompute() -> bool:
    """Without gradients nothing is kept anyhow, and a compiler decides by itself what to keep."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()
