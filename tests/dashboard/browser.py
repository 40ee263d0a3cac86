"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright


def chromium() -> str | None:
    """Where it is installed; None where it is not."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser without a screen."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(),
            args=["--no-sandbox", "--disable-gpu", "--in-process-gpu", "--disable-dev-shm-usage"],
        )
        try:
            yield browser
        finally:
            browser.close()
