"""Contexts: which server a command talks to, and with which token."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from queen.cli.common.session import Session
from tests.cli.conftest import Cli, Served, serving

SECRET = "s" * 40


def token(**claims: object) -> str:
    """A token that servers with this secret take."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(value)).rstrip(b"=").decode()

    head = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part({'exp': time.time() + 600, **claims})}"
    signature = hmac.new(SECRET.encode(), head.encode(), hashlib.sha256).digest()
    return f"{head}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def test_a_context_is_made_used_changed_and_deleted(no_server: Cli, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    assert no_server("config", "current-context").code == 1
    assert no_server("config", "set-context", "local", "--server", "http://127.0.0.1:1").code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert no_server("config", "use-context", "local").out == 'switched to context "local"\n'
    assert no_server("config", "current-context").out == "local\n"
    no_server(
        "config",
        "set-context",
        "prod",
        "--server",
        "https://q.example",
        "--token",
        "tok",
        "--no-keychain",
        "--insecure",
    )
    no_server("config", "set-context", "prod", "--secure")
    assert yaml.safe_load(file.read_text()) == {
        "current-context": "local",
        "contexts": [
            {"name": "local", "server": "http://127.0.0.1:1"},
            {"name": "prod", "server": "https://q.example", "token-ref": "literal:tok", "insecure": False},
        ],
    }
    listed = no_server("config", "get-contexts", "-o", "wide").out.splitlines()
    assert listed[1].split() == ["*", "local", "http://127.0.0.1:1", "-", "no"]
    assert listed[2].split() == ["-", "prod", "https://q.example", "literal", "no"]
    assert "tok" not in no_server("config", "view").out.replace("token", "")
    assert no_server("config", "delete-context", "local").code == 0
    assert no_server("config", "current-context").code == 1
    missing = no_server("config", "use-context", "nowhere")
    assert missing.code == 1
    assert "there is: prod" in missing.err


def test_bad_contexts_are_refused(no_server: Cli, tmp_path: Path) -> None:
    assert no_server("config", "set-context", "x", "--server", "localhost").code == 1
    assert no_server("config", "set-context", "x", "--token", "a", "--token-ref", "env").code == 1
    (tmp_path / "config.yaml").write_text("contexts: [1, 2]")
    assert "must be a list of entries with a name" in no_server("ping").err
    (tmp_path / "config.yaml").write_text("{")
    assert "cannot be read" in no_server("ping").err


def test_options_win_over_variables_and_these_over_contexts(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    secret = tmp_path / "token"
    secret.write_text("from-file\n")
    contexts = [
        {"name": "a", "server": "http://a:1", "token-ref": "literal:tok-a"},
        {"name": "b", "server": "http://b:1/", "token-ref": f"file://{secret}", "insecure": True},
        {"name": "c", "server": "http://c:1", "token-ref": "env"},
    ]
    file.write_text(yaml.safe_dump({"current-context": "a", "contexts": contexts}))

    def resolved(given: dict[str, object], **environ: str) -> tuple[str, str | None, bool]:
        server = Session({"config": file, **given}, environ).server
        return server.url, server.token, server.insecure

    assert resolved({}) == ("http://a:1", "tok-a", False)
    assert resolved({}, QUEEN_CONTEXT="b") == ("http://b:1", "from-file", True)
    assert resolved({"context": "c"}, QUEEN_CONTEXT="b", QUEEN_TOKEN="t") == ("http://c:1", "t", False)
    assert resolved({"context": "c"}, QUEEN_SERVER="http://e:1") == ("http://e:1", None, False)
    assert resolved({"server": "http://s:1", "token": "x"}, QUEEN_SERVER="http://e:1") == ("http://s:1", "x", False)
    # Another server is not given the token of the current context, unless that context is asked for.
    assert resolved({"server": "http://s:1"}) == ("http://s:1", None, False)
    assert resolved({}, QUEEN_SERVER="http://e:1") == ("http://e:1", None, False)
    assert resolved({"server": "http://a:1/"}) == ("http://a:1", "tok-a", False)
    assert resolved({"server": "http://s:1", "context": "b"}) == ("http://s:1", "from-file", True)


def test_without_a_server_ping_ends_with_1_and_a_server_that_does_not_answer_with_2(
    no_server: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen.cli.common.session.DEFAULT_SERVER", "http://127.0.0.1:1")
    ran = no_server("ping")
    assert ran.code == 1
    assert "no server is configured" in ran.err
    ran = no_server("--server", "http://127.0.0.1:1", "queue", "list")
    assert ran.code == 2
    assert ran.err == (
        "queen: cannot reach http://127.0.0.1:1: connection refused; "
        "start it (queen serve), or name another: --server\n"
    )
    nowhere = no_server("--server", "http://nowhere.invalid", "queue", "list")
    assert nowhere.err.startswith("queen: cannot reach http://nowhere.invalid: ")
    assert "Cannot connect" not in nowhere.err


def test_a_server_of_another_kind_is_named_as_such(cli: Cli, server: Served) -> None:
    ran = cli("queue", "list", "--server", f"{server.url}/elsewhere")
    assert ran.code == 2
    assert "is it a Queen server? --server names another" in ran.err
    tls = cli("queue", "list", "--server", server.url.replace("http:", "https:"))
    assert tls.code == 2
    assert tls.err.endswith("it does not speak TLS; use http:// in place of https://\n")


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Answers as the proxy does: a login gives a token as a cookie, and everything else wants one."""

    def do_GET(self) -> None:
        self._answer(
            200 if self.headers["Authorization"] else 401, b'{"queues":[]}', b'{"error":"Authentication required"}'
        )

    def do_DELETE(self) -> None:
        self._answer(403, b"", b'{"error":"Insufficient permissions"}')

    def _answer(self, status: int, good: bytes, bad: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(good if status == 200 else bad)

    def do_POST(self) -> None:
        sent = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
        good = self.path == "/api/login" and sent == {"username": "ada", "password": "lovelace"}
        self.send_response(200 if good else 401)
        if good:
            self.send_header("Set-Cookie", "token=the-token; HttpOnly; Path=/")
        self.end_headers()
        self.wfile.write(b'{"user":{"username":"ada"}}' if good else b'{"error":"Invalid credentials"}')

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_password_becomes_a_token(no_server: Cli, proxy: str, tmp_path: Path) -> None:
    login = ("login", "--method", "password", "-u", "ada", "--server", proxy, "--no-keychain")
    assert no_server(*login, "--password", "wrong").code == 3
    assert no_server(*login, stdin="lovelace\n").code == 0
    entry = yaml.safe_load((tmp_path / "config.yaml").read_text())["contexts"][0]
    assert entry == {"name": "default", "server": proxy, "token-ref": "literal:the-token"}


def test_a_login_is_kept_and_refusals_end_with_3(no_server: Cli, proxy: str) -> None:
    refused = no_server("--server", proxy, "queue", "list")
    assert refused.code == 3
    assert refused.err == "queen: Authentication required; log in (queen login) or pass --token\n"
    assert no_server("login", "--server", proxy, "--token", "good", "--no-keychain").code == 0
    assert no_server("queue", "list").json == []
    ran = no_server("queue", "delete", "x", "--yes")
    assert ran.code == 3
    assert "higher role" in ran.err
    assert no_server("logout").code == 0
    assert no_server("queue", "list").code == 3
    assert no_server("login", "--server", proxy, "--method", "magic").code == 1


def test_a_login_at_another_server_leaves_the_current_context_as_it_was(no_server: Cli, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    login = ("login", "--token", "t", "--no-keychain", "--server")
    assert no_server(*login, "https://production").code == 0
    before = file.read_text()
    refused = no_server(*login, "https://other")
    assert refused.code == 1
    assert refused.err.startswith('queen: context "default" is for https://production')
    assert file.read_text() == before
    assert no_server(*login, "https://production/").code == 0
    assert no_server("config", "set-context", "other", "--server", "https://other").code == 0
    assert no_server(*login, "https://other", "--context", "other").code == 0
    assert no_server("config", "current-context").out == "default\n"
    assert no_server(*login, "https://moved", "--context", "default").code == 0
    assert yaml.safe_load(file.read_text())["contexts"][0]["server"] == "https://moved"


def test_a_server_that_wants_tokens_takes_them_by_role(no_server: Cli, server: Served, tmp_path: Path) -> None:
    with serving(server.dsn, tmp_path, jwt_enabled=True, jwt_secret=SECRET) as guarded:
        at = ("--server", guarded.url)
        assert no_server(*at, "queue", "list").code == 3
        reader, admin = token(sub="bob", role="read-only"), token(sub="ada", role="admin")
        assert no_server(*at, "queue", "list", "--token", reader).code == 0
        assert no_server(*at, "queue", "delete", "x", "--yes", "--token", reader).code == 3
        assert no_server("login", *at, "--token", admin, "--no-keychain").code == 0
        assert no_server("queue", "delete", "x", "--yes").code == 4
        findings = {row["check"]: row for row in no_server("doctor").json}
        assert findings["access"] == {"check": "access", "status": "ok", "found": "a token is needed", "remedy": ""}
