"""A captured model: the plain graph before any gate."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from tgfx.ir.containers import is_container_type, parts
from tgfx.ir.refusal import Refusal


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested value, in flattening order; those in the fields of dataclasses too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (tuple, list) and all(isinstance(item, torch.Tensor) for item in value):
        return list(value)
    leaves = torch.utils._pytree.tree_leaves(value)
    return [tensor for leaf in leaves for tensor in ([leaf] if isinstance(leaf, torch.Tensor) else _held(leaf))]


def _held(leaf: Any) -> list[torch.Tensor]:
    """In a class that torch knows nothing about: a dataclass, a dict of the user's own."""
    return tensors_in(list(parts(leaf).values())) if is_container_type(type(leaf)) else []


@dataclass
class Source:
    """A model as a graph.

    module: GraphModule over a copy of the user's model; args/kwargs: the example it was captured with;
    front_end: "fx" or "export"; refusals: submodules that stayed opaque, and why.
    """

    module: fx.GraphModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    front_end: str
    refusals: list[Refusal] = field(default_factory=list)
    opaque: set[str] = field(default_factory=set)
    training: Source | None = None  # the same model captured in train mode, where its structure differs
    result: Any = None  # what the graph gave on the example, until it has been compared

    def example_tensors(self) -> list[torch.Tensor]:
        return tensors_in((self.args, self.kwargs))

    def flat_inputs(self) -> list[Any]:
        """The example as the graph's placeholders want it, one value each."""
        if isinstance(self.module.graph._codegen, torch.fx.graph._PyTreeCodeGen):
            return list(torch.utils._pytree.tree_leaves((self.args, self.kwargs)))
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        names = [str(node.target).lstrip("*") for node in placeholders]
        bound: dict[str, Any] = dict(zip(names, self.args, strict=False))
        bound.update(self.kwargs)
        return [
            bound[name] if name in bound else (node.args[0] if node.args else None)
            for name, node in zip(names, placeholders, strict=True)
        ]


def source_line(node: fx.Node) -> str:
    """file:line of the user's code that made this node: the innermost frame outside torch and tgfx."""
    if "tgfx_source" not in node.meta:
        trace = node.meta.get("stack_trace") or node.stack_trace or ""
        frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
        places = []
        for frame in frames:
            parts = frame.split(",")
            if len(parts) > 1:
                path = parts[0].removeprefix('File "').rstrip('"')
                places.append((path, parts[1].strip().removeprefix("line ")))
        own = [place for place in places if not is_machinery(place[0])]
        node.meta["tgfx_source"] = "{}:{}".format(*own[-1]) if own else ""
    return node.meta["tgfx_source"]


@cache
def is_machinery(path: str) -> bool:
    """Files of torch, Python and tgfx: not where the user would look."""
    of_python = path.startswith(_STANDARD_LIBRARY) and "site-packages" not in path and "dist-packages" not in path
    return path.startswith("<") or of_python or any(part in path for part in _MACHINERY)


_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_MACHINERY = tuple(f"{os.sep}{part}{os.sep}" for part in ("torch", "tgfx", "passes", os.path.join("tgfx", "capture")))
