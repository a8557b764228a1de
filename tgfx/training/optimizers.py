"""The gated model and its optimizer: parameter groups, and whether they belong together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from tgfx.errors import InputError, OptimizerError
from tgfx.gated_check import check_gated, inside_compiled
from tgfx.passes.insert_gates import BANK

if TYPE_CHECKING:
    from tgfx.gated import GatedModule


class GateGroup(dict[str, Any]):
    """The gates' parameter group: what an optimizer leaves out as its default is set to make a plain step.

    No momentum and a large eps make SGD, Adam and RMSprop alike take one: a moment would erase magnitudes. The
    optimizer that a group is for is not known when it is made, and eps is not a number in each (Adafactor has two).
    """

    PLAIN: ClassVar[dict[str, float]] = {"momentum": 0.0, "eps": 1.0}

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Optimizers fill in their defaults with this."""
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        return super().setdefault(name, self.PLAIN.get(name, default) if is_number else default)


def param_groups(
    gated: GatedModule, lr: float, *, gate_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer: weights as usual, gates without weight decay and with their own rate.

    `gate_lr` (default: `lr`) matters when you train to `budget_loss(weight=...)`, the paper's rule. The default rule
    takes the gradient step of the gates itself and is not touched by it. Frozen weights are left out. torch itself
    refuses the groups for LBFGS (which takes no groups), Muon (matrices only: give it the weights that are, and the
    rest to another optimizer) and SparseAdam (sparse gradients only).
    """
    gated = inside_compiled(gated)  # its parameters are those of the model that was compiled
    check_gated(gated, "has parameters and gates to group")
    gates = {id(gate.weight) for gate in gated.gates.values()}
    weights = [p for p in gated.parameters() if p.requires_grad and id(p) not in gates]
    own = GateGroup(
        params=[gate.weight for gate in gated.gates.values()],
        lr=lr if gate_lr is None else gate_lr,
        weight_decay=0.0,
        name="gates",
    )
    if not weights:
        return [own]
    return [{"params": weights, "lr": lr, "weight_decay": weight_decay, "name": "weights"}, own]


def check_optimizer(gated: GatedModule, optimizer: Optimizer) -> None:
    """Raise OptimizerError if the optimizer does not hold all that is to be trained."""
    gated = inside_compiled(gated)
    check_gated(gated, "has gates that an optimizer could hold")
    if not hasattr(optimizer, "param_groups"):
        raise InputError("this is no optimizer", expected="a torch.optim.Optimizer", found=type(optimizer).__name__)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in gated.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise not_held(gated, missing)


def check_gates_held(gated: GatedModule, optimizers: Iterable[Optimizer]) -> None:
    """Raise OptimizerError if none of the optimizers holds the gates that are trained."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    gates = {id(weight) for weight in trained_gates(gated)}
    missing = [name for name, p in gated.named_parameters() if id(p) in gates - held]
    if missing:
        raise not_held(gated, missing)


def check_gates_together(gated: GatedModule, optimizer: Optimizer) -> None:
    """Raise OptimizerError if the optimizer holds some of the gates that are trained and not the others.

    One step moves all gates, by gradients of the same batch; a second optimizer would move its own once more.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {name: gate.weight for name, gate in gated.gates.items() if gate.weight.requires_grad}
    missing = [name for name, weight in trained.items() if id(weight) not in held]
    if 0 < len(missing) < len(trained):
        raise OptimizerError(
            "the optimizer holds some of the gates and not the others",
            expected="all gates that require a gradient in one optimizer",
            found=f"{len(trained) - len(missing)} of {len(trained)}; {_listed(missing)} missing",
            fix="give the gates to one optimizer, whichever holds the weights: [gate.weight for gate in "
            "gated.gates.values()]; gates that are to stay as they are: gate.weight.requires_grad_(False)",
        )


def trained_gates(gated: GatedModule) -> list[Tensor]:
    """Latent weights of the gates that may move: requires_grad_(False) holds a gate as it is."""
    return [gate.weight for gate in gated.gates.values() if gate.weight.requires_grad]


def all_frozen(gated: GatedModule) -> bool:
    """Whether nothing but gates asks for a gradient."""
    own = {id(gate.weight) for gate in gated.gates.values()}
    return not any(p.requires_grad for p in gated.parameters() if id(p) not in own)


def all_gates(gated: GatedModule) -> list[Tensor]:
    return [gate.weight for gate in gated.gates.values()]


def not_held(gated: nn.Module, missing: Iterable[str]) -> OptimizerError:
    missing = list(missing)
    gates = [name for name in missing if name.startswith(BANK)]
    what = "the gates" if len(gates) == len(missing) else f"{len(missing)} parameters of the gated model"
    return OptimizerError(
        f"the optimizer does not hold {what}: they would never be trained",
        expected="all parameters of the gated model that require a gradient",
        found="missing " + _listed(missing),
        fix="build the optimizer after tgfx.transform: torch.optim.SGD(tgfx.param_groups(gated, lr=0.1))",
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def scale_of(optimizer: Optimizer) -> float:
    """What a GradScaler leaves to the optimizer to divide gradients by in its step (fused ones); else 1."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)
