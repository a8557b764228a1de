"""Whole numbers that a module computes with: they follow it from device to device, and are no state of it.

Not buffers: averages of a model (torch's AveragedModel with use_buffers=True) take every buffer for a value that may be
averaged, and `i * 0.9 + i * 0.1` is not `i` in whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn


class Constants(nn.Module):
    """A module with constant tensors as plain attributes; see `keep_constant`."""

    def __init__(self) -> None:
        super().__init__()
        self.constants: list[str] = []

    def keep_constant(self, name: str, value: Tensor | None) -> None:
        """Make this the attribute `name`, from now on where the module is."""
        if name not in self.constants:
            self.constants.append(name)
        self.__dict__[name] = value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for name in self.constants:
            value = self.__dict__[name]
            if value is not None:
                # only the device is taken over: to_empty() makes tensors without their values, and meta has none
                device = fn(value.new_empty(0)).device
                self.__dict__[name] = value if device.type == "meta" else value.to(device)
        return self


def beside(constant: Tensor, tensor: Tensor | fx.Proxy) -> Tensor:
    """The constant where the tensor is: wrappers may move parameters one by one (FSDP), or leave them on meta."""
    if isinstance(tensor, fx.Proxy):  # somebody traces the gated model: there is no device to ask for
        return constant
    return constant if constant.device == tensor.device else constant.to(tensor.device)


__all__ = ["Constants", "beside"]
