"""Every page: it shows what there is, to everybody, in both themes, on a phone too, and asks no other host."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from http.client import HTTPConnection
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.conftest import OpenPage, Site, Window, run_aside

# Address, and something that is only there when the data have arrived.
PAGES = {
    "/": "search-index",
    "/operations": "Workers",
    "/operations?kind=parked&by=worker": "Workers",
    "/analytics": "Largest queues",
    "/queues": "shop · checkout",
    "/queues/orders": "namespace shop",
    "/queues/orders?tab=partitions": "customer-7",
    "/queues/orders?tab=groups": "fulfilment",
    "/queues/orders?tab=options": "dlqAfterMaxRetries",
    "/consumers": "fraud-check",
    "/consumers/billing": "customer-7",
    "/messages?range=all&queue=orders": '"kind": "order", "customer"',
    "/dead-letters?queue=orders": "card_declined: the issuer refused the payment",
    "/dead-letters?queue=orders&tab=report": "TimeoutError: payment gateway did not answer within",
    "/traces": "refund-88",
    "/traces?name=order-4711": "handed to the carrier",
    "/namespaces?namespace=acme": "video-transcode",
    "/namespaces/acme/topics/thumbnails": "thumbnails-60",
    "/namespaces/acme/topics/thumbnails?tab=priorities": "the lowest is served first",
    "/namespaces/acme/topics/video-transcode?tab=dead": "ffmpeg exited with status 1",
    "/state": "backoffice",
    "/state?ns=orders": "order-4704",
    "/state?tab=locks": "indexer-4.example",
    "/state?tab=timers": "expire-order-4704",
    "/state?tab=ephemeral": "presence",
    "/tasks": "build_report",
    "/tasks?tab=failures": "SMTPServerDisconnected: connection lost",
    "/tasks?tab=workers": "worker-1.example",
    "/tasks?tab=schedules": "Europe/Berlin",
    "/streams": "totals-per-minute",
    "/pipelines": "revenue-by-minute",
    "/system": "Workers",
    "/system?tab=postgres": "Updates in place",
    "/system?tab=hosts": "One host",
    "/system?tab=connections": "GET /api/v1/system/connections",
    "/shards": "What lives where",
    "/maintenance": "Pop maintenance",
    "/migration?host=db-new&user=shop&audit=leave": "Switch both modes of step 1 on first.",
    "/settings": "NUM_WORKERS",
    "/audit": "POST /api/v1/configure",
}
AXE = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
EVERYTHING = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
CONTRAST = {"type": "rule", "values": ["color-contrast"]}


REPEATED = ["tbody tr:nth-child(n+3)", "li:nth-child(n+6)"]
"""Of a table or a list the first ones do: the others are made of the same."""


def violations(page: Page, rules: object = EVERYTHING, without: Sequence[str] = ()) -> list[str]:
    """What axe-core finds."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE)
    found: dict[str, Any] = page.evaluate(
        "([rules, exclude]) => axe.run({exclude}, {runOnly: rules, resultTypes: ['violations'], elementRef: false})",
        [rules, [*REPEATED, *without]],
    )
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:150] for node in one['nodes'][:3]]}"
        for one in found["violations"]
    ]


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than the window."""
    width: int = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


SQUEEZED = """() => [...document.querySelectorAll('main .keys dd')].map(one => one.getBoundingClientRect())
    .filter(({width, right}) => width < 80 || right > innerWidth).length"""
"""Values beside their names that have no room, or are cut off."""


@pytest.mark.parametrize(("path", "shown"), PAGES.items())
def test_page_is_whole_accessible_and_fits(window: Window, path: str, shown: str) -> None:
    page = window.visit(path)
    expect(page.locator("main").get_by_text(shown).first).to_be_visible()
    # What stands beside every page is looked at on the first.
    without = () if path == "/" else (".sidebar",)
    assert not violations(page, EVERYTHING, without)
    other = "light" if page.locator("html").get_attribute("data-theme") == "dark" else "dark"
    page.keyboard.press("d")
    expect(page.locator("html")).to_have_attribute("data-theme", other)
    assert not violations(page, CONTRAST, without)
    assert overflow(page) <= 0
    page.set_viewport_size({"width": 390, "height": 844})
    assert overflow(page) <= 0
    assert not page.evaluate(SQUEEZED)
    assert not window.watch.problems()


def run_python(page: Page, text: str) -> None:
    """Paste what a page without data offers."""
    program = page.get_by_label("Python", exact=True)
    expect(program).to_contain_text(text)
    subprocess.run([sys.executable, "-"], input=program.inner_text(), text=True, timeout=60, check=True)


def test_pages_without_data_teach_the_next_step(window: Window, site: Site) -> None:
    page = window.visit("/messages?queue=order-totals&partition=nowhere")
    expect(page.get_by_text("No message matches")).to_be_visible()
    page.get_by_role("button", name="Show all times").click()
    expect(page).to_have_url(f"{window.url}/messages?queue=order-totals&partition=nowhere&range=all")
    window.visit("/namespaces?namespace=empty")
    run_python(page, "queen.topic(")
    assert [one["topic"] for one in site.call("GET", "/api/v1/topics/counts?namespace=empty")] == ["thumbnails"]
    window.visit("/queues/not-yet")
    expect(page.get_by_text("No such queue")).to_be_visible()
    run_python(page, "queen.queue(")
    assert len(site.messages("not-yet")) == 1
    window.visit("/state?ns=vacant")
    run_python(page, "queen.kv(")
    assert site.call("GET", "/api/v1/kv/vacant/order-7")["value"] == {"state": "packed"}
    window.visit("/consumers/no-such-group")
    expect(page.get_by_text('.group("no-such-group").consume(handle)')).to_be_visible()
    assert not violations(page)
    assert not window.watch.problems()


def test_one_thing_is_not_many(window: Window, site: Site) -> None:
    site.make_dead("lonely", 1)
    page = window.visit("/queues/lonely")
    expect(page.get_by_text("1 message of this queue failed for good.")).to_be_visible()
    site.make_dead("lonely-too", 1)
    window.visit("/consumers?search=lonely")
    expect(page.get_by_text("1 group, 2 rows")).to_be_visible()
    window.visit("/consumers/workers?queue=lonely")
    expect(page.locator(".metric", has_text="Messages behind")).to_contain_text("of 1 partition")
    expect(page.locator(".metric", has_text="Messages behind")).not_to_contain_text("partitions")
    window.visit("/dead-letters?queue=lonely")
    page.get_by_role("button", name="Delete all 1").click()
    expect(page.locator("dialog[open]").get_by_text("Its message stays in its partition.")).to_be_visible()
    page.keyboard.press("Escape")
    assert not window.watch.problems()


def test_menu_of_a_phone_opens_and_closes_from_the_keyboard(window: Window) -> None:
    page = window.visit("/queues")
    page.set_viewport_size({"width": 390, "height": 844})
    burger = page.get_by_role("button", name="Menu")
    burger.press("Enter")
    expect(page.get_by_role("link", name="Queen, overview")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".sidebar")).not_to_be_visible()
    expect(burger).to_be_focused()


def test_unknown_address_is_a_page_and_an_unknown_call_is_not(window: Window, site: Site) -> None:
    page = window.visit("/no/such/page")
    expect(page.get_by_text("There is no such page")).to_be_visible()
    window.visit("/queues/no-such-queue")
    expect(page.get_by_text("It may have been deleted meanwhile.")).to_be_visible()
    assert not site.exists("/api/v1/no-such-call")
    window.watch.problems()


def test_dialogs_are_accessible(window: Window) -> None:
    page = window.visit("/queues/orders")
    for button in ("Options", "Clear", "Push"):
        page.get_by_role("button", name=button, exact=True).first.click()
        expect(page.get_by_role("dialog")).to_be_visible()
        assert not violations(page), button
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard shortcuts")).to_be_visible()
    assert not violations(page)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox")).to_be_focused()
    assert not violations(page)
    page.keyboard.press("Escape")


def test_message_is_shown_beside_its_list_and_can_be_linked_to(window: Window) -> None:
    page = window.visit("/messages?range=all&queue=orders")
    page.locator("tbody a.main").first.click()
    drawer = page.get_by_role("dialog")
    expect(drawer.get_by_text('"customer"')).to_be_visible()
    assert not violations(page)
    page.reload()
    expect(drawer.get_by_text('"customer"')).to_be_visible()
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    assert not window.watch.problems()


def test_back_closes_what_was_opened_and_leaves_the_page_then(window: Window) -> None:
    page = window.visit("/queues")
    page.get_by_role("link", name="Messages", exact=True).first.click()
    listed = f"{window.url}/messages"
    expect(page).to_have_url(listed)
    page.get_by_role("button", name="All", exact=True).click()
    listed += "?range=all"
    expect(page).to_have_url(listed)
    drawer = page.locator(".drawer")
    page.locator("tbody a.main").first.click()
    expect(drawer).to_be_visible()
    page.go_back()
    expect(drawer).to_be_hidden()
    expect(page).to_have_url(listed)
    page.go_forward()
    expect(drawer).to_be_visible()
    # Closed by hand it leaves no entry behind either.
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    expect(page).to_have_url(listed)
    page.go_back()
    expect(page).to_have_url(f"{window.url}/queues")
    assert not window.watch.problems()


def test_keyboard_stays_in_a_drawer_and_comes_back(window: Window) -> None:
    page = window.visit("/messages?range=all&queue=orders")
    row = page.locator("tbody a.main").nth(2)
    row.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".drawer").get_by_text('"customer"')).to_be_visible()
    for _ in range(30):
        page.keyboard.press("Tab")
        assert page.evaluate("() => !document.activeElement.closest('.shell')")
    page.keyboard.press("Escape")
    expect(row).to_be_focused()


def test_everything_can_be_found_from_the_keyboard(window: Window) -> None:
    page = window.visit("/")
    for words, target in (("fraud", "/consumers/fraud-check"), ("refund", "/traces?name=refund-88"),
                          ("imports", "/namespaces/globex/topics/imports"), ("audit-log", "/queues/audit-log"),
                          ("dead let", "/dead-letters")):  # fmt: skip
        page.keyboard.press("Control+k")
        page.get_by_role("combobox").fill(words)
        expect(page.locator("#palette-results [aria-selected=true]")).to_contain_text(words, ignore_case=True)
        page.keyboard.press("Enter")
        expect(page).to_have_url(window.url + target)
    page.keyboard.press("g")
    page.keyboard.press("q")
    expect(page).to_have_url(f"{window.url}/queues")
    page.keyboard.press("/")
    page.keyboard.type("ord")
    expect(page).to_have_url(f"{window.url}/queues?search=ord")
    expect(page.locator("tbody a.main")).to_have_count(2)
    assert not window.watch.problems()


def test_filters_are_in_the_address(window: Window) -> None:
    page = window.visit("/queues?namespace=platform&sort=name")
    expect(page.locator("tbody a.main")).to_have_text(["audit-log", "search-index", "webhooks"])
    page.get_by_role("button", name="Messages").click()
    expect(page).to_have_url(f"{window.url}/queues?namespace=platform&sort=-stored")
    page.get_by_label("Task").select_option("notify")
    expect(page.locator("tbody a.main")).to_have_text(["webhooks"])
    page.reload()
    expect(page.locator("tbody a.main")).to_have_text(["webhooks"])
    page.get_by_role("button", name="Clear filters").click()
    expect(page).to_have_url(f"{window.url}/queues?sort=-stored")


def test_queues_are_sorted_by_lag_and_by_messages_of_a_partition(window: Window, site: Site) -> None:
    # Sorted by lag, by messages of a partition and by pending ones their orders differ.
    for name, partitions, messages in (("days", 1, 30), ("hours", 9, 10), ("minutes", 2, 20)):
        site.call("POST", "/api/v1/configure", {"queue": name, "namespace": "paced"})
        for partition in range(partitions):
            site.push(name, *range(messages), partition=f"p{partition}")

    async def age() -> None:
        connection = await asyncpg.connect(site.dsn)
        for name, seconds in (("days", 500_000.0), ("hours", 50_000.0), ("minutes", 500.0)):
            await connection.execute(
                "UPDATE queen.segments s SET created_at = s.created_at - make_interval(secs => $2)"
                " FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id"
                " WHERE q.name = $1 AND s.partition_id = p.id",
                name,
                seconds,
            )
        await connection.close()

    # Groups come after that: the server knows that the time of a stored message never changes.
    run_aside(age())
    for name in ("days", "hours", "minutes"):
        site.consume(name, "readers", 1)
    page = window.visit("/queues?namespace=paced")
    rows = page.locator("tbody a.main")
    expect(rows).to_have_text(["hours", "minutes", "days"])
    for column, sort, names in (
        ("Lag", "-lag", ["days", "hours", "minutes"]),
        ("Lag", "lag", ["minutes", "hours", "days"]),
        ("Per partition", "-density", ["days", "minutes", "hours"]),
    ):
        page.get_by_role("button", name=column, exact=True).click()
        expect(page).to_have_url(f"{window.url}/queues?namespace=paced&sort={sort}")
        expect(rows).to_have_text(names)
    assert not window.watch.problems()


@pytest.mark.parametrize(("span", "minutes"), [("6h", 5), ("24h", 15), ("7d", 60)])
def test_charts_begin_with_a_whole_bucket(window: Window, span: str, minutes: int) -> None:
    page = window.visit("/shards")
    expect(page.get_by_text("What lives where")).to_be_visible()
    with page.expect_response(lambda answer: urlsplit(answer.url).path == "/api/v1/status") as answered:
        window.visit(f"/analytics?range={span}")
    since = datetime.fromisoformat(parse_qs(urlsplit(answered.value.url).query)["from"][0])
    assert answered.value.json()["bucketMinutes"] == minutes
    assert since.timestamp() % (60 * minutes) == 0


def test_connections_of_all_workers_are_shown(window: Window, site: Site) -> None:
    clients = [HTTPConnection(urlsplit(site.url).netloc, source_address=("127.0.0.9", 0)) for _ in range(8)]
    for client in clients:
        client.request("GET", "/health")
        client.getresponse().read()
    page = window.visit("/system?tab=connections")
    row = page.get_by_role("row", name="127.0.0.9")
    expect(row.get_by_role("cell").nth(1)).to_have_text("8")
    expect(page.get_by_text("2 workers of this host together")).to_be_visible()
    for client in clients:
        client.close()
    expect(row).to_have_count(0)
    assert not window.watch.problems()


def test_menu_is_made_narrow_and_stays_so(open_page: OpenPage, site: Site) -> None:
    page = open_page("/queues")
    sidebar = page.locator(".sidebar")
    expect(sidebar.get_by_text("Queues", exact=True)).to_be_in_viewport()
    page.get_by_role("button", name="Menu").click()
    page.reload()
    expect(page.get_by_role("button", name="Menu")).to_have_attribute("aria-expanded", "false")
    assert sidebar.evaluate("one => one.offsetWidth") < 70
    assert not violations(page)
    sidebar.get_by_role("link", name="Dead letters").click()
    expect(page).to_have_url(f"{site.url}/dead-letters")
    page.get_by_role("button", name="Menu").click()
    assert sidebar.evaluate("one => one.offsetWidth") > 150


JUMPY = (
    "/queues/orders",
    "/consumers",
    "/consumers/billing",
    "/dead-letters?queue=orders&tab=report",
    "/pipelines",
    "/operations",
    "/system?tab=postgres",
    "/namespaces?namespace=acme",
)
SHIFTS = (
    "() => new Promise(done => { setTimeout(done, 300, 0);"
    " new PerformanceObserver(list => done(list.getEntries().reduce((sum, one) => sum + one.value, 0)))"
    ".observe({type: 'layout-shift', buffered: true}) })"
)


def test_nothing_jumps_when_what_a_page_asked_for_arrives(open_page: OpenPage, site: Site) -> None:
    page = open_page("/shards")
    for path in JUMPY:
        page.goto(site.url + path)
        expect(page.locator("main").get_by_text(PAGES.get(path, "billing")).first).to_be_visible()
        expect(page.locator("main .skeleton")).to_have_count(0)
        shifts: float = page.evaluate(SHIFTS)
        assert shifts < 0.1, path


HOSTILE = ("<img src=x onerror=alert(1)>", "{{ constructor }}", "a/b?c#d%2e", "\U0001f0a1", "שלום")


def test_names_and_payloads_are_shown_as_text(window: Window, site: Site) -> None:
    names = [f"hostile {text}" for text in HOSTILE]
    for name in names:
        # Names hold nothing that is not seen; transaction ids and payloads may.
        payload = {"html": "<script>alert(1)</script>", "rtl": "\u202eevil", "nul": "\u0001"}
        item = {"queue": name, "partition": name, "payload": payload, "transactionId": f"\u202e\u0007{name}"}
        site.call("POST", "/api/v1/push", {"items": [item]})
    page = window.visit("/queues?search=hostile")
    page.on("dialog", lambda dialog: pytest.fail(f"a payload ran: {dialog.message}"))
    expect(page.locator("tbody a.main")).to_have_count(len(names))
    page.get_by_role("link", name="<img src=x onerror=alert(1)>").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(names[0])
    page.get_by_role("link", name="Messages", exact=True).last.click()
    expect(page.locator("tbody a.main").first).to_have_text(f"⟨U+202E⟩␇{names[0]}")
    page.locator("tbody a.main").first.click()
    drawer = page.get_by_role("dialog")
    expect(drawer.get_by_text("<script>alert(1)</script>")).to_be_visible()
    expect(drawer.get_by_text("⟨U+202E⟩evil")).to_be_visible()
    assert not page.locator("main img, .drawer img, .drawer script").count()
    assert not window.watch.problems()


def test_names_that_browsers_take_for_directories_are_not_acted_on(window: Window, site: Site) -> None:
    site.push("dotted", 1, partition="..")
    site.pop("dotted", "readers")
    page = window.visit("/consumers/readers?queue=dotted")
    page.get_by_role("button", name="Seek on ..").click()
    dialog = page.locator("dialog[open]")
    # The address of the partition would be that of the whole queue.
    dialog.locator("[name=to]").select_option("beginning")
    expect(dialog.get_by_text("No browser can ask for something called “..”")).to_be_visible()
    expect(dialog.locator(".confirm")).to_be_disabled()
    assert len(site.messages("dotted")) == 1
    page.keyboard.press("Escape")


def test_large_payload_is_cut_until_it_is_wanted(window: Window, site: Site) -> None:
    (pushed,) = site.push("large", {"text": "x" * 1_000_000})
    page = window.visit(f"/messages?message={pushed['partition_id']}/{pushed['transaction_id']}")
    more = page.get_by_role("button", name="Show all 1,")
    expect(more).to_be_visible()
    assert len(page.locator(".json code").inner_text()) < 30_000
    more.click()
    expect(more).to_be_hidden()
    assert page.locator(".json code").evaluate("one => one.textContent.length") > 1_000_000


def test_first_page_is_small_and_nothing_in_it_jumps(open_page: OpenPage) -> None:
    page = open_page("/")
    expect(page.get_by_text("search-index").first).to_be_visible()
    expect(page.locator("main .skeleton")).to_have_count(0)
    shifts: float = page.evaluate(SHIFTS)
    assert shifts < 0.1
    sizes: list[int] = json.loads(
        page.evaluate(
            "() => JSON.stringify([...performance.getEntriesByType('resource'), "
            "...performance.getEntriesByType('navigation')].filter(one => "
            "/assets|svg|\\/$/.test(new URL(one.name).pathname)).map(one => one.transferSize))"
        )
    )
    assert 100_000 < sum(sizes) < 350_000
