"""The page in a real headless Chromium."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tgfx
from tests.support.browser import chromium, complaints, open_page, wait_for, what_is_missing
from tests.support.view_models import EVIL, EXAMPLE, LARGE, Evil, Residual, close_some_
from tgfx.view.data import page_data

MISSING = what_is_missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"THE PAGE IS NOT TESTED IN A BROWSER: {MISSING}")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium() as running:
        running.execute_cdp_cmd(
            "Browser.setDownloadBehavior",
            {"behavior": "allow", "downloadPath": str(tmp_path_factory.mktemp("downloads"))},
        )
        running.downloads = tmp_path_factory.getbasetemp() / "downloads0"
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


def data_of(driver: Any) -> Any:
    return driver.execute_script("return tgfxView.data")


def place(driver: Any, path: str) -> str:
    """The data-place of a node by its path."""
    return f"n{[node['path'] for node in data_of(driver)['nodes']].index(path)}"


def box(driver: Any, path: str) -> Any:
    return driver.find_element("css selector", f'.box[data-place="{place(driver, path)}"]')


def with_class(driver: Any, name: str) -> set[str]:
    """Paths of nodes that have a class."""
    places = driver.execute_script(
        f"return [...document.querySelectorAll('.box.{name}')].map((one) => one.dataset.place)"
    )
    nodes = data_of(driver)["nodes"]
    return {nodes[int(own[1:])]["path"] for own in places if own.startswith("n")}


def titles(driver: Any) -> set[str]:
    return set(
        driver.execute_script(
            "return [...document.querySelectorAll('.box.node .title')].map((one) => one.firstChild.textContent)"
        )
    )


def press(driver: Any, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def click(driver: Any, element: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).move_to_element(element).click().perform()


def panel(driver: Any) -> str:
    return driver.find_element("id", "panel").text


def settled(driver: Any) -> None:
    """Until the layout and the next two frames are done."""
    wait_for(driver, "document.getElementById('busy').hidden", "the layout")
    driver.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")


def test_it_opens_from_disk(driver: Any, page: Path, gated: tgfx.GatedModule) -> None:
    open_page(driver, page)
    assert driver.current_url.startswith("file://") and driver.title == "Residual · tgfx"
    drawn = driver.find_elements("css selector", "#graph .box.node")
    assert len(drawn) == len(gated.facts.source.module.graph.nodes)
    overview = panel(driver)
    now, total = float(gated.cost("flops")), gated.total("flops")
    assert f"{100 * now / total:.0f}%" in overview and "budget 50%" in overview
    assert "makes the model's output" in overview
    fetched = driver.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert [name for name in fetched if not name.startswith(("blob:", "data:"))] == []
    assert complaints(driver) == []


def test_hovering_a_node_lights_its_group(driver: Any, page: Path, gated: tgfx.GatedModule) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    open_page(driver, page)
    driver.execute_script("tgfxView.zoomAt(1)")
    ActionChains(driver).move_to_element(box(driver, "stem")).perform()
    expected = {member.name.rpartition(".")[0] for member in gated.groups["stem"].members}
    wait_for(driver, "document.querySelectorAll('.box.member').length", "the highlight")
    assert with_class(driver, "member") == expected
    assert with_class(driver, "tie") == {"add", "add_1"}
    assert "stages.0.0.bn1" not in expected | with_class(driver, "carrier")
    tip = driver.find_element("id", "tip").text
    assert f"{gated.gates['stem'].open_count()} of 8 open" in tip
    ActionChains(driver).move_to_element(driver.find_element("id", "fit")).perform()
    wait_for(driver, "!document.querySelector('.box.member')", "the end of the highlight")
    assert complaints(driver) == []


def test_clicking_a_group_shows_axes_and_ties(driver: Any, page: Path, gated: tgfx.GatedModule) -> None:
    open_page(driver, page, "#t=groups")
    row = driver.find_element("css selector", 'tr[data-row="1"]')
    name = gated.groups[1].name
    click(driver, row)
    wait_for(driver, "document.querySelector('tr.opened')", "the details")
    text = driver.find_element("css selector", "tr.opened").text
    for member in gated.groups[1].members:
        assert str(member) in text
    assert "native_batch_norm" in text and "convolution" in text and "return self.relu(x + self.bn2" in text
    strip = driver.find_element("css selector", "tr.opened canvas.strip").get_attribute("aria-label")
    assert strip == f"{gated.gates[name].open_count()} of 8 open"
    assert driver.find_elements("css selector", "tr.opened .chart rect")
    assert with_class(driver, "member") == {m.name.rpartition(".")[0] for m in gated.groups[1].members}
    assert complaints(driver) == []


def test_a_node_shows_its_sizes_and_prices(driver: Any, page: Path, gated: tgfx.GatedModule) -> None:
    open_page(driver, page)
    click(driver, box(driver, "stages.0.0.conv1"))
    text = panel(driver)
    kept, entering = gated.gates["stages.0.0.conv1"].open_count(), gated.gates["stem"].open_count()
    assert f"8×6×6 → {kept}×6×6" in text
    assert f"584 → {kept * (entering * 9 + 1)}" in text  # parameters
    flops = [2 * 36 * 9 * own for own in (8 * 8, kept * entering)]
    assert f"{flops[0] / 1e3:.3g} k → {flops[1] / 1e3:.3g} k" in text
    marginal = gated.marginal("flops")["stages.0.0.conv1"].mean() / 1e3
    assert f"one channel costs\n{float(marginal):.3g} k FLOPs" in text
    assert "tests/support/view_models.py" in text or "support/view_models.py" in text
    assert complaints(driver) == []


def test_search_by_name_and_operator(driver: Any, page: Path) -> None:
    open_page(driver, page)
    press(driver, "/")
    assert driver.switch_to.active_element.get_attribute("id") == "search"
    press(driver, "batchnorm")
    found = driver.find_elements("css selector", "#results [role=option]")
    assert len(found) == 4 and all("BatchNorm2d" in one.text for one in found)
    assert with_class(driver, "match") == {f"stages.{i}.0.bn{k}" for i in (0, 1) for k in (1, 2)}
    press(driver, "\ue015", "\ue007")  # arrow down, Enter: the second
    wait_for(driver, "tgfxView.state.selected", "a selection")
    settled(driver)
    chosen = driver.execute_script("return tgfxView.state.selected")
    assert data_of(driver)["nodes"][chosen["id"]]["op"] == "BatchNorm2d"
    assert panel(driver).splitlines()[0] == data_of(driver)["nodes"][chosen["id"]]["path"]
    press(driver, "\ue00c")  # Escape
    assert driver.execute_script("return [tgfxView.state.selected, tgfxView.state.matches.size]") == [None, 0]
    press(driver, "/", "nothing of that name")
    assert driver.find_element("id", "results").text == "nothing found"
    assert complaints(driver) == []


def test_search_opens_what_hides_the_node(driver: Any, page: Path) -> None:
    open_page(driver, page)
    press(driver, "c")
    wait_for(driver, "tgfxView.state.expanded.size === 0", "all to close")
    settled(driver)
    press(driver, "/", "stages.1.0.conv2", "\ue007")
    wait_for(driver, "tgfxView.state.selected", "a selection")
    settled(driver)
    assert box(driver, "stages.1.0.conv2").is_displayed()
    assert "selected" in box(driver, "stages.1.0.conv2").get_attribute("class")


def test_modules_close_and_open(driver: Any, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    open_page(driver, page)
    module = '[data-place="m:stages.0.0"]'
    before = len(driver.find_elements("css selector", ".box.node"))
    click(driver, driver.find_element("css selector", f".header{module} .toggle"))
    wait_for(driver, f"document.querySelector('.box.module{module}')", "the module to close")
    settled(driver)
    closed = driver.find_element("css selector", f".box.module{module}")
    assert len(driver.find_elements("css selector", ".box.node")) == before - 7
    assert "7 operations" in closed.text
    ActionChains(driver).double_click(closed).perform()
    wait_for(driver, f"document.querySelector('.box.frame{module}')", "the module to open")
    settled(driver)
    assert len(driver.find_elements("css selector", ".box.node")) == before
    assert complaints(driver) == []


def test_the_table_sorts(driver: Any, page: Path, gated: tgfx.GatedModule) -> None:
    open_page(driver, page, "#t=groups")

    def order() -> list[str]:
        return [one.text for one in driver.find_elements("css selector", "#group-table tbody tr .chip")]

    opened = {name: gate.open_count() for name, gate in gated.gates.items()} | {"head": 4}
    assert order() == [group.name for group in gated.groups]
    for expected, reverse in (("descending", True), ("ascending", False)):
        click(driver, driver.find_element("css selector", '[data-sort="open"]'))
        head = driver.find_element("xpath", "//th[button[@data-sort='open']]")
        assert head.get_attribute("aria-sort") == expected
        counts = [opened[name] for name in order()]
        assert counts == sorted(opened.values(), reverse=reverse)
    click(driver, driver.find_element("css selector", '[data-sort="name"]'))
    assert order() == sorted(opened)
    assert complaints(driver) == []


def test_what_is_kept_is_hatched_and_says_why(driver: Any, page: Path) -> None:
    open_page(driver, page)
    hatched = driver.execute_script(
        "return [...document.querySelectorAll('.hatch')].map((one) => one.parentNode.dataset.place)"
    )
    assert hatched == [place(driver, "head")]
    press(driver, "/", "head Linear", "\ue007")
    wait_for(driver, "tgfxView.state.selected", "a selection")
    settled(driver)
    text = driver.find_element("css selector", "#panel .kept-block").text
    assert "makes the model's output" in text
    assert re.search(r"support/view_models\.py:\d+", text) and "return self.head(" in text
    assert complaints(driver) == []


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_both_themes_can_be_read(driver: Any, page: Path) -> None:
    open_page(driver, page, "#th=light")
    colours: dict[str, dict[str, str]] = {}
    for theme in ("light", "dark"):
        assert driver.execute_script("return document.documentElement.dataset.theme") == theme
        colours[theme] = driver.execute_script(
            """
            const probe = document.createElement("i");
            document.body.append(probe);
            const names = ["text", "muted", "reason", "accent", "surface", "canvas", "node"];
            const found = Object.fromEntries(names.map((name) => {
              probe.style.color = `var(--${name})`;
              return [name, getComputedStyle(probe).color];
            }));
            found.fills = [...new Set([...document.querySelectorAll(".box.node > .outline")]
              .map((one) => getComputedStyle(one).fill))].join(";");
            probe.remove();
            return found;
            """
        )
        press(driver, "t")
    assert colours["light"]["surface"] != colours["dark"]["surface"]
    for theme, own in colours.items():
        for ink in ("text", "muted", "reason", "accent"):
            for paper in ("surface", "canvas"):
                assert contrast(own[ink], own[paper]) >= 4.5, (theme, ink, paper)
        for fill in own["fills"].split(";"):
            assert contrast(own["text"], fill) >= 7 and contrast(own["muted"], fill) >= 4.5, (theme, fill)
    assert complaints(driver) == []


def test_heat_by_cost_and_by_what_is_kept(driver: Any, page: Path, gated: tgfx.GatedModule) -> None:
    from selenium.webdriver.support.ui import Select

    open_page(driver, page)
    fills = {}
    for choice in ("group", "flops", "params", "kept"):
        Select(driver.find_element("id", "colour")).select_by_value(choice)
        settled(driver)
        own = driver.find_elements("css selector", ".box.node > .outline")
        fills[choice] = [one.get_attribute("fill") for one in own]
        if choice == "kept":
            kept = gated.gates["stem"].open_count() / 8
            assert f"{100 * kept:.0f}% of channels kept" in box(driver, "stem").text
    assert len({tuple(own) for own in fills.values()}) == 4
    assert len(set(fills["flops"])) > 2
    assert complaints(driver) == []


def test_panels_agree_with_the_model(driver: Any, page: Path, gated: tgfx.GatedModule) -> None:
    open_page(driver, page, "#t=cost")
    assert f"FLOPs = {int(gated.cost('flops')):,} now, of {int(gated.total('flops')):,}" in panel(driver)
    terms = driver.find_elements("css selector", ".terms li")
    assert len(terms) == len(data_of(driver)["cost"]["flops"]["terms"])
    click(driver, driver.find_element("id", "tab-channels"))
    bars = [one.get_attribute("aria-label") for one in driver.find_elements("css selector", ".bar")]
    assert f"stem: {gated.gates['stem'].open_count()} of 8 channels" in bars and "head: 4 of 4 channels" in bars
    click(driver, driver.find_element("id", "tab-compare"))
    after = sum(p.numel() for p in tgfx.shrink(gated).parameters())
    assert driver.execute_script("return tgfxView.data.comparison.parameters[1]") == after
    assert "stages.0.0.conv1" in panel(driver)
    assert driver.find_elements("id", "tab-training") == []
    assert complaints(driver) == []


def test_the_address_holds_the_view(driver: Any, page: Path) -> None:
    open_page(driver, page)
    press(driver, "/", "stages.1.0.bn1", "\ue007")
    wait_for(driver, "tgfxView.state.selected", "a selection")
    settled(driver)
    driver.execute_script(
        "document.getElementById('colour').value = 'params';"
        "document.getElementById('colour').dispatchEvent(new Event('change'));"
    )
    press(driver, "\ue00c", "c")
    settled(driver)
    driver.execute_script("tgfxView.state.view.x += 33; tgfxView.zoomAt(0.8)")
    press(driver, "t")
    wait_for(driver, "location.hash.slice(1) === tgfxView.fragment()", "the address")
    address = driver.current_url
    kept = (
        "[tgfxView.fragment(), tgfxView.state.colour, tgfxView.state.expanded.size, tgfxView.state.view.k.toFixed(3)]"
    )
    before = driver.execute_script(f"return {kept}")
    open_page(driver, address)
    assert driver.execute_script(f"return {kept}") == before
    assert before[1] == "params" and before[2] == 0
    assert complaints(driver) == []


def test_copy_as_svg_and_save_png(driver: Any, page: Path) -> None:
    open_page(driver, page)
    driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    click(driver, driver.find_element("id", "copy"))
    wait_for(driver, "!document.getElementById('note').hidden", "the note")
    assert "Copied as SVG" in driver.find_element("id", "note").text
    text = driver.execute_async_script("const done = arguments[0]; navigator.clipboard.readText().then(done, done)")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = " ".join(root.itertext())
    assert "stem" in words and "Linear" in words and "var(" not in text
    click(driver, driver.find_element("id", "png"))
    target = driver.downloads / "Residual.png"
    end = time.monotonic() + 20
    while not target.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert target.read_bytes().startswith(b"\x89PNG") and target.stat().st_size > 10_000
    assert complaints(driver) == []


def test_it_works_by_keyboard_alone(driver: Any, page: Path) -> None:
    open_page(driver, page)
    press(driver, "g", "\ue015")  # into the graph, arrow down
    walked = []
    for _ in range(4):
        walked.append(driver.execute_script("return tgfxView.state.selected"))
        press(driver, "\ue015")
    nodes = data_of(driver)["nodes"]
    assert [nodes[one["id"]]["path"] for one in walked] == ["x", "stem", "stages.0.0.conv1", "stages.0.0.bn1"]
    press(driver, "\ue003")  # Backspace closes the module around
    wait_for(driver, "document.querySelector('.box.module')", "the module to close")
    settled(driver)
    said = driver.find_element("id", "announcer").get_attribute("textContent")
    assert "stages.0" in said and "closed" in said
    press(driver, "\ue007")  # Enter opens it again
    wait_for(driver, "!document.querySelector('.box.module')", "the module to open")
    press(driver, "?")
    assert driver.switch_to.active_element.get_attribute("id") == "help-close"
    press(driver, "\ue00c")
    assert not driver.find_element("id", "help").is_displayed()
    driver.find_element("id", "tab-overview").send_keys("\ue014")  # arrow right
    assert driver.switch_to.active_element.get_attribute("id") == "tab-groups"
    assert complaints(driver) == []


def test_everything_has_a_name(driver: Any, page: Path) -> None:
    for tab in ("overview", "groups", "cost", "channels", "compare", "details"):
        open_page(driver, page, f"#t={tab}&s=g0")
        unnamed = driver.execute_script(
            """
            const name = (one) => (one.getAttribute("aria-label") || one.textContent || one.title || "").trim()
              || (one.labels && one.labels.length && one.labels[0].textContent.trim());
            return [...document.querySelectorAll("button, input, select, [role=img], [role=tab], #graph, canvas")]
              .filter((one) => !name(one)).map((one) => one.outerHTML);
            """
        )
        assert unnamed == [], tab
    ids = driver.execute_script("return [...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))


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


def test_kept_inputs_do_not_hatch_a_layer_whose_outputs_can_go(driver: Any, tmp_path: Path) -> None:
    class Skip(nn.Module):
        """The stream makes the output, so it is kept; what is inside of the branch can go."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.skip = nn.Linear(3, 4), Skip()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.skip(self.first(x))

    open_page(driver, tgfx.visualize(Two(), tmp_path / "two.html", example_inputs=torch.randn(1, 3)))
    hatched = driver.execute_script(
        "return [...document.querySelectorAll('.hatch')].map((one) => one.parentNode.dataset.place)"
    )
    assert sorted(hatched) == sorted([place(driver, "first"), place(driver, "skip.down")])
    click(driver, box(driver, "skip.up"))
    assert "Some of its parameters' axes are kept" in panel(driver) and "makes the model's output" in panel(driver)
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
