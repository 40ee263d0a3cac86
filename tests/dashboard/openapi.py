"""Prints the server's description of its API, of which the dashboard's types are made: `make dashboard`."""

from __future__ import annotations

import sys
import tempfile
import urllib.request
from pathlib import Path

from tests.acceptance.served import served

if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as place,
        served(Path(place)) as server,
        urllib.request.urlopen(f"{server.url}/openapi.json") as answer,
    ):
        sys.stdout.buffer.write(answer.read())
