"""A graph as a function of some module that is not its own, as the train-mode graph of a gated model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.graph_module import _forward_from_src

_THEIRS, _OURS = "self._out_spec", "_own_out_spec"


def function_of(graph: fx.Graph) -> Callable[..., Any]:
    """f(module, *args, **kwargs) runs the graph over the module's layers.

    The code that fx writes puts its result together as the *module's* own graph does, which may give more or fewer
    values (an output that only one mode has). So this graph's own way is put there in its place.
    """
    code = graph.python_code("self")
    if not isinstance(graph._codegen, _PyTreeCodeGen):
        return _forward_from_src(code.src, code.globals)
    known = {**code.globals, _OURS: graph._codegen.pytree_info.out_spec}
    return _forward_from_src(code.src.replace(_THEIRS, _OURS), known)
