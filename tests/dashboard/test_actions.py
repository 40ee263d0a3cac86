"""What the dashboard does, checked over the API."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

import asyncpg
import pytest
from playwright.sync_api import Page, Route, expect

from tests.dashboard.conftest import OpenPage, Site, Window, run_aside
from tests.support.ageing import block_until

LANGUAGES: Final[Mapping[Literal["curl", "Python"], list[str]]] = {"curl": ["bash"], "Python": [sys.executable, "-"]}


def confirm(page: Page, *, effect: str = "", typed: str = "") -> None:
    """Read what will happen, confirm it, and wait until it has."""
    dialog = page.locator("dialog[open]")
    if effect:
        expect(dialog.get_by_text(effect)).to_be_visible()
    if typed:
        expect(dialog.locator(".confirm")).to_be_disabled()
        dialog.locator("[name=typed]").fill(typed)
    dialog.locator(".confirm").click()
    expect(dialog).to_be_hidden()


def shown(page: Page, language: Literal["curl", "Python"], text: str) -> None:
    """What the open dialog does, as a command; the language chosen last is the one that is shown first."""
    dialog = page.locator("dialog[open]")
    if not dialog.get_by_role("group", name="Language").is_visible():
        dialog.get_by_text("As curl and Python").click()
    dialog.get_by_role("button", name=language, exact=True).click()
    expect(dialog.get_by_label(language.lower(), exact=True)).to_contain_text(text)


def toast(page: Page, text: str) -> None:
    expect(page.locator(".toast", has_text=text).first).to_be_visible()


def undo(page: Page) -> None:
    for earlier in page.locator(".toast", has_text="Undone").get_by_role("button", name="Dismiss").all():
        earlier.click()
    page.locator(".toast").get_by_role("button", name="Undo").first.click()
    toast(page, "Undone")


def test_pushing_a_message_and_undoing_it(window: Window, site: Site) -> None:
    page = window.visit("/queues")
    page.get_by_role("button", name="Push a message").click()
    dialog = page.locator("dialog[open]")
    dialog.locator("[name=queue]").fill("pushed")
    dialog.locator("[name=payload]").fill("{ not json")
    expect(dialog.get_by_text("Payload is not JSON")).to_be_visible()
    expect(dialog.locator(".confirm")).to_be_disabled()
    dialog.locator("[name=payload]").fill('{"it\'s": "here"}')
    shown(page, "curl", "curl -sS -X POST")
    shown(page, "Python", 'await queen.queue("pushed").push([{"data": {"it\'s": "here"}}])')
    confirm(page, effect="No group reads this queue yet")
    toast(page, "is queued")
    assert len(site.messages("pushed")) == 1
    undo(page)
    assert site.messages("pushed") == []


def test_what_is_shown_as_curl_and_as_python_runs_as_it_is_pasted(window: Window, site: Site) -> None:
    page = window.visit("/queues")
    page.get_by_role("button", name="Push a message").click()
    dialog = page.locator("dialog[open]")
    dialog.locator("[name=queue]").fill('it\'s "pasted" $HOME `id`')
    dialog.locator("[name=partition]").fill("a'b")
    # Longer than an argument of a command may be.
    payload = {"it's": '"quoted" $HOME `id` \\ ü \n', "large": 2**70, "none": None, "long": "x" * 200_000}
    dialog.locator("[name=payload]").fill(json.dumps(payload))
    for language, command in LANGUAGES.items():
        shown(page, language, "pasted")
        text = dialog.get_by_label(language.lower(), exact=True).inner_text()
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    page.keyboard.press("Escape")
    pushed = site.messages('it\'s "pasted" $HOME `id`')
    assert len(pushed) == 2
    for one in pushed:
        assert site.call("GET", f"/api/v1/messages/{one['partitionId']}/{one['transactionId']}")["payload"] == payload


def test_creating_configuring_clearing_and_deleting_a_queue(window: Window, site: Site) -> None:
    page = window.visit("/queues")
    page.get_by_role("button", name="New queue").click()
    dialog = page.locator("dialog[open]")
    dialog.locator("[name=queue]").fill("made")
    dialog.locator("[name=namespace]").fill("tests")
    dialog.locator("[name=retryLimit]").fill("7")
    confirm(page, effect="The queue made is made")
    expect(page).to_have_url(f"{site.url}/queues/made")
    options = site.call("GET", "/api/v1/status/queues/made")["queue"]["options"]
    assert (options["retryLimit"], options["leaseTime"], options["ttl"]) == (7, 300, None)

    page.get_by_role("button", name="Options", exact=True).first.click()
    expect(dialog.locator(".confirm")).to_be_disabled()
    dialog.locator("[name=leaseTime]").fill("45")
    dialog.locator("[name=deadLetterQueue]").check()
    expect(dialog.locator(".diff")).to_contain_text("leaseTime")
    expect(dialog.locator(".diff del").first).to_have_text("300")
    expect(dialog.locator(".diff ins").first).to_have_text("45")
    confirm(page)
    toast(page, "Options of made are changed")
    changed = site.call("GET", "/api/v1/status/queues/made")["queue"]
    assert changed["options"] == options | {"leaseTime": 45, "deadLetterQueue": True}
    assert changed["namespace"] == "tests"
    undo(page)
    assert site.call("GET", "/api/v1/status/queues/made")["queue"]["options"] == options

    site.push("made", 1, 2, 3)
    page.get_by_role("button", name="Clear", exact=True).click()
    confirm(page, effect="3 messages are removed", typed="made")
    toast(page, "3 messages removed")
    assert site.messages("made") == []
    page.get_by_role("button", name="Delete", exact=True).click()
    confirm(page, typed="made")
    expect(page).to_have_url(f"{site.url}/queues")
    assert not site.exists("/api/v1/resources/queues/made")


def test_clearing_one_partition_leaves_the_others(window: Window, site: Site) -> None:
    site.push("parts", 1, 2, partition="left")
    site.push("parts", 3, partition="right")
    page = window.visit("/queues/parts?tab=partitions")
    page.get_by_role("button", name="Clear left").click()
    confirm(page, typed="left")
    toast(page, "2 messages removed from left")
    assert [one["partition"] for one in site.messages("parts")] == ["right"]


def test_group_is_made_that_begins_where_it_is_told(window: Window, site: Site) -> None:
    site.push("unread", *range(3))
    page = window.visit("/consumers")
    dialog = page.locator("dialog[open]")
    for group, begins, waiting in (("newcomers", "new", 0), ("historians", "beginning", 3), ("recent", "time", 3)):
        window.visit("/consumers")
        page.get_by_role("button", name="New group").click()
        dialog.locator("[name=group]").fill(group)
        dialog.locator("[name=queue]").fill("unread")
        dialog.locator("[name=from]").select_option(begins)
        confirm(page, effect=f"{group} gets messages of unread")
        expect(page).to_have_url(f"{site.url}/consumers/{group}?queue=unread")
        assert site.lag(group, "unread") == waiting
    window.visit("/queues/unread?tab=groups")
    page.get_by_role("button", name="New group").click()
    dialog.locator("[name=group]").fill("recent")
    expect(dialog.get_by_text("recent reads unread already: seek to move it.")).to_be_visible()
    expect(dialog.locator(".confirm")).to_be_disabled()
    assert len(site.pop("unread", "historians")) == 3


def test_seeking_says_what_comes_again_and_what_is_skipped_and_can_be_undone(window: Window, site: Site) -> None:
    site.push("sought", *range(5))
    site.consume("sought", "seekers", 3)
    page = window.visit("/consumers?search=seekers")
    seek = page.get_by_role("table", name="Consumer groups").get_by_role("button", name="Seek", exact=True)
    dialog = page.locator("dialog[open]")
    seek.click()
    dialog.locator("[name=to]").select_option("end")
    confirm(page, effect="2 messages would be skipped.")
    toast(page, "seekers moved on 1 partition")
    assert site.lag("seekers", "sought") == 0
    undo(page)
    assert site.lag("seekers", "sought") == 2
    seek.click()
    dialog.locator("[name=to]").select_option("beginning")
    confirm(page, effect="3 messages would be delivered again.")
    assert site.lag("seekers", "sought") == 5
    seek.click()
    dialog.locator("[name=to]").select_option("offset")
    dialog.locator("[name=offset]").fill("4")
    confirm(page, effect="4 messages would be skipped.")
    assert site.lag("seekers", "sought") == 1
    site.pop("sought", "seekers", 1)
    seek.click()
    yesterday = datetime.now(UTC) - timedelta(days=1)
    dialog.locator("[name=time]").fill(yesterday.strftime("%Y-%m-%dT%H:%M:%S"))
    expect(dialog.get_by_text("1 lease of the group ends")).to_be_visible()
    confirm(page, effect="4 messages would be delivered again.")
    assert len(site.pop("sought", "seekers")) == 5


def test_seek_over_many_partitions_is_done_in_parts_and_undone_from_its_list(window: Window, site: Site) -> None:
    # A group that waits for new messages knows every partition of the queue.
    site.call("POST", "/api/v1/configure", {"queue": "wide"})
    site.call("GET", "/api/v1/pop/queue/wide?consumerGroup=wanderers&subscriptionMode=new")
    items = [{"queue": "wide", "partition": f"p{number}", "payload": number} for number in range(1001)]
    site.call("POST", "/api/v1/push", {"items": items})
    page = window.visit("/consumers/wanderers")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or "") if "/seek" in request.url else None)
    page.get_by_role("button", name="Seek", exact=True).first.click()
    page.locator("dialog[open] [name=to]").select_option("end")
    # On a busy machine an estimate comes first.
    expect(page.locator("dialog[open]").get_by_text("1,001 messages would be skipped.", exact=True)).to_be_visible()
    # By hand it is one call, which does all of it.
    shown(page, "curl", "-d '{\"toEnd\":true}'")
    confirm(page)
    toast(page, "wanderers moved on 1,001 partitions")
    assert site.lag("wanderers", "wide") == 0
    assert any('"limit":5000' in body for body in sent)
    page.get_by_role("table", name="Seeks").get_by_role("button", name="Undo seek").first.click()
    confirm(page, effect="where it was on 1,001 partitions before it went to end")
    toast(page, "wanderers is back on 1,001 partitions of wide")
    assert site.lag("wanderers", "wide") == 1001


def test_failed_job_of_a_task_is_retried(window: Window, site: Site) -> None:
    page = window.visit("/tasks?tab=failures")
    row = page.get_by_role("table", name="Jobs that failed").get_by_role("row").filter(has_text="customer-0@")
    row.get_by_role("button", name="Retry").click()
    confirm(page, effect="ready again")
    toast(page, "1 item ready again")
    letters = site.call("GET", "/api/v1/topics/dlq?namespace=backoffice&topic=mail/send_receipt")
    assert [one["data"]["job"] for one in letters] == ["send_receipt-1"]


def test_failed_job_is_looked_at_and_retried_there(window: Window, site: Site) -> None:
    place = {"namespace": "backoffice", "topic": "reports/build_report"}
    query = "namespace=backoffice&topic=reports/build_report&limit=1&ids=string"
    (item,) = site.call("GET", f"/api/v1/topics/dequeue?{query}")
    site.call("POST", "/api/v1/topics/nack?ids=string", place | {"id": item["id"], "error": "Traceback\n  line 7"})
    page = window.visit("/tasks?tab=failures")
    page.get_by_role("table", name="Jobs that failed").get_by_role("link", name="build_report").click()
    drawer = page.locator(".drawer")
    expect(drawer.get_by_text("Traceback␊  line 7")).to_be_visible()
    expect(drawer.get_by_label("data", exact=True)).to_contain_text(f'"job": "{item["data"]["job"]}"')
    drawer.get_by_role("button", name="Retry").click()
    confirm(page, effect="ready again")
    expect(drawer).to_be_hidden()
    assert site.call("GET", "/api/v1/topics/dlq?namespace=backoffice&topic=reports/build_report") == []


def test_lease_is_released_a_partition_is_skipped_and_the_group_deleted(window: Window, site: Site) -> None:
    site.push("skipped", 1, 2)
    site.pop("skipped", "skippers", 1)
    page = window.visit("/consumers/skippers")
    page.get_by_role("button", name="Release the lease on Default").click()
    confirm(page, effect="delivered again at once")
    toast(page, "The lease has ended; 2 messages to deliver")
    assert len(site.pop("skipped", "skippers", 1)) == 1
    page.get_by_role("button", name="Skip to the end of Default").click()
    confirm(page, effect="2 messages would be skipped.")
    toast(page, "skippers moved on 1 partition")
    assert site.lag("skippers", "skipped") == 0
    page.get_by_role("button", name="Delete group").click()
    confirm(page, effect="Its position on 1 partition of 1 queue is forgotten.", typed="skippers")
    expect(page).to_have_url(f"{site.url}/consumers")
    assert site.call("GET", "/api/v1/consumer-groups/skippers") == {}


def test_queue_and_group_are_paused_shown_so_and_resumed(window: Window, site: Site) -> None:
    site.push("paused", 1, 2)
    page = window.visit("/queues/paused")
    page.get_by_role("button", name="Pause", exact=True).click()
    confirm(page, effect="No group gets anything of it")
    expect(page.get_by_text("This queue is paused")).to_be_visible()
    assert site.pop("paused", "waiters") == []
    undo(page)
    expect(page.get_by_text("This queue is paused")).to_be_hidden()
    assert len(site.pop("paused", "waiters", 1)) == 1
    window.visit("/consumers?search=waiters")
    page.get_by_role("button", name="Pause waiters on paused").click()
    confirm(page, effect="other groups go on")
    expect(page.locator("tbody .badge").first).to_have_text("paused")
    assert site.pop("paused", "waiters", 1) == []
    assert len(site.pop("paused", "others", 1)) == 1
    page.get_by_role("button", name="Resume waiters on paused").click()
    confirm(page)
    expect(page.get_by_role("button", name="Pause waiters on paused")).to_be_visible()


def test_message_is_retried_edited_given_up_and_deleted(window: Window, site: Site) -> None:
    (pushed,) = site.push("single", {"n": 1})
    page = window.visit(f"/messages?queue=single&message={pushed['partition_id']}/{pushed['transaction_id']}")
    drawer = page.locator(".drawer")
    drawer.get_by_role("button", name="Retry").click()
    confirm(page, effect="stored at the tail of its partition")
    assert len(site.messages("single")) == 2
    undo(page)
    assert len(site.messages("single")) == 1

    drawer.get_by_role("button", name="Move to dead letters").click()
    page.locator("dialog [name=error]").fill("not wanted")
    shown(page, "Python", 'error="not wanted"')
    page.locator("dialog .confirm").click()
    toast(page, "1 dead letter made")
    assert [one["errorMessage"] for one in site.dead_letters("single")] == ["not wanted"]
    undo(page)
    assert site.dead_letters("single") == []

    drawer.get_by_role("button", name="Edit and send again").click()
    page.locator("dialog [name=payload]").fill('{"n": 2}')
    expect(page.locator("dialog .diff ins")).to_have_text('{"n":2}')
    page.locator("dialog .confirm").click()
    toast(page, "The edited message is queued in single")
    expect(drawer).to_be_hidden()
    (left,) = site.messages("single")
    path = f"/api/v1/messages/{left['partitionId']}/{left['transactionId']}"
    assert site.call("GET", path)["payload"] == {"n": 2}

    page.locator("tbody a.main").first.click()
    drawer.get_by_role("button", name="Delete").click()
    page.locator("dialog .confirm").click()
    toast(page, "1 message deleted")
    assert site.messages("single") == []


def test_whole_numbers_of_any_size_stay_what_they_are(window: Window, site: Site) -> None:
    exact = {"id": 2**63 - 1, "negative": -(2**70), "float": 1e300, "text": "12345678901234567890"}
    (pushed,) = site.push("exact", exact)
    page = window.visit(f"/messages?queue=exact&message={pushed['partition_id']}/{pushed['transaction_id']}")
    drawer = page.locator(".drawer")
    expect(drawer.get_by_label("Payload", exact=True)).to_contain_text("9223372036854775807")
    drawer.get_by_role("button", name="Edit and send again").click()
    payload = page.locator("dialog [name=payload]")
    payload.fill(payload.input_value().replace("1e+300", "18446744073709551615"))
    shown(page, "Python", '"float": 18446744073709551615')
    page.locator("dialog .confirm").click()
    toast(page, "The edited message is queued in exact")
    (left,) = site.messages("exact")
    path = f"/api/v1/messages/{left['partitionId']}/{left['transactionId']}"
    assert site.call("GET", path)["payload"] == exact | {"float": 2**64 - 1}


def test_many_messages_are_deleted_at_once(window: Window, site: Site) -> None:
    site.push("many", *range(60))
    page = window.visit("/messages?queue=many")
    expect(page.locator("tbody tr")).to_have_count(60)
    page.get_by_label("Select all on this page").check()
    page.get_by_label("Select", exact=False).nth(1).uncheck()
    page.get_by_role("button", name="Delete", exact=True).click()
    confirm(page, effect="In many.")
    toast(page, "59 messages deleted")
    assert len(site.messages("many")) == 1


def test_list_holds_still_while_something_of_it_is_selected(window: Window, site: Site) -> None:
    site.push("moving", 1, 2, 3)
    page = window.visit("/messages?queue=moving")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(3)
    page.get_by_label("Select all on this page").check()
    site.push("moving", 4, 5)
    page.wait_for_timeout(2500)
    expect(page.locator(".bulk")).to_contain_text("3 selected")
    expect(rows).to_have_count(3)
    page.locator(".bulk").get_by_role("button", name="Delete").click()
    confirm(page, effect="In moving.")
    toast(page, "3 messages deleted")
    # What is done is seen, and the list goes on.
    expect(rows).to_have_count(2)
    site.push("moving", 6)
    expect(rows).to_have_count(3)


def test_message_that_is_selected_is_not_its_namesake_of_another_partition(window: Window, site: Site) -> None:
    for partition in ("left", "right"):
        item = {"queue": "twins", "partition": partition, "payload": partition, "transactionId": "twin"}
        site.call("POST", "/api/v1/push", {"items": [item]})
    page = window.visit("/messages?queue=twins")
    page.locator("tbody tr", has_text="left").get_by_role("checkbox").check()
    expect(page.locator(".bulk")).to_contain_text("1 selected")
    page.locator(".bulk").get_by_role("button", name="Delete").click()
    confirm(page)
    toast(page, "1 message deleted")
    assert [one["partition"] for one in site.messages("twins")] == ["right"]


def test_payloads_are_searched_and_thousands_that_match_are_changed(window: Window, site: Site) -> None:
    for start in range(0, 3000, 1000):
        site.push(
            "crowd", *({"n": start + number, "city": "Oslo" if number % 4 else "Ghent"} for number in range(1000))
        )
    page = window.visit("/messages?queue=crowd")
    page.get_by_label("Payload contains").fill("2999")
    page.keyboard.press("Enter")
    expect(page.locator("tbody a.main")).to_have_count(1)
    expect(page.locator("tbody")).to_contain_text('{"n":2999,"city":"Oslo"}')
    page.get_by_role("button", name="Clear filters").click()
    window.visit("/messages?queue=crowd&where=city%3DGhent,n%3C1000")
    expect(page.get_by_role("heading", name="100 found")).to_be_visible()
    page.get_by_role("button", name="Search further").click()
    expect(page.get_by_role("heading", name="200 found")).to_be_visible()
    page.get_by_role("button", name="Dead-letter all").click()
    confirm(page, effect="250 messages match")
    toast(page, "250 messages dead-lettered")
    assert site.call("GET", "/api/v1/dlq?queue=crowd")["total"] == 250
    window.visit("/messages?queue=crowd&where=city%3DOslo")
    page.get_by_role("button", name="Delete all").click()
    expect(page.locator("dialog[open]").get_by_text("2,250 messages match")).to_be_visible()
    shown(page, "curl", "# again with the cursor of its answer, until that is null")
    confirm(page, typed="crowd")
    toast(page, "2,250 messages deleted")
    everything = {"queue": "crowd", "filter": {}, "limit": 10_000, "dryRun": True}
    assert site.call("POST", "/api/v1/messages/delete", everything)["matched"] == 750


def test_what_was_stopped_does_not_go_on_while_something_else_is_done(window: Window, site: Site) -> None:
    for _ in range(3):
        site.push("halted", *range(1000))
    page = window.visit("/messages?queue=halted")
    held: list[Route] = []

    def hold(route: Route) -> None:
        if '"dryRun":true' in (route.request.post_data or ""):
            route.continue_()
        else:
            held.append(route)

    page.route("**/api/v1/messages/delete", hold)
    dialog = page.locator("dialog[open]")
    page.get_by_role("button", name="Delete all").click()
    expect(dialog.get_by_text("3,000 messages match")).to_be_visible()
    dialog.locator("[name=typed]").fill("halted")
    with page.expect_request("**/api/v1/messages/delete"):
        dialog.locator(".confirm").click()
    dialog.get_by_role("button", name="Stop").click()
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Push a message").click()
    dialog.locator("[name=queue]").fill("meanwhile")
    confirm(page, effect="No group reads this queue yet")
    page.get_by_role("button", name="Push a message").click()
    held[0].continue_()
    toast(page, "1,000 messages deleted")
    toast(page, "It was stopped before the end")
    assert len(held) == 1
    page.unroute("**/api/v1/messages/delete", hold)
    # What is open now is not closed by what has ended.
    expect(dialog.locator("[name=queue]")).to_have_value("halted")
    page.keyboard.press("Escape")
    everything = {"queue": "halted", "filter": {}, "limit": 10_000, "dryRun": True}
    assert site.call("POST", "/api/v1/messages/delete", everything)["matched"] == 2000
    assert len(site.messages("meanwhile")) == 1


def test_dead_letters_are_retried_and_thrown_away(window: Window, site: Site) -> None:
    site.make_dead("dying", *({"n": number} for number in range(6)), error="<b>boom</b>")
    page = window.visit("/dead-letters?queue=dying")
    expect(page.locator("tbody tr")).to_have_count(6)
    expect(page.locator("tbody").get_by_text("<b>boom</b>").first).to_be_visible()
    page.locator("tbody").get_by_role("button", name="Retry").first.click()
    confirm(page, effect="1 message is stored")
    toast(page, "1 message queued again")
    expect(page.locator("tbody tr")).to_have_count(5)
    for number in (1, 2):
        page.locator("tbody [type=checkbox]").nth(number).check()
    page.locator(".bulk").get_by_role("button", name="Delete").click()
    confirm(page, effect="2 dead letters with their errors are removed.")
    expect(page.locator("tbody tr")).to_have_count(3)

    page.locator("tbody a.main").first.click()
    page.locator(".drawer").get_by_role("button", name="Edit and send again").click()
    page.locator("dialog [name=payload]").fill('{"mended": true}')
    page.locator("dialog .confirm").click()
    toast(page, "The edited message is queued")
    expect(page.locator("tbody tr")).to_have_count(2)
    assert {"mended": True} in [one["data"] for one in site.pop("dying", "others", 20)]

    page.get_by_role("button", name="Retry all 2").click()
    confirm(page)
    expect(page.get_by_text("No dead letters")).to_be_visible()
    assert site.dead_letters("dying") == []


def test_selected_dead_letters_are_those_of_their_group_and_partition_alone(window: Window, site: Site) -> None:
    site.make_dead("disputed", 1)
    (message,) = site.pop("disputed", "others")
    ack = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
    site.call("POST", "/api/v1/ack", ack | {"consumerGroup": "others", "status": "dlq", "error": "it broke, too"})
    again = {"queue": "disputed", "partition": "p2", "payload": 1, "transactionId": message["transactionId"]}
    site.call("POST", "/api/v1/push", {"items": [again]})
    site.call("POST", "/api/v1/ack/batch", {
        "consumerGroup": "workers",
        "acknowledgments": [
            {key: one[key] for key in ("transactionId", "partitionId", "leaseId")} | {"status": "dlq"}
            for one in site.pop("disputed", "workers")
        ],
    })  # fmt: skip
    page = window.visit("/dead-letters?queue=disputed")
    expect(page.locator("tbody tr")).to_have_count(3)
    page.locator("tbody tr", has_text="it broke, too").get_by_role("checkbox").check()
    page.locator(".bulk").get_by_role("button", name="Delete").click()
    confirm(page, effect="1 dead letter with its errors is removed.")
    toast(page, "1 dead letter deleted")
    assert [one["consumerGroup"] for one in site.dead_letters("disputed")] == ["workers", "workers"]
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_label("Select all on this page").check()
    page.locator(".bulk").get_by_role("button", name="Retry").click()
    confirm(page, effect="2 messages are stored")
    toast(page, "2 messages queued again")
    assert site.dead_letters("disputed") == []


def test_more_dead_letters_than_one_call_takes_are_all_retried(window: Window, site: Site) -> None:
    site.make_dead("dying-crowd", *range(1200))
    page = window.visit("/dead-letters?queue=dying-crowd")
    page.get_by_role("button", name="Retry all 1").click()
    confirm(page, effect="1,200 messages are stored")
    toast(page, "1,200 messages queued again")
    assert site.dead_letters("dying-crowd") == []


def test_deleting_all_dead_letters_wants_the_name_of_the_queue(window: Window, site: Site) -> None:
    site.make_dead("doomed", 1, 2, 3)
    page = window.visit("/dead-letters?queue=doomed")
    page.get_by_role("button", name="Delete all 3").click()
    confirm(page, typed="doomed")
    toast(page, "3 dead letters deleted")
    assert site.dead_letters("doomed") == []
    assert len(site.messages("doomed")) == 3


def test_topic_is_filled_configured_purged_and_deleted(window: Window, site: Site) -> None:
    page = window.visit("/namespaces")
    page.get_by_role("button", name="Enqueue an item").click()
    dialog = page.locator("dialog[open]")
    dialog.locator("[name=namespace]").fill("tenant")
    dialog.locator("[name=topic]").fill("jobs")
    dialog.locator("[name=priority]").fill("3")
    confirm(page, effect="It is ready at once")
    (counts,) = site.call("GET", "/api/v1/topics/counts?namespace=tenant")
    assert (counts["ready"], counts["options"]["max_retries"]) == (1, 3)

    window.visit("/namespaces/tenant/topics/jobs")
    page.get_by_role("button", name="Options").click()
    dialog.locator("[name=max_retries]").fill("0")
    expect(dialog.locator(".diff")).to_contain_text("max_retries")
    confirm(page)
    (counts,) = site.call("GET", "/api/v1/topics/counts?namespace=tenant")
    assert counts["options"]["max_retries"] == 0

    page.get_by_role("button", name="Pause", exact=True).click()
    confirm(page, effect="what is enqueued waits")
    expect(page.get_by_text("This topic is paused")).to_be_visible()
    assert site.call("GET", "/api/v1/topics/dequeue?namespace=tenant&topic=jobs") == []
    page.get_by_role("button", name="Resume", exact=True).click()
    confirm(page, effect="1 ready item can be leased again.")
    site.call("GET", "/api/v1/topics/dequeue?namespace=tenant&topic=jobs")
    page.get_by_role("button", name="Leased").click()
    page.get_by_role("button", name="Release").click()
    confirm(page, effect="It is ready as before")
    expect(page.get_by_text("Nothing is leased")).to_be_visible()
    (item,) = site.call("GET", "/api/v1/topics/dequeue?namespace=tenant&topic=jobs")
    ref = {key: item[key] for key in ("id", "namespace", "topic")}
    site.call("POST", "/api/v1/topics/nack", ref | {"error": "no"})
    page.get_by_role("button", name="Dead letters").click()
    page.get_by_label("Select all on this page").check()
    page.locator(".bulk").get_by_role("button", name="Retry").click()
    confirm(page, effect="It is ready again")
    expect(page.get_by_text("No dead letters")).to_be_visible()
    page.get_by_role("button", name="Purge").click()
    confirm(page, effect="1 item is removed", typed="jobs")
    toast(page, "1 item removed")
    page.get_by_role("button", name="Delete", exact=True).click()
    confirm(page, typed="jobs")
    expect(page).to_have_url(f"{site.url}/namespaces?namespace=tenant")
    assert site.call("GET", "/api/v1/topics/counts?namespace=tenant") == []


def test_all_dead_letters_of_a_topic_are_retried_and_deleted(window: Window, site: Site) -> None:
    place = {"namespace": "graves", "topic": "crowd"}
    options = {"max_retries": 0, "lease_seconds": 600}
    site.call("POST", "/api/v1/topics/configure", place | {"options": options})
    site.call("POST", "/api/v1/topics/enqueue", [place | {"data": number} for number in range(1200)])

    def counts() -> tuple[int, int]:
        (found,) = site.call("GET", "/api/v1/topics/counts?namespace=graves")
        return found["ready"], found["dead"]

    def fail() -> None:
        while items := site.call("GET", "/api/v1/topics/dequeue?namespace=graves&topic=crowd&limit=400&ids=string"):
            site.call("POST", "/api/v1/topics/nack", [place | {"id": one["id"], "error": "no"} for one in items])

    fail()
    assert counts() == (0, 1200)
    page = window.visit("/namespaces/graves/topics/crowd?tab=dead")
    page.get_by_role("button", name="Retry all 1").click()
    shown(page, "curl", "to POST /api/v1/topics/dlq/retry; again")
    shown(page, "Python", ".dlq().limit(1000).retry()")
    confirm(page, effect="1,200 dead letters are ready again")
    toast(page, "1,200 dead letters ready again")
    assert counts() == (1200, 0)

    fail()
    page.get_by_role("button", name="Delete all").click()
    page.locator("dialog [name=typed]").fill("crowd")
    confirm(page, effect="1,200 dead letters are removed")
    toast(page, "1,200 dead letters deleted")
    assert counts() == (0, 0)


def test_topic_is_made_with_options_before_its_first_item(window: Window, site: Site) -> None:
    page = window.visit("/namespaces?namespace=acme")
    page.get_by_role("button", name="New topic").click()
    dialog = page.locator("dialog[open]")
    dialog.locator("[name=topic]").fill("reports")
    expect(dialog.get_by_text("reports exists already: its options would be replaced")).to_be_visible()
    dialog.locator("[name=namespace]").fill("architects")
    dialog.locator("[name=topic]").fill("plans")
    dialog.locator("[name=max_retries]").fill("9")
    confirm(page, effect="The topic plans is made")
    expect(page).to_have_url(f"{site.url}/namespaces/architects/topics/plans")
    (counts,) = site.call("GET", "/api/v1/topics/counts?namespace=architects")
    assert (counts["topic"], counts["ready"], counts["options"]["max_retries"]) == ("plans", 0, 9)


def test_quota_and_write_mode_of_a_namespace(window: Window, site: Site) -> None:
    page = window.visit("/namespaces?namespace=globex")
    page.get_by_role("button", name="Quota", exact=True).click()
    page.locator("dialog [name=quota]").fill("90")
    confirm(page)
    assert site.call("GET", "/api/v1/topics/quotas")["globex"] == 90
    item = {"namespace": "globex", "topic": "imports", "data": 1}
    site.call("POST", "/api/v1/topics/enqueue", [item] * 9)
    expect(page.get_by_role("table", name="Quotas").locator("tr", has_text="globex")).to_contain_text("90")
    expect(page.locator(".metric", has_text="Quota").locator(".value")).to_have_text("9 of 90")
    undo(page)
    assert "globex" not in site.call("GET", "/api/v1/topics/quotas")
    page.get_by_role("button", name="Write mode").click()
    page.locator("dialog [name=mode]").select_option("sync")
    confirm(page)
    assert site.call("GET", "/api/v1/topics/modes")["globex"] == "sync"
    undo(page)
    assert site.call("GET", "/api/v1/topics/modes")["globex"] == "buffered"


def test_replay_of_an_archive_is_a_command(window: Window) -> None:
    page = window.visit("/pipelines")
    page.get_by_role("button", name="Replay an archive").click()
    dialog = page.locator("dialog[open]")
    dialog.locator("[name=archive]").fill("/data/archive")
    dialog.locator("[name=queue]").fill("orders")
    dialog.locator("[name=toQueue]").fill("orders-again")
    confirm(page, effect="Messages are pushed to orders-again")
    expect(page.get_by_label("Command", exact=True)).to_contain_text("queen pipeline replay /data/archive")


def test_migration_names_its_target_and_leaves_behind_what_was_chosen(window: Window) -> None:
    page = window.visit("/migration")
    page.locator("[name=host]").fill("db'new")
    page.locator("[name=host]").press("Tab")
    expect(page.get_by_label("Target", exact=True)).to_contain_text("TARGET='postgresql://queen@db'\\''new:5432/queen")
    copy = page.get_by_label("Copy", exact=True).last
    expect(copy).not_to_contain_text("exclude-table-data")
    page.get_by_role("group", name="Traces").get_by_role("button", name="leave").click()
    expect(copy).to_contain_text("--exclude-table-data='queen.trace_names' --dbname=\"$SOURCE\" |")
    assert page.url.endswith("&traces=leave")
    page.locator("[name=host]").fill("127.0.0.1")
    page.locator("[name=port]").fill("many")
    page.get_by_role("button", name="Test connection").click()
    naming = page.locator(".steps > li", has=page.get_by_role("heading", name="Name the target"))
    expect(naming.get_by_role("alert")).to_contain_text("port")
    page.locator("[name=port]").fill("1")
    page.locator("[name=password]").fill("correct horse")
    page.get_by_role("button", name="Test connection").click()
    expect(page.get_by_role("status").filter(has_text="Connection failed")).to_contain_text("refused")
    expect(naming.get_by_role("alert")).to_have_count(0)
    shown = page.get_by_label("curl", exact=True)
    expect(shown).to_contain_text("/api/v1/migration/test-connection")
    expect(shown).not_to_contain_text("correct horse")
    expect(page.get_by_role("button", name="Copy everything")).to_be_disabled()
    assert "correct" not in page.url


@pytest.mark.parametrize(("kind", "field"), [("push", "maintenanceMode"), ("pop", "popMaintenanceMode")])
def test_maintenance_is_switched_on_shown_everywhere_and_undone(
    window: Window, site: Site, kind: str, field: str
) -> None:
    page = window.visit("/maintenance")
    page.get_by_role("button", name=f"Switch {kind} maintenance on").click()
    confirm(page, effect="It holds across restarts.")
    block_until(lambda: site.call("GET", "/api/v1/system/maintenance")[field], "it is on at every worker")
    expect(page.get_by_text(f"{kind.capitalize()} maintenance is on.")).to_be_visible()
    undo(page)
    block_until(lambda: not site.call("GET", "/api/v1/system/maintenance")[field], "it is off at every worker")
    expect(page.locator(".banner")).to_have_count(0)


def test_two_browsers_act_on_the_same_message(open_page: OpenPage, site: Site) -> None:
    (pushed,) = site.push("shared", {"n": 1})
    address = f"/messages?queue=shared&message={pushed['partition_id']}/{pushed['transaction_id']}"
    first, second = open_page(address), open_page(address)
    second.locator(".drawer").get_by_role("button", name="Delete").click()
    expect(second.locator("dialog .confirm")).to_be_enabled()
    first.locator(".drawer").get_by_role("button", name="Delete").click()
    first.locator("dialog .confirm").click()
    toast(first, "1 message deleted")
    second.locator("dialog .confirm").click()
    expect(second.locator("dialog [role=alert]")).to_contain_text("not found", ignore_case=True)
    second.keyboard.press("Escape")
    expect(second.get_by_text("It may have been deleted meanwhile.")).to_be_visible()


def test_ten_thousand_queues_are_searched_and_paged(window: Window, site: Site) -> None:
    async def execute(statement: str) -> None:
        connection = await asyncpg.connect(site.dsn)
        await connection.execute(statement)
        await connection.close()

    run_aside(
        execute(
            "INSERT INTO queen.queues (name, namespace) SELECT 'bulk-' || lpad(n::text, 5, '0'), 'bulk'"
            " FROM generate_series(1, 10000) n;"
            "INSERT INTO queen.groups (name) VALUES ('bulk-readers');"
            "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at)"
            " SELECT id, 'p-' || lpad(n::text, 5, '0'), 3, now() FROM queen.queues, generate_series(1, 12000) n"
            " WHERE name = 'bulk-09999';"
            "INSERT INTO queen.cursors (partition_id, group_id, committed) SELECT p.id, g.id, 3"
            " FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id, queen.groups g"
            " WHERE q.name = 'bulk-09999' AND g.name = 'bulk-readers'"
        )
    )
    try:
        page = window.visit("/queues?namespace=bulk&sort=name")
        expect(page.get_by_text("of 10,000", exact=False)).to_be_visible()
        expect(page.locator("tbody tr")).to_have_count(50)
        page.get_by_role("button", name="Next page").click()
        expect(page.locator("tbody a.main").first).to_have_text("bulk-00051")
        page.get_by_label("Search by name").fill("09999")
        expect(page.locator("tbody a.main")).to_have_text(["bulk-09999"])
        window.visit("/queues?namespace=bulk")
        page.get_by_role("button", name="Lag", exact=True).click()
        expect(page.locator("tbody a.main").first).to_have_text("bulk-09999")
        for path in ("/queues/bulk-09999?tab=partitions", "/consumers/bulk-readers?sort=name"):
            window.visit(path)
            expect(page.locator("tbody tr")).to_have_count(50)
            page.get_by_role("button", name="Next page").click()
            expect(page.get_by_text("100 of 12,000")).to_be_visible()
            expect(page.locator("tbody a.main").first).to_have_text("p-00051")
            page.get_by_label("Search partitions").fill("p-1199")
            expect(page.locator("tbody a.main")).to_have_count(10)
        assert not window.watch.problems()
    finally:
        run_aside(
            execute(
                "DELETE FROM queen.cursors USING queen.groups g WHERE group_id = g.id AND g.name = 'bulk-readers';"
                "DELETE FROM queen.groups WHERE name = 'bulk-readers';"
                "DELETE FROM queen.queues WHERE namespace = 'bulk'"
            )
        )


def test_key_is_written_changed_and_deleted_and_each_can_be_undone(window: Window, site: Site) -> None:
    page = window.visit("/state?ns=kept")
    expect(page.get_by_text("No keys in this namespace")).to_be_visible()
    page.get_by_role("button", name="Write a key").click()
    dialog = page.locator("dialog[open]")
    dialog.locator("[name=key]").fill("<b>/order 7")
    dialog.locator("[name=value]").fill('{"state": "held"}')
    shown(page, "Python", 'await queen.kv("kept").put("<b>/order 7", {"state": "held"}, expect=0)')
    confirm(page, effect="only if there is no such key")
    toast(page, "is written")
    path = "/api/v1/kv/kept/%3Cb%3E%2Forder%207"
    assert site.call("GET", path)["value"] == {"state": "held"}

    page.locator("tbody a.main").click()
    page.locator(".drawer").get_by_role("button", name="Change value").click()
    dialog.locator("[name=value]").fill('{"state": "packed"}')
    expect(dialog.locator(".diff ins")).to_have_text('{"state":"packed"}')
    # Somebody else is faster.
    site.call(
        "POST",
        "/api/v1/kv",
        {"operations": [{"op": "put", "ns": "kept", "key": "<b>/order 7", "value": 1, "ttlSeconds": 60}]},
    )
    dialog.locator(".confirm").click()
    expect(dialog.get_by_text("was written meanwhile")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".drawer").get_by_text("1", exact=True).first).to_be_visible()
    page.locator(".drawer").get_by_role("button", name="Delete").click()
    confirm(page, effect="find nothing from then on")
    toast(page, "is deleted")
    assert not site.exists(path)
    page.locator(".toast", has_text="is deleted").get_by_role("button", name="Undo").click()
    toast(page, "Undone: Delete the key")
    assert site.call("GET", path)["value"] == 1


def test_lock_is_released_timer_cancelled_and_ephemeral_queue_dropped(window: Window, site: Site) -> None:
    acquire = {"op": "acquire", "name": "nightly", "owner": "stuck-worker", "ttlSeconds": 600}
    site.call("POST", "/api/v1/locks", {"operations": [acquire]})
    page = window.visit("/state?tab=locks&prefix=night")
    page.get_by_role("button", name="Release nightly").click()
    confirm(page, effect="stuck-worker holds it", typed="nightly")
    toast(page, "Lock nightly is free")
    assert site.call("GET", "/api/v1/locks?prefix=nightly")["locks"] == []

    timer = {"op": "schedule", "queue": "later", "timerKey": "call", "payload": "eyJhIjogMX0=", "delayMs": 3_600_000}
    site.call("POST", "/api/v1/timers", {"operations": [timer]})
    window.visit("/state?tab=timers&queue=later")
    page.locator("tbody a.main").click()
    expect(page.locator(".drawer").get_by_label("Payload", exact=True)).to_contain_text('"a": 1')
    page.locator(".drawer").get_by_role("button", name="Cancel timer").click()
    confirm(page, effect="Nothing is pushed to later")
    toast(page, "Timer call is cancelled")
    assert site.call("GET", "/api/v1/timers?queue=later")["timers"] == []

    site.call("POST", "/api/v1/ephemeral/push", {"queue": "typing", "messages": [{"payload": 1}, {"payload": 2}]})
    site.call("GET", "/api/v1/ephemeral/pop?queue=typing&group=screen&batch=1")
    window.visit("/state?tab=ephemeral&search=typing")
    page.locator("tbody a.main").click()
    expect(page.locator(".drawer")).to_contain_text("1 message pending")
    expect(page.locator(".drawer")).to_contain_text("1 leased")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Options of typing").click()
    page.locator("dialog [name=maxLength]").fill("50")
    expect(page.locator("dialog .diff")).to_contain_text("declared")
    confirm(page)
    assert site.call("GET", "/api/v1/ephemeral/queues/typing/depth")["options"]["maxLength"] == 50
    page.get_by_role("button", name="Drop all messages of typing").click()
    confirm(page, effect="2 messages", typed="typing")
    toast(page, "2 messages dropped")
    page.get_by_role("button", name="Delete typing").click()
    confirm(page, typed="typing")
    expect(page.get_by_text("No ephemeral queue matches")).to_be_visible()
    assert not site.exists("/api/v1/ephemeral/queues/typing/depth")
