"""`queen maintenance`, `metrics` and `analytics`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from queen.cli.common.arguments import Since, Until, Yes
from queen.cli.common.exits import UserError
from queen.cli.common.session import Session
from queen.cli.common.times import optional_time
from queen.cli.common.tree import command, group

maintenance_app = group("Maintenance modes of pushes and pops.")
metrics_app = group("Print the server's metrics.")
analytics_app = group("Show metrics over time.")

Pop = Annotated[bool, typer.Option("--pop", help="Pop maintenance: pops return no messages.")]


@command(maintenance_app, "get", aliases=("status",), example="queen maintenance get")
def get(ctx: typer.Context, pop: Pop = False) -> None:
    """Show whether maintenance is on, and what is buffered."""
    session = Session.of(ctx)
    session.out.value(session.admin.get_pop_maintenance_mode() if pop else session.admin.get_maintenance_mode())


@command(maintenance_app, "on", example="queen maintenance on --yes\nqueen maintenance on --pop --yes")
def on(ctx: typer.Context, pop: Pop = False, yes: Yes = False) -> None:
    """Buffer pushes on disk, or answer pops empty, until it is switched off."""
    session = Session.of(ctx)
    if not yes and not session.out.terminal:
        raise UserError("maintenance affects every producer or consumer; pass --yes to switch it on")
    if not yes and not typer.confirm("This affects every producer or consumer. Continue?", err=True):
        raise UserError("nothing was changed")
    _switch(session, pop, True)


@command(maintenance_app, "off", example="queen maintenance off\nqueen maintenance off --pop")
def off(ctx: typer.Context, pop: Pop = False) -> None:
    """Store pushes again, or serve pops again."""
    _switch(Session.of(ctx), pop, False)


def _switch(session: Session, pop: bool, enabled: bool) -> None:
    word = "on" if enabled else "off"
    if pop:
        session.out.done(f"pop-maintenance {word}", session.admin.set_pop_maintenance_mode(enabled))
    else:
        session.out.done(f"maintenance {word}", session.admin.set_maintenance_mode(enabled))


@command(metrics_app, "metrics", example="queen metrics\nqueen metrics --prometheus | grep queen_queue")
def metrics(
    ctx: typer.Context,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="In the format of Prometheus.")] = False,
) -> None:
    """Print the server's metrics."""
    session = Session.of(ctx)
    if prometheus:
        session.out.text(str(session.admin.prometheus_metrics()).rstrip("\n"))
    else:
        session.out.value(session.admin.metrics())


def _analytics(name: str, call: str, summary: str, ranged: bool = True) -> None:
    def show(
        ctx: typer.Context,
        queue: Annotated[str | None, typer.Option("--queue", help="Only this queue.")] = None,
        since: Since = None,
        until: Until = None,
    ) -> None:
        session = Session.of(ctx)
        asked: dict[str, Any] = {"queue": queue, "from": optional_time(since), "to": optional_time(until)}
        session.out.value(getattr(session.admin, call)(**(asked if ranged else {})))

    show.__doc__ = summary
    example = f"queen analytics {name}" + (" --from '6h ago'" if ranged else "")
    command(analytics_app, name, example=example)(show)


_analytics("overview", "get_analytics", "Messages stored over time.")
_analytics("status", "get_status", "Throughput, leases, errors and workers over time.")
_analytics("queue-lag", "get_queue_lag", "How long messages waited before they were popped.")
_analytics("queue-ops", "get_queue_operations", "What was done with each queue.")
_analytics("queue-parked", "get_parked_consumers", "How many pops waited for messages.")
_analytics("retention", "get_retention", "What retention, expiry and eviction removed.")
_analytics("system", "get_system_metrics", "CPU, memory and connections of the servers.")
_analytics("worker", "get_worker_metrics", "What the workers did.")
_analytics("postgres", "get_postgres_stats", "Statistics of PostgreSQL.", ranged=False)
