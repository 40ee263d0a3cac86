"""Chains of stream operators, and their fingerprints as the SDK of this interpreter makes them.

python -m tests.acceptance.stream_chains < chains.json > hashes.json
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from queen.streams import Stream

FUNCTION = "<function>"

_SECONDS = [1, 5, 60, 0.5, 1.5, 10.0, 3600, 1e-2, 86_400]
_SLIDES = [(60, 10), (1, 1), (1.5, 0.5), (10.0, 5), (3600, 60)]
_EVERY = ["second", "minute", "hour", "day", "week"]
_FIELDS = ["count", "sum", "min", "max", "avg", "weight", "größe", 'quo"te', "emoji😀"]
_QUEUES = ["out", "billing.out", "größe", 'a"b\\c', "emoji😀", "tab\tbed"]
_INITIALS: list[Any] = [None, 0, 1.5, "", [], {}, False, {"n": [1]}]


def random_chain(chance: random.Random) -> list[list[Any]]:
    """Steps of a chain that may be run: the name of each, and its arguments."""
    chain: list[list[Any]] = _stateless(chance)
    if chance.random() < 0.5:
        chain.append(["key_by", [FUNCTION], {}])
    shape = chance.choice(["plain", "gate", "window", "window", "window"])
    if shape == "gate":
        chain.append(["gate", [FUNCTION], {}])
        chain += _stateless(chance)
    elif shape == "window":
        chain.append(_window(chance))
        chain.append(_reducer(chance))
        chain += _stateless(chance)
    end = chance.choice(["to", "to", "foreach", ""])
    if end == "to":
        chain.append(["to", [{"queueName": chance.choice(_QUEUES)}], {}])
    elif end == "foreach":
        chain.append(["foreach", [FUNCTION], {}])
    return chain


def hash_of(chain: list[list[Any]]) -> str:
    """The fingerprint of a chain."""
    stream: Any = Stream.from_({"queueName": "in"})
    for name, arguments, options in chain:
        stream = getattr(stream, name)(*_with_functions(arguments), **_with_functions(options))
    # This project's streams say it, those of the published client say it when they are compiled.
    return str(stream.config_hash if hasattr(stream, "config_hash") else stream._compile().config_hash)


def _stateless(chance: random.Random) -> list[list[Any]]:
    return [[chance.choice(["map", "filter", "flat_map"]), [FUNCTION], {}] for _ in range(chance.randint(0, 3))]


def _window(chance: random.Random) -> list[Any]:
    kind = chance.choice(["tumbling", "sliding", "session", "cron"])
    shape: dict[str, Any] = {}
    if kind == "tumbling":
        shape["seconds"] = chance.choice(_SECONDS)
    elif kind == "sliding":
        shape["size"], shape["slide"] = chance.choice(_SLIDES)
    elif kind == "session":
        shape["gap"] = chance.choice(_SECONDS)
    else:
        shape["every"] = chance.choice(_EVERY)
    options: dict[str, Any] = {
        "grace_period": chance.choice([0, 1, 2.5, 0.0]),
        "idle_flush_ms": chance.choice([0, 100, 250.7, -5]),
        "event_time": chance.choice([FUNCTION, None]),
        "allowed_lateness": chance.choice([0, 5, 0.25]),
        "on_late": chance.choice(["drop", "include", None]),
    }
    chosen = {name: value for name, value in options.items() if chance.random() < 0.5}
    if chance.random() < 0.3:
        chosen = {_camel(name): value for name, value in chosen.items()}
    return [f"window_{kind}", [], shape | chosen]


def _reducer(chance: random.Random) -> list[Any]:
    if chance.random() < 0.5:
        return ["reduce", [FUNCTION, chance.choice(_INITIALS)], {}]
    fields = chance.sample(_FIELDS, chance.randint(1, len(_FIELDS)))
    return ["aggregate", [dict.fromkeys(fields, FUNCTION)], {}]


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


def _with_functions(value: Any) -> Any:
    if value == FUNCTION:
        return _function
    if isinstance(value, dict):
        return {key: _with_functions(one) for key, one in value.items()}
    return [_with_functions(one) for one in value] if isinstance(value, list) else value


def _function(*arguments: Any) -> Any:
    return arguments


if __name__ == "__main__":
    json.dump([hash_of(chain) for chain in json.load(sys.stdin)], sys.stdout)
