"""Who may what: people sign in with a password or a token, and are offered what their role may do."""

from __future__ import annotations

from collections.abc import Iterator

import asyncpg
import pytest
from playwright.sync_api import Browser, expect

from queen.embedded import EmbeddedPostgres
from queen.proxy.passwords import hash_password
from queen.proxy.users import UserStore
from tests.acceptance.served import served
from tests.dashboard.conftest import Watch, follow, new_context, run_aside
from tests.http.auth.issuer import SECRET, issue

PASSWORD = "correct horse battery"
# Address, and the buttons of its page that a role is offered, each role those of the ones before, too.
OFFERED = {
    "/queues/guarded": {"read-write": {"Push", "Pause"}, "admin": {"Clear", "Delete"}},
    "/queues": {"read-write": {"New queue", "Pause guarded"}, "admin": {"Clear guarded", "Delete guarded"}},
    "/consumers": {
        "read-write": {"New group", "Seek", "Pause readers on guarded"}, "admin": {"Delete readers on guarded"},
    },
    "/messages?queue=guarded": {"read-write": {"Push a message"}},
    "/namespaces?namespace=acme": {
        "read-write": {"Enqueue an item"}, "admin": {"New topic", "Quota", "Write mode", "Set a quota"},
    },
    "/namespaces/acme/topics/jobs": {"read-write": {"Enqueue"}, "admin": {"Options", "Pause", "Purge", "Delete"}},
    "/state?ns=guarded": {"read-write": {"Write a key", "Delete order-7"}},
    "/state?tab=locks": {"read-write": {"Release report"}},
    "/state?tab=timers": {"read-write": {"Cancel reminder"}},
    "/state?tab=ephemeral": {"read-write": {"Push to presence", "Options of presence", "Delete presence"}},
    "/maintenance": {"admin": {"Switch push maintenance on", "Switch pop maintenance on"}},
}  # fmt: skip
ROLES = ("read-only", "read-write", "admin")


def both(postgres: EmbeddedPostgres) -> str:
    """Two shards."""
    return ",".join(postgres.dsn(name) for name in ("guarded", "guarded_too"))


@pytest.fixture(scope="module")
def guarded(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that wants to know who somebody is: three people, one of each role, and a little to look at."""

    async def prepare() -> None:
        connection = await asyncpg.connect(postgres.dsn())
        for name in ("guarded", "guarded_too"):
            await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()

    async def add_people() -> None:
        async with asyncpg.create_pool(postgres.dsn("guarded"), min_size=1, max_size=1) as pool:
            users = UserStore(pool)
            for role in ROLES:
                await users.create(role, hash_password(PASSWORD), role)

    run_aside(prepare())
    directory = tmp_path_factory.mktemp("guarded")
    with served(
        directory, NUM_WORKERS="1", DATABASE_URLS=both(postgres), QUEEN_LOGIN="true", JWT_SECRET=SECRET
    ) as server:
        run_aside(add_people())
        yield server.url


@pytest.fixture(scope="module")
def tokens_only(postgres: EmbeddedPostgres, guarded: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Another server of the same databases, which knows tokens and no passwords."""
    directory = tmp_path_factory.mktemp("tokens")
    with served(
        directory, NUM_WORKERS="1", DATABASE_URLS=both(postgres), JWT_ENABLED="true", JWT_SECRET=SECRET
    ) as server:
        yield server.url


@pytest.mark.parametrize("role", list(reversed(ROLES)))
def test_person_is_offered_what_the_role_may_do(browser: Browser, guarded: str, role: str) -> None:
    context = new_context(browser)
    page = context.new_page()
    watch = Watch(guarded)
    watch.on(page)
    page.goto(f"{guarded}/queues/guarded")
    page.get_by_label("User name").fill(role)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{guarded}/queues/guarded")
    if role == "admin":  # The first to come: there is something to look at for the others, then.
        page.evaluate(
            """async () => {
                const call = (method, path, body) => fetch(path, {method, body: body && JSON.stringify(body),
                    headers: {'Content-Type': 'application/json'}})
                await call('POST', '/api/v1/push', {items: [{queue: 'guarded', payload: 1}]})
                await call('GET', '/api/v1/pop/queue/guarded?consumerGroup=readers&subscriptionMode=all')
                await call('POST', '/api/v1/topics/enqueue', [{namespace: 'acme', topic: 'jobs', data: 1}])
                const key = {op: 'put', ns: 'guarded', key: 'order-7', value: 1, forever: true}
                await call('POST', '/api/v1/kv', {operations: [key]})
                await call('POST', '/api/v1/locks', {operations: [{op: 'acquire', name: 'report', ttlSeconds: 600}]})
                await call('POST', '/api/v1/timers', {operations: [
                    {op: 'schedule', queue: 'guarded', timerKey: 'reminder', payload: 'MQ==', delayMs: 600000}]})
                await call('POST', '/api/v1/ephemeral/push', {queue: 'presence', messages: [{payload: 1}]})
            }"""
        )
    expect(page.locator(".sidebar footer")).to_contain_text(role)
    watch.problems()
    for path, offered in OFFERED.items():
        follow(page, path)
        if path == "/maintenance" and role != "admin":
            expect(page.get_by_text("Only the role admin may see this")).to_be_visible()
            continue
        mine = [button for rank in ROLES[: ROLES.index(role) + 1] for button in offered.get(rank, ())]
        others = [button for rank in ROLES[ROLES.index(role) + 1 :] for button in offered.get(rank, ())]
        expect(page.locator("main h1")).to_be_visible()
        expect(page.locator("main .skeleton")).to_have_count(0)
        for button in mine:
            expect(page.locator("main").get_by_role("button", name=button, exact=True).first).to_be_visible()
        for button in others:
            expect(page.locator("main").get_by_role("button", name=button, exact=True)).to_have_count(0)
    follow(page, "/system?tab=connections")
    expect(page.get_by_role("button", name="Connections")).to_have_count(1 if role == "admin" else 0)
    expect(page.locator("main").get_by_text("127.0.0.1" if role == "admin" else "Up for").first).to_be_visible()
    for name in ("Audit log", "Settings", "Spool & maintenance", "Migration"):
        expect(page.get_by_role("link", name=name)).to_have_count(1 if role == "admin" else 0)
    assert watch.problems() == []
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(f"{guarded}/login")
    context.close()


def test_token_is_asked_for_where_the_server_wants_one(browser: Browser, tokens_only: str) -> None:
    context = new_context(browser)
    page = context.new_page()
    watch = Watch(tokens_only)
    watch.on(page)
    page.goto(f"{tokens_only}/system")
    page.get_by_label("Token").fill("not a token")
    # What wants a token is not asked for without one.
    assert watch.problems() == []
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    watch.problems()
    page.get_by_label("Token").fill(issue("read-only"))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="System")).to_be_visible()
    expect(page.get_by_role("button", name="Connections")).to_have_count(0)
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").fill(issue("admin"))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("button", name="Connections")).to_be_visible()
    page.goto(f"{tokens_only}/")
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    # What is shown to be run elsewhere brings a token, and never shows the one in use.
    page.get_by_role("button", name="Push a message").click()
    dialog = page.locator("dialog[open]")
    dialog.locator("[name=queue]").fill("shown")
    dialog.get_by_text("As curl and Python").click()
    expect(dialog.get_by_label("curl", exact=True)).to_contain_text('-H "Authorization: Bearer $QUEEN_TOKEN"')
    dialog.get_by_role("button", name="Python", exact=True).click()
    expect(dialog.get_by_label("python", exact=True)).to_contain_text('bearer_token=os.environ["QUEEN_TOKEN"]')
    assert watch.problems() == []
    context.close()


def test_who_signs_in_again_goes_on_with_what_was_open(browser: Browser, tokens_only: str) -> None:
    context = new_context(browser)
    page = context.new_page()
    page.goto(f"{tokens_only}/queues")
    page.get_by_label("Token").fill(issue("admin"))
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="Push a message").click()
    dialog = page.locator("dialog.action")
    dialog.locator("[name=queue]").fill("resumed")
    dialog.locator("[name=payload]").fill('{"written": "at length"}')
    page.route("**/api/v1/push", lambda route: route.fulfill(status=401, json={"error": "Token expired"}), times=1)
    dialog.locator(".confirm").click()
    page.get_by_label("Token").fill(issue("admin"))
    page.get_by_role("button", name="Sign in").click()
    expect(dialog.locator("[name=payload]")).to_have_value('{"written": "at length"}')
    dialog.locator(".confirm").click()
    expect(page.locator(".toast", has_text="is queued")).to_be_visible()
    expect(dialog).to_be_hidden()
    context.close()


def test_limited_token_sees_the_state_of_its_queues_alone(browser: Browser, tokens_only: str) -> None:
    context = new_context(browser)
    page = context.new_page()
    page.goto(f"{tokens_only}/state?ns=mine")
    page.get_by_label("Token").fill(issue("read-write", queues=["mine"]))
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("button", name="Write a key").click()
    dialog = page.locator("dialog[open]")
    dialog.locator("[name=key]").fill("seen")
    dialog.locator(".confirm").click()
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("table", name="Keys").get_by_text("seen")).to_be_visible()
    follow(page, "/state")
    expect(page.get_by_role("alert").get_by_text("concerns all queues")).to_be_visible()
    follow(page, "/state?tab=timers&queue=mine")
    expect(page.get_by_text("No timer matches")).to_be_visible()
    follow(page, "/state?ns=others")
    expect(page.get_by_role("alert").get_by_text("the token is not for the queue 'others'")).to_be_visible()
    context.close()


def test_queue_moves_to_another_shard(browser: Browser, tokens_only: str) -> None:
    context = new_context(browser)
    page = context.new_page()
    page.goto(f"{tokens_only}/shards")
    page.get_by_label("Token").fill(issue("admin"))
    page.get_by_role("button", name="Sign in").click()
    rows = page.get_by_role("table", name="Shards").locator("tbody tr")
    expect(rows).to_have_count(2)
    page.evaluate(
        """async token => fetch('/api/v1/push', {method: 'POST', headers: {Authorization: 'Bearer ' + token},
            body: JSON.stringify({items: [{queue: 'travels', payload: 1}, {queue: 'travels', payload: 2}]})})""",
        issue("admin"),
    )
    # Many are called something like it.
    page.evaluate(
        """async token => fetch('/api/v1/push', {method: 'POST', headers: {Authorization: 'Bearer ' + token},
            body: JSON.stringify({items: Array.from({length: 25}, (_, number) => (
                {queue: `a-travels-${number}`, payload: 1}))})})""",
        issue("admin"),
    )
    for target in ("0", "1"):
        page.get_by_role("button", name="Move a queue").click()
        dialog = page.locator("dialog[open]")
        dialog.locator("[name=queue]").fill("travels")
        dialog.locator("[name=to]").select_option(target)
        expect(dialog.get_by_text("2 messages with ids, leases, groups")).to_be_visible()
        dialog.locator(".confirm").click()
        expect(page.locator(".toast", has_text="queue travels").last).to_be_visible()
        expect(dialog).to_be_hidden()
    # Wherever it was, it lives on the second now.
    expect(page.locator(".toast", has_text="queue travels lives on shard 1")).to_be_visible()
    expect(rows.nth(1).locator("td").nth(3)).not_to_have_text("0")
    context.close()
