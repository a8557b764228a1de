"""What torch.export took for granted about sizes becomes checks in the graph.

    for t in range(x.shape[1])      x.shape[1] was 5: written out five times     ->  assert x.shape[1] == 5
    if x.shape[0] % 2 == 0          the batch stays free, and was even           ->  assert x.shape[0] % 2 == 0
    x + y                           both lengths are free, and one symbol        ->  assert y.shape[1] == x.shape[1]

So sizes that export kept free stay free, and any other that it was not asked about is an error in every call, as are
other values of plain arguments. Export never asks whether a free size is 0 or 1 but takes it to be more, so that is
tried (see small_sizes.py). The checks are operators of Python and torch, since they go into the compact model too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

_AGAIN = "transform it anew with an example of these"


@dataclass(frozen=True)
class _Axis:
    """One size of one input; `size` is a number where export fixed it."""

    node: fx.Node
    axis: int
    size: Any

    def __str__(self) -> str:
        return f"{self.node.target}.shape[{self.axis}]"


class AssumedSizes:
    """The sizes of a captured graph's inputs, and what was assumed of them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.axes = [
            _Axis(node, axis, _formula(size))
            for node in self.inputs if isinstance(node.meta.get("val"), torch.Tensor)
            for axis, size in enumerate(node.meta["val"].shape)
        ]  # fmt: skip
        self.free: dict[sympy.Symbol, _Axis] = {}
        for axis in self.axes:
            if isinstance(axis.size, sympy.Symbol):
                self.free.setdefault(axis.size, axis)
        self._sizes: dict[_Axis, fx.Proxy] = {}
        self._tracer = fx.proxy.GraphAppendingTracer(graph)

    def check(self) -> None:
        """Put a check of each assumption behind the graph's inputs."""
        with self._behind_inputs():
            for node in self.inputs:
                self._check_plain(node)
            for axis in self.axes:
                self._check_axis(axis)
            for guard in self._guards():
                self._check_guard(guard)

    def refuse(self, symbols: tuple[sympy.Symbol, ...], size: int) -> None:
        """Check that not all of these sizes are that small at once."""
        told = " and ".join(f"{self.free[symbol]} == {size}" for symbol in symbols)
        with self._behind_inputs():
            held = self._call(operator.gt, self._size(self.free[symbols[0]]), size)
            for symbol in symbols[1:]:
                held = self._call(operator.or_, held, self._call(operator.gt, self._size(self.free[symbol]), size))
            self._assert(held, f"with {told} the model does not do what it did when it was captured; {_AGAIN}")

    def _check_plain(self, node: fx.Node) -> None:
        value = node.meta.get("val", node)
        if (value is not None and not isinstance(value, bool | int | float | str)) or value != value:
            return
        message = (
            f"{node.target} was {value!r} when this model was captured, and is fixed: transform it anew to change it"
        )
        self._assert(self._call(operator.eq, fx.Proxy(node, self._tracer), value), message)

    def _check_axis(self, axis: _Axis) -> None:
        if self.free.get(axis.size) == axis:
            return
        fixed = isinstance(axis.size, int)
        wanted = axis.size if fixed else self._computed(axis.size)
        meant = f"was {axis.size}" if fixed else f"was {self._told(axis.size)}"
        why = "is fixed, since the code loops over it or counts with it" if fixed else "has to be"
        message = f"{axis} {meant} when this model was captured, and {why}; for other sizes, {_AGAIN}"
        self._assert(self._call(operator.eq, self._size(axis), wanted), message)

    def _check_guard(self, guard: sympy.Basic) -> None:
        self._check_divisors(guard)
        message = f"the model asked whether {self._told(guard)} when it was captured, and it was so; for other sizes, "
        self._assert(self._computed(guard), message + _AGAIN)

    def _check_divisors(self, formula: sympy.Basic) -> None:
        """First, so that a size of 0 is an error with a reason."""
        for part in formula.atoms(Mod, PythonMod, FloorDiv):
            if part.args[1].free_symbols:
                held = self._call(operator.ne, self._computed(part.args[1]), 0)
                self._assert(held, f"{self._told(part.args[1])} is 0, which the model divides by; {_AGAIN}")

    def _guards(self) -> Iterator[sympy.Basic]:
        """What the code asked about free sizes, in terms of these."""
        envs = {id(env): env for axis in self.axes for env in _shape_envs(axis)}
        seen = set()
        for env in envs.values():
            for guard in env.guards:
                known = env.replace(guard.expr)
                if known not in seen and known is not sympy.true:
                    seen.add(known)
                    yield known

    # -- formulas as nodes ------------------------------------------------------------------------------------------

    def _computed(self, formula: sympy.Basic) -> Any:
        unknown = formula.free_symbols - self.free.keys()
        if unknown:
            raise ValueError(f"torch.export assumed {formula}, where {unknown} is no size of an input")
        sizes = {symbol: self._size(self.free[symbol]) for symbol in formula.free_symbols}
        return sympy_interp(PythonReferenceAnalysis, sizes, formula)

    def _told(self, formula: sympy.Basic) -> str:
        """As the user would write it."""
        named = {symbol: sympy.Symbol(str(self.free[symbol])) for symbol in formula.free_symbols}
        return PythonPrinter().doprint(formula.xreplace(named))

    @contextmanager
    def _behind_inputs(self) -> Iterator[None]:
        self._sizes.clear()  # those of before come later in the graph
        with self.graph.inserting_before(self.inputs[-1].next if self.inputs else None):
            yield

    def _size(self, axis: _Axis) -> fx.Proxy:
        if axis not in self._sizes:
            node = fx.Proxy(axis.node, self._tracer)
            self._sizes[axis] = self._call(torch.ops.aten.sym_size.int, node, axis.axis)
        return self._sizes[axis]

    def _call(self, function: Callable, *args: Any) -> fx.Proxy:
        return self._tracer.create_proxy("call_function", function, args, {})

    def _assert(self, held: Any, message: str) -> None:
        self._call(torch._assert, held, message)


def _formula(size: int | torch.SymInt) -> Any:
    """A number where export fixed the size, a symbol where it is free."""
    formula = size.node.expr if isinstance(size, torch.SymInt) else size
    return formula if isinstance(formula, sympy.Basic) and not formula.is_number else int(formula)


def _shape_envs(axis: _Axis) -> Iterator[Any]:
    size = axis.node.meta["val"].shape[axis.axis]
    if isinstance(size, torch.SymInt):
        yield size.node.shape_env
