"""What the tests of the page do with a browser that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.browser import wait_for, what_is_missing

needs_browser = pytest.mark.skipif(
    (missing := what_is_missing()) is not None, reason=f"THE PAGE IS NOT TESTED IN A BROWSER: {missing}"
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
