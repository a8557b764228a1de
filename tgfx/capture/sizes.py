"""What a traced value is on the example, as far as sizes decide it.

Plain fx stops where Python asks a traced value for a fact: `if height % 7:`, `range(x.shape[1])`. Where the answer
follows from the sizes of the example alone, it is computed on fake tensors, which have sizes and no numbers: whatever
would depend on numbers fails there, and so is never baked in. Each answer that was used is checked again in the graph
at every call (see GateTracer), so that sizes with another answer are an error and not a wrong result.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tgfx.ir.tree import find

_PLACES = {"device", "is_cuda", "is_cpu", "is_mps", "is_meta", "is_xpu"}
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Unknown(Exception):
    """The value does not follow from sizes."""


class ExampleSizes:
    """Values of traced nodes on an example, computed as they are asked for."""

    def __init__(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.root = root
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        args, kwargs = pytree.tree_map(self._faked, widened(args, kwargs))
        bound = inspect.signature(root.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        self._inputs = bound.arguments
        self._values: dict[fx.Node, Any] = {}
        self.computing = False  # while true, fx must not record what layers do

    def value(self, node: fx.Node) -> Any:
        """The node's value: a number, a string, or a container or fake tensor that has such."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [arg for arg in top.all_input_nodes if arg not in self._values]
            if top in self._values or not missing:
                if top not in self._values:
                    self._values[top] = self._computed(top)
                stack.pop()
            else:
                stack.extend(missing)
        return self._values[node]

    def _faked(self, value: Any) -> Any:
        return self._mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    def _computed(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        self.computing = True
        try:
            with self._mode, torch.no_grad():
                if node.op == "placeholder":
                    return self._inputs[str(node.target).lstrip("*")]
                if node.op == "get_attr":
                    return find(self.root, str(node.target))
                if node.op == "call_module":
                    return self.root.get_submodule(str(node.target))(*args, **kwargs)
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            raise Unknown(f"{node.format_node()}: {type(error).__name__}") from error
        finally:
            self.computing = False

    def is_about_device(self, node: fx.Node) -> bool:
        """Whether an answer follows from where the tensors are, and from nothing else about them."""
        stack, asked = [node], set()
        while stack:
            top = stack.pop()
            if isinstance(self._values.get(top), torch.Tensor):
                continue
            if any(isinstance(self._values.get(arg), torch.Tensor) for arg in top.all_input_nodes):
                asked.add(top.args[1] if top.target is getattr else top.target)
            stack.extend(top.all_input_nodes)
        return bool(asked) and asked <= _PLACES


def widened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example with twice the batch, if its tensors share one: what the batch alone decides then shows."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors or any(t.ndim == 0 or t.shape[0] != tensors[0].shape[0] for t in tensors):
        return args, kwargs
    return pytree.tree_map(lambda v: torch.cat([v, v]) if isinstance(v, torch.Tensor) else v, (args, kwargs))
