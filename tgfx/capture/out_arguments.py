"""`out=` written as what it means, so that the analysis sees a value or a change of one.

z = torch.empty_like(y); torch.add(y, 1, out=z); f(z)    ->  f(torch.add(y, 1).type_as(z))
torch.add(y, 1, out=z[:, :, 0])                          ->  z[:, :, 0].copy_(torch.add(y, 1))
"""

from __future__ import annotations

from typing import Any

from torch import fx

from tgfx.ops.naming import op_name

_MAKERS = ("empty", "zeros", "ones", "full", "new_")


def write_out_arguments(module: fx.GraphModule) -> None:
    """Change `module`'s graph in place."""
    graph = module.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        into: Any = (
            node.kwargs.get("out") if node.op == "call_function" and not hasattr(node.target, "_schema") else None
        )
        if node.op != "call_function" or hasattr(node.target, "_schema") or not isinstance(into, fx.Node):
            continue
        fresh = op_name(into).startswith(_MAKERS) and all(order[user] >= order[node] for user in into.users)
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
        uses = [user for user in into.users if fresh]
        with graph.inserting_after(node):
            call = ("type_as", (node, into)) if fresh else ("copy_", (into, node))
            written = graph.call_method(*call)
        written.meta = dict(node.meta)
        order[written] = order[node]
        node.replace_all_uses_with(written, lambda user, own=written: user is not own, propagate_meta=False)
        for user in uses:
            user.replace_input_with(into, written)
