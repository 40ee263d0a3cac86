"""The command tree: help, examples, the page of documentation, and what loading it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from queen.cli.app import ENTRIES, tree
from queen.cli.common.arguments import complete_queues
from queen.cli.common.session import OPTIONS_KEY
from queen.cli.common.tree import example_of, reference, walk
from tests.cli.conftest import Cli

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_every_command_has_help_with_an_example_that_calls_it() -> None:
    commands = {f"queen {' '.join(path)}": command for path, command in walk(tree())}
    assert len(commands) > 100
    for called, command in commands.items():
        assert command.help, f"{called} says what it does"
        assert any(called in line for line in example_of(command).splitlines()), called
        for option in command.params:
            assert option.help, f"{option.name} of {called} says what it is"


def test_the_names_of_the_contract_are_there() -> None:
    """Those that users of queenctl know, aliases included."""
    root = tree()
    known = {" ".join(path) for path, _ in walk(root)}
    for name in ("ping", "version", "status", "lag", "push", "pop", "tail", "ack", "tx", "replay", "bench", "apply"):
        assert name in known
    for alias, below in (
        ("q", ("ls", "get", "show", "describe", "configure", "delete", "rm", "stats")),
        ("p", ("list", "describe", "seek")),
        ("msg", ("list", "get", "delete", "traces")),
        ("cg", ("list", "describe", "lag", "seek", "delete", "rm", "refresh-stats")),
        ("dlq", ("list", "describe", "drain")),
        ("ns", ("list",)),
        ("task", ("list",)),
        ("maint", ("get", "on", "off")),
        ("an", ("overview", "queue-lag", "queue-ops", "queue-parked", "retention", "system", "worker", "postgres")),
        ("traces", ("names", "by-name", "by-message")),
        ("config", ("view", "current-context", "get-contexts", "set-context", "use-context", "delete-context")),
        ("lease", ("extend",)),
    ):
        assert set(below) <= set(root.commands[alias].commands), alias


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_the_overview_says_what_the_command_says(entry: Any) -> None:
    assert tree().commands[entry.name].help.startswith(entry.summary.removesuffix("."))


def test_the_page_has_every_command_as_its_help_has_it() -> None:
    text = PAGE.read_text("utf-8")
    for path, command in walk(tree()):
        assert f"### queen {' '.join(path)}\n" in text, "make docs"
        assert example_of(command) in text, "make docs"
    assert reference(tree()) in text, "the page is not that of the commands: make docs"


def test_help_loads_neither_the_client_nor_the_server() -> None:
    """The time that `queen --help` takes is that of its imports."""
    code = (
        "import sys; from queen.cli.app import execute; execute(['--help']);"
        "heavy = {'aiohttp', 'asyncpg', 'rich', 'yaml', 'uvloop', 'queen.settings', 'queen.server', 'queen.client'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: queen" in ended.stdout
    assert ended.stderr.strip() == "[]"


def test_help_goes_to_stdout(no_server: Cli) -> None:
    for arguments in ([], ["--help"], ["queue"], ["queue", "--help"], ["queue", "list", "-h"]):
        ran = no_server(*arguments)
        assert (ran.code, ran.err) == (0, ""), arguments
        assert "Usage: queen" in ran.out
    assert "queen queue list" in no_server("queue", "list", "--help").out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["qeue"], "queen: No such command 'qeue'. Did you mean 'queue'"),
        (["queue", "lst"], "queen: No such command 'lst'"),
        (["queue", "list", "--limt", "3"], "queen: No such option: --limt"),
        (["queue", "describe"], "queen: Missing argument 'QUEUE'"),
        (["queue", "list", "--limit", "none"], "queen: Invalid value for '-n' / '--limit'"),
        (["queue", "configure", "q", "--lease-time", "-1"], "queen: Invalid value for '--lease-time'"),
        (["topic", "extend", "n", "t", "1", "--seconds", "nan"], "queen: Invalid value for '--seconds': nan is not"),
        (["pop"], "queen: name a queue, or --namespace or --task"),
        (["completion", "tcsh"], "queen: there is completion for bash"),
        (["replay", "q", "--cg", "g", "--to", "soon"], "queen: Invalid value: 'soon' is not a time"),
        (["queue", "list", "-o", "xml"], "queen: no output format 'xml'"),
        (["docs", "--topic", "cooking"], "queen: there are pages about cli"),
        (["group", "describe", ""], "queen: Invalid value for 'GROUP': it is empty"),
        (["queue", "delete", "", "--yes"], "queen: Invalid value for 'QUEUE': it is empty"),
        (["ping", "--timeout", "nan"], "queen: Invalid value: 'nan' is not a duration"),
        (["replay", "q", "--cg", "g", "--to", "99999999999d"], "queen: Invalid value: '99999999999d' is not a time"),
        (["ping", "--server", "http://"], "queen: the server 'http://' is not a URL"),
        (["ping", "--server", "http://[::1"], "queen: the server 'http://[::1' is not a URL"),
        (["ping", "--server", "http://localhost:99999"], "queen: the server 'http://localhost:99999' is not a URL"),
        (["config", "set-context", "x", "--server", "https://"], "queen: the server 'https://' is not a URL"),
    ],
)
def test_a_wrong_command_line_ends_with_1_and_one_line(no_server: Cli, arguments: list[str], text: str) -> None:
    ran = no_server(*arguments)
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err.startswith(text)
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_the_command(no_server: Cli, shell: str) -> None:
    ran = no_server("completion", shell)
    assert ran.code == 0
    assert "_QUEEN_COMPLETE" in ran.out
    # What zsh loads at the first Tab completes, and does not only register itself for the next.
    assert ("compstate" in ran.out) == (shell == "zsh")


BASH = """
source <(queen completion bash)
complete -p queen >/dev/null
while read -r -a COMP_WORDS; do
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    [ "${COMP_WORDS[$COMP_CWORD]}" = _ ] && COMP_WORDS[$COMP_CWORD]=
    _queen_completion queen
    echo "${COMPREPLY[@]}"
done
"""
"""Completes what it reads, word by word; `_` is a word that was not begun."""


def test_bash_completes_commands_options_and_names_of_the_server(cli: Cli, name: str) -> None:
    for queue in ("a", "b"):
        cli("push", f"{name}-{queue}", "--data", "1")
    cli("pop", f"{name}-a", "--cg", f"{name}-group")
    lines = [
        "queen que",
        "queen queue _",
        "queen queue configure q --le",
        f"queen status {name}",
        f"queen cg seek {name}",
    ]
    bin_path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = subprocess.run(
        ["bash", "-c", BASH],
        input="\n".join([*lines, ""]),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": bin_path},
    )
    commands, subcommands, options, queues, groups = shell.stdout.splitlines()
    assert commands == "queue"
    assert {"list", "describe", "pause"} <= set(subcommands.split())
    assert options == "--lease-time"
    assert queues == f"{name}-a {name}-b"
    assert groups == f"{name}-group"


def test_completion_says_nothing_of_a_server_that_does_not_answer(no_server: Cli) -> None:
    context = tree().make_context("queen", ["status"], resilient_parsing=True)
    context.meta[OPTIONS_KEY] = {"server": "http://127.0.0.1:1"}
    assert complete_queues(context, "") == []


def test_settings_are_data_like_all_others(no_server: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "7001")
    monkeypatch.setenv("JWT_SECRET", "0123456789abcdef0123456789abcdef")
    rows = {row["variable"]: row for row in no_server("settings").json}
    assert (rows["PORT"]["value"], rows["PORT"]["default"]) == ("7001", "6632")
    assert rows["JWT_SECRET"]["value"] == "(set, not shown)"
    assert "PORT,7001,6632," in no_server("settings", "-o", "csv").out
    assert no_server("settings", "-o", "xml").code == 1


def test_every_page_of_the_documentation_is_named(no_server: Cli) -> None:
    named = {line.partition(": ")[2] for line in no_server("docs").out.splitlines()[:-1]}
    assert named == {f"docs/{page.name}" for page in PAGE.parent.glob("*.md")} | {"docs/client/README.md"}
    assert no_server("docs", "--topic", "backup", "--server", "http://queen:1").out.splitlines() == [
        "backup: docs/backup.md",
        "HTTP API: http://queen:1/docs",
    ]
