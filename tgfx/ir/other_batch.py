"""Shapes of a graph's values at another batch: sizes alone, computed on fake tensors as they are asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tgfx.ir.source import Source, tensors_in
from tgfx.ir.tree import find


class OtherBatch:
    """The example with twice the batch. Nothing is known where its tensors share none, or the graph refuses it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: dict[fx.Node, Any] = {}
        self._failed = not self._starts()

    def shape(self, node: fx.Node) -> tuple[int, ...] | None:
        """Of the one tensor that a node gives."""
        if not self._failed and node not in self._values:
            try:
                with self._mode, torch.no_grad():
                    self._compute(node)
            except Exception:  # a batch that is written down in the code, an answer that needs numbers
                self._failed = True
        value = None if self._failed else self._values[node]
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    def _starts(self) -> bool:
        flat = self.source.flat_inputs()
        tensors = tensors_in(flat)
        if not tensors or any(t.ndim == 0 or t.shape[0] != tensors[0].shape[0] for t in tensors):
            return False
        placeholders = [node for node in self.source.module.graph.nodes if node.op == "placeholder"]
        self._values = dict(zip(placeholders, torch.utils._pytree.tree_map(self._doubled, flat), strict=True))
        return True

    def _doubled(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fake = self._mode.from_tensor(value)
        with self._mode:
            return torch.cat([fake, fake])

    def _compute(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            missing = [arg for arg in stack[-1].all_input_nodes if arg not in self._values]
            if missing:
                stack.extend(missing)
                continue
            top = stack.pop()
            if top not in self._values:
                self._values[top] = self._call(top)

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if node.op == "get_attr":
            return find(self.source.module, str(node.target))
        if node.op == "call_module":
            return self.source.module.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]
