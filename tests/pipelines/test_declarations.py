"""Pipelines are declared in YAML or Python, and what is wrong with them is said with its line, without Spark."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from queen.pipelines.checks import warnings
from queen.pipelines.declaration import Dedup, Frame, Join, SinkKind, Sql, Window, WindowKind, tables_of
from queen.pipelines.errors import DeclarationError, PipelineError
from queen.pipelines.example import leads
from queen.pipelines.loading import load
from queen.wire.times import duration_ms

_YAML = """\
pipeline: leads
trigger: 5 seconds
dead_letters: {queue: lead-errors}
sources:
  events:
    queue: lead-events
    schema: lead string, points int, at timestamp
    event_time: at
    lateness: 30 seconds
    expect: {some: points > 0}
steps:
  hot:
    sql: SELECT * FROM events WHERE points > 10
  once:
    from: hot
    dedup: [lead]
  scores:
    from: once
    sliding: 10 minutes
    every: 1 minute
    by: lead
    aggregate: {score: sum(points)}
sinks:
  out: {from: scores, queue: lead-scores, partition: lead}
  table: {from: scores, postgres: public.scores, key: [lead, window_start]}
"""
_PYTHON = """\
from queen.pipelines import Pipeline

leads = Pipeline("leads", trigger="5 seconds", dead_letters={"queue": "lead-errors"})
leads.source("events", queue="lead-events", schema="lead string, points int, at timestamp",
             event_time="at", lateness="30 seconds", expect={"some": "points > 0"})
leads.sql("hot", "SELECT * FROM events WHERE points > 10")
leads.dedup("once", "hot", ["lead"])
leads.window("scores", "once", sliding="10 minutes", every="1 minute", by=["lead"], aggregate={"score": "sum(points)"})
leads.sink("out", "scores", queue="lead-scores", partition="lead")
leads.sink("table", "scores", postgres="public.scores", key=["lead", "window_start"])
"""


def test_yaml_and_python_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "leads.yaml").write_text(_YAML)
    (tmp_path / "leads.py").write_text(_PYTHON)
    one, other = load(tmp_path / "leads.yaml"), load(tmp_path / "leads.py")
    assert one.name == other.name == "leads"
    assert one.trigger == other.trigger == "5 seconds"
    assert one.dead_letters is not None and other.dead_letters is not None
    assert str(one.dead_letters) == str(other.dead_letters) == "queue lead-errors"
    assert [(node.name, node.event_time, node.expect) for node in one.nodes] == [
        (node.name, node.event_time, node.expect) for node in other.nodes
    ]
    assert [(step.action, step.inputs) for step in one.steps] == [(step.action, step.inputs) for step in other.steps]
    assert [(sink.kind, sink.target, sink.options) for sink in one.sinks] == [
        (sink.kind, sink.target, sink.options) for sink in other.sinks
    ]
    hot, once, scores = one.steps
    assert hot.action == Sql("SELECT * FROM events WHERE points > 10")
    assert once.action == Dedup(("lead",))
    assert scores.action == Window(WindowKind.SLIDING, "10 minutes", {"score": "sum(points)"}, "1 minute", ("lead",))
    assert one.sinks[1].kind is SinkKind.POSTGRES
    assert one.sinks[1].options == {"key": "lead,window_start"}


def test_the_pipelines_of_the_documentation_are_good(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipelines.md").read_text()
    (python,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "leads.py").write_text(python)
    (tmp_path / "leads.yaml").write_text(yaml)
    one, other = load(tmp_path / "leads.py"), load(tmp_path / "leads.yaml")
    assert [(sink.name, str(sink), sink.options) for sink in one.sinks] == [
        (sink.name, str(sink), sink.options) for sink in other.sinks
    ]
    assert one.steps[1].action == other.steps[1].action
    example = Path(leads.__file__)
    assert [sink.name for sink in load(example).sinks] == ["sales", "archive"]


def test_things_know_their_lines(tmp_path: Path) -> None:
    (tmp_path / "leads.yaml").write_text(_YAML)
    (tmp_path / "leads.py").write_text(_PYTHON)
    yaml, python = load(tmp_path / "leads.yaml"), load(tmp_path / "leads.py")
    assert [node.where.line for node in yaml.nodes] == [5, 12, 14, 17]
    assert [node.where.line for node in python.nodes] == [4, 6, 7, 8]
    assert [sink.where.line for sink in yaml.sinks] == [24, 25]


def test_functions_are_steps_and_their_parameters_name_their_inputs(tmp_path: Path) -> None:
    path = tmp_path / "joined.py"
    path.write_text(
        textwrap.dedent("""\
        from queen.pipelines import Pipeline

        p = Pipeline("joined")
        for name in ("clicks", "views"):
            p.source(name, rate=1, event_time="timestamp", lateness="1 minute")

        @p.step
        def both(clicks, views, spark):
            return clicks.union(views)

        p.join("matched", "clicks", "views", on="clicks.value = views.value")
        p.sink("shown", "both", console=True)
        p.sink("also", "matched", console=True)
        """)
    )
    both, matched = load(path).steps
    assert isinstance(both.action, Frame)
    assert both.inputs == ("clicks", "views")
    assert both.where.line == 7
    assert matched.action == Join("clicks.value = views.value")


def test_yaml_takes_functions_from_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "enrich.py").write_text("def doubled(rows):\n    return rows\n")
    path = tmp_path / "p.yaml"
    path.write_text(
        "sources: {a: {rate: 1}}\n"
        "steps: {b: {from: a, frame: 'enrich.py:doubled'}}\n"
        "sinks: {c: {from: b, console: true}}\n"
    )
    declaration = load(path)
    assert declaration.name == "p"
    assert isinstance(declaration.steps[0].action, Frame)


_TIMED = "event_time: timestamp, lateness: 1 minute"
_BAD_YAML = {
    "pipeline: p\nsources: {a: {rate: 1}}": ["p.yaml:1: a pipeline needs a sink"],
    "sources: [a]": ["p.yaml:1: 'sources' must map names to declarations"],
    "sources: {a: {rate: 1}\n": ["p.yaml:2: not valid YAML"],
    "- a": ["a pipeline must have sources, steps and sinks"],
    "sources:\n  a: {rate: 1}\n  a: {rate: 2}": ["p.yaml:3: 'a' is given twice"],
    "sources:\n  a: {queu: x}": [
        "p.yaml:2: source 'a' needs one of queue, queue_pattern, files, rate; did you mean 'queue'?"
    ],
    "sources:\n  a:\n    rate: 1\n    shema: x int": ["p.yaml:4: source 'a': unknown 'shema'; did you mean 'schema'?"],
    "sources:\n  a: {queue: x, rate: 1}": ["p.yaml:2: source 'a' must have only one of queue and rate"],
    "sources:\n  a: {rate: 0}": ["p.yaml:2: 'rate' must be a whole number above 0, not '0'"],
    "sources:\n  a:\n    rate: 1\n    lateness: soon": [
        "p.yaml:4: source 'a': lateness: 'soon' is not a length of time"
    ],
    "sources:\n  a: {rate: 1, event_time: timestamp}": ["'event_time' needs 'lateness'"],
    "trigger: often\nsources: {a: {rate: 1}}": ["p.yaml:1: trigger: 'often' is neither 'once' nor a length of time"],
    "colour: red": ["p.yaml:1: unknown section 'colour'"],
    "sources: {a: {rate: 1}}\nsinks:\n  s: {from: b, console: true}": [
        "p.yaml:3: sink 's' takes rows from 'b', which does not exist; there are a"
    ],
    "sources: {events: {rate: 1}}\nsteps:\n  x: {sql: SELECT * FROM event}\nsinks: {s: {from: x, console: true}}": [
        "p.yaml:3: step 'x' takes rows from 'event', which does not exist; did you mean 'events'?"
    ],
    "sources: {a: {rate: 1}}\nsteps:\n  x: {sql: SELECT * FROM y}\n  y: {sql: SELECT * FROM x}\n"
    "sinks: {s: {from: x, console: true}}": ["p.yaml:3: step 'x' depends on itself"],
    "sources: {a: {rate: 1}}\nsteps:\n  w: {from: a, tumbling: 1 minute, aggregate: {n: count(*)}}\n"
    "sinks: {s: {from: w, console: true}}": ["p.yaml:3: step 'w' has a window, but 'a' has no event_time"],
    f"sources: {{a: {{rate: 1, {_TIMED}}}}}\nsteps:\n  w: {{from: a, sliding: 1 minute, aggregate: {{n: count(*)}}}}\n"
    "sinks: {s: {from: w, console: true}}": ["p.yaml:3: step 'w' needs 'every'"],
    f"sources: {{a: {{rate: 1, {_TIMED}}}}}\nsteps:\n  w: {{from: a, tumbling: 1 minute}}\n": ["needs 'aggregate'"],
    "sources: {a: {rate: 1}}\nsteps:\n  j: {join: [a, a], on: x}\n": ["p.yaml:3: step 'j' joins two different inputs"],
    "sources: {a: {rate: 1}}\nsteps:\n  f: {from: a, frame: nowhere.py:f}\n": ["p.yaml:3: there is no file"],
    "sources: {a: {rate: 1}}\nsinks:\n  s: {from: a, topic: work}": [
        "p.yaml:3: sink 's': a topic is given as namespace"
    ],
    "sources: {a: {files: x}}\nsinks: {s: {from: a, console: true}}": ["p.yaml:1: source 'a' needs 'schema'"],
    "pipeline: ../up\nsources: {a: {rate: 1}}\nsinks: {s: {from: a, console: true}}": ["p.yaml:1: the name of"],
    "sources: {a-b: {rate: 1}}\nsinks: {s: {from: a-b, console: true}}": ["a name must be letters, digits and '_'"],
    "sources:\n  a: {queue: x, start: sometime}": ["p.yaml:2: source 'a': start: unknown 'sometime'"],
    "sources: {a: {rate: 1}}\nsteps:\n  d: {from: a, dedup: []}": ["p.yaml:3: step 'd' needs the columns"],
    'sources: {a: {rate: 1}}\nsinks:\n  s: {from: a, queue: "x\\0"}': [
        "p.yaml:3: the name of a queue must not contain control characters (at sink 's')"
    ],
    "sources: {a: {rate: 1}}\nsinks:\n  s: {from: a, topic: /work}": [
        "p.yaml:3: the name of a topic must not be empty"
    ],
    "sources: {a: {rate: 1}}\n? [1, 2]\n: 3": ["p.yaml:2: a key must be text"],
    # All problems are reported together.
    "sources:\n  a: {queu: x}\n  b: {rate: x}\nsinks:\n  s: {console: true}": ["p.yaml:2:", "p.yaml:3:", "p.yaml:5:"],
}


@pytest.mark.parametrize("text", _BAD_YAML)
def test_bad_yaml_is_refused_with_what_and_where(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(DeclarationError) as refused:
        load(path)
    for expected in _BAD_YAML[text]:
        assert expected in str(refused.value)


_BAD_PYTHON = {
    "x = 1\n": "p.py:1: the file declares no pipeline",
    "x = (\n": "p.py:1: not valid Python",
    "import sys\nsys.exit()\n": "p.py:2: SystemExit",
    "\nimport nowhere_to_be_found\n": "p.py:2: ModuleNotFoundError",
    "from queen.pipelines import Pipeline\np = Pipeline('p')\np.source('a', rate='x')\n": "p.py:3: 'rate' must be",
    "from queen.pipelines import Pipeline\np = Pipeline('p')\nq = Pipeline('q')\n": "declares 2 pipelines",
    "from queen.pipelines import Pipeline\np = Pipeline('p')\n@p.step\ndef f(): pass\n": "p.py:3: step 'f' needs",
}


@pytest.mark.parametrize("text", _BAD_PYTHON)
def test_bad_python_is_refused_with_what_and_where(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.py"
    path.write_text(text)
    with pytest.raises(DeclarationError) as refused:
        load(path)
    assert _BAD_PYTHON[text] in str(refused.value)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        """\
sources:
  events: {queue: events, schema: n int, fail_on_data_loss: perhaps}
  broken: {qeue: events}
steps:
  many: {from: events, tumbling: 1 minute, aggregate: {n: count(*)}}
  from_broken: {from: broken, tumbling: 1 minute, aggregate: {n: count(*)}}
sinks:
  out: {from: mnay, queue: out}
  other: {from: broken, queue: out, partitoin: n}
"""
    )
    with pytest.raises(DeclarationError) as refused:
        load(file)
    assert [(problem.where.line, problem.text[:36]) for problem in refused.value.problems] == [
        (2, "'fail_on_data_loss' must be true or "),
        (3, "source 'broken' needs one of queue, "),
        (5, "step 'many' has a window, but 'event"),
        (8, "sink 'out' takes rows from 'mnay', w"),
        (9, "sink 'other': unknown 'partitoin'; d"),
    ]
    assert "did you mean 'many'?" in str(refused.value)


def test_what_is_wrong_with_a_sink_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("sources: {a: {rate: 1}}\nsinks:\n  s: {console: true}\n  t: {from: [a], console: true}\n")
    with pytest.raises(DeclarationError) as refused:
        load(file)
    assert [problem.text[:26] for problem in refused.value.problems] == [
        "sink 's' needs 'from', the",
        "'from' must be text, not [",
    ]


def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="there is no file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "p.toml").write_text("")
    with pytest.raises(PipelineError, match="Python file"):
        load(tmp_path / "p.toml")


def test_rows_that_are_not_used_are_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "sources: {a: {rate: 1}, b: {rate: 1}}\nsteps: {c: {from: a, dedup: [value]}}\n"
        "sinks: {s: {from: c, console: true}}\n"
    )
    notes = [note.text for note in warnings(load(path))]
    assert "the rows of 'b' are not used" in notes
    assert any("keeps every value forever" in note for note in notes)


@pytest.mark.parametrize(
    ("query", "tables"),
    [
        ("SELECT * FROM a JOIN b ON a.x = b.x", ("a", "b")),
        ("WITH c AS (SELECT * FROM a) SELECT * FROM c", ("a",)),
        ("SELECT 'from nowhere' FROM `a` -- from b", ("a",)),
        ("SELECT extract(hour FROM at) FROM a", ("a",)),
        ("SELECT * FROM range(5)", ()),
    ],
)
def test_the_inputs_of_a_query_are_found(query: str, tables: tuple[str, ...]) -> None:
    assert tables_of(query) == tables


@pytest.mark.parametrize(
    ("text", "length"),
    [("30 seconds", 30_000), ("5m", 300_000), ("1 hour 30 min", 5_400_000), ("", None), ("1", None), ("2 moons", None)],
)
def test_lengths_of_time_are_read(text: str, length: int | None) -> None:
    assert duration_ms(text) == length
