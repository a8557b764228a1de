"""The guarantees as functions that raise AssertionError: used on every block alone and on random chains."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tgfx
from tests.support.random_models import Case, build
from tgfx.passes.survivors import Survivors
from tgfx.training.selection import cheapest

IDENTITY = 1e-12  # float64; of the largest entry
TRAINED = 1e-10  # the same after a backward pass
EXACT = 1e-10
CONV_AND_LINEAR = {"convolution", "mm", "addmm"}


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    assert bool(torch.isfinite(expected).all()), f"{what}: the test itself is no good, it expects {expected}"
    found, expected = found.detach(), expected.detach()
    worst = float((found - expected).abs().max()) if found.numel() else 0.0
    scale = max(float(expected.abs().max()), 1e-9) if found.numel() else 1.0
    assert worst <= tolerance * scale, f"{what}: off by {worst:.3g} where the largest entry is {scale:.3g}"


def gate_at_random(gated: tgfx.GatedModule, density: float, seed: int) -> None:
    """Open each gate with this probability (0: one of every group); one of every group stays open."""
    generator = torch.Generator().manual_seed(seed)
    for gate in gated.gates.values():
        mask = torch.rand(gate.weight.shape, generator=generator) < density
        mask[int(torch.randint(len(mask), (), generator=generator))] = True
        gate.set_open_(mask)


# -- G1 ----------------------------------------------------------------------------------------------------


def identical_in_eval(case: Case, model: nn.Module, gated: tgfx.GatedModule) -> None:
    gated.eval()
    with torch.no_grad():
        for batch in (2, 1, 3):
            x = case.example(batch)
            assert_close(gated(x), model(x), IDENTITY, f"gated output, batch {batch}")


def identical_in_training(case: Case, steps: int = 2) -> None:
    """Step for step: the same loss, gradients, parameters and statistics."""
    model = build(case).train()
    gated = tgfx.transform(model, case.example())
    assert gated.training
    own = dict(gated.named_parameters())
    for name, parameter in own.items():
        if name.startswith("gate_bank."):
            parameter.requires_grad_(False)
    losses = []
    for each in (model, gated):
        names = [n for n, _ in model.named_parameters()]
        parameters = dict(each.named_parameters())
        optimizer = torch.optim.SGD([parameters[n] for n in names], lr=0.01)
        torch.manual_seed(7)
        history = []
        for step in range(steps):
            y = each(case.example(2 + step))
            loss = (y - torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            history.append((loss.detach(), {n: parameters[n].grad for n in names}))
            history[-1] = copy.deepcopy(history[-1])
            optimizer.step()
        losses.append(history)
    for step, (expected, found) in enumerate(zip(*losses, strict=True)):
        assert_close(found[0], expected[0], TRAINED, f"loss of step {step}")
        scale = max(float(g.abs().max()) for g in expected[1].values() if g is not None)
        for name, gradient in expected[1].items():
            other = found[1][name]
            if gradient is None or other is None:
                assert not _any(gradient) and not _any(other), f"step {step}: gradient of {name} only once"
                continue
            worst = float((gradient - other).abs().max())
            assert worst <= TRAINED * scale, f"step {step}: gradient of {name} off by {worst:.3g} of {scale:.3g}"
    after = gated.state_dict()
    for name, tensor in model.state_dict().items():
        assert_close(after[name].double(), tensor.double(), TRAINED, f"{name} after {steps} steps")


def _any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


# -- G2 ----------------------------------------------------------------------------------------------------


def exact_cut(case: Case, gated: tgfx.GatedModule, compact: nn.Module) -> None:
    """Both in eval mode, gates as they are."""
    gated.eval()
    compact.eval()
    with torch.no_grad():
        for batch in (2, 1, 5):
            x = case.example(batch)
            assert_close(compact(x), gated(x), EXACT, f"compact output, batch {batch}")


def dead_count_for_nothing(case: Case, gated: tgfx.GatedModule) -> int:
    """Large noise in all dead slices of parameters and buffers: the output stays. Gives how many entries."""
    facts = gated.facts
    survivors = Survivors(facts.channels, facts.coupling, gated.open_slots())
    noisy = copy.deepcopy(gated).eval()
    gated.eval()
    tensors = dict(noisy.named_parameters(remove_duplicate=False)) | dict(noisy.named_buffers(remove_duplicate=False))
    generator = torch.Generator().manual_seed(1)
    filled = 0
    for name, ids in [*facts.channels.params.items(), *facts.channels.buffers.items()]:
        tensor = tensors[name]
        living = torch.ones(tensor.shape, dtype=torch.bool)
        for axis, kept in enumerate(survivors.kept(ids)):
            if kept is not None:
                line = torch.zeros(tensor.shape[axis], dtype=torch.bool)
                line[torch.from_numpy(kept)] = True
                living &= line.reshape([-1 if a == axis else 1 for a in range(tensor.ndim)])
        if name in facts.channels.taps:
            living &= torch.from_numpy(survivors.alive_of_id[facts.channels.taps[name].numpy()])
        if living.all() or not tensor.is_floating_point():
            continue
        noise = 1e3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if name.endswith("running_var"):
            noise = noise.abs() + 1
        with torch.no_grad():
            tensor.copy_(torch.where(living, tensor, noise))
        filled += int((~living).sum())
    with torch.no_grad():
        for batch in (2, 3):
            x = case.example(batch)
            assert_close(noisy(x), gated(x), EXACT, f"output with noise in dead slices, batch {batch}")
    return filled


# -- G3 ----------------------------------------------------------------------------------------------------


def exact_price(case: Case, gated: tgfx.GatedModule, compact: nn.Module) -> None:
    x = case.example()
    # FlopCounterMode has no formula for the CPU's fused attention: run it as the two products it is
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        compact.eval()(x)
    counted = {str(op).split(".")[-1]: n for op, n in counter.get_flop_counts().get("Global", {}).items()}
    real = {
        "flops": sum(n for op, n in counted.items() if op in CONV_AND_LINEAR),
        "flops_all": sum(counted.values()),
    }
    for kind, flops in real.items():
        priced = float(gated.cost(kind)) * len(x)
        if kind == "flops_all" and (
            uses(case, "einsum") or uses(case, "eye")
        ):  # torch.einsum multiplies where one entry is summed up
            assert priced >= flops, (kind, priced, counted)
        else:
            assert priced == flops, (kind, priced, counted)
    parameters = sum(p.numel() for p in compact.parameters())
    assert float(gated.cost("params")) == parameters, (float(gated.cost("params")), parameters)
    if not any(name in ("BareWeight", "Constants") for name, _ in case.blocks) and not uses(case, "lstm"):
        channels = out_channels(compact)
        assert float(gated.cost("channels")) == channels, (float(gated.cost("channels")), channels)


def uses(case: Case, how: str) -> bool:
    return any(options.get("how") == how for _, options in case.blocks)


def out_channels(model: nn.Module) -> int:
    """Output channels of all convolutions and fully-connected layers that are used, each weight once."""
    used = {str(n.target).rpartition(".")[0] if n.op == "get_attr" else str(n.target) for n in model.graph.nodes}
    total, seen = 0, set()
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if path in used and isinstance(module, nn.modules.conv._ConvNd | nn.Linear) and id(weight) not in seen:
            total += module.out_features if isinstance(module, nn.Linear) else module.out_channels
            seen.add(id(weight))
        if weight is not None and weight.ndim > 2 and not weight.shape[1]:  # no tap is left, but its bias
            total += len(weight)
        packed = module._parameters.get("in_proj_weight")
        total += len(packed) if packed is not None else 0
        if packed is not None and module._modules.get("out_proj") is not None:
            assert f"{path}.out_proj" in used, used
    return total


def whole_price(model: nn.Module, gated: tgfx.GatedModule) -> None:
    assert gated.total("params") == sum(p.numel() for p in model.parameters())
    for kind in ("flops", "flops_all", "params", "channels"):
        assert float(gated.cost(kind)) == gated.total(kind)
        assert float(gated.ratio(kind)) == 1


def price_as_polynomial(gated: tgfx.GatedModule) -> None:
    """cost_expr at the open counts is the cost; of taps, those of living channels count."""
    opened = {name: gate.is_open() for name, gate in gated.gates.items()} | living_taps(gated)
    for kind in ("flops", "flops_all", "params", "channels"):
        expression = sympy.sympify(gated.cost_expr(kind))
        values = {symbol: _symbol_value(str(symbol), opened) for symbol in expression.free_symbols}
        assert int(expression.subs(values)) == float(gated.cost(kind)), (kind, expression)


def living_taps(gated: tgfx.GatedModule) -> dict[str, Tensor]:
    """Group -> its taps in the order of the gates: open, and of a channel that lives."""
    facts = gated.facts
    survivors = Survivors(facts.channels, facts.coupling, gated.open_slots())
    found = {}
    for weight, ids in facts.channels.taps.items():
        alive = torch.from_numpy(survivors.alive_of_id[ids.numpy()][0])
        kept = survivors.kept(facts.channels.params[weight])[1]
        if kept is not None:
            gone = torch.ones(len(alive), dtype=torch.bool)
            gone[torch.from_numpy(kept)] = False
            alive[gone] = False
        found[f"{weight.removesuffix('.weight')}.taps"] = alive.reshape(-1)
    return found


def _symbol_value(name: str, opened: dict[str, Tensor]) -> int:
    whole = re.fullmatch(r"n\[(.+)\]", name)
    if whole and whole[1] in opened:
        return int(opened[whole[1]].sum())
    single = re.fullmatch(r"(.+)\[(\d+)\]", name)
    assert single and single[1] in opened, f"{name!r} names no group of {list(opened)}"
    return int(opened[single[1]][int(single[2])])


def marginal_is_the_slope(gated: tgfx.GatedModule, kinds: Iterable[str] = ("flops", "params")) -> None:
    """Against central differences of the cost in each gate value."""
    bank, step = gated.bank().detach().double(), 1e-3
    for kind in kinds:
        slopes = gated.marginal(kind)
        assert list(slopes) == list(gated.gates)
        for group in gated.facts.coupling.groups:
            for offset in (0, group.size - 1):
                up, down = bank.clone(), bank.clone()
                up[group.start + offset] += step
                down[group.start + offset] -= step
                price = gated.facts.cost.evaluate
                slope = float(price(kind, up) - price(kind, down)) / (2 * step)
                found = float(slopes[group.name][offset])
                # the third derivative, if there is one, is below 1e-3 of the slope at this step
                assert abs(found - slope) <= 1e-4 * max(abs(slope), 1.0), (kind, group.name, found, slope)


def budget_is_used_up(gated: tgfx.GatedModule, kind: str, share: float) -> None:
    """The budget is met, and no closed gate fits in any more. Leaves eval mode."""
    gated.eval()
    left = share - gated.ratio(kind).item()
    assert left >= 0, f"{kind} is over the budget by {-left:.3g}"
    for name, slope in gated.marginal(kind).items():
        fits = ~gated.gates[name].is_open() & (slope / gated.total(kind) <= left)
        assert not bool(fits.any()), f"{kind}: {left:.3g} is left, and a channel of {name} would fit"


def price_has_gradients(gated: tgfx.GatedModule) -> None:
    gated.train()
    gates = [gate.weight for gate in gated.gates.values()]
    shares = {}
    for kind in ("flops", "params"):  # not where the model is: the gradient of a budget that is met is zero
        feasible, now = (1.0, max(0.5, cheapest(gated, kind, 0.0))), gated.ratio(kind).item()
        shares[kind] = max(feasible, key=lambda share, now=now: abs(share - now))
    loss = gated.budget_loss(weight=1.0, **shares)
    gradients = torch.autograd.grad(loss, gates, allow_unused=True)
    gated.eval()
    for (name, gate), gradient in zip(gated.gates.items(), gradients, strict=True):
        assert gradient is not None and gradient.shape == gate.weight.shape, name
        assert bool(gradient.isfinite().all()) and bool(gradient.any()), f"no gradient reaches the gates of {name}"


# -- G5, G8 ------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that must not change."""
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "ids": {k: id(v) for k, v in [*model.named_parameters(), *model.named_buffers()]},
        "modes": {k: m.training for k, m in model.named_modules()},
        "attributes": {k: sorted(vars(m)) for k, m in model.named_modules()},
        "classes": {k: type(m) for k, m in model.named_modules()},
        "requires_grad": {k: p.requires_grad for k, p in model.named_parameters()},
        "grads": {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()},
        "hooks": {k: (len(m._forward_hooks), len(m._forward_pre_hooks)) for k, m in model.named_modules()},
    }


def assert_same_snapshot(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key in before:
        if key in ("state", "grads"):
            assert before[key].keys() == after[key].keys()
            for name, tensor in before[key].items():
                other = after[key][name]
                same = other is None if tensor is None else torch.equal(other, tensor)
                assert same, f"{key} of {name} changed"
        else:
            assert before[key] == after[key], f"{key} changed"


def only_torch_modules(compact: nn.Module) -> None:
    for path, module in compact.named_modules():
        if path:
            assert type(module).__module__.startswith("torch."), f"{path} is a {type(module)}"
    for node in compact.graph.nodes:
        if node.op == "call_function":
            home = getattr(node.target, "__module__", "") or ""
            assert not home.startswith(("tgfx", "tests")), f"{node} calls {node.target}"
