"""Structs of the routes that copy everything to another PostgreSQL."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from queen.wire.fields import Answer, Body, Count


class MigrationTarget(Body, kw_only=True):
    """The PostgreSQL database that everything is copied to."""

    host: str = ""
    port: str | int = "5432"
    database: str = ""
    user: str = ""
    password: Annotated[str, Meta(description="Neither stored nor shown.")] = ""
    ssl: Annotated[bool, Meta(description="Whether TLS is required; it is used where the target has it.")] = False


class MigrationStart(MigrationTarget, kw_only=True):
    """The target, and what is left behind."""

    schema: Literal["queen"] = "queen"
    exclude_table_data: Annotated[
        list[str],
        Meta(description="Groups of tables that start empty: traces, metrics, history, dead_letters, audit."),
    ] = field(default_factory=list)


class ConnectionTest(Answer, kw_only=True):
    """Whether the target can be reached, and what it is."""

    success: bool
    message: str
    version: str | UnsetType = UNSET
    error: str | UnsetType = UNSET


class MigrationStarted(Answer):
    """The copy is being made."""

    status: Literal["started"]
    message: str


class MigrationStatus(Answer, kw_only=True):
    """How far the last copy is; outputs are the ends of what pg_dump and pg_restore wrote."""

    status: str
    current_step: str
    elapsed_seconds: float
    error: str | UnsetType = UNSET
    dump_output: str | UnsetType = UNSET
    restore_output: str | UnsetType = UNSET


class TableComparison(Answer):
    """The rows of one table here and in the target."""

    table: str
    source_count: Count
    target_count: Count
    match: bool


class MigrationValidation(Answer):
    """The rows of every table here and in the target."""

    success: bool
    all_match: bool
    tables: list[TableComparison]


class MigrationReset(Answer):
    """The last copy is forgotten."""

    status: Literal["idle"]
    message: str
