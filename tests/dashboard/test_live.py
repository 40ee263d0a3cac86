"""What an open page does while the world changes: it follows, it says when it cannot, and it goes on by itself."""

from __future__ import annotations

import json

from playwright.sync_api import Browser, Page, Route, expect

from tests.dashboard.conftest import Site, Window, follow, new_context


def show(page: Page, state: str) -> None:
    """Have the page believe that its tab is hidden, or visible."""
    page.evaluate(
        "state => { Object.defineProperty(document, 'visibilityState', {value: state, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')) }",
        state,
    )


def pending(page: Page, count: int) -> None:
    expect(page.locator(".metric", has_text="Pending").locator(".value")).to_have_text(str(count))


def test_change_is_seen_without_reloading_and_a_hidden_tab_asks_for_nothing(window: Window, site: Site) -> None:
    site.push("seen-live", {"n": 1})
    page = window.visit("/queues/seen-live")
    pending(page, 1)
    site.push("seen-live", {"n": 2})
    pending(page, 2)
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/api/v1/events")):
        show(page, "hidden")
    window.watch.requests.clear()
    page.wait_for_timeout(1500)
    assert window.watch.requests == []
    site.push("seen-live", {"n": 3})
    show(page, "visible")
    pending(page, 3)


def test_more_windows_than_a_browser_has_connections_go_on_without_a_stream(browser: Browser, site: Site) -> None:
    context = new_context(browser)
    windows = []
    for _ in range(7):
        windows.append(context.new_page())
        windows[-1].goto(site.url)
        expect(windows[-1].get_by_text("search-index").first).to_be_visible()
    states = [one.locator(".badge", has_text="live").inner_text() for one in windows]
    assert states == ["live"] * 4 + ["not live"] * 3
    site.push("many-windows", 1)
    follow(windows[-1], "/queues/many-windows")
    pending(windows[-1], 1)
    site.push("many-windows", 2)
    pending(windows[-1], 2)
    context.close()


def test_stream_that_is_cut_is_said_and_opened_again(window: Window, site: Site) -> None:
    site.push("streamed", 1)
    page = window.visit("/queues/streamed")
    pending(page, 1)
    show(page, "hidden")

    def cut(route: Route) -> None:
        route.abort("connectionreset")

    page.route("**/api/v1/**", cut)
    show(page, "visible")
    banner = page.get_by_role("alert").filter(has_text="The connection to the server is lost.")
    expect(banner).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_text("streamed")
    site.push("streamed", 2)
    page.unroute("**/api/v1/**", cut)
    expect(banner).to_be_hidden()
    pending(page, 2)
    window.watch.problems()


FIRST_COUNTERS = {
    "at": "2026-11-19T12:00:00.000Z",
    "rates": {"push": 0, "pop": 0, "ack": 0, "failed": 0, "deadLetters": 0, "requests": 0},
    "totals": {"pushMessages": 1, "popMessages": 0, "ackMessages": 0, "failed": 0, "deadLetters": 0, "requests": 1},
    "parked": 0,
    "inFlight": 0,
    "pushLatencyMs": None,
    "depth": None,
    "shards": [{"shard": 0, "up": True, "reason": ""}],
    "maintenance": {"push": False, "pop": False},
    "spool": {"messages": 0, "bytes": 0, "failed": 0},
    "queues": [],
}


def test_stream_that_ends_at_once_is_opened_again_later_each_time(window: Window, site: Site) -> None:
    site.push("ending", 1)
    page = window.visit("/queues/ending")
    pending(page, 1)
    show(page, "hidden")
    opened: list[str] = []

    def end(route: Route) -> None:
        opened.append(route.request.url)
        route.fulfill(content_type="text/event-stream", body=f"event: counters\ndata: {json.dumps(FIRST_COUNTERS)}\n\n")

    page.route("**/api/v1/events", end)
    show(page, "visible")
    rate = page.locator(".metric", has_text="Ack").locator(".hint")
    # The first counters have none before them that would say how fast it goes.
    expect(rate).to_have_text("last minute")
    page.wait_for_timeout(1500)
    assert len(opened) < 8
    page.unroute("**/api/v1/events", end)
    expect(rate).to_have_text("right now")
    expect(page.get_by_role("alert").filter(has_text="The connection to the server is lost.")).to_be_hidden()
    window.watch.problems()


def test_one_slow_answer_is_no_server_that_is_gone(browser: Browser, site: Site) -> None:
    site.push("slow", 1)
    context = new_context(browser)
    # A second is as long as a hundred.
    context.add_init_script("{ const real = AbortSignal.timeout; AbortSignal.timeout = ms => real(ms / 100) }")
    page = context.new_page()
    page.route("**/api/v1/status/queues/slow?**", lambda _: None)
    page.goto(f"{site.url}/queues/slow")
    expect(page.get_by_role("alert").filter(has_text="The server did not answer within 30 s.")).to_be_visible()
    expect(page.locator(".banner")).to_have_count(0)
    page.route("**/api/v1/push", lambda _: None)
    page.get_by_role("button", name="Push", exact=True).click()
    page.locator("dialog[open] .confirm").click()
    expect(page.locator("dialog[open] [role=alert]")).to_contain_text("look before you repeat it")
    page.unroute_all(behavior="ignoreErrors")
    context.close()


def test_database_that_stops_is_said_and_its_return_is_noticed(window: Window, site: Site) -> None:
    site.push("outlasts", {"n": 1})
    page = window.visit("/queues/outlasts")
    pending(page, 1)
    site.postgres.stop()
    try:
        banner = page.get_by_role("alert").filter(has_text="PostgreSQL is unavailable.")
        expect(banner).to_be_visible(timeout=30_000)
        expect(page.get_by_role("heading", level=1)).to_have_text("outlasts")
    finally:
        site.postgres.start()
    expect(banner).to_be_hidden(timeout=30_000)
    site.push("outlasts", {"n": 2})
    pending(page, 2)
    window.watch.problems()
