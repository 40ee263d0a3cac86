"""One server with the shop's data, one browser, one window that goes from page to page as a person does.

They end with this package: while Playwright runs, no other event loop can run in its thread.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, Response, expect

from queen.embedded import EmbeddedPostgres
from tests.acceptance.served import served
from tests.dashboard.browser import chromium, launched
from tests.dashboard.seed import add_pipelines, seed

expect.set_options(timeout=60_000)
OpenPage = Callable[[str], Page]


def run_aside(work: Coroutine[Any, Any, None]) -> None:
    """Playwright's event loop runs in this thread, and a thread has one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


@dataclass(frozen=True)
class Site:
    """A running server, and its API without the dashboard."""

    url: str
    dsn: str
    postgres: EmbeddedPostgres

    def call(self, method: str, path: str, body: object = None) -> Any:
        """What the API answers; a refusal is an error."""
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, method=method), timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def exists(self, path: str) -> bool:
        try:
            self.call("GET", path)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return False
            raise
        return True

    def push(self, queue: str, *payloads: object, partition: str = "Default") -> list[dict[str, Any]]:
        """Store messages; each is answered with its ids."""
        items = [{"queue": queue, "partition": partition, "payload": payload} for payload in payloads]
        pushed: list[dict[str, Any]] = self.call("POST", "/api/v1/push", {"items": items})
        return pushed

    def pop(self, queue: str, group: str, batch: int = 10) -> list[dict[str, Any]]:
        path = f"/api/v1/pop/queue/{quote(queue, safe='')}?consumerGroup={group}&batch={batch}&subscriptionMode=all"
        popped: list[dict[str, Any]] = (self.call("GET", path) or {}).get("messages", [])
        return popped

    def consume(self, queue: str, group: str, count: int) -> None:
        """Pop and acknowledge so many messages."""
        acks = [
            {key: one[key] for key in ("transactionId", "partitionId", "leaseId")}
            for one in self.pop(queue, group, count)
        ]
        self.call("POST", "/api/v1/ack/batch", {"consumerGroup": group, "acknowledgments": acks})

    def lag(self, group: str, queue: str) -> int:
        """How many messages a group has yet to get."""
        partitions = self.call("GET", f"/api/v1/consumer-groups/{group}")[queue]["partitions"]
        return sum(one["offsetLag"] for one in partitions)

    def messages(self, queue: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.call("GET", f"/api/v1/messages?queue={quote(queue, safe='')}")["messages"]
        return listed

    def dead_letters(self, queue: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.call("GET", f"/api/v1/dlq?queue={quote(queue, safe='')}")["messages"]
        return listed

    def make_dead(self, queue: str, *payloads: object, error: str = "it broke") -> list[dict[str, Any]]:
        """Messages that a group `workers` has given up on."""
        self.call(
            "POST",
            "/api/v1/configure",
            {"queue": queue, "options": {"deadLetterQueue": True, "dlqAfterMaxRetries": True}},
        )
        self.push(queue, *payloads)
        popped = self.pop(queue, "workers", len(payloads))
        acks = [
            {key: one[key] for key in ("transactionId", "partitionId", "leaseId")} | {"status": "dlq", "error": error}
            for one in popped
        ]
        self.call("POST", "/api/v1/ack/batch", {"consumerGroup": "workers", "acknowledgments": acks})
        return popped


@dataclass
class Watch:
    """What went wrong behind a page."""

    url: str
    console: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def on(self, page: Page) -> None:
        page.on("console", lambda message: self.console.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.console.append(str(error)))
        page.on("request", self._request)
        page.on("response", self._response)

    def _request(self, request: Request) -> None:
        self.requests.append(request.url)
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.foreign.append(request.url)

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.failed.append(f"{response.status} {response.url}")

    def problems(self) -> list[str]:
        """What was found since it was last asked."""
        found = [*self.console, *self.failed, *self.foreign]
        self.console, self.failed, self.foreign = [], [], []
        return found


class Window:
    """A tab that stays open. Going elsewhere loads nothing again: the page's own router does it."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page = context.new_page()
        self.url = url
        self.watch = Watch(url)
        self.watch.on(self.page)
        self.page.goto(url)

    def visit(self, path: str) -> Page:
        """Go to an address, with nothing open over the page."""
        self.watch.problems()
        self.page.set_viewport_size({"width": 1440, "height": 900})
        self.page.evaluate(
            "() => { document.querySelectorAll('.toast [aria-label=Dismiss]').forEach(one => one.click());"
            " document.querySelectorAll('dialog[open]').forEach(one => one.close()) }"
        )
        follow(self.page, path)
        return self.page


def follow(page: Page, path: str) -> None:
    """Go to an address as a link of the page does."""
    page.evaluate(
        "path => { history.pushState(null, '', path); dispatchEvent(new PopStateEvent('popstate', {state: null})) }",
        path,
    )


def new_context(browser: Browser, theme: Literal["dark", "light"] = "light") -> BrowserContext:
    return browser.new_context(
        viewport={"width": 1440, "height": 900}, color_scheme=theme, reduced_motion="reduce", timezone_id="UTC"
    )


@pytest.fixture(scope="package")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    if chromium() is None:
        pytest.skip("the dashboard is tested in Debian's chromium, which is not installed")
    settings = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    with EmbeddedPostgres(tmp_path_factory.mktemp("postgres") / "pg", settings=settings) as postgres:
        yield postgres


@pytest.fixture(scope="package")
def site(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Queues, groups, dead letters, traces, topics: see `seed`."""
    directory: Path = tmp_path_factory.mktemp("dashboard")
    with served(directory, DATABASE_URLS=postgres.dsn()) as server:
        run_aside(seed(server.url))
        add_pipelines(directory / "data")
        yield Site(server.url, postgres.dsn(), postgres)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="package")
def window(browser: Browser, site: Site) -> Iterator[Window]:
    context = new_context(browser)
    yield Window(context, site.url)
    context.close()


@pytest.fixture
def open_page(browser: Browser, site: Site) -> Iterator[OpenPage]:
    """Opens an address in a browser window of its own, in which nothing of another is known."""
    contexts = []

    def open(path: str) -> Page:
        contexts.append(new_context(browser))
        page = contexts[-1].new_page()
        page.goto(site.url + path)
        return page

    yield open
    for context in contexts:
        context.close()
