"""`queen serve` with options alone does not load the parser of the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from queen.cli.app import tree
from queen.cli.serve.start import OPTIONS, plain_options


def test_plain_options_are_those_of_the_command() -> None:
    command = tree().get_command(None, "serve")
    assert set(OPTIONS) == {option for parameter in command.params for option in parameter.opts} - {"--help"}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--port", "80", "--workers", "2"], {"port": "80", "num_workers": "2"}),
        (
            ["--data-dir", "/d", "--database-url", "postgresql://h"],
            {"queen_data_dir": "/d", "database_urls": "postgresql://h"},
        ),
        (["--help"], None),
        (["--port"], None),
        (["--port=80"], None),
        (["--port", "--workers"], None),
        (["--prot", "80"], None),
        (["80", "--port"], None),
    ],
)
def test_what_is_not_an_option_with_its_value_is_left_to_the_command_line(
    arguments: list[str], options: dict[str, str] | None
) -> None:
    assert plain_options(arguments) == options


def test_a_supervisor_does_not_load_the_command_line() -> None:
    program = """
import sys
sys.argv = ["queen", "serve", "--port", "99999"]
from queen.cli import main
try:
    main()
finally:
    print(*({"click", "pydantic", "rich", "typer"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (1, [])
    assert done.stderr == "queen: port=99999: expected an integer from 1 to 65535\n"
