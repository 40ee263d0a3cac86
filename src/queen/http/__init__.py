"""The HTTP shell: connections, requests, routes. It knows nothing of what the routes mean."""

from queen.http.message import HttpError, Request, Response, error_response, json_response
from queen.http.protocol import Gate, HttpProtocol, Shell
from queen.http.router import Access, Handler, Route, Router, UpgradeHandler

__all__ = [
    "Access",
    "Gate",
    "Handler",
    "HttpError",
    "HttpProtocol",
    "Request",
    "Response",
    "Route",
    "Router",
    "Shell",
    "UpgradeHandler",
    "error_response",
    "json_response",
]
