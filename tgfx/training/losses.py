"""From a batch to a loss: one rule for what the model and the loss function are given.

    batch                  model                 loss
    (x, target, ...)       model(x)              loss_fn(output, target, ...)
    ((x, y), target)       model(x, y)           loss_fn(output, target)
    ({"a": x}, target)     model(a=x)            loss_fn(output, target)
    {"a": x, ...}          model(a=x, ...)       loss_fn(output, batch); without loss_fn: output.loss
    x                      model(x)              loss_fn(output, x)

Whoever needs more writes `training_step(model, batch) -> loss` instead, or `-> Probed(loss, probe)`
(tgfx.training.probed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from tgfx.errors import InputError, TrainingError
from tgfx.training.batches import call_model
from tgfx.training.probed import Probed

Step = Callable[[nn.Module, Any], Tensor | Probed]


def step_of(loss_fn: Callable[..., Tensor] | None, training_step: Step | None) -> Step:
    """One function (model, batch) -> loss out of the two ways to give one."""
    for name, given in (("loss_fn", loss_fn), ("training_step", training_step)):
        if given is not None and not callable(given):
            raise InputError(f"{name} cannot be called", expected="a function", found=type(given).__name__)
    if training_step is not None:
        if loss_fn is not None:
            raise InputError(
                "two ways to a loss", expected="loss_fn or training_step", found="both", fix="leave one of them out"
            )
        return lambda model, batch: _checked_both(training_step(model, batch), "training_step(model, batch)")
    return lambda model, batch: _loss(model, batch, loss_fn)


def _loss(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None) -> Tensor:
    output = call_model(model, batch)
    if loss_fn is None:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        return _checked(own, "the model's output, as no loss_fn was given")
    if isinstance(batch, tuple | list) and len(batch):
        return _checked(loss_fn(output, *batch[1:]), "loss_fn(output, target)")
    return _checked(loss_fn(output, batch), "loss_fn(output, batch)")


def _checked_both(found: Any, where: str) -> Tensor | Probed:
    if isinstance(found, Probed):
        return Probed(_checked(found.loss, where), _checked(found.probe, f"the probe of {where}"))
    return _checked(found, where)


def _checked(loss: Any, where: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TrainingError(
            "there is no loss to descend", expected="a tensor with one number", found=found, where=where
        )
    if not loss.requires_grad:
        raise TrainingError(
            "the loss does not depend on anything that is trained",
            expected="a loss with a gradient",
            found="one without",
            where=where,
            fix="compute it from the output of the model that it is given, not under torch.no_grad()",
        )
    return loss.reshape(())
