"""What an open page does while the world changes: it follows, it says when it cannot, and it goes on by itself."""

from __future__ import annotations

from playwright.sync_api import Page, Route, expect

from tests.dashboard.conftest import Site, Window


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
