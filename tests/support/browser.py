"""A real headless Chromium, and pages in it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--window-size=1400,2200",
)  # fmt: skip


def what_is_missing() -> str | None:
    """Why there is no browser here, and what would bring it; None if there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install selenium"
    if not any(map(shutil.which, CHROMIUM)):
        return "no Chromium: apt-get install chromium chromium-driver"
    if shutil.which("chromedriver") is None:
        return "no chromedriver: apt-get install chromium-driver"
    return None


@contextmanager
def chromium(*flags: str) -> Iterator[Any]:
    """A browser with a profile of its own, closed and forgotten at the end."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    profile = tempfile.mkdtemp(prefix="tgfx-chromium-")
    options = Options()
    options.binary_location = next(path for path in map(shutil.which, CHROMIUM) if path)
    for flag in (*FLAGS, f"--user-data-dir={profile}", *flags):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


def wait_for(driver: Any, script: str, what: str, seconds: float = 30.0) -> Any:
    """The value of a script as soon as it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = driver.execute_script(f"return {script}")
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s for {what}")


def open_page(driver: Any, page: Path | str, fragment: str = "") -> None:
    """Open a page from disk (or an address) afresh and wait until the graph is there."""
    driver.get("about:blank")
    driver.get_log("browser")
    driver.get((page if isinstance(page, str) else page.resolve().as_uri()) + fragment)
    wait_for(driver, "document.documentElement.dataset.ready", "the first picture")


def complaints(driver: Any) -> list[str]:
    """What the console has said since the page was opened."""
    return [entry["message"] for entry in driver.get_log("browser")]
