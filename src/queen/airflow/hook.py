"""`QueenHook`: the client, as a connection of Airflow says."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

from airflow.sdk import BaseHook

from queen.airflow.connection import ServerConnection, read_connection
from queen.client.client import Queen
from queen.client.sync import QueenSync
from queen.errors import QueenError
from queen.wire.paths import path_of

DEFAULT_CONNECTION = "queen_default"


class QueenHook(BaseHook):
    """Connects to the server that an Airflow connection names.

    with QueenHook("queen_default").get_conn() as queen:
        queen.queue("orders").push([{"data": {"order": 1}}])
    """

    conn_name_attr = "queen_conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = "queen"
    hook_name = "Queen"

    def __init__(self, queen_conn_id: str = DEFAULT_CONNECTION, **options: Any) -> None:
        super().__init__(**options)
        self.queen_conn_id = queen_conn_id

    def read(self) -> ServerConnection:
        """The connection, checked. Raises `QueenError`."""
        return read_connection(self.get_connection(self.queen_conn_id))

    def get_conn(self) -> QueenSync:
        """A client; failed calls raise. Close it, or use it with `with`."""
        return QueenSync(**self.read().client_options())

    async def get_async_conn(self) -> Queen:
        """The asynchronous client, for triggers."""
        if hasattr(self, "aget_connection"):
            stored = await self.aget_connection(self.queen_conn_id)
        else:
            stored = await asyncio.to_thread(self.get_connection, self.queen_conn_id)
        return Queen(**read_connection(stored).client_options())

    def test_connection(self) -> tuple[bool, str]:
        """For the button of Airflow's page of connections."""
        try:
            with self.get_conn() as queen:
                # It requires the token, too, which the health probe of the server does not.
                queen.admin.list_queues(limit=1)
        except QueenError as error:
            return False, str(error)
        return True, f"connected to {', '.join(self.read().urls)}"

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        return {
            "hidden_fields": ["login", "schema"],
            "relabeling": {"password": "Token"},
            "placeholders": {
                "host": "queen.example.com (several: separated by commas)",
                "port": "6632",
                "extra": '{"tls": true}',
            },
        }


def depth_path(queue: str, group: str) -> str:
    """Where the server says how many messages a group has not consumed."""
    return f"{path_of('/api/v1/resources/queues', queue, 'depth')}?{urlencode({'group': group})}"
