"""What the page says, in a real headless Chromium: themes, heat, what is kept, names, panels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tgfx
from tests.support.browser import complaints, open_page, wait_for
from tests.support.page_driver import box, click, data_of, needs_browser, panel, place, press, settled

pytestmark = needs_browser


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
