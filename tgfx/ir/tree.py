"""The module tree: finding, placing and ordering modules and tensors by their dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def find(root: nn.Module, name: str) -> Any:
    """The module, tensor or other attribute of that name; None if there is none."""
    value: Any = root
    for part in name.split(".") if name else []:
        value = getattr(value, part, None)
    return value


def has_module(root: nn.Module, path: str) -> bool:
    return isinstance(find(root, path), nn.Module)


def named_modules(root: nn.Module, *, repeat: bool = False) -> list[tuple[str, nn.Module]]:
    """As torch lists them, several times faster; repeat: shared ones under each of their names."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    ahead = [("", root)]
    while ahead:
        name, module = ahead.pop()
        if not repeat:
            if id(module) in seen:
                continue
            seen.add(id(module))
        found.append((name, module))
        prefix = name + "." if name else ""
        ahead += [(prefix + own, child) for own, child in reversed(module._modules.items()) if child is not None]
    return found


def named_parameters(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tied ones under each of their names."""
    return [pair for name, module in named_modules(root, repeat=True) for pair in _own(name, module._parameters)]


def named_buffers(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Shared ones under each of their names."""
    return [pair for name, module in named_modules(root, repeat=True) for pair in _own(name, module._buffers)]


def named_tensors(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers; tied ones under each of their names."""
    modules = named_modules(root, repeat=True)
    parameters = [pair for name, module in modules for pair in _own(name, module._parameters)]
    return parameters + [pair for name, module in modules for pair in _own(name, module._buffers)]


def _own(path: str, table: Mapping[str, torch.Tensor | None]) -> list[tuple[str, torch.Tensor]]:
    prefix = path + "." if path else ""
    return [(prefix + name, tensor) for name, tensor in table.items() if tensor is not None]


def put_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Place a module under a name, in the stead of what is there; its parent exists."""
    parent, _, last = path.rpartition(".")
    root.get_submodule(parent).add_module(last, module)


def put_tensor(root: nn.Module, name: str, tensor: torch.Tensor, like: nn.Module) -> None:
    """Place a parameter or buffer under a name, making the way to it; a buffer is saved if `like`'s is."""
    path, _, last = name.rpartition(".")
    owner = root
    for part in path.split(".") if path else []:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(last, tensor)
    else:
        owner.register_buffer(last, tensor, persistent=last not in like.get_submodule(path)._non_persistent_buffers_set)


def put_in_order(module: nn.Module, model: nn.Module) -> None:
    """List modules and tensors in the model's own order (optimizers and tied names depend on it)."""
    for table in ("_modules", "_parameters", "_buffers"):
        own, wanted = getattr(module, table), list(getattr(model, table))
        ordered = {name: own[name] for name in [*(n for n in wanted if n in own), *(n for n in own if n not in wanted)]}
        own.clear()
        own.update(ordered)
    for name, child in model._modules.items():
        if child is not None and name in module._modules and module._modules[name] is not child:
            put_in_order(module._modules[name], child)  # type: ignore[arg-type]
