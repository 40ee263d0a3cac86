"""Airflow on Queen: a connection type, operators and a deferrable sensor; found through `apache_airflow_provider`."""

from __future__ import annotations

from typing import Any

from queen import __version__


def get_provider_info() -> dict[str, Any]:
    """The metadata that Airflow's provider manager reads. Imports nothing of Airflow."""
    integration = "Queen"

    def modules(*names: str) -> list[dict[str, Any]]:
        return [{"integration-name": integration, "python-modules": [f"queen.airflow.{name}" for name in names]}]

    return {
        "package-name": "queen-broker",
        "name": integration,
        "description": "Queues, consumer groups and data pipelines of Queen, a message queue on PostgreSQL.",
        "versions": [__version__],
        "integrations": [{"integration-name": integration, "tags": ["service"]}],
        "hooks": modules("hook"),
        "operators": modules("operators", "jobs"),
        "sensors": modules("lag"),
        "triggers": modules("lag"),
        "connection-types": [
            {
                "connection-type": "queen",
                "hook-class-name": "queen.airflow.hook.QueenHook",
                "hook-name": integration,
            }
        ],
    }
