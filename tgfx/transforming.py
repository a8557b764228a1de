"""The first half of the pipeline: from a model to its gated copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from tgfx.bank import GateBank
from tgfx.capture import Reference, capture, copy_model, example_inputs_for, prepare
from tgfx.capture.attempts import by_any_front_end
from tgfx.capture.checkpoints import Checkpoints
from tgfx.capture.choices import TakenGate, lift_choices, take_gates
from tgfx.capture.connections import open_connections
from tgfx.capture.parametrized import put_back, refuse_what_rewrites_weights, take_parametrizations
from tgfx.capture.taps import find_taps
from tgfx.choice import spelled_out
from tgfx.collector import no_full_collections
from tgfx.errors import (
    AlreadyGatedError,
    GranularityError,
    InputError,
    LazyModuleError,
    NothingToGateError,
    StrictError,
    VerificationError,
)
from tgfx.gated import Facts, GatedModule
from tgfx.gates import GateSpec
from tgfx.granularity import parse
from tgfx.ignored import Ignore, freeze_ignored, ignored_names, is_within
from tgfx.instruments import observed
from tgfx.ir.draws import same_draws
from tgfx.ir.facts import ChannelMap
from tgfx.ir.rehearsal import RehearsalEndedError
from tgfx.ir.rng import untouched_rng
from tgfx.ir.source import Source, tensors_in
from tgfx.ir.switches import Switches, SwitchGroup
from tgfx.ir.tree import named_modules, named_tensors
from tgfx.mirror import mirror
from tgfx.passes.attention import HeadRows
from tgfx.passes.channels import analyse_channels
from tgfx.passes.cost import build_cost
from tgfx.passes.couple import Coupling, couple
from tgfx.passes.heads import find_heads, keep_all_but_heads
from tgfx.passes.insert_gates import BANK, INDEX, GatedGraph, insert_gates
from tgfx.passes.liveness import node_conditions, parameter_conditions
from tgfx.passes.place import Placement, place_gates
from tgfx.passes.residual_branches import residual_branches
from tgfx.passes.switch_groups import add_switches, without_channels
from tgfx.passes.switch_sites import place_switches


@no_full_collections()
def transform(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    granularity: str | Sequence[str] = "channel",
    gate: GateSpec | None = None,
    ignore: Sequence[Ignore] | Ignore = (),
    strict: bool = False,
) -> GatedModule:
    """A gated copy of `model`; the model itself is left as it is.

    example_inputs: a tensor, a tuple of arguments or a dict of keyword arguments; may be left out where the model says
    what it takes. granularity: what gates decide on: "channel", "connection" (channels, and which channels
    of a residual sum each layer reads and each branch adds to), "tap" (channels, and which entries of its window each
    convolution reads of each channel), "head" (of attentions), "layer" (a residual branch as a
    whole), or several in a tuple, where heads come before channels inside of attentions; or "weight", each entry of the
    weights of convolutions and fully-connected layers. A model that holds a tgfx.Choice gets the gates of its
    alternatives in any case. ignore: layers whose output channels stay, and with them the branch that they are in
    (names, glob patterns, types, modules). strict: raise instead of keeping what meets something unknown.
    Gradient checkpoints inside of the model are not kept, with a warning; see `gradient_checkpointing_enable` of the
    result.
    """
    _check_model(model, gate)
    granularities = parse(granularity)
    ignored = ignored_names(model, ignore)
    checkpoints = Checkpoints(model)
    with checkpoints.watched():
        if "weight" in granularities:
            from tgfx.weight.transforming import transform_weights  # which is built from the steps below

            gated = transform_weights(model, example_inputs, gate=gate or GateSpec(), ignored=ignored, strict=strict)
        else:
            gated = _transformed(model, example_inputs, granularities, gate or GateSpec(), ignored, strict)
    checkpoints.warn(type(model).__name__, stacklevel=3)  # whoever called us, through the decorator
    return gated


def _transformed(
    model: nn.Module,
    example_inputs: Any,
    granularities: frozenset[str],
    gate: GateSpec,
    ignored: set[str],
    strict: bool,
) -> GatedModule:
    """Gates over channels, heads, layers and choices, the arguments of `transform` checked."""
    seed = torch.initial_seed()  # random gates are other ones after another torch.manual_seed; asking draws nothing
    with untouched_rng(), torch.no_grad(), spelled_out():
        args, kwargs = example_inputs_for(model, example_inputs)
        mine = _copied(model)
        modes = {name: module.training for name, module in named_modules(mine)}
        mine.eval()
        gates = take_gates(mine)
        parametrizations = take_parametrizations(mine)
        reference = prepare(mine, args, kwargs)

        def understood(source: Source) -> _Understood:
            try:
                return _understood(source, reference, gates, granularities)
            except Exception:
                _take_again(gates)  # for the next front end
                raise

        source, choices, heads, channels = by_any_front_end(reference, capture, understood)
        if granularities & {"connection", "tap"}:
            channels = observed("connections", _finer(model, source, channels, choices, heads, granularities), source)
        freeze_ignored(channels, ignored)
        if strict:
            _refuse_unknown(source, channels if granularities & {"channel", "head"} else None)
        branches = _branches(source, channels, choices, ignored) if "layer" in granularities else ()
        coupling, switches = add_switches(_coupled(channels, granularities), (*branches, *choices))
        observed("couple", coupling, source, channels)
        if not coupling.groups:
            raise _nothing_to_gate(model, granularities, coupling.frozen)
        placement, gated_graph, training_graph = _with_gates(source, channels, coupling, switches)
        bank = _bank(coupling, gate, gates, seed)
        root = mirror(source.module, gated_graph.twins)
        root.add_module(BANK, bank)
        root.add_module(INDEX, gated_graph.indices)
        put_back(root, parametrizations)
        needed = node_conditions(source, switches)
        needed.update(parameter_conditions(source, needed, switches))
        cost = build_cost(channels, coupling, _counted_parameters(source.module), needed)
        observed("cost", cost, source, channels)
    _match_device(root, bank, gated_graph.indices)
    for name, module in named_modules(root):
        module.training = modes.get(name, modes[""])
    known = (source, channels, coupling, placement, cost)
    facts = Facts(*known, type(model).__name__, tuple(sorted(ignored)), granularities, switches)
    return GatedModule(root, gated_graph.graph, facts, training_graph)


# -- steps of transform ----------------------------------------------------------------------------------------


def _check_model(model: Any, gate: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError("this is not a model", expected="torch.nn.Module", found=type(model).__name__)
    if isinstance(model, GatedModule) or any(isinstance(m, GateBank) for _, m in named_modules(model)):
        raise AlreadyGatedError(
            "the model is gated already",
            expected="a plain model",
            found=type(model).__name__,
            fix="train it as it is, or tgfx.shrink it first",
        )
    refuse_what_rewrites_weights(model)
    own = (*model._modules, *model._parameters, *model._buffers)
    taken = [name for name in own if hasattr(GatedModule, name) and not hasattr(nn.Module, name)]
    if taken:
        raise InputError(
            "the model has parts with names that a gated model needs for itself",
            expected="other names",
            found=", ".join(taken),
            fix="rename them, or put the model into another: nn.Sequential(model)",
        )
    for name, tensor in named_tensors(model):
        if isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
            raise LazyModuleError(
                "a lazy layer has no size yet",
                expected="initialised parameters and buffers",
                found=f"uninitialised {name}",
                where=name,
                fix="run the model once on real data before tgfx.transform",
            )
    if gate is not None and not isinstance(gate, GateSpec):
        raise InputError(
            "gate cannot be used", expected='a tgfx.GateSpec, e.g. tgfx.GateSpec(shape="tanh")', found=repr(gate)
        )


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy_model(model)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied, and tgfx changes nothing but a copy",
            expected="a model that copy.deepcopy can copy",
            found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            fix="a tensor attribute with a gradient history is the usual cause: detach it, or make it in forward",
        ) from error


class _Understood(NamedTuple):
    source: Source
    choices: tuple[SwitchGroup, ...]
    heads: HeadRows | None
    channels: ChannelMap


def _understood(
    source: Source, reference: Reference, gates: list[TakenGate], granularities: frozenset[str]
) -> _Understood:
    observed("capture", source, source)
    choices = lift_choices(source, gates)
    if len(choices) < len(gates):  # the rest are in closed boxes, where they decide by themselves
        reference.compute()
    heads = find_heads(source) if "head" in granularities else None
    channels = observed("channels", analysed(source, reference, heads), source)
    return _Understood(source, choices, heads, channels)


def _take_again(gates: list[TakenGate]) -> None:
    """Those that choices in closed boxes got back."""
    for number, own in enumerate(gates):
        if own.choice.number is None:
            own.choice.number = number
            del own.choice.gate


def analysed(source: Source, reference: Reference, heads: HeadRows | None = None) -> ChannelMap:
    """The channels of a graph that is seen to compute what the model does."""
    if reference.rehearsed:
        try:
            channels = analyse_channels(source, heads, calls=reference.calls)
        except RehearsalEndedError:
            pass
        else:
            if reference.is_met_by(tensors_in(source.result)):
                source.result = None
                reference.calls.clear()
                return channels
        reference.compute()
    with same_draws():
        channels = analyse_channels(source, heads, calls=reference.calls)
    check_capture(source, reference)
    reference.calls.clear()
    return channels


def check_capture(source: Source, reference: Reference) -> None:
    if not (reference.is_met_by(tensors_in(source.result)) and reference.is_met_apart(source.module)):
        raise VerificationError(
            "the captured graph does not compute what the model does",
            expected="equal outputs on the example",
            found="different ones",
            fix="the model draws random numbers in eval mode, which makes it hard to tell: pass them in as an argument"
            if reference.draws
            else "is the model deterministic in eval mode? If so, please report it",
        )
    source.result = None


def _finer(
    model: nn.Module,
    source: Source,
    channels: ChannelMap,
    choices: Sequence[SwitchGroup],
    heads: HeadRows | None,
    granularities: frozenset[str],
) -> ChannelMap:
    """The channels of the same graph with the connections of its residual sums opened, and the taps of its layers."""
    tapped = find_taps(source) if "tap" in granularities else ()
    if "tap" in granularities and not tapped:
        raise GranularityError(
            f"{type(model).__name__} has no taps to gate",
            expected="layers Conv1d, Conv2d or Conv3d with windows of more than one entry, groups=1 and zero padding",
            found="none",
            fix='use granularity="channel"',
        )
    if "connection" in granularities:
        _connect(model, source, channels, choices, tapped)
    return analyse_channels(source, heads, tapped=tapped)


def _connect(
    model: nn.Module,
    source: Source,
    channels: ChannelMap,
    choices: Sequence[SwitchGroup],
    tapped: tuple[str, ...],
) -> None:
    if source.training is not None:
        raise GranularityError(
            f"connections of {type(model).__name__} cannot be gated: it is another graph in train mode",
            expected="a model that computes in train mode as in eval mode, but for batch norm and dropout",
            found="two graphs",
            fix='use granularity="channel"',
        )
    found = [branch for group in _branches(source, channels, choices, set()) for branch in group.branches]
    if not open_connections(source, channels, found, tapped):
        raise GranularityError(
            f"{type(model).__name__} has no connections to gate",
            expected="residual sums, y = x + f(x), whose channels can be told apart",
            found="none",
            fix='use granularity="channel"',
        )


def _branches(
    source: Source, channels: ChannelMap, choices: Sequence[SwitchGroup], ignored: set[str]
) -> tuple[SwitchGroup, ...]:
    """Residual branches without an ignored layer in them."""
    taken = [branch for choice in choices for branch in choice.branches]
    found = residual_branches(
        source, channels, ([e for b in taken for e in b.edges], [e for b in taken for e in b.training_edges])
    )
    return tuple(
        group for group in found
        if not any(is_within(name, ignored) for branch in group.branches for name in branch.parameters)
    )  # fmt: skip


def _coupled(channels: ChannelMap, granularities: frozenset[str]) -> Coupling:
    """The groups of channels and heads that were asked for."""
    if "channel" not in granularities and "head" in granularities:
        keep_all_but_heads(channels)
    coupling = couple(channels)
    return coupling if granularities & {"channel", "head"} else without_channels(coupling)


def _with_gates(
    source: Source, channels: ChannelMap, coupling: Coupling, switches: Switches
) -> tuple[Placement, GatedGraph, fx.Graph | None]:
    """Where the gates are, the gated graph, and the one for train mode where the model has one of its own."""
    placement = place_switches(source, switches.edges, place_gates(source, channels, coupling))
    observed("place", placement, source, channels)
    gated_graph = observed("insert_gates", insert_gates(source, placement), source)
    if source.training is None or channels.training is None:
        return placement, gated_graph, None
    also = place_gates(source.training, channels.training, coupling)
    also = place_switches(source.training, switches.training_edges, also)
    return placement, gated_graph, insert_gates(source.training, also, like=gated_graph).graph


def _bank(coupling: Coupling, spec: GateSpec, choices: Sequence[TakenGate], seed: int) -> GateBank:
    generator = torch.Generator().manual_seed(seed)
    own = {taken.name: taken.gate for taken in choices}
    return GateBank(
        {
            group.name: own[group.name] if group.kind == "choice" else spec.build(group.size, generator=generator)
            for group in coupling.groups
        }
    )


def _refuse_unknown(source: Source, channels: ChannelMap | None) -> None:
    unknown = list(source.refusals)
    for refusals in channels.space.refusals.values() if channels is not None else ():
        unknown.extend(refusal for refusal in refusals if refusal.limit)
    if unknown:
        raise StrictError(
            "strict=True, and channels would have to be kept",
            expected="a model of which every operator is known",
            found="; ".join(dict.fromkeys(map(str, unknown[:5]))),
            fix="leave strict out: the rest of the model is gated all the same",
        )


def _nothing_to_gate(model: nn.Module, granularities: frozenset[str], frozen: Sequence[Any]) -> NothingToGateError:
    if granularities == {"layer"}:
        return NothingToGateError(
            f"{type(model).__name__} has no residual branch that can be gated",
            expected="a sum of a value and of layers that start from it, y = x + f(x), none of them ignored",
            found="none",
            fix='use granularity="channel"',
        )
    reasons = list(dict.fromkeys(str(g.frozen) for g in frozen if g.frozen))
    if "channel" not in granularities:
        also = " and no residual branch" if "layer" in granularities else ""
        asked = [reason for reason in reasons if "only heads are gated" not in reason]
        return NothingToGateError(
            f"{type(model).__name__} has no attention heads{also} that can be gated",
            expected="softmax(q k^T) v over several heads that layers of the model make",
            found="; ".join(asked[:3]) or "no such attention",
            fix='granularity="channel" gates channels',
        )
    return NothingToGateError(
        f"{type(model).__name__} has no channels that can be gated",
        expected="at least one layer between input and output whose channels can go",
        found="; ".join(reasons[:3]) or "no convolution or fully-connected layer",
        fix="the layer that makes the output is never cut; see the reasons above",
    )


def _counted_parameters(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _match_device(root: nn.Module, bank: GateBank, index: nn.Module) -> None:
    first = next((p for n, p in root.named_parameters() if not n.startswith(BANK)), None)
    if first is not None:
        bank.to(device=first.device, dtype=first.dtype if first.dtype == torch.float64 else None)
        index.to(device=first.device)
