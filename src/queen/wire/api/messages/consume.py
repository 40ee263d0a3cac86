"""Structs of the route that upgrades to a WebSocket."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from queen.wire.api.fields import Query


class ConsumeQuery(Query):
    """The token of a client that cannot set headers."""

    token: Annotated[str, Meta(description="A bearer token, for clients that cannot set headers.")] = ""
