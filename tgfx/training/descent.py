"""Where the optimizer moves the gates itself, by the gradient of equation 7: the paper's rule, and that of choices."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from tgfx.budget import Budget
from tgfx.training.optimizer_watch import OptimizerWatch


class Descent(OptimizerWatch):
    """Moves nothing: it finds out budgets that cannot be met and optimizers that do not hold the gates."""

    def __init__(self, gated: Any, budget: Budget) -> None:
        super().__init__(gated, budget)
        gated._check_feasible(budget)
        self.watch_steps()

    def retarget(self, budget: Budget) -> None:
        self.gated._check_feasible(budget)
        self.budget = budget

    def before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        self.holds_gates(optimizer)

    def after_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        self.holds_gates(optimizer)
