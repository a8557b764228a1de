"""The module tree of a gated model: new containers around the very same layers."""

from __future__ import annotations

from torch import fx, nn


def mirror(module: nn.Module, twins: dict[str, nn.Module]) -> nn.Module:
    """New containers around the very same layers, with gated twins in their places."""

    def rebuilt(old: nn.Module, path: str) -> nn.Module:
        if path in twins:
            return twins[path]
        if type(old) is not nn.Module and not isinstance(old, fx.GraphModule):
            return old
        new = nn.Module()
        for key in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            new.__dict__[key] = old.__dict__[key]
        for name, child in old._modules.items():
            below = f"{path}.{name}" if path else name
            new.add_module(name, None if child is None else rebuilt(child, below))
        return new

    return rebuilt(module, "")
