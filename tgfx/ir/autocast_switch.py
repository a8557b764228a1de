"""Nodes that switch autocast off and on again, as a forward does with torch.autocast(..., enabled=False).

    off = _enter_autocast(x.device.type, None, False, None);  y = conv(a);  _exit_autocast(off)

A model without gates is pickled as code, which fx traces anew, and such calls leave no node then: it refuses to be
called with autocast on instead.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast


def is_switch(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in (_enter_autocast, _exit_autocast)


def switch_off(graph: fx.Graph, device_of: fx.Node, first: fx.Node, last: fx.Node) -> None:
    """Around the nodes from `first` to `last`, on the device of a tensor that is there before."""
    with graph.inserting_before(first):
        device = graph.call_function(getattr, (device_of, "device"))
        kind = graph.call_function(getattr, (device, "type"))
        off = graph.call_function(_enter_autocast, (kind, None, False, None))
    with graph.inserting_after(last):
        on = graph.call_function(_exit_autocast, (off,))
    for node in (device, kind, off, on):
        node.meta["tgfx_source"] = first.meta.get("tgfx_source", "")


def refuse_autocast(module: fx.GraphModule) -> None:
    """In place of the switches of `module`: an assertion that autocast is off."""
    graph = module.graph
    switches = [node for node in graph.nodes if is_switch(node)]
    for off in switches:
        if off.target is not _enter_autocast:
            continue
        kind = off.args[0]
        device_of = kind.args[0].args[0]
        line = off.meta.get("tgfx_source", "")
        message = (
            f"a part of this model runs without autocast ({line}), and the cut model cannot see to that itself: "
            "call it outside of torch.autocast"
        )
        with graph.inserting_before(off):
            one = graph.call_method("new_ones", (device_of, (1, 1)), {"dtype": torch.float32})
            product = graph.call_function(torch.mm, (one, one))
            found = graph.call_function(getattr, (product, "dtype"))
            same = graph.call_function(operator.eq, (found, torch.float32))
            graph.call_function(torch._assert, (same, message))
    for node in reversed(switches):
        graph.erase_node(node)
    if switches:
        graph.eliminate_dead_code(is_impure_node=lambda node: bool(node.users) or node.target is not getattr)
        module.recompile()
