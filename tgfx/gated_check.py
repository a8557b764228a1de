"""Whether what was given is a gated model, and what to give instead."""

from __future__ import annotations

from typing import Any

from torch import nn

from tgfx.errors import InputError


def check_gated(given: Any, what: str, *, compiled: str = "pass the gated model that was compiled") -> None:
    """Raise InputError unless it is a gated model: "only a gated model `what`".

    compiled: what to do where it is torch.compile's wrapper around one.
    """
    from tgfx.gated import GatedModule  # which needs controllers, and they need this

    if isinstance(given, GatedModule):
        return
    raise InputError(
        f"only a gated model {what}",
        expected="the GatedModule itself, as tgfx.transform returns it",
        found=type(given).__name__,
        fix=compiled if isinstance(inside_compiled(given), GatedModule) else _fix(given),
    )


def inside_compiled(model: Any) -> Any:
    """What torch.compile(module) was given; anything else is returned as it is."""
    return model.__dict__.get("_modules", {}).get("_orig_mod", model) if isinstance(model, nn.Module) else model


def _fix(given: Any) -> str:
    from tgfx.gated import GatedModule

    if not isinstance(given, nn.Module):
        return "gated = tgfx.transform(model, example_inputs)"
    path = next((path for path, module in given.named_modules() if isinstance(module, GatedModule)), None)
    if path is None:
        return "tgfx.transform the model first, and pass what it returns"
    return f"pass the gated model itself, which is the submodule {path!r} of this one"
