"""The description of the API: complete, true, and of use to people and programs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import msgspec
import pytest

from queen.http.api.table import all_routes
from queen.http.routing.document import TAGS, build_document
from queen.http.server.message import Access, Response, Route
from tests.support.api import Api

ROUTES_PAGE = Path(__file__).parents[3] / "docs" / "http-api.md"


@pytest.fixture
async def document(api: Api) -> dict[str, Any]:
    answer = await api.call("GET", "/openapi.json")
    assert answer.status == 200
    found: dict[str, Any] = answer.body
    return found


def key(route: Route) -> str:
    return f"{route.method} {route.pattern}"


async def test_every_declared_route_is_served_and_no_other(api: Api) -> None:
    assert api.worker is not None
    served = [key(route) for route in api.worker.http.router.routes]
    assert sorted(served) == sorted(operation.key for operation in all_routes())
    assert len(served) == len(all_routes())


async def test_every_route_is_in_the_document(api: Api, document: dict[str, Any]) -> None:
    assert api.worker is not None
    in_document = {f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item}
    assert in_document == {key(route) for route in api.worker.http.router.routes}


async def test_a_route_without_a_declaration_is_in_the_document_all_the_same(api: Api) -> None:
    assert api.worker is not None
    router = api.worker.http.router
    router.add("PUT", "/api/v1/things/{thing}", lambda request: Response(204), Access.ADMIN)
    made = build_document(router.routes)["paths"]["/api/v1/things/{thing}"]["put"]
    assert (made["x-access"], [one["name"] for one in made["parameters"]]) == ("admin", ["thing"])


def test_the_list_of_routes_in_the_docs_is_the_table_of_routes() -> None:
    section = ROUTES_PAGE.read_text().partition("## Routes\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([A-Z]+ /\S*)` \| [^|]+ \| (.+) \|$", section, flags=re.MULTILINE)
    assert listed == [(operation.key, operation.summary) for operation in all_routes()]


async def test_operations_have_names_access_tags_and_successes(api: Api, document: dict[str, Any]) -> None:
    assert api.worker is not None
    access = {key(route): route.access for route in api.worker.http.router.routes}
    ids: list[str] = []
    for path, item in document["paths"].items():
        for method, operation in item.items():
            ids.append(operation["operationId"])
            level = access[f"{method.upper()} {path}"]
            assert operation["x-access"] == level.name.lower().replace("_", "-")
            assert operation["security"] == ([] if level is Access.PUBLIC else [{}, {"bearer": []}])
            assert operation["tags"][0] in TAGS
            assert any(status.startswith(("101", "2")) for status in operation["responses"])
            assert set(re.findall(r"\{(\w+)\}", path)) == {
                one["name"] for one in operation["parameters"] if one["in"] == "path"
            }
    assert len(ids) == len(set(ids))


async def test_examples_are_what_the_schemas_allow(document: dict[str, Any]) -> None:
    checked = 0
    for content in _contents(document["paths"]):
        if "example" in content:
            schema = {**content["schema"], "components": document["components"]}
            jsonschema_rs.validator_for(schema).validate(content["example"])
            checked += 1
    assert checked > 20


async def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    references = set(re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', msgspec.json.encode(document).decode()))
    assert references <= document["components"]["schemas"].keys()
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.validator_for({**schema, "components": document["components"]})


async def test_the_page_needs_nothing_from_elsewhere(api: Api) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{api.url}/docs") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        page = await answer.text()
    assert 'fetch("openapi.json")' in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)
    assert '<html lang="en">' in page


def _contents(node: Any) -> list[dict[str, Any]]:
    """Every media type object below a node."""
    if isinstance(node, list):
        return [content for one in node for content in _contents(one)]
    if not isinstance(node, dict):
        return []
    own = list(node["content"].values()) if isinstance(node.get("content"), dict) else []
    return own + [content for key, value in node.items() if key != "content" for content in _contents(value)]
