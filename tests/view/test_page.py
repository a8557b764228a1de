"""The file: whole, alone, and safe whatever the names in it are."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import tgfx
from tests.support.view_models import EVIL, EXAMPLE, Evil, Residual
from tgfx.errors import InputError
from tgfx.view.data import page_data
from tgfx.view.page import SCRIPTS, embedded, notebook, page


class Elements(HTMLParser):
    """Tags as a browser sees them, and the text of every script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data


def test_names_cannot_leave_the_data() -> None:
    data = page_data(Evil(), torch.randn(1, 3, 4, 4))
    found = Elements(page(data))
    assert [tag for tag, _ in found.tags].count("script") == 3
    assert "img" not in [tag for tag, _ in found.tags]
    inside = json.loads(found.scripts[0])
    assert inside == json.loads(json.dumps(data))
    assert {f"{name}.0" for name in EVIL} <= {node["path"] for node in inside["nodes"]}


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "\u2028\u2029", "&lt;", '"', "\\", "\U0001f600", "\x00"])
def test_embedded_json_is_plain_and_comes_back(text: str) -> None:
    written = embedded({text: [text]})
    assert not re.search(r"[<>&\u2028\u2029]", written) and written.isascii()
    assert json.loads(written) == {text: [text]}


def test_nothing_is_fetched_and_only_our_script_runs() -> None:
    text = page(page_data(Residual(), torch.randn(*EXAMPLE)))
    found = Elements(text)
    for tag, attributes in found.tags:
        assert not attributes.get("src"), tag
        assert (attributes.get("href") or "#").startswith(("#", "data:")), tag
    (policy,) = [a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and "default-src 'none'" in policy and "unsafe-eval" not in policy
    script_rule = next(rule for rule in policy.split(";") if "script-src" in rule)
    digest = base64.b64encode(hashlib.sha256(found.scripts[-1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in script_rule and "unsafe-inline" not in script_rule


def test_a_title_is_escaped_once() -> None:
    data = page_data(Residual(), torch.randn(*EXAMPLE))
    data["name"] = "</title><b>{{SCRIPT}}"
    assert "<title>&lt;/title&gt;&lt;b&gt;{{SCRIPT}} · tgfx</title>" in page(data)


def test_visualize_writes_one_file(tmp_path: Path) -> None:
    gated = tgfx.transform(Residual(), torch.randn(*EXAMPLE))
    path = tgfx.visualize(gated, tmp_path / "graph.html", compact=tgfx.shrink(gated))
    assert [file.name for file in tmp_path.iterdir()] == ["graph.html"] and path.stat().st_size < 2_000_000
    assert "EPL-2.0" in path.read_text()
    with pytest.raises(InputError, match="cannot be written"):
        tgfx.visualize(gated, tmp_path / "no" / "such" / "folder.html")


def test_a_notebook_gets_a_frame_of_its_own() -> None:
    gated = tgfx.transform(Residual(), torch.randn(*EXAMPLE))
    found = Elements(gated._repr_html_())
    ((tag, attributes),) = found.tags
    assert tag == "iframe" and "allow-same-origin" not in (attributes["sandbox"] or "")
    assert (attributes["srcdoc"] or "").startswith("<!doctype html>")
    assert notebook(page_data(gated)) == gated._repr_html_()


def test_every_script_is_in_the_page() -> None:
    folder = Path(tgfx.__file__).parent / "view" / "static"
    assert sorted(SCRIPTS) == sorted(file.name for file in folder.glob("*.js"))


def test_the_layout_engine_keeps_its_license() -> None:
    folder = Path(tgfx.__file__).parent / "view" / "static" / "vendor"
    assert "Eclipse Public License - v 2.0" in (folder / "elkjs-LICENSE.md").read_text()
    assert "github.com/kieler/elkjs" in (folder / "README.md").read_text()
