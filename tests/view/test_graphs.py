"""The graph for other tools: DOT text, networkx, Model Explorer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import networkx as nx
import pytest
import torch

import tgfx
from tests.support.view_models import EXAMPLE, Evil, Residual, close_some_
from tgfx.ir.dot import DotNode, dot_text

STRING = r'"(?:[^"\\]|\\.)*"'
STATEMENT = re.compile(
    rf"digraph {STRING} {{|}}|  node \[.*\];|  {STRING} \[label={STRING}(, \w+={STRING})*\];"
    rf"|  {STRING} -> {STRING};|  subgraph cluster_\d+ {{ label={STRING};( {STRING};)* }}"
)


@pytest.fixture
def gated() -> tgfx.GatedModule:
    made = tgfx.transform(Residual(), torch.randn(*EXAMPLE)).eval()
    close_some_(made)
    return made


def test_dot_names_every_node_and_edge(gated: tgfx.GatedModule) -> None:
    text = gated.to_dot()
    assert text == tgfx.to_dot(gated)
    assert all(STATEMENT.fullmatch(line) for line in text.splitlines())
    graph = gated.facts.source.module.graph
    for node in graph.nodes:
        assert f'  "{node.name}" [label=' in text
        for source in node.all_input_nodes:
            assert f'  "{source.name}" -> "{node.name}";' in text
    kept = gated.gates["stem"].open_count()
    assert f"1x8x6x6 -> 1x{kept}x6x6" in text and "kept: makes the model's output" in text


def test_dot_quotes_any_name() -> None:
    text = tgfx.to_dot(Evil(), torch.randn(1, 3, 4, 4))
    assert all(STATEMENT.fullmatch(line) for line in text.split("\n") if line)
    odd = 'a"b\\c\nd'
    written = dot_text(odd, {odd: DotNode([odd, odd])}, [(odd, odd)], {odd: [odd]})
    assert all(STATEMENT.fullmatch(line) for line in written.split("\n") if line)


def test_networkx_has_shapes_prices_and_groups(gated: tgfx.GatedModule) -> None:
    graph = gated.to_networkx()
    assert nx.is_directed_acyclic_graph(graph) and len(graph) == len(gated.facts.source.module.graph.nodes)
    assert sum(flops for _, flops in graph.nodes(data="flops_now")) == float(gated.cost("flops"))
    stem = graph.nodes["stem"]
    assert stem["groups"] == ["stem"] and stem["shape_now"][1] == gated.gates["stem"].open_count()
    assert graph.nodes["head"]["kept"] == "makes the model's output" and stem["kept"] is None
    assert graph.edges["stem", "stages_0_0_conv1"]["groups"] == ["stem"]
    assert graph.graph["groups"]["stem"]["members"][0] == ("stem.weight", 0)
    assert nx.has_path(tgfx.to_networkx(gated), "x", "output")


def test_model_explorer_files_speak_of_the_same_nodes(gated: tgfx.GatedModule, tmp_path: Path) -> None:
    written = tgfx.to_model_explorer(gated, tmp_path / "explorer")
    files = {path.name: json.loads(path.read_text()) for path in written}
    assert list(files) == ["graph.json", "flops.json", "params.json", "kept.json"]
    (graph,) = files["graph.json"]["graphs"]
    ids = {node["id"] for node in graph["nodes"]}
    assert {edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]} < ids
    assert next(n["namespace"] for n in graph["nodes"] if n["id"] == "stages_0_0_conv1") == "stages/0/0"
    for name in ("flops", "params", "kept"):
        (data,) = files[f"{name}.json"].values()
        assert set(files[f"{name}.json"]) == {graph["id"]} and set(data["results"]) <= ids
        assert [stop["stop"] for stop in data["gradient"]] == [0, 1]
    total = sum(entry["value"] for entry in files["flops.json"][graph["id"]]["results"].values())
    assert total == float(gated.cost("flops"))
    kept = files["kept.json"][graph["id"]]["results"]["stem"]["value"]
    assert kept == gated.gates["stem"].open_count() / 8
