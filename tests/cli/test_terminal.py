"""The command in a terminal, as a person sees it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec

from tests.cli.conftest import Cli, OpenTerminal, Served
from tests.support.proxy import TcpProxy


def test_lists_are_tables_with_bold_headings_unless_colours_are_off(
    cli: Cli, terminal: OpenTerminal, name: str
) -> None:
    cli("queue", "configure", name)
    shown = terminal("queue", "list")
    assert shown.ended() == 0
    assert "\033[1mNAME" in shown.raw
    assert name in shown.text
    plain = terminal("queue", "list", NO_COLOR="1")
    assert plain.ended() == 0
    assert "\033[" not in plain.raw


def test_deleting_asks_first(cli: Cli, terminal: OpenTerminal, name: str) -> None:
    cli("queue", "configure", name)
    refused = terminal("queue", "delete", name)
    refused.until("Continue?")
    refused.press("n\n")
    assert refused.ended() == 1
    assert "nothing was changed" in refused.text
    agreed = terminal("queue", "delete", name)
    agreed.until("Continue?")
    agreed.press("y\n")
    assert agreed.ended() == 0
    assert cli("queue", "describe", name).code == 2


def test_top_shows_queues_and_groups_until_q(cli: Cli, terminal: OpenTerminal, name: str) -> None:
    cli("push", name, stdin="1\n2\n3")
    cli("pop", name, "--cg", "watchers", "--auto-ack")
    top = terminal("top", "--interval", "200ms")
    top.until("watchers")
    top.until("sorted by pending")
    assert name in top.text
    top.press("l")
    top.until("sorted by lag")
    top.press("q")
    assert top.ended() == 0


def test_tail_follows_in_colours_until_ctrl_c(cli: Cli, terminal: OpenTerminal, name: str) -> None:
    cli("push", name, "--data", '{"n": 1}')
    tail = terminal("tail", name, "-f", "--timeout", "1s")
    tail.until('{"n":1}')
    assert "\033[" in tail.raw
    cli("push", name, "--data", '{"n": 2}')
    tail.until('{"n":2}')
    assert f"{name}/Default" in tail.text
    tail.press("\x03")
    assert tail.ended() == 0


async def test_a_tail_that_follows_outlives_an_outage(
    cli: Cli, terminal: OpenTerminal, server: Served, name: str
) -> None:
    proxy = TcpProxy(partial(asyncio.open_connection, *server.url.removeprefix("http://").split(":")))
    await proxy.start()
    cli("push", name, "--data", '{"n": 1}')
    tail = terminal("tail", name, "-f", "--timeout", "1s", QUEEN_SERVER=f"http://127.0.0.1:{proxy.port}")
    await asyncio.to_thread(tail.until, '{"n":1}')
    async with proxy.away():
        await asyncio.to_thread(tail.until, "trying again")
        cli("push", name, "--data", '{"n": 2}')
    await asyncio.to_thread(tail.until, '{"n":2}')
    tail.press("\x03")
    assert await asyncio.to_thread(tail.ended) == 0
    await proxy.stop()


def test_long_work_shows_a_bar_and_data_stay_clean(cli: Cli, terminal: OpenTerminal, name: str, tmp_path: Path) -> None:
    file = tmp_path / "many.ndjson"
    file.write_text("".join(f'{{"n": {number}}}\n' for number in range(3000)))
    push = terminal("push", name, "-f", str(file))
    assert push.ended() == 0
    assert f"pushing to {name}" in push.text
    assert "queued=3000 duplicate=0 failed=0" in push.text
    quiet = terminal("queue", "export", name, "-q", "-f", str(tmp_path / "out.ndjson"))
    assert quiet.ended() == 0
    assert quiet.text == ""
    assert len((tmp_path / "out.ndjson").read_text().splitlines()) == 3000


def test_lines_on_a_terminal_are_not_drawn_into_a_bar(cli: Cli, terminal: OpenTerminal, name: str) -> None:
    cli("push", name, stdin="1\n2\n3")
    shown = terminal("queue", "export", name)
    assert shown.ended() == 0
    *lines, note = shown.text.splitlines()
    assert [msgspec.json.decode(line)["data"] for line in lines] == [1, 2, 3]
    assert note == f"exported 3 messages of {name}"


def test_applying_and_acknowledging_show_how_far_they_are(
    cli: Cli, terminal: OpenTerminal, name: str, tmp_path: Path
) -> None:
    manifest, popped = tmp_path / "queen.yaml", tmp_path / "popped.ndjson"
    manifest.write_text(f"kind: Queue\nname: {name}\n")
    applied = terminal("apply", "-f", str(manifest))
    assert applied.ended() == 0
    assert "comparing" in applied.text
    assert applied.text.splitlines()[-1] == f'applied Queue "{name}"'
    cli("push", name, stdin="1\n2")
    popped.write_text(cli("pop", name, "-n", 2).out)
    acked = terminal("ack", "--batch", str(popped))
    assert acked.ended() == 0
    assert "acknowledging" in acked.text
    assert "ok=2 failed=0" in acked.text


def test_names_that_look_like_markup_are_names(cli: Cli, terminal: OpenTerminal, name: str, tmp_path: Path) -> None:
    queue = f"{name}[/b][red]"
    push = terminal("push", queue, "--data", "1")
    assert push.ended() == 0
    assert f"pushing to {queue}" in push.text
    assert terminal("queue", "export", queue, "-f", str(tmp_path / "out.ndjson")).ended() == 0
    top = terminal("top", "--sort", "name", "-n", "1000", LINES="500")
    top.until(queue)
    top.press("q")
    assert top.ended() == 0


def test_what_others_wrote_does_nothing_to_the_terminal(cli: Cli, terminal: OpenTerminal, name: str) -> None:
    cli("queue", "configure", name, "--retry-limit", "0")
    cli("push", name, "--data", '"\x9b31m"', "--transaction-id", "t\033[31m")
    cli("ack", "--batch", "-", "--error", "no\033]0;title\x07\nmore", stdin=cli("pop", name).out)
    for arguments in (
        ("dlq", "list", "--queue", name),
        ("dlq", "list", "--queue", name, "-o", "name"),
        ("dlq", "list", "--queue", name, "-o", "csv"),
        ("dlq", "list", "--queue", name, "-o", "json"),
        ("dlq", "list", "--queue", name, "-o", "jsonpath=[*].errorMessage"),
        ("dlq", "report", "--queue", name),
        ("dlq", "export", name),
        ("tail", name),
    ):
        shown = terminal(*arguments, NO_COLOR="1")
        assert shown.ended() == 0, shown.text
        assert not [sign for sign in shown.raw if sign in "\033\x07\x9b"], arguments
    # Where no terminal is, data are what they are.
    assert cli("dlq", "list", "--queue", name, "-o", "name").out == "t\033[31m\n"


def test_top_fits_the_screen(cli: Cli, terminal: OpenTerminal, name: str) -> None:
    for number in range(9):
        cli("push", f"{name}-{number}", "--data", "1")
    cli("pop", f"{name}-0", "--cg", "watchers")
    top = terminal("top", LINES="12", COLUMNS="60")
    # The groups and the line about keys are below all queues.
    top.until("GROUP")
    top.until("q quit")
    top.press("q")
    assert top.ended() == 0
    narrow = terminal("top", "--sort", "name", LINES="60", COLUMNS="44")
    narrow.until(f"{name}-0 ")
    narrow.press("q")
    assert narrow.ended() == 0
