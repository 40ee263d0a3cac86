"""The tree of commands: loaded when they are called, with the options that all of them have."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core
import typer.main

from queen.cli.common.output import FORMATS
from queen.cli.common.session import OPTIONS_KEY
from queen.errors import QueenError

Function = TypeVar("Function", bound=Callable[..., Any])

_PANEL = "Options of all commands"
_OF_SPARK = frozenset(
    {"pyspark", "pyarrow", "pandas", "psycopg", "adbc_driver_manager", "adbc_driver_postgresql", "matplotlib"}
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A command of the root: where it is, and what `queen --help` says about it before it is loaded."""

    name: str
    home: str
    """`module:attribute`, a `typer.Typer` of one command or of several."""
    summary: str
    section: str
    aliases: tuple[str, ...] = ()
    remote: bool = True
    """Whether it talks to a server, and so has the options that say which."""


def group(summary: str) -> typer.Typer:
    """An app for the commands of one resource."""
    return typer.Typer(
        help=summary,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def command(
    app: typer.Typer, name: str, *, example: str, aliases: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Register a function as a command with an example, one or several lines, that its help ends with."""
    shown = "[bold]Example[/bold]\n\n" + "\n\n".join(
        f"  {line}".replace("[", "\\[") for line in example.strip().splitlines()
    )

    def register(function: Function) -> Function:
        vars(function)["example"] = example.strip()
        settings = {"help_option_names": ["-h", "--help"]}
        app.command(name, epilog=shown, context_settings=settings)(function)
        for alias in aliases:
            app.command(alias, hidden=True, epilog=shown, context_settings=settings)(function)
        return function

    return register


class Commands(MutableMapping[str, Any]):
    """Commands by name, made when first used."""

    def __init__(self, entries: Sequence[Entry], shared: Sequence[Any]) -> None:
        self._shared = shared
        self._entries = {name: entry for entry in entries for name in (entry.name, *entry.aliases)}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        found = self._loaded.get(entry.name)
        if found is None:
            module, _, attribute = entry.home.partition(":")
            try:
                found = typer.main.get_command(getattr(importlib.import_module(module), attribute))
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in _OF_SPARK:
                    raise
                raise QueenError(
                    f"queen {entry.name} needs Spark, which is not installed ({error.name} is missing): "
                    "run `make spark`, or install the extra `spark` of this package"
                ) from error
            found.name = entry.name
            if entry.remote:
                _give_options(found, self._shared)
            self._loaded[entry.name] = found
        return found

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Root(typer.core.TyperGroup):
    """The command `queen`; its help names commands without loading them."""

    entries: Sequence[Entry] = ()

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        shared = _shared_options()
        self.commands = Commands(self.entries, shared)
        self.params.extend(shared)

    def list_commands(self, ctx: Any) -> list[str]:
        return [entry.name for entry in self.entries]

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        item = vars(typer.core)["CompletionItem"]
        found = [item(entry.name, help=entry.summary) for entry in self.entries if entry.name.startswith(incomplete)]
        return found if found or not incomplete.startswith("-") else super().shell_complete(ctx, incomplete)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        bold = "\033[1m%s\033[0m" if sys.stdout.isatty() else "%s"
        lines = ["Usage: queen [OPTIONS] COMMAND [ARGS]...", "", str(self.help), ""]
        width = max(len(entry.name) for entry in self.entries)
        for section in dict.fromkeys(entry.section for entry in self.entries):
            lines.append(bold % section)
            lines += [f"  {entry.name:<{width}}  {entry.summary}" for entry in self.entries if entry.section == section]
            lines.append("")
        lines.append(bold % "Options")
        # `queen completion` does what typer's own two options do.
        options: list[Any] = [option for option in self.get_params(ctx) if "completion" not in str(option.name)]
        shown = [(", ".join(option.opts), option.help or "") for option in options if not option.hidden]
        width = max(len(names) for names, _ in shown)
        lines += [f"  {names:<{width}}  {text}" for names, text in shown]
        lines += ["", "queen COMMAND --help explains a command, with an example."]
        sys.stdout.write("\n".join(lines) + "\n")


def walk(root: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its path; aliases are left out."""
    if not isinstance(root, typer.core.TyperGroup):
        yield path, root
        return
    names = root.list_commands(None) if isinstance(root, Root) else list(root.commands)
    for name in names:
        below = root.commands[name]
        if not below.hidden:
            yield from walk(below, (*path, name))


def example_of(command: Any) -> str:
    """The example of a command; empty when it has none."""
    return str(vars(command.callback).get("example", ""))


def reference(root: Any) -> str:
    """Every command with what it does and an example, as Markdown."""
    parts = []
    for path, found in walk(root):
        parts.append(f"### queen {' '.join(path)}\n\n{found.get_short_help_str(1000)}\n")
        if example := example_of(found):
            parts.append(f"```\n{example}\n```\n")
    return "\n".join(parts)


def _shared(
    server: Annotated[str | None, typer.Option("--server", help="URL of the server. [QUEEN_SERVER]")] = None,
    token: Annotated[str | None, typer.Option("--token", help="Token to log in with. [QUEEN_TOKEN]")] = None,
    context: Annotated[
        str | None, typer.Option("--context", help="Context of the configuration file. [QUEEN_CONTEXT]")
    ] = None,
    output: Annotated[str | None, typer.Option("-o", "--output", help=" | ".join(FORMATS))] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the server's certificate.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only data and errors.")] = False,
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Print tables without headings.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Print without colours.")] = False,
    color: Annotated[bool, typer.Option("--color", help="Print with colours, wherever it goes.")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="Configuration file. [QUEEN_CONFIG]")] = None,
) -> None:
    """The options that all commands have."""


def _shared_options() -> list[Any]:
    app = typer.Typer(add_completion=False)
    app.command()(_shared)
    options = [option for option in typer.main.get_command(app).params if option.name != "help"]
    for option in options:
        option.expose_value = False
        option.callback = _remember
        option.rich_help_panel = _PANEL  # type: ignore[attr-defined]
    return options


def _remember(ctx: Any, option: Any, value: Any) -> Any:
    given: dict[str, Any] = ctx.meta.setdefault(OPTIONS_KEY, {})
    # An option may stand before the command, behind it, or both: the last one wins, and one not given says nothing.
    if value:
        given[option.name] = value
    return value


def _refuse_empty(ctx: Any, argument: Any, value: Any) -> Any:
    # What an unset variable of the shell leaves: a path without the name would mean something else.
    if value == "":
        raise typer.BadParameter("it is empty", ctx=ctx, param=argument)
    return value


def _refuse_infinite(ctx: Any, option: Any, value: Any) -> Any:
    # JSON has neither nan nor inf: they would be sent as null, which means the default.
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number", ctx=ctx, param=option)
    return value


def _give_options(command: Any, shared: Sequence[Any]) -> None:
    for parameter in command.params:
        if parameter.callback is None:
            parameter.callback = _refuse_empty if parameter.param_type_name == "argument" else _refuse_infinite
    taken = {name for option in command.params for name in option.opts}
    command.params.extend(option for option in shared if not taken.intersection(option.opts))
    if isinstance(command, typer.core.TyperGroup):
        for below in command.commands.values():
            _give_options(below, shared)


def run_tree(root: Any, arguments: Sequence[str] | None) -> int:
    """Run a command line, and return its exit code; errors in it are raised as `UsageProblem`."""
    try:
        code = root.main(arguments, prog_name="queen", standalone_mode=False)
    except Exception as error:
        if not isinstance(error, _usage_errors()):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            return 0
        raise UsageProblem(_usage_text(error)) from error
    return code if isinstance(code, int) else 0


class UsageProblem(Exception):
    """The command line itself is wrong."""


def _usage_errors() -> tuple[type[Exception], ...]:
    """Exceptions of the parser: typer has its own or uses those of click, so they are found by their base classes."""
    return tuple(
        kind for kind in typer.BadParameter.__mro__ if issubclass(kind, Exception) and kind.__module__ != "builtins"
    )


def _usage_text(error: Any) -> str:
    context = getattr(error, "ctx", None)
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    path = context.command_path if context is not None else "queen"
    return f"{text}; see {path} --help"
