"""Where a node belongs: its module path, and its line in the user's code."""

from __future__ import annotations

import linecache
import os
from pathlib import Path

from torch import fx, nn

from tgfx.ir.source import source_line


def module_path(node: fx.Node, root: nn.Module) -> str:
    """Path of the module whose forward makes the call ("" for the model's own); a layer's call is its parent's."""
    if node.op == "call_module":
        return str(node.target).rpartition(".")[0]
    if node.op in ("placeholder", "output"):
        return ""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if isinstance(entry, tuple | list) and entry]
    path = paths[-1] if paths else ""
    if not path and node.op == "get_attr":
        path = str(node.target).rpartition(".")[0]
    return path


def module_types(nodes: list[fx.Node], root: nn.Module) -> dict[str, str]:
    """Class name of every module that a path can name."""
    types = {name: type(module).__name__ for name, module in root.named_modules() if name}
    for node in nodes:  # classes that the capture has replaced by plain containers
        for entry in (node.meta.get("nn_module_stack") or {}).values():
            if isinstance(entry, tuple | list) and len(entry) > 1 and entry[0]:
                kind = entry[1]
                types[str(entry[0])] = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return types


def shown_line(node: fx.Node) -> dict[str, str] | None:
    """{"place": "models/resnet.py:102", "code": "out += identity"}, where the tracer recorded a line."""
    return describe_line(source_line(node))


def describe_line(place: str) -> dict[str, str] | None:
    path, _, number = place.rpartition(":")
    if not path or not number.isdigit():
        return None
    return {"place": f"{short_path(path)}:{number}", "code": linecache.getline(path, int(number)).strip()[:200]}


def short_path(path: str) -> str:
    """Without what only says where packages lie on this machine: a page is made to be passed on."""
    parts = Path(path).parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :])
    relative = os.path.relpath(path)
    return relative.replace(os.sep, "/") if not relative.startswith("..") else "/".join(parts[-2:])
