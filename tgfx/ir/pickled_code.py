"""What torch's pickle of an fx.GraphModule will be when it is loaded: its code, traced again.

Where that would be another program the model refuses to be pickled: nobody would notice after it is loaded.
"""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import fx
from torch.fx import graph_module
from torch.package.importer import sys_importer

from tgfx.ir.portable import is_pythons
from tgfx.ir.tree import named_tensors

_KEY = "tgfx_cannot_be_pickled"


def guard_pickle(module: fx.GraphModule) -> None:
    """Where pickle would lose something, let it fail with a word on what."""
    lost = lost_in_pickle(module)
    if lost is not None:
        module.meta[_KEY] = _Refuses(lost)


def lost_in_pickle(module: fx.GraphModule) -> str | None:
    """What is not as it was in a model that is pickled and loaded again; None if all is."""
    try:
        loaded = _loaded(module)
    except Exception as error:
        return f"its code cannot be traced again ({type(error).__name__}: {str(error).splitlines()[0]})"
    known: dict[int, str] = {}  # tied tensors have several names, of which fx takes the one it likes
    first = {name: known.setdefault(id(tensor), name) for name, tensor in named_tensors(module)}
    for mine, other in zip_longest(_calls(module.graph, first), _calls(loaded, first)):
        if mine != other:
            return f"{mine or 'nothing'} would be {other or 'nothing'}"
    return None


def _calls(graph: fx.Graph, first: dict[str, str]) -> Iterator[str]:
    """What the graph does, in order. Attributes have no place of their own: fx notes them when they are first used.

    `first`: the first name of each tensor.
    """
    names: dict[fx.Node, str] = {}
    known: set[fx.Node] = set()  # plain values that the graph says itself: gone when its code is traced

    def named(value: Any) -> str:
        return repr(fx.node.map_arg(value, lambda node: _Name(names[node])))

    count = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = str(node.target)
        elif node.op == "get_attr":
            names[node] = f"self.{first.get(str(node.target), node.target)}"
        elif node.op == "output":
            yield f"return {[names[result] for result in node.all_input_nodes]}"
        elif node.target is getattr and len(node.args) == 2:
            names[node] = f"{named(node.args[0])}.{node.args[1]}"
        elif known.issuperset(node.all_input_nodes) and (is_pythons(node.target) or node.target is torch._assert):
            known.add(node)
            names[node] = named((node.target, *node.args))
        else:
            names[node] = f"value_{count}"
            count += 1
            yield f"{node.target}{named(_arguments(node))}"


def _arguments(node: fx.Node) -> Any:
    """By name where there is one: fx itself gives some by position and some by name."""
    if node.op == "call_function":
        try:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
        else:
            bound.apply_defaults()
            return tuple(bound.arguments.items())
    return tuple(node.args), dict(node.kwargs)


class _Name(str):
    """Shown without quotes: it stands for a value."""

    __repr__ = str.__str__


class _CodeOnly(torch.nn.Module):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        held = {name: value for name, value in module.__dict__.items() if name not in ("_graph", "meta")}
        self.__dict__ = {k: dict(v) if k in ("_modules", "_parameters", "_buffers") else v for k, v in held.items()}


class _KeepModules(fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True


def _loaded(module: fx.GraphModule) -> fx.Graph:
    code = module.recompile()
    block = graph_module._format_import_block(code.globals, sys_importer)
    kind = type("_Code", (_CodeOnly,), {"forward": graph_module._forward_from_src(block + code.src, {})})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _KeepModules().trace(kind(module))


class _Refuses:
    """Part of a model that must not be pickled."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __deepcopy__(self, memo: dict[int, Any]) -> _Refuses:
        return self

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError(
            f"this model would not be the same after pickle, since torch keeps the code of its graph only: {self.why}. "
            "tgfx.save_plan(gated, file) keeps it without pickle"
        )
