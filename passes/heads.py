"""Analysis: which rows of which projections make one attention head.

    q = wq(x).view(b, n, heads, size)      rows 0 ... size-1 of wq are head 0, and so on

The rows are followed to the product they meet in by a run that ties nothing, because what lies between (rotary tables,
norms over the head size) would tie equal rows of all heads before the heads are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from tgfx.ir.facts import Axis, ChannelMap
from tgfx.ir.ids import LooseIds
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import Source
from tgfx.passes.attention import Attention, HeadRows, find_attention
from tgfx.passes.channels import ChannelRecorder
from tgfx.passes.undisturbed import undisturbed


def find_heads(source: Source) -> HeadRows:
    """The heads of all attentions in the model, in both modes."""
    found = {"attention": source, "in_training": source.training}
    attention = {key: find_attention(graph.module) for key, graph in found.items() if graph is not None}
    rows: list[np.ndarray] = []
    with undisturbed():
        for key, products in attention.items():
            if products.products:
                rows += _HeadFinder(found[key], products).rows()
    return HeadRows(**attention, rows=tuple(rows))


def head_roots(channels: ChannelMap) -> np.ndarray:
    """Atoms that are heads: they lie on the head axis of an attention, and a layer makes them."""
    heads = [axis.reshape(-1).numpy() for work in channels.heads for axis in work.axes]
    made = [ids.reshape(-1).numpy() for ids in channels.channels.values()]
    if not heads or not made:
        return np.zeros(0, dtype=np.int64)
    find = channels.space.find
    roots = np.intersect1d(find(np.concatenate(heads)), find(np.concatenate(made)))
    return roots[roots != 0]


def keep_all_but_heads(channels: ChannelMap) -> None:
    """Only heads are asked for: all other channels stay."""
    ids = np.arange(1, channels.space.size)
    others = ids[~np.isin(channels.space.find(ids), head_roots(channels))]
    channels.space.freeze(others, Refusal("is no attention head, and only heads are gated", op="granularity"))


def attention_path(
    channels: ChannelMap, roots: np.ndarray, members: tuple[Axis, ...], producers: set[tuple[str, int]]
) -> str:
    """Path of the (first) attention module that these heads belong to; empty if it is the model itself.

    That is where its projections and the layers that read the heads come together.
    """
    space = channels.space
    for work in channels.heads:
        ids = np.concatenate([axis.reshape(-1).numpy() for axis in work.axes])
        own = ids[np.isin(space.find(ids), roots)]
        owners = [space.owners[i] for i in np.unique(space.owner_indices(own)).tolist()]
        made = [_module(a.name) for a in owners if isinstance(a, Axis) and a.kind == "param"]
        if made:
            break
    else:
        return ""
    path = made[0]
    for other in made[1:]:
        path = _shared(path, other)
    making = {_module(m.name) for m in members if (m.name, m.axis) in producers}
    tables = [m for m in members if len(channels.params[m.name].shape) > 1]  # not a norm or a bias on the way
    reading = [_shared(path, _module(m.name)) for m in tables if _module(m.name) not in making]
    return max(reading, key=len, default=path)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _shared(a: str, b: str) -> str:
    pairs = zip(a.split("."), b.split("."), strict=False)
    return ".".join(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class _HeadFinder(ChannelRecorder):
    """Follows rows of projections to the heads that they meet in."""

    def __init__(self, source: Source | None, attention: Attention) -> None:
        assert source is not None
        super().__init__(source, attention, LooseIds())
        self.parameters = self.space.size  # parameters get the first ids, the same ones in every run

    def rows(self) -> Sequence[np.ndarray]:
        self.run_example()
        return [own for ids in self.head_rows if (own := self._of_parameters(ids)).size]

    def _of_parameters(self, ids: np.ndarray) -> np.ndarray:
        """Only ids of parameters, the others replaced by one of them; heads without any are left out."""
        known = (ids > 0) & (ids < self.parameters)
        first = np.where(known, ids, self.parameters).min(axis=1, keepdims=True)
        return np.where(known, ids, first)[known.any(axis=1)]

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        before = self.ids(args[0]).layers if func is torch.ops.aten.native_layer_norm.default else ()
        super().observe(func, args, kwargs, out)
        if before:  # a norm inside of heads moves nobody
            self.give(out[0], before)
