"""Analysis: atoms and the groups that share one gate.

Atoms whose channels live on exactly the same parameter axes form a group: one vector of gates. A networkx graph over
parameter axes, whose edges carry the operator that ties them, answers "why".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np

from tgfx.ir.facts import TAPS, Axis, ChannelMap
from tgfx.ir.refusal import Refusal
from tgfx.passes.heads import attention_path, head_roots

Members = dict[tuple[int, ...], np.ndarray]


@dataclass(frozen=True, eq=False)
class Group:
    """What one gate vector decides on: channels as a rule (or that are kept: `frozen` says why), see `kind`.

    size: how many atoms, each of which lives or dies as a whole; members: parameter axes it touches; ties: the
    operators that tie them.
    """

    name: str
    size: int
    members: tuple[Axis, ...]
    ties: tuple[Refusal, ...]
    frozen: Refusal | None
    roots: np.ndarray
    start: int = -1  # first slot in the gate bank; -1 when frozen
    kind: str = "channel"  # "head": of an attention; "layer": a residual branch; "choice": options of a tgfx.Choice;
    # "tap": entries of a convolution's window in its input channels

    @property
    def is_switch(self) -> bool:
        """Whether its gates switch branches on and off, instead of removing slices of parameters."""
        return self.kind in ("layer", "choice")

    @property
    def can_be_empty(self) -> bool:
        """Whether the model has a cut with all of its gates closed, wherever it lies."""
        return self.is_switch or self.kind == "tap"

    @property
    def op(self) -> str:
        """The operators that tie the members, most telling first."""
        seen = dict.fromkeys(tie.op for tie in self.ties)
        return ", ".join(seen) if seen else "none"


class Groups(tuple[Group, ...]):
    """All groups in order; one can also be had by name, as from a dict."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        for group in self:
            if group.name == key:
                return group
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return any(group is key or group.name == key for group in self)

    def keys(self) -> list[str]:
        return [group.name for group in self]

    def values(self) -> list[Group]:
        return list(self)

    def items(self) -> list[tuple[str, Group]]:
        return [(group.name, group) for group in self]


@dataclass(frozen=True)
class Coupling:
    """Groups, and where each id's gate sits. Slot `slots` is the constant one: channels that stay."""

    groups: tuple[Group, ...]
    frozen: tuple[Group, ...]
    slots: int
    slot_of_id: np.ndarray
    graph: nx.Graph

    def slots_of(self, ids: np.ndarray) -> np.ndarray:
        return self.slot_of_id[ids]


def couple(channels: ChannelMap) -> Coupling:
    axes = _parameter_axes(channels)
    graph = _tie_graph(channels)
    members = _members_of_atoms(channels, axes)
    producers = _producers(channels)
    groups, frozen, start = [], [], 0
    names: set[str] = set()
    heads = head_roots(channels)
    for signature, kind, roots in _by_kind(members, heads, axes):
        own = tuple(axes[i] for i in signature)
        path = attention_path(channels, roots, own, producers) if kind == "head" else ""
        if kind == "tap":
            path = f"{own[0].name.rpartition('.')[0]}.taps"
        name = _unused(path, names) if path else _name(own, producers, names)
        ties = _ties_between(graph, signature, axes)
        refusal = None
        if len(roots) < 2:
            refusal = Refusal(f"is a single {kind}: a group never loses its last one", own[0].name)
        group = Group(name, len(roots), own, ties, refusal, np.sort(roots), -1 if refusal else start, kind)
        if refusal:
            frozen.append(group)
        else:
            groups.append(group)
            start += len(roots)
    slot_of_root = np.full(channels.space.size, start, dtype=np.int64)
    for group in groups:
        slot_of_root[group.roots] = np.arange(group.start, group.start + group.size)
    everyone = channels.space.find(np.arange(channels.space.size))
    frozen.extend(_frozen_groups(channels, axes, graph, producers, names))
    return Coupling(tuple(groups), tuple(frozen), start, slot_of_root[everyone], graph)


def _by_kind(
    members: Members, heads: np.ndarray, axes: list[Axis]
) -> Iterator[tuple[tuple[int, ...], str, np.ndarray]]:
    """Atoms of a signature that are attention heads have a group of their own."""
    for signature, roots in members.items():
        if any(axes[i].axis == TAPS for i in signature):  # which nothing ties to anything
            yield signature, "tap", roots
            continue
        is_head = np.isin(roots, heads)
        for kind, chosen in (("channel", ~is_head), ("head", is_head)):
            if chosen.any():
                yield signature, kind, roots[chosen]


def _parameter_axes(channels: ChannelMap) -> list[Axis]:
    return [o if isinstance(o, Axis) else Axis("?", "", 0) for o in channels.space.owners]


def _members_of_atoms(channels: ChannelMap, axes: list[Axis]) -> Members:
    """signature (sorted owner indices, parameters only) -> roots, in the order of their first id."""
    space = channels.space
    ids = np.arange(1, space.size)
    owner = space.owner_indices(ids)
    is_param = np.array([axis.kind == "param" for axis in axes] + [False])[owner]
    ids, owner = ids[is_param], owner[is_param]
    roots = space.find(ids)
    living = roots != 0
    roots, owner = roots[living], owner[living]
    if not len(roots):
        return {}
    keys = np.sort(roots * len(axes) + owner)  # one number per (root, owner): far faster than rows
    keys = keys[np.r_[True, keys[1:] != keys[:-1]]]
    roots, owner = keys // len(axes), keys % len(axes)
    starts = np.flatnonzero(np.r_[True, roots[1:] != roots[:-1]])
    ends = np.r_[starts[1:], len(roots)]
    heads = np.flatnonzero(~_like_the_one_before(owner, starts, ends - starts))
    atoms = roots[starts]
    members: dict[tuple[int, ...], list[np.ndarray]] = {}
    for head, following in zip(heads.tolist(), [*heads[1:].tolist(), len(atoms)], strict=True):
        members.setdefault(tuple(owner[starts[head] : ends[head]].tolist()), []).append(atoms[head:following])
    return {signature: np.concatenate(runs) for signature, runs in sorted(members.items())}


def _like_the_one_before(owner: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Which atoms have just the owners of the atom before; neighbours mostly do."""
    same_length = np.r_[False, lengths[1:] == lengths[:-1]]
    before = np.arange(len(owner)) - np.repeat(lengths, lengths)  # the same place in the atom before, if as long
    equal = np.repeat(same_length, lengths) & (owner == owner[np.maximum(before, 0)])
    return np.logical_and.reduceat(equal, starts)


def _producers(channels: ChannelMap) -> set[tuple[str, int]]:
    """(parameter, axis) pairs that make channels: output axes of convolutions and fully-connected layers."""
    found = set()
    for name, ids in {
        **(channels.training.channels if channels.training else {}),
        **channels.channels,
    }.items():
        owners = channels.space.owner_indices(ids.numpy().reshape(-1))
        wanted = {int(owners[0])} if len(owners) and (owners == owners[0]).all() else set(owners.tolist())
        for index in wanted:
            owner = channels.space.owners[index] if index >= 0 else None
            if isinstance(owner, Axis) and owner.name == name:
                found.add((owner.name, owner.axis))
    return found


def _name(members: Iterable[Axis], producers: set[tuple[str, int]], taken: set[str]) -> str:
    """The first layer that makes these channels; numbered if it makes several groups."""
    members = list(members)
    first = next((m for m in members if (m.name, m.axis) in producers), members[0])
    return _unused(first.name.rpartition(".")[0] or first.name, taken)


def _unused(base: str, taken: set[str]) -> str:
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}#{count}"
    taken.add(name)
    return name


def _tie_graph(channels: ChannelMap) -> nx.Graph:
    graph = nx.Graph()
    space = channels.space
    for index, owner in enumerate(space.owners):
        graph.add_node(index, axis=owner, refusals=space.refusals.get(index, []))
    for (left, right), places in space.ties.items():
        graph.add_edge(left, right, places=places)
    return graph


def _ties_between(graph: nx.Graph, members: tuple[int, ...], axes: list[Axis]) -> tuple[Refusal, ...]:
    inside = set(members)
    ties: dict[Refusal, None] = {}
    for index in members:
        for other, data in graph.adj[index].items():
            if other in inside or axes[other].kind in ("expand", "const", "buffer", "connection"):
                for place in data["places"]:
                    ties[place] = None
    return tuple(ties)


def _frozen_groups(
    channels: ChannelMap, axes: list[Axis], graph: nx.Graph, producers: set[tuple[str, int]], names: set[str]
) -> list[Group]:
    """Layers whose output channels are all kept, gathered by what ties them, each with the reason."""
    space = channels.space
    ids = np.arange(1, space.size)
    owner = space.owner_indices(ids)
    frozen_ids = space.is_frozen(ids)
    total = np.bincount(owner, minlength=len(axes))
    kept = np.bincount(owner[frozen_ids], minlength=len(axes))
    whole = {i for i in range(len(axes)) if total[i] and kept[i] == total[i] and axes[i].kind == "param"}
    seeds = [i for i in whole if (axes[i].name, axes[i].axis) in producers]
    related = graph.subgraph(whole)
    found, done = [], set()
    for seed in sorted(seeds):
        if seed in done:
            continue
        component = nx.node_connected_component(related, seed)
        done |= component
        own = tuple(axes[i] for i in sorted(component))
        refusal = _nearest_refusal(graph, sorted(component))
        size = int(total[seed])
        found.append(Group(_name([axes[seed], *own], producers, names), size, own, (), refusal, np.zeros(0, np.int64)))
    return found


def _nearest_refusal(graph: nx.Graph, component: list[int]) -> Refusal:
    """The reason recorded on a member, or else on the nearest axis that it is tied to."""
    seen, frontier = set(component), list(component)
    while frontier:
        for index in frontier:
            for refusal in graph.nodes[index]["refusals"]:
                if "window of a" not in refusal.reason:
                    return refusal
        following = [n for i in frontier for n in graph.adj[i] if n not in seen]
        seen.update(following)
        frontier = list(dict.fromkeys(following))
    return Refusal("meets data that has no channel identity")
