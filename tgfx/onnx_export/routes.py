"""Channels that go straight from the layer that makes them to the one that reads them.

Before:  Concat -> Gather(order) -> Split -> one half waits for the next Concat, the other -> Conv(W)
After:   Conv' -> Split by who reads -> Concat per reader -> Conv(W')

A stack of ragged channel shuffles (a cut ShuffleNet) is a web of Concat, Gather and Split through which each channel
passes several times before a layer reads it. Where both ends are free to choose their order, the layers that make the
channels put those with the same readers side by side: no look-up is left, and nothing is copied on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tgfx.onnx_export.channel_chains import Chain, Wiring, drop_unused, forget
from tgfx.onnx_export.look_ups import channel_order
from tgfx.optional_packages import needed

Channel = tuple[str, int]  # the value that a layer made, and the place in it
MOVES = {"Concat", "Gather", "Identity", "Slice", "Split"}


def straighten_routes(model: Any) -> Any:
    """In place; webs without a look-up, or with an end whose order matters, stay as they are."""
    seen: set[str] = set()
    for gather in [node for node in model.graph.node if node.op_type == "Gather"]:
        if gather.output[0] in seen:
            continue
        wiring = Wiring(model)
        moves = _web(gather, wiring)
        seen |= {name for node in moves for name in node.output}
        web = _understood(model, moves, wiring)
        if web is not None:
            _rebuild(model, web, wiring)
    drop_unused(model)
    return model


@dataclass
class _Read:
    """A node outside of the web that reads a value of it; chain: up to the layer that mixes the channels."""

    node: Any
    name: str
    chain: Chain
    channels: list[Channel]


@dataclass
class _Web:
    moves: list[Any]
    makers: dict[str, Chain] = field(default_factory=dict)
    reads: list[_Read] = field(default_factory=list)


def _web(start: Any, wiring: Wiring) -> list[Any]:
    """Moving nodes that are tied to this one, directly or by reading the same value."""
    found: dict[str, Any] = {}
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node.op_type not in MOVES or node.output[0] in found:
            continue
        found[node.output[0]] = node
        for name in _data(node):
            waiting += [wiring.producer[name]] if name in wiring.producer else []
            waiting += wiring.readers[name]
        for name in node.output:
            waiting += wiring.readers[name]
    return list(found.values())


def _understood(model: Any, moves: list[Any], wiring: Wiring) -> _Web | None:
    """Every channel of every value followed to the layer that makes it; None if an end is not free."""
    inside = {node.output[0] for node in moves}
    web = _Web([node for node in model.graph.node if node.output and node.output[0] in inside])
    known: dict[str, list[Channel]] = {}
    for node in web.moves:
        for name in _data(node):
            if name not in known:
                chain = wiring.making(name)
                if chain is None:
                    return None
                web.makers[name] = chain
                known[name] = [(name, place) for place in range(wiring.made(chain))]
        moved = _moved(node, [known[name] for name in _data(node)], wiring)
        if moved is None:
            return None
        known.update(zip(node.output, moved, strict=True))
    for name, channels in known.items():
        for node in wiring.readers[name]:
            if node.output[0] in inside:
                continue
            chain = wiring.reading(name, node)
            if chain is None or wiring.taken(chain) != len(channels) or len(set(channels)) != len(channels):
                return None
            web.reads.append(_Read(node, name, chain, channels))
    return None if any(name in wiring.outputs for name in known) else web


def _data(node: Any) -> list[str]:
    return list(node.input) if node.op_type == "Concat" else list(node.input[:1])


def _moved(node: Any, given: list[list[Channel]], wiring: Wiring) -> list[list[Channel]] | None:
    """Channels of each output; None where something else than channels is moved, or who knows where to."""
    settings = {attribute.name: attribute for attribute in node.attribute}
    axis = settings["axis"].i if "axis" in settings else 0
    if node.op_type == "Identity":
        return [given[0]]
    if node.op_type == "Concat":
        return [[channel for part in given for channel in part]] if axis == 1 else None
    if node.op_type == "Gather":
        order = channel_order(node, wiring)
        fits = order is not None and (order < len(given[0])).all()
        return [[given[0][place] for place in order]] if fits and order is not None else None
    if node.op_type == "Split":
        sizes = wiring.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        if axis != 1 or sizes is None or sizes.sum() != len(given[0]):
            return None
        ends = np.cumsum(sizes)
        return [given[0][end - size : end] for size, end in zip(sizes, ends, strict=True)]
    bounds = [wiring.constant(name) for name in node.input[1:5] if name]
    if len(bounds) < 3 or any(one is None or one.shape != (1,) for one in bounds) or bounds[2] != 1:
        return None
    start, stop, _, *step = (int(one[0]) for one in bounds if one is not None)
    return [given[0][start : stop : step[0] if step else 1]]


def _rebuild(model: Any, web: _Web, wiring: Wiring) -> None:
    onnx = needed("onnx")
    pieces = _pieces(web, wiring)
    changed = {name for node in web.moves for name in node.output}
    nodes = []
    for source, groups in pieces.items():
        chain = web.makers[source]
        wiring.reorder_making(chain, np.array([place for _, group in groups for place in group]))
        changed |= {node.output[0] for node in chain}
        if len(groups) > 1:
            sizes = np.array([len(group) for _, group in groups], dtype=np.int64)
            model.graph.initializer.append(onnx.numpy_helper.from_array(sizes, f"{source}_sizes"))
            nodes.append(
                onnx.helper.make_node(
                    "Split",
                    [source, f"{source}_sizes"],
                    [_piece(source, place) for place in range(len(groups))],
                    name=f"split_{source}",
                    axis=1,
                )
            )
    joined: dict[tuple[str, ...], str] = {}
    for number, read in enumerate(web.reads):
        now: list[Channel] = []
        parts: list[str] = []
        for source in dict.fromkeys(source for source, _ in read.channels):
            groups = pieces[source]
            mine = [place for place, (readers, _) in enumerate(groups) if number in readers]
            now += [(source, channel) for place in mine for channel in groups[place][1]]
            parts += [source] if len(mine) == len(groups) else [_piece(source, place) for place in mine]
        before = {channel: place for place, channel in enumerate(read.channels)}
        wiring.reorder_reading(read.chain, np.array([before[channel] for channel in now]))
        changed |= {node.output[0] for node in read.chain[:-1]}
        key = tuple(parts)
        if len(parts) > 1 and key not in joined:
            joined[key] = f"{read.node.output[0]}_channels"
            nodes.append(onnx.helper.make_node("Concat", parts, [joined[key]], name=f"concat_{joined[key]}", axis=1))
        read.node.input[0] = joined.get(key, parts[0])
    for node in web.moves:
        model.graph.node.remove(node)
    model.graph.node.extend(nodes)
    forget(model, changed)
    _sort(model)


def _pieces(web: _Web, wiring: Wiring) -> dict[str, list[tuple[frozenset[int], list[int]]]]:
    """Of each made value: channels with the same readers, in the order in which these come."""
    readers: dict[Channel, list[int]] = {}
    for number, read in enumerate(web.reads):
        for channel in read.channels:
            readers.setdefault(channel, []).append(number)
    pieces = {}
    for source, chain in web.makers.items():
        groups: dict[tuple[int, ...], list[int]] = {}
        for place in range(wiring.made(chain)):
            groups.setdefault(tuple(readers.get((source, place), ())), []).append(place)
        pieces[source] = [(frozenset(key), groups[key]) for key in sorted(groups)]
    return pieces


def _piece(source: str, place: int) -> str:
    return f"{source}_piece{place}"


def _sort(model: Any) -> None:
    """Makers before readers, otherwise as it is."""
    waiting = list(model.graph.node)
    missing = {name for node in waiting for name in node.output}
    ordered = []
    while waiting:
        ready = next(node for node in waiting if missing.isdisjoint(node.input))
        waiting.remove(ready)
        missing -= set(ready.output)
        ordered.append(ready)
    copies = [type(node).FromString(node.SerializeToString()) for node in ordered]
    del model.graph.node[:]
    model.graph.node.extend(copies)
