"""An fx.GraphModule that writes its Python code when someone wants it, not whenever its graph changes.

transform looks at graphs node by node; most of the code that fx would generate and compile for them is never run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.graph import _PyTreeCodeGen


class _Forward:
    """`forward` until the code is there: whoever asks for it gets the real one."""

    def __get__(self, module: LazyGraphModule | None, kind: type[LazyGraphModule]) -> Any:
        found = module if module is not None else kind.__dict__.get("_made_for", _nobody)()
        if found is None:
            return self
        found._write_code()
        return kind.forward if module is None else kind.forward.__get__(module, kind)


def _nobody() -> None:
    return None


class LazyGraphModule(fx.GraphModule):
    """Runs and reads like any fx.GraphModule (fx gives every one a class of its own, which holds its `forward`)."""

    forward: Callable = _Forward()  # type: ignore[assignment]

    def recompile(self) -> Any:
        """The graph has changed: the code is out of date."""
        kind = type(self)
        kind._made_for = weakref.ref(self)  # type: ignore[attr-defined]
        if "forward" in kind.__dict__:
            del kind.forward
        for name in ("_code", "_lineno_map", "_prologue_start"):  # running a module must not add to it
            self.__dict__.setdefault(name, None)
        codegen = self._graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec

    def _write_code(self) -> None:
        """Generate and compile the code now, if it is not there."""
        if "forward" not in type(self).__dict__:
            super().recompile()

    @property
    def code(self) -> str:
        self._write_code()
        return super().code

    def __str__(self) -> str:
        self._write_code()
        return super().__str__()

    def __reduce__(self) -> Any:
        return fx.GraphModule(self, self.graph, type(self).__name__).__reduce__()
