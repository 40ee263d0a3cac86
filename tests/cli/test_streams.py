"""What the shell gives the command: arguments, encodings, streams that are closed or full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Served


def shell(server: Served, line: str, **variables: str) -> tuple[int, str, str]:
    """Run a line of a shell in which `queen` is the command; its exit code, stdout and stderr."""
    environment = {**os.environ, "QUEEN_SERVER": server.url, "QUEEN": f"{sys.executable} -m queen.cli"} | variables
    line = line.replace("queen ", "$QUEEN ", 1)
    ended = subprocess.run(["bash", "-c", line], capture_output=True, env=environment, check=False)
    return ended.returncode, ended.stdout.decode(), ended.stderr.decode()


@pytest.mark.parametrize("command", ["status", "pop", "push --data 1", "group describe", "topic list"])
def test_bytes_that_are_not_utf8_are_refused_in_one_line(server: Served, command: str) -> None:
    code, out, err = shell(server, f"queen {command} $'\\xff'")
    assert (code, out) == (1, "")
    assert err.startswith("queen: '\\udcff' is not UTF-8; ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_data_that_go_to_a_program_are_utf8_whatever_the_locale(
    cli: Cli, server: Served, name: str, encoding: str
) -> None:
    cli("push", f"{name}-€", "--data", '"ü"')
    code, out, err = shell(server, f"queen queue list --search {name} -o table", PYTHONIOENCODING=encoding)
    assert (code, err) == (0, "")
    assert f"{name}-€" in out
    assert '"ü"' in shell(server, f"queen pop '{name}-€'", PYTHONIOENCODING=encoding)[1]


def test_closed_streams_are_no_error(cli: Cli, server: Served, name: str) -> None:
    assert shell(server, f"queen push {name} --data 1 <&- >&- 2>&-") == (0, "", "")
    assert shell(server, f"queen push {name} <&-")[0] == 4
    assert shell(server, "queen queue list -o yaml >&-") == (0, "", "")
    assert len(cli("pop", name, "-n", 5).lines) == 1


def test_a_reader_that_has_seen_enough_is_no_error(cli: Cli, server: Served, name: str) -> None:
    cli("push", name, stdin="1\n" * 3000)
    code, out, err = shell(server, f"queen queue export {name} -q | head -n 1")
    assert (code, out.count("\n"), err) == (0, 1, "")


def test_a_full_disk_is_named(server: Served) -> None:
    code, _, err = shell(server, "queen docs --reference > /dev/full")
    assert code == 2
    assert err.startswith("queen: No space left on device; ")


@pytest.mark.parametrize(
    "arguments",
    [("user", "list"), ("shards", "add", "postgresql://127.0.0.1:1/q"), ("backup", "none")],
)
def test_a_database_that_does_not_answer_is_named_in_one_line(
    no_server: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setenv("DATABASE_URLS", "postgresql://127.0.0.1:1/q")
    monkeypatch.chdir(tmp_path)
    ran = no_server(*arguments)
    assert ran.code == 1
    assert "connection refused" in ran.err
    assert ("127.0.0.1:1" in ran.err) == (arguments[0] != "user")
    assert "Errno" not in ran.err
    assert ran.err.count("\n") == 1


def test_a_path_that_cannot_be_written_is_named_as_such(no_server: Cli) -> None:
    ran = no_server("cert", "/proc/none")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert ran.err.startswith("queen: /proc/none")
    assert "check the path" in ran.err


def test_a_secret_that_can_be_guessed_is_said_in_one_line(server: Served) -> None:
    code, out, err = shell(server, "queen token create ci", JWT_SECRET="short")
    assert (code, out.count("."), err.count("\n")) == (0, 2, 1)
    assert err.startswith("JWT_SECRET has 5 bytes, fewer than the 32 that HS256 needs")
