"""Parameters that the forward reaches otherwise than as attributes: `for p in self.parameters()`, a list of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

# what a tensor is asked without the answer going into the graph
_ASIDE = frozenset(
    (
        "__hash__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "requires_grad", "is_leaf", "grad",
        "grad_fn", "_version", "dtype", "device", "ndim", "dim", "is_floating_point", "is_complex", "layout",
        "is_sparse", "is_quantized", "is_meta", "is_cuda", "is_cpu", "is_mps", "data_ptr", "untyped_storage",
    )
)  # fmt: skip


class OwnTensorsTraced(TorchFunctionMode):
    """Operators on tensors of the model become nodes that name them, so that what is trained or loaded later counts."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        asked = func.__self__.__name__ if name in ("__get__", "__set__") else name
        if asked in _ASIDE or self.tracer.is_computing or not any(map(self._has_own, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        args, kwargs = self._traced(args), {key: self._traced(value) for key, value in kwargs.items()}
        if name == "__set__":
            setattr(args[0], asked, args[1])
            return None
        if name == "__get__":
            return getattr(args[0], asked)
        if is_tensor_method_or_property(func) and isinstance(args[0], fx.Proxy):
            return getattr(args[0], name)(*args[1:], **kwargs)
        return fx.Proxy.__torch_function__(func, types, args, kwargs)

    def _has_own(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._has_own, value))
        return isinstance(value, torch.Tensor) and self.tracer.owns(value)

    def _traced(self, value: Any) -> Any:
        if isinstance(value, list | tuple) and self._has_own(value):
            return type(value)(map(self._traced, value))
        return self.tracer.named(value) if self._has_own(value) else value
