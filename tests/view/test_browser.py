"""The page in a real headless Chromium: opening it, finding one's way, pictures of it."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import tgfx
from tests.support.browser import complaints, open_page, wait_for
from tests.support.page_driver import box, click, data_of, needs_browser, panel, press, settled, with_class

pytestmark = needs_browser


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
