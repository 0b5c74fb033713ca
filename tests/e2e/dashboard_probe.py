"""Looks at a dashboard in headless Chromium and prints what it saw as JSON. Runs in an environment
that has playwright.

dashboard_probe.py URL KEY FOLDER: KEY is the server's, FOLDER takes the pictures.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Page, sync_playwright

# else the one that playwright installed
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def main(url: str, key: str, folder: Path) -> dict[str, Any]:
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            dark = browser.new_context(viewport=WIDE, color_scheme="dark")
            light = browser.new_context(viewport=PHONE, color_scheme="light")
            return {
                "dark": look(dark, url, key, folder / "dark.png"),
                "phone": look(light, url, key, folder / "phone.png"),
            }
        finally:
            browser.close()


def look(context: BrowserContext, url: str, key: str, picture: Path) -> dict[str, Any]:
    page = context.new_page()
    seen: dict[str, Any] = {"errors": [], "foreign": []}
    page.on("pageerror", lambda error: seen["errors"].append(str(error)))
    page.on(
        "request",
        lambda request: request.url.startswith(url) or seen["foreign"].append(request.url),
    )
    page.goto(f"{url}/dashboard")
    page.wait_for_selector("#door:visible")
    seen["behind_the_door"] = page.is_visible("#now")
    page.fill("#key", "wrong")
    page.click("#door button")
    until(page, "document.getElementById('notice').textContent !== ''")
    seen["wrong_key"] = page.inner_text("#notice")
    page.fill("#key", key)
    page.click("#door button")
    # So that lines have something to join.
    until(
        page,
        "[...document.querySelectorAll('path')].some((one) => one.getAttribute('d').length > 20)",
    )
    seen["door_after_key"] = page.is_visible("#door")
    seen |= contents(page)
    page.screenshot(path=str(picture), full_page=True)
    return seen


def until(page: Page, expression: str) -> None:
    """`wait_for_function` would evaluate inside the page, which the page's policy forbids."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(200)
    raise TimeoutError(expression)


def contents(page: Page) -> dict[str, Any]:
    tables = """tables => tables.map((table) => [...table.rows].map((row) =>
        [...row.cells].map((cell) => cell.textContent)))"""
    return {
        "paper": page.evaluate("getComputedStyle(document.body).backgroundColor"),
        "overflow": page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        ),
        "model": page.inner_text("#model"),
        "facts": page.inner_text("#facts"),
        "charts": page.eval_on_selector_all("svg", "nodes => nodes.length"),
        "tables": page.eval_on_selector_all("table", tables),
        "alarms": page.eval_on_selector_all("tr.alarm", "nodes => nodes.length"),
        "injected": page.evaluate(
            "window.injected === true || document.querySelector('main img') !== null"
        ),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
