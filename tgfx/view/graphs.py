"""The graph for networkx, for analyses of one's own."""

from __future__ import annotations

from typing import Any

import networkx as nx
from torch import nn

from tgfx.view.data import page_data


def to_networkx(model: nn.Module, example_inputs: Any = None) -> nx.DiGraph:
    """A DiGraph over the names of fx nodes.

    Nodes have path, module, op, shape and shape_now, flops and flops_now, params and params_now, groups (names of those
    whose channels are in the value) and kept (the reason, or None); edges have groups. `graph.graph` holds name,
    totals, totals_now, and groups: name -> kind, size, open, members, frozen.
    """
    data = page_data(model, example_inputs)
    now, groups = data["now"], data["groups"]
    kept = {i: g["frozen"]["reason"] for g in groups if g["frozen"] for m in g["members"] for i in m["nodes"]}
    graph = nx.DiGraph(
        name=data["name"],
        totals=data["totals"],
        totals_now=now["totals"],
        groups={
            group["name"]: {
                "kind": group["kind"],
                "size": group["size"],
                "open": state["open"],
                "members": [(member["name"], member["axis"]) for member in group["members"]],
                "frozen": group["frozen"]["reason"] if group["frozen"] else None,
            }
            for group, state in zip(groups, now["groups"], strict=True)
        },
    )
    for index, node in enumerate(data["nodes"]):
        graph.add_node(
            node["name"],
            **{key: node[key] for key in ("path", "module", "op", "shape", "flops", "params")},
            **{f"{key}_now": now["nodes"][key][index] for key in ("shape", "flops", "params")},
            groups=[groups[i]["name"] for i in node["groups"]],
            kept=node["closed_box"] or kept.get(index),
        )
    for node in data["nodes"]:
        for source in node["inputs"]:
            carried = [groups[i]["name"] for i in data["nodes"][source]["groups"]]
            graph.add_edge(data["nodes"][source]["name"], node["name"], groups=carried)
    return graph
