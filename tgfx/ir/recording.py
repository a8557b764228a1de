"""Watching a first run, so that a second one need not compute: what both ways of doing so have in common."""

from __future__ import annotations

from typing import Any, Protocol

from torch.utils._python_dispatch import TorchDispatchMode

from tgfx.ir.kept_state import KeptState


class Calls(Protocol):
    def first_call(self, func: Any, args: tuple, kwargs: dict) -> Any: ...


class Recording(TorchDispatchMode):
    """While this mode is on, `calls` answers every operator, and `state` is told before what is written to."""

    def __init__(self, calls: Calls, state: KeptState) -> None:
        super().__init__()
        self.calls, self.state = calls, state

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it costs more than the call

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.state.before(func, args, kwargs)
        return self.calls.first_call(func, args, kwargs)
