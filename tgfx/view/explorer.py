"""Files for Google's Model Explorer: the graph, and node data that colour it by FLOPs, parameters and kept share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from tgfx.view.data import page_data

GRAPH = "graph.json"
_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e4572e"}]


def to_model_explorer(model: nn.Module, folder: str | os.PathLike[str], example_inputs: Any = None) -> list[Path]:
    """Write graph.json (to be opened) and flops.json, params.json, kept.json (node data, to be laid over it)."""
    data = page_data(model, example_inputs)
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    files = {GRAPH: _graph(data), **{f"{kind}.json": _node_data(data, kind) for kind in ("flops", "params", "kept")}}
    for name, content in files.items():
        (where / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return [where / name for name in files]


def _graph(data: dict[str, Any]) -> dict[str, Any]:
    nodes = []
    for index, node in enumerate(data["nodes"]):
        attributes = {
            "path": node["path"],
            "shape": str(node["shape"]),
            "shape now": str(data["now"]["nodes"]["shape"][index]),
            "groups": ", ".join(data["groups"][i]["name"] for i in node["groups"]),
            "source": node["line"]["place"] if node["line"] else "",
        }
        nodes.append(
            {
                "id": node["name"],
                "label": node["op"],
                "namespace": node["module"].replace(".", "/"),
                "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
                "incomingEdges": [
                    {"sourceNodeId": data["nodes"][s]["name"], "sourceNodeOutputId": "0", "targetNodeInputId": str(k)}
                    for k, s in enumerate(node["inputs"])
                ],
            }
        )
    return {"label": data["name"], "graphs": [{"id": data["name"], "nodes": nodes}]}


def _node_data(data: dict[str, Any], kind: str) -> dict[str, Any]:
    now = data["now"]["nodes"]
    results = {}
    for index, node in enumerate(data["nodes"]):
        if kind == "kept":
            value = kept_share(node["shape"], now["shape"][index])
        else:
            value = now[kind][index] or None
        if value is not None:
            results[node["name"]] = {"value": value}
    return {data["name"]: {"results": results, "gradient": _GRADIENT}}


def kept_share(before: list[int] | None, after: list[int] | None) -> float | None:
    """How much of a value stays."""
    if not before or after is None:
        return None
    share = 1.0
    for whole, left in zip(before, after, strict=True):
        share *= left / whole if whole else 1.0
    return share
