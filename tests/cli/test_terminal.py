"""The command in a terminal, as a person sees it."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Cli, OpenTerminal


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
    assert name in top.text
    assert "sorted by pending" in top.text
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
