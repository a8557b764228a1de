"""The pipeline: transform and shrink."""

from __future__ import annotations

import copy
import fnmatch
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from tgfx.bank import GateBank
from tgfx.capture import capture, example_inputs_for, prepare
from tgfx.errors import (
    AlreadyGatedError,
    EmptyGroupError,
    GranularityError,
    IgnoreError,
    InputError,
    LazyModuleError,
    NothingToGateError,
    StrictError,
    VerificationError,
)
from tgfx.gated import Facts, GatedModule
from tgfx.gates import GateSpec
from tgfx.ir.facts import Axis, ChannelMap
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source, tensors_in
from tgfx.passes.channels import analyse_channels
from tgfx.passes.cost import build_cost
from tgfx.passes.couple import couple
from tgfx.passes.cut import cut
from tgfx.passes.dead_branches import DeadBranches, dead_branches
from tgfx.passes.insert_gates import BANK, INDEX, insert_gates
from tgfx.passes.place import place_gates
from tgfx.passes.survivors import Survivors
from tgfx.verify import close, first_difference

Ignore = str | type | nn.Module


def transform(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    granularity: str = "channel",
    gate: GateSpec | None = None,
    ignore: Sequence[Ignore] | Ignore = (),
    strict: bool = False,
) -> GatedModule:
    """A gated copy of `model`; the model itself is left as it is.

    example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments; may be left out where the model says
    what it takes. ignore: layers whose output channels stay (names, glob patterns, types, modules). strict: raise
    instead of keeping channels that meet something unknown.
    """
    _check_model(model, granularity, gate)
    ignored = _ignored_names(model, ignore)
    with _untouched_rng(), torch.no_grad():
        args, kwargs = example_inputs_for(model, example_inputs)
        mine = copy.deepcopy(model)
        modes = {name: module.training for name, module in mine.named_modules()}
        mine.eval()
        reference = prepare(mine, args, kwargs)
        source = capture(mine, args, kwargs)
        channels = analyse_channels(source)
        _check_capture(source, reference)
        _freeze_ignored(channels, ignored)
        if strict:
            _refuse_unknown(source, channels)
        coupling = couple(channels)
        if not coupling.groups:
            raise _nothing_to_gate(model, coupling.frozen)
        placement = place_gates(source, channels, coupling)
        gated_graph = insert_gates(source, placement)
        training_graph = None
        if source.training is not None and channels.training is not None:
            training_placement = place_gates(source.training, channels.training, coupling)
            training_graph = insert_gates(source.training, training_placement, like=gated_graph).graph
        spec = gate or GateSpec()
        generator = torch.Generator().manual_seed(0)
        bank = GateBank({g.name: spec.build(g.size, generator=generator) for g in coupling.groups})
        root = _mirror(source.module, gated_graph.twins)
        root.add_module(BANK, bank)
        root.add_module(INDEX, gated_graph.indices)
        cost = build_cost(channels, coupling, _counted_parameters(source.module))
    _match_device(root, bank, gated_graph.indices)
    for name, module in root.named_modules():
        module.training = modes.get(name, modes[""])
    facts = Facts(source, channels, coupling, placement, cost, type(model).__name__, tuple(sorted(ignored)))
    return GatedModule(root, gated_graph.graph, facts, training_graph)


def shrink(gated: GatedModule, *, round_to: int | None = None, verify: bool = True) -> fx.GraphModule:
    """The physically smaller model: plain torch modules, the same output as `gated.eval()`.

    round_to: keep group sizes at multiples of this number, reviving the best of the dead. The result is run against
    the gated model on the example before it is returned (verify=False skips that).
    """
    if not isinstance(gated, GatedModule):
        raise InputError("only a gated model can be shrunk", expected="GatedModule", found=type(gated).__name__)
    return cut_to(gated, shrink_slots(gated, round_to), verify=verify)


def shrink_slots(gated: GatedModule, round_to: int | None) -> np.ndarray:
    """Which slots of the gate bank stay."""
    return gated.open_slots() if round_to is None else _rounded(gated, round_to)


def cut_to(gated: GatedModule, opened: np.ndarray, *, verify: bool = True) -> fx.GraphModule:
    """Cut a gated model to these slots; its gates are not touched."""
    facts = gated.facts
    if facts.source.training is not None:
        warnings.warn(
            f"{facts.model_name} takes another path in train mode (an auxiliary output, say); "
            "the compact model keeps the eval path in both modes",
            stacklevel=3,
        )
    with _untouched_rng(), torch.no_grad():
        tensors = dict(gated.named_parameters(remove_duplicate=False))
        tensors.update(gated.named_buffers(remove_duplicate=False))
        survivors = Survivors(facts.channels, facts.coupling, opened)
        compact = cut(facts.source, facts.channels, survivors, tensors, _dead(gated, survivors, opened))
        for name, module in gated.named_modules():
            if name and _has_module(compact, name):
                compact.get_submodule(name).training = module.training
        compact.training = gated.training
        if verify:
            _verify(gated, compact, survivors, opened)
    return compact


def _verify(gated: GatedModule, compact: fx.GraphModule, survivors: Survivors, opened: np.ndarray) -> None:
    """Run both on the example; a cut that changes the output is never handed out."""
    source = gated.facts.source
    with _gates_at(gated, opened), _eval_mode(gated), _eval_mode(compact):
        like = next(gated.parameters())
        args, kwargs = torch.utils._pytree.tree_map(lambda v: _like(v, like), (source.args, source.kwargs))
        expected = tensors_in(gated(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
        try:
            found = tensors_in(compact(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
        except Exception as error:
            found, cause = [], error
        else:
            cause = None
        if len(expected) == len(found) and all(map(close, expected, found)):
            return
        inputs = [_like(value, like) for value in source.flat_inputs()]
        place = first_difference(gated, compact, survivors, gated.facts.channels.nodes, inputs)
    raise VerificationError(
        "the cut model does not compute what the gated one does; it is not handed out",
        expected="equal outputs on the example",
        found=f"first difference at {place}",
        fix="please report this model: a rule of tgfx is wrong",
    ) from cause


# -- steps of transform ----------------------------------------------------------------------------------------


def _check_model(model: Any, granularity: Any, gate: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError("this is not a model", expected="torch.nn.Module", found=type(model).__name__)
    if isinstance(model, GatedModule) or any(isinstance(m, GateBank) for m in model.modules()):
        raise AlreadyGatedError(
            "the model is gated already",
            expected="a plain model",
            found=type(model).__name__,
            fix="train it as it is, or tgfx.shrink it first",
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise LazyModuleError(
                "a lazy layer has no size yet",
                expected="initialised parameters",
                found=f"uninitialised {name}",
                where=name,
                fix="run the model once on real data before tgfx.transform",
            )
    for name, buffer in model.named_buffers():
        if isinstance(buffer, nn.parameter.UninitializedBuffer):
            raise LazyModuleError(
                "a lazy layer has no size yet",
                expected="initialised buffers",
                found=f"uninitialised {name}",
                where=name,
            )
    if gate is not None and not isinstance(gate, GateSpec):
        raise InputError(
            "gate cannot be used", expected='a tgfx.GateSpec, e.g. tgfx.GateSpec(shape="tanh")', found=repr(gate)
        )
    if granularity != "channel":
        raise GranularityError(
            f"granularity {granularity!r} is not available", expected='"channel"', found=repr(granularity)
        )


def _ignored_names(model: nn.Module, ignore: Any) -> set[str]:
    several = isinstance(ignore, list | tuple | set | frozenset)
    wanted = list(ignore) if several else [ignore]
    modules = dict(model.named_modules())
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


def _freeze_ignored(channels: ChannelMap, ignored: set[str]) -> None:
    """What an ignored layer puts out stays: output channels of a mixing weight, all axes of other parameters."""
    for name, ids in channels.params.items():
        if not any(name == own or name.startswith(own + ".") for own in ignored):
            continue
        refusal = Refusal("is ignored, as asked", name, "ignore")
        if name in channels.channels:
            channels.space.freeze(channels.channels[name].numpy(), refusal)
        else:
            for layer in ids.layers:
                channels.space.freeze(layer.numpy(), refusal)


def _check_capture(source: Source, reference: list[Tensor]) -> None:
    found = tensors_in(source.result)
    same = len(found) == len(reference) and all(
        a.shape == b.shape and close(a, b) for a, b in zip(reference, found, strict=True)
    )
    if not same:
        raise VerificationError(
            "the captured graph does not compute what the model does",
            expected="equal outputs on the example",
            found="different ones",
            fix="is the model deterministic in eval mode? If so, please report it",
        )
    source.result = None


def _refuse_unknown(source: Source, channels: ChannelMap) -> None:
    unknown = list(source.refusals)
    for refusals in channels.space.refusals.values():
        unknown.extend(refusal for refusal in refusals if refusal.limit)
    if unknown:
        raise StrictError(
            "strict=True, and channels would have to be kept",
            expected="a model of which every operator is known",
            found="; ".join(dict.fromkeys(map(str, unknown[:5]))),
            fix="leave strict out: the rest of the model is gated all the same",
        )


def _nothing_to_gate(model: nn.Module, frozen: Sequence[Any]) -> NothingToGateError:
    reasons = list(dict.fromkeys(str(g.frozen) for g in frozen if g.frozen))
    return NothingToGateError(
        f"{type(model).__name__} has no channels that can be gated",
        expected="at least one layer between input and output whose channels can go",
        found="; ".join(reasons[:3]) or "no convolution or fully-connected layer",
        fix="the layer that makes the output is never cut; see the reasons above",
    )


def _mirror(module: nn.Module, twins: dict[str, nn.Module]) -> nn.Module:
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
            new.add_module(name, rebuilt(child, f"{path}.{name}" if path else name))
        return new

    return rebuilt(module, "")


def _counted_parameters(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _match_device(root: nn.Module, bank: GateBank, index: nn.Module) -> None:
    first = next((p for n, p in root.named_parameters() if not n.startswith(BANK)), None)
    if first is not None:
        bank.to(device=first.device, dtype=first.dtype if first.dtype == torch.float64 else None)
        index.to(device=first.device)


# -- steps of shrink -------------------------------------------------------------------------------------------


def _dead(gated: GatedModule, survivors: Survivors, opened: np.ndarray) -> DeadBranches:
    """Groups without an open gate: the branches they take along, or an error if they cannot go as a whole."""
    facts = gated.facts
    empty = [g for g in facts.coupling.groups if not opened[g.start : g.start + g.size].any()]
    if not empty:
        return DeadBranches()
    dead = dead_branches(facts.source, facts.channels, survivors)
    if dead.stuck is not None:
        raise EmptyGroupError(
            f"all {empty[0].size} gates of group '{empty[0].name}' are closed",
            expected="at least one open channel, or a branch that can disappear as a whole",
            found=f"none, and {dead.stuck}",
            where=", ".join(str(m) for m in empty[0].members[:4]),
            fix="open the best one again, or use a weaker budget",
        )
    return dead


def _rounded(gated: GatedModule, multiple: int) -> np.ndarray:
    """Revive the best of the dead until every group's size is a multiple (or whole)."""
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise InputError("round_to must be a positive whole number", expected="e.g. 8", found=repr(multiple))
    opened = gated.open_slots().copy()
    for group in gated.facts.coupling.groups:
        own = opened[group.start : group.start + group.size]
        count = int(own.sum())
        target = min(group.size, -(-count // multiple) * multiple)
        weight = gated.gates[group.name].weight.detach().cpu().numpy()
        order = sorted(np.flatnonzero(~own), key=lambda i: (-weight[i], i))
        own[order[: target - count]] = True
    return opened


@contextmanager
def _gates_at(gated: GatedModule, opened: np.ndarray) -> Iterator[None]:
    """Hold the gates at an assignment for a while."""
    saved = {name: gate.weight.detach().clone() for name, gate in gated.gates.items()}
    try:
        for group in gated.facts.coupling.groups:
            wanted = torch.from_numpy(opened[group.start : group.start + group.size].copy())
            gate = gated.gates[group.name]
            if not torch.equal(gate.is_open().cpu(), wanted):
                gate.set_open_(wanted.to(gate.weight.device))
        yield
    finally:
        for name, weight in saved.items():
            gated.gates[name].weight.data.copy_(weight)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


@contextmanager
def _untouched_rng() -> Iterator[None]:
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


def _like(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device=parameter.device, dtype=parameter.dtype if value.is_floating_point() else None)


def _has_module(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


__all__ = ["Axis", "shrink", "transform"]
