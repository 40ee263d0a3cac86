"""Lead enrichment: who visits, what company that is, and how interested each company is, every five minutes.

Run it with: queen pipeline run leads.py
"""

from typing import Any

from queen.pipelines import Pipeline

# What a CRM or a data provider would have.
COMPANIES = {
    "acme.example": {"company": "Acme", "size": 5000},
    "globex.example": {"company": "Globex", "size": 800},
    "initech.example": {"company": "Initech", "size": 120},
    "hooli.example": {"company": "Hooli", "size": 20000},
}
POINTS = {"visit": 1, "download": 5, "pricing": 8, "demo": 20}

leads = Pipeline("lead-enrichment", dead_letters={"queue": "lead-errors"})

# Events carry the time they happened at, and may come two minutes late.
leads.source(
    "events",
    queue="lead-events",
    schema="email string NOT NULL, kind string NOT NULL, at timestamp NOT NULL",
    event_time="at",
    lateness="2 minutes",
)

# The same click sent twice is one click.
leads.dedup("clicks", "events", ["email", "kind", "at"])


@leads.each(schema="company string, size int, kind string, points int", of="clicks")
def enriched(event: dict[str, Any]) -> dict[str, Any] | None:
    """Called with each event; what it raises makes the event a dead letter, and the others go on."""
    if event["kind"] == "clock":
        return None  # It only advances the watermark, so that windows can close.
    company = COMPANIES[event["email"].partition("@")[2]]
    return {**company, "kind": event["kind"], "points": POINTS[event["kind"]]}


leads.window(
    "scores",
    "enriched",
    tumbling="5 minutes",
    by=["company"],
    aggregate={"score": "sum(points)", "events": "count(*)", "demos": "count_if(kind = 'demo')"},
)

leads.sql("hot", "SELECT company, score, demos, window_start FROM scores WHERE demos > 0 OR score >= 100")

leads.sink("sales", "hot", queue="hot-leads", partition="company")
leads.sink("archive", "scores", parquet="lead-scores")
