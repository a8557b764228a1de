"""One optimizer step: forward, backward, checks, and then either all of it is applied or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from tgfx.errors import InputError, TrainingError
from tgfx.training.batches import inputs_of, samples_in
from tgfx.training.controller import BudgetController
from tgfx.training.device import device_of, to_device
from tgfx.training.losses import Step
from tgfx.training.probed import Probed, probe_gradients

if TYPE_CHECKING:
    from tgfx.gated import GatedModule


@dataclass
class Stepper:
    """`penalty`: budget and weight of the paper's rule, whose loss is added to the task's."""

    gated: GatedModule
    optimizer: Optimizer
    loss_of: Step
    amp: torch.dtype | None = None
    clip: float | None = None
    penalty: tuple[Mapping[str, Any], float] | None = None
    _changing: set[str] | None = field(default=None, init=False)

    def step(self, batches: Sequence[Any]) -> float:
        """The mean loss of the task over the batches. On a loss or gradient that is not finite, nothing changes."""
        before = self._copied_buffers()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            loss = self._backward(batches)
            self._check_gradients()
        except BaseException:
            self._put_back(before)
            self.optimizer.zero_grad(set_to_none=True)
            raise
        self.optimizer.step()
        if self._changing is None:  # from now on only those that a step changes (batch norm's) need a copy
            now = dict(self.gated.named_buffers())
            self._changing = {name for name, old in before.items() if not torch.equal(old, now[name])}
        return loss

    def _backward(self, batches: Sequence[Any]) -> float:
        device = device_of(self.gated)
        sums = 0.0
        for batch in batches:
            with nullcontext() if self.amp is None else torch.autocast(device.type, dtype=self.amp):
                found = self.loss_of(self.gated, to_device(batch, device))
            loss, probe = (found.loss, self._wanted(found.probe)) if isinstance(found, Probed) else (found, None)
            if isinstance(controller := self.gated.controller, BudgetController):
                controller.tell_samples(samples_in(*inputs_of(batch)))
            value = float(loss.detach())
            if self.penalty is not None:
                budget, weight = self.penalty
                loss = loss + self.gated.budget_loss(weight=weight, **budget)
            if not bool(loss.detach().isfinite()):
                raise not_finite("loss", value)
            sums += value
            (loss / len(batches)).backward(retain_graph=probe is not None)
            if probe is not None:
                gradient = probe_gradients(self.gated, probe / len(batches))
                if not bool(gradient.isfinite().all()):
                    raise not_finite("gradient of the probe", float(gradient.norm()))
                self._controller().take_probe(gradient)
        return sums / len(batches)

    def _wanted(self, probe: Tensor) -> Tensor | None:
        """None where gates stand still, and nothing is to be learned of them."""
        if not bool(probe.detach().isfinite()):
            raise not_finite("probe", float(probe.detach()))
        return None if self._controller().phase == "hold" else probe

    def _controller(self) -> BudgetController:
        controller = self.gated.controller
        if isinstance(controller, BudgetController) and controller.weights_frozen:
            return controller
        raise InputError(
            "training_step gives a probe, and nobody asks for one",
            expected='a loss alone, or train="gates", a budget, rule="default" and no gates over single weights',
            found="tgfx.Probed",
            fix="return the loss itself",
        )

    def _check_gradients(self) -> None:
        gates = {id(gate.weight) for gate in self.gated.gates.values()}
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        weights = [p for p in trained if id(p) not in gates]
        norms = []
        for own in (weights, [p for p in trained if id(p) in gates]):
            norm = get_total_norm([p.grad for p in own if p.grad is not None])
            if not bool(norm.isfinite()):
                raise not_finite("gradient", float(norm))
            norms.append(norm)
        if self.clip is not None and weights:
            # gates are left alone: their gradients are evidence, and the batches must stay comparable
            clip_grads_with_norm_(weights, self.clip, norms[0])

    def _copied_buffers(self) -> dict[str, Tensor]:
        now = self.gated.named_buffers()
        return {name: b.detach().clone() for name, b in now if self._changing is None or name in self._changing}

    @torch.no_grad()
    def _put_back(self, buffers: dict[str, Tensor]) -> None:
        now = dict(self.gated.named_buffers())
        for name, old in buffers.items():
            now[name].copy_(old)


def not_finite(what: str, value: float) -> TrainingError:
    return TrainingError(
        f"the {what} is not finite",
        expected="a number",
        found=f"{value}",
        fix="look at the data and the loss; a smaller learning rate or clip=1.0 helps where training diverges",
    )
