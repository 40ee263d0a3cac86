"""The settings as a table: for the terminal, and for docs/settings.md."""

from rich.table import Table

from queen.settings import Settings, describe_settings

_HEAD = """\
# Settings

Every setting is an environment variable. `queen serve` also takes the most used ones as options, and an
option wins over its variable. `queen settings` shows what is in force.

- The variable `X` may also be given as `X_FILE`, the path of a file that holds the value; use it for secrets.
- An empty variable counts as unset. It makes a true-or-false setting false.
- A value that cannot be used stops the start, with a message that names the variable and what was expected.
- Without `PG_HOST` and `DATABASE_URLS`, Queen runs on an embedded PostgreSQL below `QUEEN_DATA_DIR`.

| Variable | Value | Default | Unit | Meaning |
|---|---|---|---|---|
"""

_FOOT = "\nThis page is made from the declarations in `src/queen/settings.py` by `make docs`.\n"


def settings_page() -> str:
    """The text of docs/settings.md."""
    rows = (
        f"| `{item.variable}` | {item.kind.name} | {item.default_text} | {item.unit} | {item.meaning} |\n"
        for item in describe_settings()
    )
    return _HEAD + "".join(rows) + _FOOT


def settings_table(settings: Settings) -> Table:
    """Every setting with the value it has now."""
    table = Table("variable", "value", "unit", "meaning", show_edge=False, pad_edge=False)
    for item in describe_settings():
        table.add_row(item.variable, item.show(settings), item.unit, item.meaning.replace("`", ""))
    return table
