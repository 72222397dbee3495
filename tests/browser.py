"""A headless Chromium, for what only a browser can tell."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1280,1000",
)
PATIENCE = 400
"""Seconds that a busy machine may take over one thing."""
PHONE = 360
"""Pixels across of a small one."""

TOO_WIDE = "return document.documentElement.scrollWidth"
"""How wide the page is, which must not be more than its window."""
UNNAMED = "return [...document.images].filter(image => !image.alt && image.offsetParent).length"
"""Images that are seen without an alternative text."""


def installed() -> tuple[str, str]:
    """Chromium and its driver; tests that need them are left out where they are not."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium with chromedriver here; `make browser` installs them on Debian and Ubuntu")
    return chromium, driver


@contextlib.contextmanager
def open_browser(*flags: str) -> Iterator[Any]:
    from selenium import webdriver

    chromium, driver = installed()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}", *flags):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
        browser.set_page_load_timeout(PATIENCE)
        try:
            yield browser
        finally:
            browser.quit()


def become_a_phone(browser: Any) -> None:
    """Its screen: a window of the desktop's cannot be as narrow."""
    screen = {"width": PHONE, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


def requested(browser: Any) -> list[str]:
    """Addresses that the page asked for; what it carries itself and the browser's own first page are left out."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("data:", "blob:", "chrome:", "chrome-untrusted:"))]


def complaints(browser: Any) -> list[str]:
    """What the page wrote to the console as an error."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
