"""The figure of accuracy against what is left."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from examples.curve_figure import HEIGHT, LEFT, TOP, WIDTH, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_every_run_has_its_line_and_name(tmp_path: Path) -> None:
    lines = {"one": [(1.0, 0.9), (0.5, 0.9), (0.25, 0.6)], "other": [(1.0, 0.8), (0.5, 0.7)]}
    draw(lines, tmp_path / "figure.svg", title="accuracy", unit="weights")
    tree = ElementTree.parse(tmp_path / "figure.svg")
    drawn = [
        [tuple(map(float, dot.split(","))) for dot in line.attrib["points"].split()]
        for line in tree.iter(f"{SVG}polyline")
    ]
    right, bottom = LEFT + WIDTH, TOP + HEIGHT
    assert drawn[0] == [(LEFT, TOP), (LEFT + WIDTH * 2 / 3, TOP), (right, bottom)]
    assert [x for x, _ in drawn[1]] == [LEFT, LEFT + WIDTH * 2 / 3]
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert {"one", "other", "accuracy, by the share of weights left", "90.0%", "60.0%", "1", "0.50", "0.25"} <= set(
        texts
    )
    assert {"65%", "70%", "75%", "80%", "85%"} <= set(texts)


def test_marks_do_not_cover_each_other(tmp_path: Path) -> None:
    lines = {"one": [(1.0, 0.9), (0.1002, 0.6)], "other": [(1.0, 0.8), (0.9996, 0.7), (0.0998, 0.7)]}
    draw(lines, tmp_path / "figure.svg", title="accuracy", unit="weights")
    texts = [text.text for text in ElementTree.parse(tmp_path / "figure.svg").iter(f"{SVG}text")]
    assert texts.count("0.10") == 1 and texts.count("1") == 1 and "1.00" not in texts


def test_a_flat_line_is_drawn(tmp_path: Path) -> None:
    draw({"one": [(1.0, 0.5), (0.5, 0.5)]}, tmp_path / "figure.svg", title="accuracy", unit="FLOPs")
    (line,) = ElementTree.parse(tmp_path / "figure.svg").iter(f"{SVG}polyline")
    assert len({dot.split(",")[1] for dot in line.attrib["points"].split()}) == 1
