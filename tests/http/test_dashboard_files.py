"""The files that are served: those of the sources, small, unchanging, and from nowhere else."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.api import Api

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "dashboard"
STATIC = ROOT / "src" / "queen" / "dashboard" / "static"
# As vite.config.ts has it.
_PARTS = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "public", "src")


def source_hash() -> str:
    """What the build says it was made of."""
    paths = [path for part in _PARTS for path in [SOURCES / part, *(SOURCES / part).rglob("*")] if path.is_file()]
    lines = sorted(
        f"{path.relative_to(SOURCES).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_committed_build_is_that_of_the_sources() -> None:
    built = json.loads((STATIC / "build.json").read_text())
    assert built["sources"] == source_hash(), "the dashboard's sources have changed: run `make dashboard`"


def test_compressed_files_hold_what_the_plain_ones_do() -> None:
    plain = [path for path in STATIC.rglob("*") if path.suffix in (".html", ".js", ".css", ".svg")]
    assert len(plain) >= 4
    for path in plain:
        assert gzip.decompress(path.with_name(path.name + ".gz").read_bytes()) == path.read_bytes()
        assert path.with_name(path.name + ".br").stat().st_size < path.stat().st_size


def test_no_file_names_another_host() -> None:
    """Fonts or scripts from elsewhere, a registry in the lock file. Names of XML vocabularies are no addresses."""
    names = re.compile(r"http://www\.w3\.org/|https://vuejs\.org/error-reference/")
    for path in [*STATIC.rglob("*.html"), *STATIC.rglob("*.js"), *STATIC.rglob("*.css")]:
        found = re.findall(r"https?://[^\s\"'`)]+", path.read_text())
        assert not [text for text in found if not names.match(text)], path
    assert "resolved" not in (SOURCES / "package-lock.json").read_text()


def without_words(described: Any) -> Any:
    """What types are made of: all but descriptions and examples."""
    if isinstance(described, list):
        return [without_words(one) for one in described]
    if not isinstance(described, dict):
        return described
    words = ("description", "summary", "example")
    kept = {name: value for name, value in described.items() if not (name in words and not isinstance(value, dict))}
    return {name: without_words(value) for name, value in kept.items() if name != "example"}


async def test_types_of_the_dashboard_are_those_of_the_api(api: Api) -> None:
    described = json.loads((SOURCES / "openapi.json").read_text())
    now = (await api.call("GET", "/openapi.json")).body
    for part in ("paths", "components"):
        assert without_words(described[part]) == without_words(now[part]), "the API has changed: run `make dashboard`"


async def test_every_call_of_the_dashboard_is_a_route(api: Api) -> None:
    """Types say so, too, yet only of the description that they were made from."""
    paths = (await api.call("GET", "/openapi.json")).body["paths"]
    calls = set()
    for source in [*SOURCES.glob("src/**/*.vue"), *SOURCES.glob("src/**/*.ts")]:
        if source.name == "schema.d.ts":
            continue
        text = source.read_text()
        calls |= {("get", path) for path in re.findall(r"\bget\(\s*'(/[^']+)'", text)}
        calls |= set(re.findall(r"\bcall\(\s*'(\w+)',\s*'(/[^']+)'", text))
    assert len(calls) > 40
    missing = sorted(f"{method} {path}" for method, path in calls if method not in paths.get(path, {}))
    assert not missing


async def fetch(api: Api, path: str, **headers: str) -> tuple[aiohttp.ClientResponse, bytes]:
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(api.url + path, headers=headers, skip_auto_headers=["Accept-Encoding"]) as response,
    ):
        return response, await response.read()


async def test_page_has_a_strict_policy_and_is_revalidated(api: Api) -> None:
    response, body = await fetch(api, "/")
    assert response.status == 200
    assert response.content_type == "text/html"
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["Cache-Control"] == "no-cache"
    again, nothing = await fetch(api, "/", **{"If-None-Match": response.headers["ETag"]})
    assert (again.status, nothing) == (304, b"")
    assert b"<script>" not in body
    assert b"<style" not in body


@pytest.mark.parametrize(("accepted", "encoding", "suffix"), [
    ("gzip, deflate, br", "br", ".br"), ("gzip", "gzip", ".gz"), ("identity", None, ""),
])  # fmt: skip
async def test_assets_are_compressed_ahead_and_kept_for_ever(
    api: Api, accepted: str, encoding: str | None, suffix: str
) -> None:
    (script,) = STATIC.glob("assets/*.js")
    response, body = await fetch(api, f"/assets/{script.name}", **{"Accept-Encoding": accepted})
    assert response.status == 200
    assert response.headers.get("Content-Encoding") == encoding
    assert body == script.with_name(script.name + suffix).read_bytes()
    assert response.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert response.headers["Vary"] == "Accept-Encoding"
    assert response.content_type == "text/javascript"


def test_all_files_together_are_at_most_350_kilobytes() -> None:
    sent = [*STATIC.rglob("*.br"), *STATIC.rglob("*.woff2")]
    assert 100_000 < sum(path.stat().st_size for path in sent) < 350_000


@pytest.mark.parametrize("path", ["/queues", "/queues/a%2Fb", "/streams", "/namespaces/a/topics/b", "/no/such/page"])
async def test_deep_links_are_the_page_for_browsers(api: Api, path: str) -> None:
    response, _ = await fetch(api, path, Accept="text/html,*/*")
    assert (response.status, response.content_type) == (200, "text/html")


@pytest.mark.parametrize("path", ["/api/v1/nothing", "/assets/gone-123.js", "/streams/v1/nothing", "/ws/v1/nothing"])
async def test_wrong_calls_are_no_pages(api: Api, path: str) -> None:
    response, body = await fetch(api, path, Accept="text/html,*/*")
    assert response.status == 404
    assert json.loads(body) == {"error": "Not Found"}


async def test_programs_get_errors_and_routes_stay_what_they_are(api: Api) -> None:
    response, _ = await fetch(api, "/queues", Accept="application/json")
    assert response.status == 404
    # Short paths of topics are calls, and none of the dashboard's.
    response, body = await fetch(api, "/topics", Accept="text/html")
    assert (response.status, b"namespace" in body) == (400, True)
    async with aiohttp.ClientSession() as session, session.post(api.url + "/queues") as refused:
        assert refused.status == 404
