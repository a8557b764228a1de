"""The page: one HTML file that needs nothing else, neither a network nor a server."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from functools import cache
from importlib.resources import files
from typing import Any

# one scope, in this order: what a file does at once may use only the files before it
SCRIPTS = (
    "base.js", "model.js", "layout.js", "drawing.js", "graph.js", "expansion.js", "highlights.js", "pointer.js",
    "keys.js", "charts.js", "panels.js", "panel_overview.js", "panel_groups.js", "panel_cost.js", "panel_channels.js",
    "panel_training.js", "panel_compare.js", "panel_details.js", "search.js", "sharing.js", "live.js", "main.js",
)  # fmt: skip


def page(data: dict[str, Any]) -> str:
    """The whole file."""
    script = _script()
    parts = {
        "TITLE": html.escape(f"{data['name']} · tgfx"),
        "POLICY": html.escape(_policy(script)),
        "STYLE": _static("page.css"),
        "DATA": embedded(data),
        "ELK": _layout_engine(),
        "SCRIPT": script,
    }
    text = _static("page.html")
    head, *rest = text.split("{{")  # in one go, so that nothing in a part is taken for a mark
    return head + "".join(parts[name] + tail for name, _, tail in (piece.partition("}}") for piece in rest))


def embedded(data: Any) -> str:
    """JSON that cannot end the element it stands in, whatever the names in it are."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def notebook(data: dict[str, Any], height: int = 640) -> str:
    """The page inside of a frame of its own, as a notebook shows it."""
    inner = html.escape(page(data), quote=True)
    return (
        f'<iframe title="tgfx" sandbox="allow-scripts allow-downloads" srcdoc="{inner}" '
        f'style="width:100%;height:{height}px;border:1px solid #8884;border-radius:6px"></iframe>'
    )


def _policy(script: str) -> str:
    """Only this very script runs, and nothing is fetched but from where the page was served (the live view)."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}' blob:; worker-src blob:; style-src 'unsafe-inline'; "
        "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


@cache
def _script() -> str:
    body = "\n".join(_static(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();\n'


@cache
def _static(name: str) -> str:
    return (files("tgfx.view") / "static" / name).read_text(encoding="utf-8")


@cache
def _layout_engine() -> str:
    """ELK, compressed: the page unpacks it into a worker."""
    code = (files("tgfx.view") / "static" / "vendor" / "elk-worker.min.js").read_bytes()
    return base64.b64encode(gzip.compress(code, 9, mtime=0)).decode()
