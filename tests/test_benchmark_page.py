"""The page that benchmarks write: a section each, replaced one at a time."""

from __future__ import annotations

from pathlib import Path

from examples.benchmarks.run import update


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    update(page, "growth", "## Growth\n\nold\n")
    update(page, "transform_time", "## Transform time\n\nfirst\n")
    update(page, "growth", "## Growth\n\nnew\n")
    text = page.read_text()
    assert "old" not in text and text.count("## Growth") == 1
    assert text.index("## Transform time") < text.index("## Growth") < text.index("new")
