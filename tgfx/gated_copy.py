"""Gated models as plain data, for deepcopy, pickle and gathering from ranks; and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from tgfx.ir.graph_state import pack_graph, unpack_graph
from tgfx.ir.lazy_module import LazyGraphModule

if TYPE_CHECKING:
    from tgfx.gated import GatedModule

_OWN = {"facts", "training_graph", "forward", "_graph", "_code"}  # forward: a wrapper, as of Accelerate's precision


def state_of(gated: GatedModule) -> dict[str, Any]:
    """Layers and tensors, graphs as text, facts. What watches a training is not copied."""
    source = gated.facts.source
    root = holder(gated)
    extra = {k: v for k, v in gated.__dict__.items() if k not in root.__dict__ and k not in _OWN}
    return {
        "kind": _class_of(gated),
        "root": root,
        "graph": pack_graph(gated.graph),
        "source_root": holder(source.module),
        "source_graph": pack_graph(source.module.graph),
        "training_graph": pack_graph(gated.training_graph) if gated.training_graph is not None else None,
        "source": replace(source, module=None, training=None),  # type: ignore[arg-type]
        "facts": replace(gated.facts, source=None),  # type: ignore[arg-type]
        "extra": {k: v for k, v in extra.items() if not k.startswith("_")},
    }


def from_state(state: dict[str, Any]) -> GatedModule:
    source = replace(state["source"], module=source_module(state["source_root"], state["source_graph"]))
    packed = state["training_graph"]
    training_graph = unpack_graph(packed) if packed is not None else None
    facts = replace(state["facts"], source=source)
    gated = state["kind"](state["root"], unpack_graph(state["graph"]), facts, training_graph)
    for key, value in state["extra"].items():
        if not hasattr(gated, key):
            setattr(gated, key, value)
    return gated


def source_module(root: nn.Module, packed: dict[str, Any]) -> fx.GraphModule:
    """A captured model from its layers and its packed graph."""
    module = LazyGraphModule(root, unpack_graph(packed))
    for table in ("_modules", "_parameters", "_buffers"):
        module.__dict__[table].update(root.__dict__[table])
    module._non_persistent_buffers_set = set(root._non_persistent_buffers_set)
    module.training = root.training
    return module


def holder(module: nn.Module) -> nn.Module:
    """Layers and tensors of a module, without its class."""
    plain = nn.Module()
    for key in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training"):
        plain.__dict__[key] = module.__dict__[key]
    return plain


def _class_of(gated: GatedModule) -> type[GatedModule]:
    """The class as tgfx wrote it: fx derives one of its own for every instance, and FSDP another one from that."""
    from tgfx.gated import GatedModule

    ours = [kind for kind in type(gated).__mro__ if issubclass(kind, GatedModule)]
    return next(kind for kind in ours if kind.__module__.startswith("tgfx.") and "facts" in kind.__annotations__)
