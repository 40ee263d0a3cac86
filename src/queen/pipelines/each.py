"""Calls a function with each record, in Spark's workers; what it raises stays with the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import ArrayType

ERROR: Final = "_error"
_LONGEST_ERROR: Final = 2000
# Arrow's own errors are kinds of these.
_CANNOT_HOLD: Final = (TypeError, ValueError, OverflowError)

Record = dict[str, Any]


def calling(
    function: Callable[[Record], Any], fields: Sequence[str], results: ArrayType
) -> Callable[[pyarrow.Array], pyarrow.Array]:
    """A function of an array of records: for each the list of what was made of it, or one result with an error."""
    names = frozenset(fields)

    def call_each(records: pyarrow.Array) -> pyarrow.Array:
        kind = to_arrow_type(results, timezone="UTC")
        made = [_made(function, names, record) for record in records.to_pylist()]
        try:
            return pyarrow.array(made, type=kind)
        except _CANNOT_HOLD:
            # One of them has a value that its column cannot hold; the others are not to suffer from it.
            return pyarrow.array([_holdable(one, kind) for one in made], type=kind)

    return call_each


def _made(function: Callable[[Record], Any], names: frozenset[str], record: Record) -> list[Record]:
    try:
        results = _listed(function(record))
        unknown = {key for result in results for key in result} - names
        if unknown:
            raise ValueError(f"the schema has no field {', '.join(sorted(map(repr, unknown)))}")
    except Exception as error:
        return _failed(error)
    return results


def _listed(given: Any) -> list[Record]:
    if given is None:
        return []
    results = list(given) if isinstance(given, list | tuple) else [given]
    for result in results:
        if not isinstance(result, dict):
            raise TypeError(f"the function must return a dict, a list of them or None, not {type(result).__name__}")
    return results


def _holdable(results: list[Record], kind: pyarrow.DataType) -> list[Record]:
    try:
        pyarrow.array([results], type=kind)
    except _CANNOT_HOLD as error:
        return _failed(error)
    return results


def _failed(error: Exception) -> list[Record]:
    return [{ERROR: f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}]
