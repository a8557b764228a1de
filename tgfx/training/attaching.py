"""What the adapters to training frameworks share: finding the gated model, a controller on it, what to log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tgfx.errors import InputError
from tgfx.gated import GatedModule
from tgfx.training.controller_for import Controller, controller_for
from tgfx.training.schedule import Schedule
from tgfx.training.tally import open_counts

PHASES = ("watch", "close", "settle", "hold")


def find_gated(model: nn.Module, name: str | None = None) -> GatedModule:
    """The gated model in `model`: the submodule of this name, or the only one there is."""
    if name is not None:
        try:
            found = [model.get_submodule(name)]
        except AttributeError:
            found = []
        wanted = f"a gated model at {name}"
    else:
        found = [module for module in model.modules() if isinstance(module, GatedModule)]
        wanted = "exactly one gated model"
    found = [module for module in found if isinstance(module, GatedModule)]
    if len(found) != 1:
        paths = [path or "itself" for path, module in model.named_modules() if isinstance(module, GatedModule)]
        raise InputError(
            f"{type(model).__name__} does not hold {wanted}",
            expected=wanted,
            found=", ".join(paths) or "none",
            fix="keep tgfx.transform(model) as an attribute; of several, name one: GateCallback(..., gated='net')",
        )
    return found[0]  # type: ignore[return-value]


def attach_controller(
    gated: GatedModule,
    budget: Mapping[str, float],
    *,
    steps: int,
    schedule: Schedule | None = None,
    floor: float | None = None,
    batch_size: int | None = None,
    round_to: int | None = None,
    state: dict[str, Any] | None = None,
) -> Controller:
    """A controller in charge of `gated`, going on from `state` if there is one."""
    controller = controller_for(
        gated, budget, schedule or Schedule(steps), floor=floor, batch_size=batch_size, round_to=round_to
    )
    controller.owner = "the GateCallback"
    if state is not None:
        controller.load_state_dict(state)
    return gated.attach(controller)


def figures(controller: Controller) -> dict[str, float]:
    """For the log: ratio and target of each kind, open gates, and the phase as its number."""
    gated = controller.gated
    values: dict[str, float] = {}
    for kind, target in controller.targets.items():
        values[f"ratio_{kind}"] = gated.ratio(kind).item()
        values[f"target_{kind}"] = target
    values["channels"] = float(sum(open_counts(gated)))
    values["phase"] = float(PHASES.index(controller.phase))
    return values
