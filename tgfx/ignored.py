"""What the user wants to keep: `transform(model, ignore=...)`."""

from __future__ import annotations

import fnmatch
from typing import Any

from torch import nn

from tgfx.errors import IgnoreError
from tgfx.ir.facts import ChannelMap
from tgfx.ir.refusal import Refusal
from tgfx.ir.tree import named_modules

Ignore = str | type | nn.Module


def ignored_names(model: nn.Module, ignore: Any) -> set[str]:
    """Names of the layers and parameters that `ignore` stands for."""
    several = isinstance(ignore, list | tuple | set | frozenset)
    wanted = list(ignore) if several else [ignore]
    modules = dict(named_modules(model))
    names: set[str] = set()
    for entry in wanted:
        if not isinstance(entry, str | type | nn.Module):
            raise IgnoreError(
                f"ignore={entry!r} cannot be used",
                expected="a layer's name, a glob pattern, a module type or a module of this model",
                found=type(entry).__name__,
            )
        if isinstance(entry, type):
            hits = [n for n, m in modules.items() if isinstance(m, entry)]
        elif isinstance(entry, nn.Module):
            hits = [n for n, m in modules.items() if m is entry]
        else:
            parameters = [n for n, _ in model.named_parameters(remove_duplicate=False)]
            hits = [n for n in (*modules, *parameters) if n and fnmatch.fnmatchcase(n, entry)]
        if not hits:
            raise IgnoreError(
                f"ignore={entry!r} matches nothing",
                expected="a layer's name, a glob pattern, a module type or a module of this model",
                found=repr(entry),
                fix="names: " + ", ".join([n for n in modules if n][:8]),
            )
        names.update(hits)
    return names


def freeze_ignored(channels: ChannelMap, ignored: set[str]) -> None:
    """What an ignored layer puts out stays: output channels of a mixing weight, all axes of other parameters."""
    for name, ids in channels.params.items():
        if not is_within(name, ignored):
            continue
        refusal = Refusal("is ignored, as asked", name, "ignore")
        if name in channels.taps:
            channels.space.freeze(channels.taps[name].numpy(), refusal)
        if name in channels.channels:
            channels.space.freeze(channels.channels[name].numpy(), refusal)
        else:
            for layer in ids.layers:
                channels.space.freeze(layer.numpy(), refusal)


def is_within(name: str, layers: set[str]) -> bool:
    """Whether a parameter is one of these, or belongs to one of these layers."""
    return any(name == own or name.startswith(own + ".") for own in layers)
