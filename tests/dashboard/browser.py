"""Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from playwright.sync_api import Browser, sync_playwright

# Debian has the one without windows as a package of its own: it takes less CPU.
_NAMES: Final = ("chromium-headless-shell", "chromium", "chromium-browser")
# Windows that know of each other share a process.
ARGUMENTS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--in-process-gpu",
    "--disable-dev-shm-usage",
    "--process-per-site",
)


def chromium() -> str | None:
    """Where it is installed; None where it is not."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser without a screen."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()
