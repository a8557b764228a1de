"""Pages of other models in a real headless Chromium: large ones, odd names, frames, histories."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from tests.support.browser import complaints, open_page, wait_for
from tests.support.page_driver import box, click, needs_browser, panel, press, settled, titles
from tests.support.view_models import EVIL, EXAMPLE, LARGE, Evil, Residual
from tgfx.view.data import page_data

pytestmark = needs_browser


def test_names_that_want_to_be_markup_are_text(driver: Any, tmp_path: Path) -> None:
    model = Evil()
    page = tgfx.visualize(model, tmp_path / "evil.html", example_inputs=torch.randn(1, 3, 4, 4))
    for tab in ("overview", "groups", "cost", "channels", "details"):
        open_page(driver, page, f"#t={tab}&s=g0")
        assert driver.execute_script("return window.taken === undefined && !document.querySelector('img')")
        assert complaints(driver) == []
    assert EVIL[0] in panel(driver)
    press(driver, "/", "<img", "\ue007")
    wait_for(driver, "tgfxView.state.selected", "a selection")
    settled(driver)
    assert EVIL[1] in panel(driver) and driver.find_elements("tag name", "img") == []
    text = driver.execute_script("return tgfxView.wholePicture().text")
    assert any(EVIL[0][:20] in part for part in ElementTree.fromstring(text).itertext())
    assert complaints(driver) == []


def test_two_thousand_nodes(driver: Any, tmp_path: Path) -> None:
    gated = tgfx.transform(Residual(**LARGE), torch.randn(*EXAMPLE))
    count = len(gated.facts.source.module.graph.nodes)
    page = tgfx.visualize(gated, tmp_path / "large.html")
    assert count >= 2000
    open_page(driver, page)
    painted = driver.execute_script("return performance.getEntriesByName('tgfx-painted')[0].startTime")
    assert painted < 10_000
    assert driver.execute_script("return tgfxView.drawn()") < 100  # modules are closed at first
    driver.execute_async_script("const done = arguments[0]; tgfxView.expandAll().then(done)")
    settled(driver)
    assert len(driver.find_elements("css selector", ".box.node")) == count
    gaps = driver.execute_async_script(
        """
        const done = arguments[0], gaps = [];
        let last = 0;
        requestAnimationFrame(function frame(time) {
          if (last) gaps.push(time - last);
          last = time;
          if (gaps.length === 40) return done(gaps.sort((a, b) => a - b));
          tgfxView.state.view.x += 5;
          tgfxView.zoomAt(1);
          requestAnimationFrame(frame);
        });
        """
    )
    assert gaps[20] < 100, "half of the frames took longer"  # examples/benchmarks has the figures
    driver.execute_script("Object.assign(tgfxView.state.view, {k: 0.8, x: 400, y: -5000}); tgfxView.zoomAt(1)")
    settled(driver)
    assert 0 < driver.execute_script("return tgfxView.drawn()") < 120  # only what can be seen is in the document
    assert complaints(driver) == []


def test_parameters_and_sizes_are_folded_until_asked_for(driver: Any, tmp_path: Path) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.out = nn.Parameter(torch.randn(6, 3, 1, 1)), nn.Conv2d(6, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(F.conv2d(x, self.weight).reshape(x.shape[0], 6, -1, 1))

    page = tgfx.visualize(Functional(), tmp_path / "folded.html", example_inputs=torch.randn(1, 3, 4, 4))
    open_page(driver, page)
    assert titles(driver).isdisjoint({"weight", "getattr"})
    assert driver.execute_script("return tgfxView.data.groups[0].members.some((m) => m.name === 'weight')")
    click(driver, driver.find_element("id", "folded"))
    settled(driver)
    assert {"weight", "getattr"} <= titles(driver)
    assert complaints(driver) == []


def test_single_weights_are_counted_as_weights(driver: Any, tmp_path: Path) -> None:
    gated = tgfx.transform(Residual(stages=1), torch.randn(*EXAMPLE), granularity="weight").eval()
    with torch.no_grad():
        gated.gates["stem.weight"].weight[:4] = -1.0
    open_page(driver, tgfx.visualize(gated, tmp_path / "weights.html"), "#t=channels")
    bars = [one.get_attribute("aria-label") for one in driver.find_elements("css selector", ".bar")]
    assert "stem.weight: 12 of 24 weights" in bars and len(bars) == len(gated.gates)
    click(driver, box(driver, "stem"))
    hatched = driver.find_elements("css selector", ".hatch")
    assert len(hatched) == 2  # the batch norms
    open_page(driver, driver.current_url.split("#")[0], "#t=groups&s=g0")
    assert "12 of 24 weights open" in panel(driver)
    assert complaints(driver) == []


def test_a_notebook_frame_draws_without_an_origin(driver: Any, gated: tgfx.GatedModule, tmp_path: Path) -> None:
    path = tmp_path / "cell.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>cell</title>{gated._repr_html_()}", encoding="utf-8")
    driver.get(path.as_uri())
    driver.switch_to.frame(driver.find_element("tag name", "iframe"))
    wait_for(driver, "document.documentElement.dataset.ready", "the first picture")
    assert driver.find_elements("css selector", ".box.node")
    driver.switch_to.default_content()
    assert complaints(driver) == []


def test_the_engine_runs_without_workers(driver: Any, page: Path) -> None:
    script = driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument",
        {"source": "window.Worker = function () { throw new Error('none here'); };"},
    )
    try:
        open_page(driver, page)
        assert driver.find_elements("css selector", ".box.node")
        assert complaints(driver) == []
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": script["identifier"]})


def test_a_training_history_is_drawn(driver: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    gated = tgfx.transform(Residual(stages=1), torch.randn(*EXAMPLE))
    batches = [(torch.randn(4, 3, 6, 6), torch.randint(4, (4,))) for _ in range(5)]
    result = tgfx.fit(
        gated, batches, F.cross_entropy, budget={"flops": 0.5}, steps=30, progress=False,
        val=lambda model: {"score": 0.5}, val_every=10,
    )  # fmt: skip
    page = tgfx.visualize(gated.eval(), tmp_path / "trained.html", history=result)
    open_page(driver, page, "#t=training")
    text = panel(driver)
    assert "Share of FLOPs" in text and "Loss" in text and "Validation: score" in text
    curves = driver.find_elements("css selector", "#panel .curve")
    assert len(curves) == 4 + len(gated.gates)  # ratio, target, loss, score, and one for every group
    assert json.loads(json.dumps(page_data(gated, history=result)["budget"])) == {"flops": 0.5}
    assert complaints(driver) == []
