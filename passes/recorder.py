"""What the channel analysis remembers while operator rules speak (see tgfx.ops.registry.Recorder)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import fx

from tgfx.ir.facts import Axis, LayerCall, TensorIds, Work
from tgfx.ir.ids import IdSpace, collapse, distinct_along, squeezed_atoms
from tgfx.ir.layer_shape import LayerShape
from tgfx.ir.refusal import Refusal
from tgfx.ir.source import source_line
from tgfx.ops.naming import tapped_weight
from tgfx.passes.attention import Attention

Origin = tuple[str, str, int]
Entry = tuple[torch.Tensor, TensorIds, Origin | None]


class RuleRecorder:
    """Identities of live tensors, and what the rules said about the node that runs."""

    def __init__(self, space: IdSpace, attention: Attention) -> None:
        self.space, self.attention = space, attention
        self.params: dict[str, TensorIds] = {}
        self.buffers: dict[str, TensorIds] = {}
        self.taps_of: dict[str, torch.Tensor] = {}
        self.works: list[Work] = []
        self.layer_calls: list[LayerCall] = []
        self.head_works: dict[str, Work] = {}  # by node: a fused attention may run as several products
        self.head_rows: list[np.ndarray] = []
        self.channels: dict[str, torch.Tensor] = {}
        self.grouping_modes: dict[str, str] = {}
        self._whole: set[str] = set()
        self._node: fx.Node | None = None
        self._op = ""
        self._place: Refusal | None = None
        self._live: dict[int, Entry] = {}  # by id of the tensor, which is kept alive along
        self._owned: dict[int, Entry] = {}  # parameters and buffers
        self._pending: list[tuple[str, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        self._sized: list[torch.Tensor] = []

    def ids(self, tensor: torch.Tensor) -> TensorIds:
        entry = self._live.get(id(tensor)) or self._owned.get(id(tensor))
        return entry[1] if entry else TensorIds(tuple(tensor.shape))

    def taps(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Those of a weight, where its own layer is called; whoever else reads it, in a closed box, reads all of it."""
        origin = self.origin(weight)
        taps = self.taps_of.get(origin[1]) if origin is not None and origin[0] == "param" else None
        if taps is None or (self._node is not None and tapped_weight(self._node, self.taps_of) == origin[1]):
            return taps
        self.freeze(taps, "is read by another than its own layer", limit=True)
        return None

    def origin(self, tensor: torch.Tensor) -> Origin | None:
        entry = self._live.get(id(tensor)) or self._owned.get(id(tensor))
        return entry[2] if entry else None

    def give(self, tensor: torch.Tensor, layers: Iterable[torch.Tensor], like: torch.Tensor | None = None) -> None:
        origin = self.origin(like) if like is not None else None
        # a layer that is frozen throughout says as much as none
        living = tuple(x for x in layers if x.numel() > 1 and not self.space.all_frozen(x.numpy()))
        if self.attention.products:  # rows of one head are one atom: the axis inside of heads has no channels
            living = tuple(squeezed_atoms(self.space, x) for x in living)
        known = TensorIds(tuple(tensor.shape), living)
        if id(tensor) in self._owned:  # a parameter written in place keeps the ids it has
            return
        self._live[id(tensor)] = (tensor, known, origin)

    def unite(self, a: torch.Tensor, b: torch.Tensor, *, quiet: bool = False) -> None:
        self.space.unite(a.numpy(), b.numpy(), None if quiet else self.place())

    def freeze(self, layer: torch.Tensor, reason: str, *, limit: bool = False) -> None:
        self._freeze_ids(layer.reshape(-1).numpy(), reason, limit=limit)

    def freeze_all(self, tensor: torch.Tensor, reason: str, *, limit: bool = False) -> None:
        for layer in self.ids(tensor).layers:
            self.freeze(layer, reason, limit=limit)

    def fresh(self, size: int, kind: str, axis: int) -> torch.Tensor:
        ids = self.space.fresh(size, Axis(kind, self._node.name if self._node else "", axis))
        return torch.from_numpy(ids)

    def line(self, layer: torch.Tensor, keep: int) -> torch.Tensor:
        return collapse(self.space, layer, keep, self.place())

    def distinct(self, layer: torch.Tensor, axis: int) -> int:
        return distinct_along(self.space, layer, axis)

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return a is b or bool((self.space.find(a.numpy()) == self.space.find(b.numpy())).all())

    def vector(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        """Ids along one axis as a flat vector; zeros (data) where there is no layer."""
        axis %= max(tensor.ndim, 1)
        size = tensor.shape[axis]
        known = self.ids(tensor)
        settled, on_axis = [], []
        for layer in known.layers:
            if layer.shape[axis] > 1:
                if layer.numel() > layer.shape[axis]:
                    layer = self.line(layer, axis)
                if not self.space.all_frozen(layer.numpy()):
                    on_axis.append(layer)
            settled.append(layer)
        if any(a is not b for a, b in zip(settled, known.layers, strict=True)):
            self.give(tensor, settled, like=tensor)
        if not on_axis:
            return torch.zeros(size, dtype=torch.int64)
        for extra in on_axis[1:]:
            self.unite(on_axis[0], extra)
        return on_axis[0].reshape(-1)

    def read(self, kind: str, layer: torch.Tensor, operands: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pending.append((kind, layer.reshape(-1), list(operands)))

    def work(self, factor: int, axes: list[tuple[torch.Tensor, int] | torch.Tensor], counted: bool) -> None:
        vectors = []
        for along in axes:
            if isinstance(along, torch.Tensor):
                vectors.append(along)
                continue
            tensor, axis = along
            ids = self._along(tensor, axis)
            if ids is not None:
                vectors.append(ids)
            else:
                factor *= tensor.shape[axis]
        self.works.append(Work(self._node.name if self._node else "", self._op, factor, tuple(vectors), counted))

    def layer(
        self,
        shape: LayerShape,
        ins: torch.Tensor,
        outs: torch.Tensor,
        rows: tuple[torch.Tensor, int] | None = None,
    ) -> None:
        along = None if rows is None else self._along(*rows)
        node = self._node.name if self._node else ""
        self.layer_calls.append(LayerCall(node, shape, ins.reshape(1, -1), outs.reshape(1, -1), along))

    def _along(self, tensor: torch.Tensor, axis: int) -> torch.Tensor | None:
        """Ids along an axis, one row per layer; None where it has none."""
        axis %= tensor.ndim
        layers = [self.line(x, axis) if x.numel() > x.shape[axis] else x for x in self.ids(tensor).on_axis(axis)]
        return torch.stack([x.reshape(-1) for x in layers]) if layers else None

    def out_channels(self, weight: torch.Tensor, channels: torch.Tensor) -> None:
        origin = self.origin(weight)
        if origin is not None and origin[0] == "param" and origin[1] in self.params:
            if origin[1] not in self._whole:
                self.channels[origin[1]] = channels
                self._whole.add(origin[1])
            return
        ids = channels.numpy()
        for index in np.unique(self.space.owner_indices(ids)).tolist():  # rows of a weight that is used in parts
            owner = self.space.owners[index] if index >= 0 else None
            if isinstance(owner, Axis) and owner.kind == "param":
                own = ids[self.space.owner_indices(ids) == index]
                known = self.channels.get(owner.name)
                if owner.name in self._whole:
                    continue  # counted as a whole already
                both = own if known is None else np.union1d(known.numpy(), own)
                self.channels[owner.name] = torch.from_numpy(np.unique(both))

    # -- attention heads ---------------------------------------------------------------------------------------

    @property
    def head_first(self) -> bool:
        return self._node is not None and self._node.name in self.attention.products

    def one_head(self, layer: torch.Tensor, axis: int) -> None:
        size = layer.shape[axis]
        self.head_rows.append(layer.movedim(axis, 0).reshape(size, -1).numpy())

    def is_broadcast(self, layer: torch.Tensor) -> bool:
        owners = [self.space.owners[i] for i in np.unique(self.space.owner_indices(layer.numpy())).tolist() if i >= 0]
        return all(isinstance(owner, Axis) and owner.kind == "expand" for owner in owners)

    def heads(self, layers: list[torch.Tensor]) -> None:
        if self._node is None or self._node.name not in self.attention.values:
            return
        by_axis: dict[int, list[torch.Tensor]] = {}
        for layer in layers:
            by_axis.setdefault(int(np.argmax(layer.shape)), []).append(layer.reshape(-1))
        # a batch may repeat the heads: each combination of ids is one head
        axes = tuple(torch.unique(torch.stack(own), dim=1) for own in by_axis.values())
        if axes:
            self.head_works[self._node.name] = Work(self._node.name, "heads", 1, axes, False)

    def grouping(self, mode: str) -> None:
        if self._node is not None:
            self.grouping_modes[self._node.name] = mode

    def sized(self, tensors: list[torch.Tensor]) -> None:
        self._sized.extend(tensors)

    def place(self) -> Refusal:
        if self._place is None:
            node = self._node
            line = source_line(node) if node is not None else ""
            self._place = Refusal("tied", node.name if node is not None else "", self._op, line)
        return self._place

    def _freeze_ids(self, ids: np.ndarray, reason: str, *, limit: bool = False) -> None:
        here = self.place()
        self.space.freeze(ids, Refusal(reason, here.node, here.op, here.source, limit))
