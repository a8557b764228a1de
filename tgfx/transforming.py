"""The first half of the pipeline: from a model to its gated copy."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from tgfx.bank import GateBank
from tgfx.capture import capture, copy_model, example_inputs_for, prepare
from tgfx.errors import (
    AlreadyGatedError,
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
from tgfx.ir.compare import close
from tgfx.ir.facts import ChannelMap
from tgfx.ir.refusal import Refusal
from tgfx.ir.remembered import Remembered
from tgfx.ir.source import Source, tensors_in
from tgfx.passes.channels import analyse_channels
from tgfx.passes.cost import build_cost
from tgfx.passes.couple import couple
from tgfx.passes.insert_gates import BANK, INDEX, insert_gates
from tgfx.passes.place import place_gates
from tgfx.rng import untouched_rng

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
    with untouched_rng(), torch.no_grad():
        args, kwargs = example_inputs_for(model, example_inputs)
        mine = copy_model(model)
        modes = {name: module.training for name, module in mine.named_modules()}
        mine.eval()
        remembered = Remembered()
        reference = prepare(mine, args, kwargs, remembered)
        source = capture(mine, args, kwargs)
        channels = analyse_channels(source, remembered=remembered)
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
