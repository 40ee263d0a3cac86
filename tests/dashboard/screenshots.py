"""`make screenshots`: pictures of every page, light and dark, for the documentation.

Starts a server of its own with realistic data and a day of figures.
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
import threading
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize

from queen.embedded import EmbeddedPostgres
from tests.acceptance.served import served
from tests.dashboard.browser import launched
from tests.dashboard.seed import add_history, add_pipelines, keep_busy, seed

TARGET = Path(__file__).parents[2] / "docs" / "images" / "dashboard"
PAGES = {
    "overview": "/",
    "operations": "/operations",
    "analytics": "/analytics",
    "queues": "/queues",
    "queue": "/queues/orders",
    "partitions": "/queues/orders?tab=partitions",
    "consumer-groups": "/consumers",
    "group": "/consumers/billing",
    "messages": "/messages?range=24h",
    "search": "/messages?queue=orders&range=all&where=customer.city%3DTurin",
    "dead-letters": "/dead-letters?queue=orders",
    "report": "/dead-letters?tab=report",
    "traces": "/traces?name=order-4711",
    "topics": "/namespaces?namespace=acme",
    "topic": "/namespaces/acme/topics/thumbnails",
    "keys": "/state?ns=orders",
    "locks": "/state?tab=locks",
    "timers": "/state?tab=timers",
    "ephemeral": "/state?tab=ephemeral",
    "streams": "/streams",
    "tasks": "/tasks",
    "tasks-failures": "/tasks?tab=failures",
    "pipelines": "/pipelines",
    "system": "/system",
    "postgres": "/system?tab=postgres",
    "shards": "/shards",
    "maintenance": "/maintenance",
    "migration": "/migration?host=db-new.internal&audit=leave",
    "settings": "/settings",
    "audit": "/audit",
}
SIZE: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}


def main() -> None:
    wanted = set(sys.argv[1:])
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        with EmbeddedPostgres(directory / "pg", settings={"fsync": "off"}) as postgres:
            dsn = postgres.dsn()
            with served(directory, DATABASE_URLS=dsn) as server:
                asyncio.run(seed(server.url))
            # Another one is shown: its latencies and figures are not those of being filled.
            with served(directory, DATABASE_URLS=dsn) as server:
                asyncio.run(add_history(dsn, int(server.url.rpartition(":")[2])))
                add_pipelines(directory / "data")
                stop = threading.Event()
                busy = threading.Thread(target=lambda: asyncio.run(keep_busy(server.url, stop.is_set)))
                busy.start()
                try:
                    with launched() as browser:
                        take(browser, server.url, wanted, directory / "data")
                finally:
                    stop.set()
                    busy.join()


def take(browser: Browser, url: str, wanted: set[str], data_dir: Path) -> None:
    context = browser.new_context(viewport=SIZE, device_scale_factor=1, reduced_motion="reduce")
    page = context.new_page()
    for name, path in PAGES.items():
        if wanted and name not in wanted:
            continue
        if name == "pipelines":  # As they report every second.
            add_pipelines(data_dir)
        page.goto(url + path)
        settle(page, 21_000 if name == "overview" else 1200)
        picture_twice(page, name)
    if not wanted or "actions" in wanted:
        actions(page, url)
    context.close()
    if not wanted or "phone" in wanted:
        context = browser.new_context(
            viewport=PHONE, color_scheme="dark", device_scale_factor=2, reduced_motion="reduce"
        )
        page = context.new_page()
        page.goto(url + "/queues/orders")
        settle(page, 1200)
        picture(page, "phone-dark")
        context.close()


def actions(page: Page, url: str) -> None:
    page.goto(url + "/consumers")
    settle(page, 500)
    page.get_by_role("button", name="Seek", exact=True).first.click()
    page.get_by_text("would be delivered again").wait_for()
    picture_twice(page, "seek")
    page.keyboard.press("Escape")
    page.goto(url + "/messages?range=24h&queue=orders")
    settle(page, 500)
    page.locator("tbody a.main").first.click()
    settle(page, 700)
    picture_twice(page, "message")
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.keyboard.type("or")
    settle(page, 700)
    picture_twice(page, "palette")
    page.keyboard.press("Escape")


def picture_twice(page: Page, name: str) -> None:
    """Dark and light, of the same moment."""
    themes: tuple[Literal["dark", "light"], ...] = ("dark", "light")
    for theme in themes:
        page.emulate_media(color_scheme=theme)
        settle(page, 250)
        picture(page, f"{name}-{theme}")


def picture(page: Page, name: str) -> None:
    few_colours(Image.open(io.BytesIO(page.screenshot())).convert("RGB")).save(TARGET / f"{name}.png", optimize=True)


def few_colours(picture: Image.Image) -> Image.Image:
    """A third of the size: the most frequent colours as they are, and of the others those that cover them best."""
    packed = np.asarray(picture).astype(np.int64) @ (1 << 16, 1 << 8, 1)
    colours, place, counts = np.unique(packed, return_inverse=True, return_counts=True)
    parts = np.stack([colours >> 16 & 255, colours >> 8 & 255, colours & 255], axis=1)
    rare = picture.quantize(96, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).getpalette() or []
    palette = np.concatenate([parts[counts.argsort()[::-1][:160]], np.reshape(rare, (-1, 3))[:96]])
    nearest = ((parts[:, None] - palette[None]) ** 2).sum(axis=2).argmin(axis=1)
    few = Image.fromarray(nearest[place].reshape(packed.shape).astype(np.uint8))
    few.putpalette(palette.astype(np.uint8).tobytes())
    return few


def settle(page: Page, milliseconds: int) -> None:
    """Until figures are there; a picture has no event to wait for."""
    page.wait_for_timeout(milliseconds)


if __name__ == "__main__":
    main()
