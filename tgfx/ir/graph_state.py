"""An fx.Graph as plain data and back, so that gated models survive pickle and deepcopy with all their facts."""

from __future__ import annotations

import importlib
import pickle
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tgfx.ir.containers import builds_container
from tgfx.ir.source import source_line


@dataclass(frozen=True)
class _Ref:
    """Stands for a node inside packed arguments."""

    name: str


@dataclass(frozen=True)
class _Op:
    """Stands for an ATen overload, e.g. "aten.view.default"."""

    name: str

    def resolve(self) -> Any:
        value: Any = torch.ops
        for part in self.name.split("."):
            value = getattr(value, part)
        return value


@dataclass(frozen=True)
class _Named:
    """Stands for a function that pickle cannot find by its own name: F.max_pool2d is `fn` inside of another one."""

    module: str
    name: str

    def resolve(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


class _Codegen:
    """How a graph takes its inputs apart; copied by reference, and pickled without torch's own deprecation noise."""

    def __init__(self, codegen: Any) -> None:
        self.codegen = codegen

    def __deepcopy__(self, memo: dict[int, Any]) -> _Codegen:
        return self

    def __reduce__(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return _unpickled_codegen, (pickle.dumps(self.codegen),)


def _unpickled_codegen(data: bytes) -> _Codegen:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return _Codegen(pickle.loads(data))


def pack_graph(graph: fx.Graph) -> dict[str, Any]:
    nodes = []
    for node in graph.nodes:
        target = _target(node.target)
        args = fx.node.map_aggregate((node.args, node.kwargs), _pack)
        nodes.append((node.op, node.name, target, args, source_line(node)))
    return {"nodes": nodes, "codegen": _Codegen(graph._codegen)}


def _target(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        return _Op(str(target))
    home, name = str(getattr(target, "__module__", "")), getattr(target, "__name__", "")
    if "<locals>" in getattr(target, "__qualname__", "") and getattr(sys.modules.get(home), name, None) is target:
        return _Named(home, name)
    return target


def unpack_graph(state: dict[str, Any]) -> fx.Graph:
    graph = fx.Graph()
    graph._codegen = state["codegen"].codegen
    made: dict[str, fx.Node] = {}
    for op, name, target, packed, line in state["nodes"]:
        target = target.resolve() if isinstance(target, _Op | _Named) else target
        args, kwargs = fx.node.map_aggregate(packed, lambda a: made[a.name] if isinstance(a, _Ref) else a)
        node = graph.create_node(op, target, args, kwargs, name=name)
        node.name = name
        node.meta["tgfx_source"] = line
        if builds_container(node):
            node.meta["is_wrapped"] = True
        made[name] = node
    return graph


def _pack(arg: Any) -> Any:
    return _Ref(arg.name) if isinstance(arg, fx.Node) else arg
