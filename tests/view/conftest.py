"""One Chromium, and the page of one small gated model, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tgfx
from tests.support.browser import chromium
from tests.support.view_models import EXAMPLE, Residual, close_some_


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    downloads = tmp_path_factory.mktemp("downloads")
    with chromium() as running:
        running.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)})
        running.downloads = downloads
        yield running


@pytest.fixture(scope="module")
def gated() -> tgfx.GatedModule:
    torch.manual_seed(0)
    made = tgfx.transform(Residual(), torch.randn(*EXAMPLE)).eval()
    close_some_(made)
    return made


@pytest.fixture(scope="module")
def page(gated: tgfx.GatedModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tgfx.visualize(
        gated, tmp_path_factory.mktemp("page") / "graph.html", compact=tgfx.shrink(gated), budget={"flops": 0.5}
    )
