"""Tokens, users and the audit log, by the steps of the person who runs a server."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from queen.embedded import EmbeddedPostgres
from queen.proxy import sessions
from tests.cli.conftest import Cli, OpenTerminal, Served, new_database, serving

SECRET = "a secret of at least thirty-two bytes"
PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def server(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that wants to know who asks, and has a login page."""
    dsn = asyncio.run(new_database(postgres))
    settings = {"jwt_enabled": True, "jwt_secret": SECRET, "queen_login": True}
    with serving(dsn, tmp_path_factory.mktemp("server"), **settings) as served:
        yield served


@pytest.fixture(autouse=True)
def _environment(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JWT_SECRET", SECRET)
    monkeypatch.setenv("DATABASE_URLS", server.dsn)
    # What was looked up is looked up again, instead of some seconds later.
    monkeypatch.setattr(sessions, "_LIVE_SECONDS", 0.0)


def ask(server: Served, method: str, path: str, body: Any = None, token: str = "", cookie: str = "") -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Sec-Fetch-Site": "same-origin"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    if cookie:
        headers["Cookie"] = cookie
    data = msgspec.json.encode(body) if body is not None else None
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            text = answer.read()
            return answer.status, msgspec.json.decode(text) if text else None
    except urllib.error.HTTPError as error:
        return error.code, msgspec.json.decode(error.read())


def log_in(server: Served, username: str, password: str = PASSWORD) -> str | None:
    """The cookie of a new session; None: not let in."""
    form = msgspec.json.encode({"username": username, "password": password})
    request = urllib.request.Request(f"{server.url}/api/login", form, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return str(answer.headers["Set-Cookie"]).partition(";")[0]
    except urllib.error.HTTPError:
        return None


def push(server: Served, queue: str, token: str = "", cookie: str = "") -> int:
    return ask(server, "POST", "/api/v1/push", {"items": [{"queue": queue, "payload": 1}]}, token, cookie)[0]


def create_token(cli: Cli, *arguments: str) -> str:
    made = cli("token", "create", *arguments)
    assert made.code == 0, made
    return made.out.strip()


def test_a_token_opens_what_it_was_made_for(cli: Cli, server: Served, name: str) -> None:
    token = create_token(cli, "billing", "--queue", f"{name}.*", "--group", "billing*", "--expires", "1h")
    assert push(server, f"{name}.a", token) == 201
    assert push(server, "elsewhere", token) == 403
    assert ask(server, "GET", f"/api/v1/pop/queue/{name}.a", token=token)[0] == 403
    status, body = ask(server, "GET", f"/api/v1/pop/queue/{name}.a?consumerGroup=billing1", token=token)
    assert (status, body["messages"][0]["producerSub"]) == (200, "billing")
    reader = create_token(cli, "eyes", "--role", "read-only", "--expires", "never")
    assert ask(server, "GET", "/api/v1/status", token=reader)[0] == 200
    assert push(server, f"{name}.a", reader) == 403
    topics = create_token(cli, "payer", "--role", "read-only", "--scope", f"{name}:write")
    item = [{"namespace": name, "topic": "t", "payload": "aGk="}]
    assert ask(server, "POST", "/enqueue", item, topics)[0] == 200
    assert ask(server, "GET", f"/dequeue?namespace={name}&topic=t", token=topics)[0] == 403


def test_the_command_line_uses_a_token(cli: Cli, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("push", name, "--data", "{}").code != 0
    monkeypatch.setenv("QUEEN_TOKEN", create_token(cli, "ops", "--role", "read-write"))
    assert cli("push", name, "--data", "{}").code == 0
    refused = cli("queue", "delete", name, "--yes")
    assert refused.code != 0
    assert "Insufficient permissions" in refused.err
    monkeypatch.setenv("QUEEN_TOKEN", create_token(cli, "other", "--queue", "other.*"))
    foreign = cli("push", name, "--data", "{}")
    assert foreign.code == 3
    assert f"the token is not for the queue '{name}'; use a token that may" in foreign.err
    monkeypatch.setenv("QUEEN_TOKEN", "two\nlines")
    assert cli("queue", "list").err.startswith("queen: the token holds control characters")


def test_what_a_token_says_is_shown(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    token = create_token(cli, "billing", "--namespace", "pay", "--expires", "30d")
    shown = cli("token", "show", token)
    assert shown.code == 0
    text, _, verdict = shown.out.rpartition("}")
    claims = msgspec.json.decode(text + "}")["claims"]
    assert (claims["sub"], claims["role"], claims["namespaces"]) == ("billing", "read-write", ["pay"])
    assert claims["exp"] - claims["iat"] == 30 * 86_400
    assert verdict.strip() == "valid: billing, read-write"
    monkeypatch.setenv("JWT_SECRET", "another secret, of thirty-two bytes")
    refused = cli("token", "show", token)
    assert (refused.code != 0, "it is not valid: Invalid token signature" in refused.err) == (True, True)
    assert "three parts" in cli("token", "show", "rubbish").err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("x", "--role", "king"), "role must be one of admin, read-write, read-only, not 'king'"),
        (("two\nlines",), "the token would not be valid: the claim sub is not text of up to 1024 printable characters"),
        (("x", "--expires", "soon"), "--expires=soon: expected a time such as 15m"),
    ],
)
def test_a_token_that_cannot_be_is_refused(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    refused = cli("token", "create", *arguments)
    assert refused.code != 0
    assert said in refused.err


def test_a_token_needs_a_key(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JWT_SECRET")
    assert "JWT_SECRET is not set" in cli("token", "create", "x").err
    assert "JWT_SECRET is not set" in cli("user", "add", "x", "--no-password", "--token", "1h").err


def test_a_user_from_the_first_day_to_the_last(
    cli: Cli, server: Served, name: str, terminal: OpenTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    typing = terminal("user", "add", name, "--role", "admin", "--email", f"{name}@example.com")
    for prompt in ("Password: ", "Again: "):
        typing.until(prompt)
        typing.press(f"{PASSWORD}\n")
    assert typing.ended() == 0
    assert f"added {name}, admin" in typing.text
    assert PASSWORD not in typing.text, "it is not shown while it is typed"
    assert "there is a user with the name" in cli("user", "add", name, "--no-password").err
    (row,) = [row for row in cli("user", "list").json if row["username"] == name]
    assert (row["role"], row["email"], row["state"]) == ("admin", f"{name}@example.com", "active")
    assert name in cli("user", "list", "-o", "name").out.splitlines()
    cookie = log_in(server, name)
    assert cookie is not None
    delete = ("DELETE", f"/api/v1/resources/queues/{name}")
    assert push(server, name, cookie=cookie) == 201
    assert cli("user", "role", name, "read-write").out == f"{name}: admin -> read-write\n"
    assert ask(server, *delete, cookie=cookie)[0] == 403, "at once, in the session that is open"
    assert ask(server, *delete, token=cookie.partition("=")[2])[0] == 403
    (session,) = cli("user", "sessions", name).json
    assert set(session) == {"begun", "expires", "from", "what"}
    assert cli("user", "sessions", name, "-o", "table").out.startswith("BEGUN ")
    assert cli("user", "sessions", name, "--revoke").code == 0
    assert push(server, name, cookie=cookie) == 401
    assert push(server, name, token=cookie.partition("=")[2]) == 401, "nor is it any good as a token"
    cookie = log_in(server, name)
    monkeypatch.setenv("QUEEN_USER_PASSWORD", "another password")
    assert cli("user", "password", name).code == 0
    assert cookie is not None
    assert push(server, name, cookie=cookie) == 401
    assert log_in(server, name) is None
    assert log_in(server, name, "another password") is not None
    assert cli("user", "disable", name).code == 0
    assert log_in(server, name, "another password") is None
    assert cli("user", "disable", name, "--enable").code == 0
    assert log_in(server, name, "another password") is not None
    assert cli("user", "delete", name).code == 0
    assert log_in(server, name, "another password") is None
    assert f"there is no user '{name}'" in cli("user", "delete", name).err
    monkeypatch.setenv("QUEEN_TOKEN", create_token(cli, "root", "--role", "admin"))
    noted = cli("audit", "--action", "user", "--limit", "50", "-o", "json").json
    mine = [entry for entry in noted if entry["object"] == name][::-1]
    assert [entry["action"] for entry in mine] == [
        "user add",
        "user role",
        "user revoke",
        "user password",
        "user disable",
        "user enable",
        "user delete",
    ]
    assert (mine[1]["before"], mine[1]["after"]) == ({"role": "admin"}, {"role": "read-write"})
    assert (mine[4]["before"], mine[4]["after"]) == ({"disabled": False}, {"disabled": True})
    assert mine[-1]["before"] == {"role": "read-write", "email": f"{name}@example.com"}
    assert {entry["address"] for entry in mine} == {socket.gethostname()}


def test_a_user_is_made_by_answering_questions(cli: Cli, server: Served, name: str, terminal: OpenTerminal) -> None:
    typing = terminal("create-user")
    for prompt, answer in (
        ("User name", name),
        ("Password: ", PASSWORD),
        ("Again: ", PASSWORD),
        ("Role", "2"),
        ("Bearer token", "7d"),
    ):
        typing.until(prompt)
        typing.press(f"{answer}\n")
    assert typing.ended() == 0
    lines = typing.text.split()
    assert f"added {name}, read-write" in typing.text
    assert push(server, name, token=lines[-1]) == 201
    assert log_in(server, name) is not None


def test_a_password_can_come_from_stdin(cli: Cli, server: Served, name: str) -> None:
    missing = cli("user", "add", name)
    assert (missing.code, missing.err) == (1, "queen: there is no password: write it to stdin, or pass --password\n")
    assert cli("user", "add", name, stdin=f"{PASSWORD}\n").code == 0
    assert log_in(server, name) is not None


def test_passwords_that_differ_make_no_user(cli: Cli, name: str, terminal: OpenTerminal) -> None:
    typing = terminal("user", "add", name)
    typing.until("Password: ")
    typing.press(f"{PASSWORD}\n")
    typing.until("Again: ")
    typing.press("something else\n")
    assert typing.ended() != 0
    assert "the passwords differ" in typing.text
    assert name not in cli("user", "list").out
    assert "a password has 8 to 1024 characters" in cli("user", "add", name, "--password", "short").err


def test_the_audit_log_shows_before_and_after(
    cli: Cli, server: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = create_token(cli, f"{name}-admin", "--role", "admin")
    for seconds in (30, 60):
        body = {"queue": name, "options": {"leaseTime": seconds}}
        assert ask(server, "POST", "/api/v1/configure", body, token)[0] == 200
    changes: list[tuple[str, dict[str, Any]]] = [
        ("/api/v1/topics/configure", {"namespace": name, "topic": "t", "options": {"max_retries": 1}}),
        ("/api/v1/topics/configure", {"namespace": name, "topic": "t", "options": {"max_retries": 2}}),
        (f"/api/v1/consumer-groups/{name}-g/queues/{name}/seek", {"toEnd": True}),
    ]
    for path, change in changes:
        if "seek" in path:
            push(server, name, token)
            ask(server, "GET", f"/api/v1/pop/queue/{name}?consumerGroup={name}-g&autoAck=true", token=token)
            push(server, name, token)
        assert ask(server, "POST", path, change, token)[0] == 200
    assert ask(server, "PUT", "/api/v1/topics/quotas", {"namespace": name, "per_minute": 9}, token)[0] == 200
    assert ask(server, "DELETE", f"/api/v1/resources/queues/{name}", token=token)[0] == 200
    monkeypatch.setenv("QUEEN_TOKEN", token)
    entries = cli("audit", "--actor", f"{name}-admin", "-o", "json").json[::-1]
    assert cli("audit", "--actor", f"{name}-admin", "-n", 1).json == entries[-1:]
    assert {entry["address"] for entry in entries} == {"127.0.0.1"}
    made, changed, topic_made, topic_changed, sought, quota, deleted = entries
    assert made["before"] is None
    assert (changed["before"]["lease_time"], changed["after"]["options"]) == (30, {"leaseTime": 60})
    assert topic_made["before"] is None
    assert topic_changed["before"]["options"]["max_retries"] == 1
    assert sought["before"] == {"positions": [{"queue": name, "partition": "Default", "offset": 1}]}
    assert (quota["before"], quota["after"]["per_minute"]) == ({"per_minute": None}, 9)
    assert deleted["before"]["lease_time"] == 60
    assert deleted["after"] == {"deleted": True, "queue": name, "existed": True}
    table = cli("audit", "--actor", f"{name}-admin", "-o", "table").out
    assert "ACTOR" in table
    assert "DELETE /api/v1/resources/queues/{queue}" in table
    monkeypatch.setenv("QUEEN_TOKEN", create_token(cli, "bob", "--role", "read-write"))
    assert "Insufficient permissions" in cli("audit").err


def test_a_certificate_to_begin_with(cli: Cli, tmp_path: Path) -> None:
    made = cli("cert", tmp_path / "tls", "--name", "queen.example", "--name", "10.0.0.7")
    assert made.code == 0
    assert (tmp_path / "tls" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert f"TLS_CERT={tmp_path}/tls/cert.pem TLS_KEY={tmp_path}/tls/key.pem queen serve" in made.out
    assert "exists already" in cli("cert", tmp_path / "tls").err


def test_a_person_logs_in_and_out_at_a_server(
    no_server: Cli, server: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEEN_USER_PASSWORD", PASSWORD)
    assert no_server("user", "add", name, "--role", "read-write").code == 0
    login = ("login", "--method", "password", "-u", name, "--server", server.url, "--no-keychain")
    assert no_server(*login, "--password", "wrong").code == 3
    assert no_server(*login, stdin=f"{PASSWORD}\n").code == 0
    assert no_server("push", name, "--data", "{}").code == 0
    assert no_server("queue", "delete", name, "--yes").code == 3
    assert no_server("logout").code == 0
    assert no_server("push", name, "--data", "{}").code == 3
