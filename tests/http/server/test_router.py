"""The table of routes: which handler a method and a target lead to, and with which parameters."""

import msgspec
import pytest

from queen.http.server.message import Access, HttpError, Request, Response
from queen.http.server.router import CACHED_TARGETS, Match, Router


def handler(request: Request) -> Response:
    return Response(200)


def router_with(*routes: str) -> Router:
    router = Router()
    for route in routes:
        method, pattern = route.split()
        router.add(method, pattern, handler, Access.READ_ONLY)
    return router


def request_for(match: Match) -> Request:
    return Request(match.method, match.path, match.params, match.query, {}, b"", route=match.route)


def answer(match: Match) -> Response:
    response = match.handler(request_for(match))
    assert isinstance(response, Response)
    return response


def test_parameters_are_taken_from_their_segments() -> None:
    router = router_with("GET /api/v1/pop/queue/{queue}/partition/{partition}")
    match = router.match(b"GET", b"/api/v1/pop/queue/orders/partition/eu?batch=10")
    assert match.params == {"queue": "orders", "partition": "eu"}
    assert match.query == {"batch": "10"}
    assert match.path == "/api/v1/pop/queue/orders/partition/eu"
    assert match.route is router.routes[0]


def test_a_static_segment_beats_a_parameter() -> None:
    router = router_with("GET /groups/{group}", "GET /groups/lagging", "GET /groups/{group}/queues/{queue}")
    assert _pattern(router, b"/groups/lagging") == "/groups/lagging"
    assert _pattern(router, b"/groups/other") == "/groups/{group}"


def test_a_static_segment_that_leads_nowhere_gives_way_to_a_parameter() -> None:
    router = router_with("GET /groups/{group}/queues", "GET /groups/lagging")
    match = router.match(b"GET", b"/groups/lagging/queues")
    assert match.params == {"group": "lagging"}


def test_a_static_segment_without_the_method_gives_way_to_a_parameter_that_has_it() -> None:
    router = router_with("GET /groups/lagging", "DELETE /groups/{group}")
    match = router.match(b"DELETE", b"/groups/lagging")
    assert match.params == {"group": "lagging"}


def test_an_encoded_slash_stays_inside_its_segment() -> None:
    router = router_with("GET /queues/{queue}", "GET /queues/{queue}/{partition}")
    assert router.match(b"GET", b"/queues/a%2Fb").params == {"queue": "a/b"}
    assert router.match(b"GET", b"/queues/a%2fb/c").params == {"queue": "a/b", "partition": "c"}


@pytest.mark.parametrize(
    ("segment", "name"),
    [
        (b"a%20b", "a b"),
        (b"a+b", "a+b"),
        (b"caf%C3%A9", "café"),
        (b"%E6%B3%A8%E6%96%87", "注文"),
        (b"100%", "100%"),
        (b"%zz", "%zz"),
        (b"..", ".."),
    ],
)
def test_segments_are_percent_decoded(segment: bytes, name: str) -> None:
    router = router_with("GET /queues/{queue}")
    assert router.match(b"GET", b"/queues/" + segment).params == {"queue": name}


def test_static_segments_are_compared_decoded() -> None:
    assert _pattern(router_with("GET /health"), b"/%68ealth") == "/health"


def test_a_segment_that_is_not_utf8_is_a_bad_request() -> None:
    response = answer(router_with("GET /queues/{queue}").match(b"GET", b"/queues/%ff"))
    assert response.status == 400
    assert b"'%ff' is not valid UTF-8" in response.body


def test_a_query_that_is_not_utf8_is_a_bad_request() -> None:
    response = answer(router_with("GET /queues").match(b"GET", b"/queues?name=%ff"))
    assert response.status == 400


def test_a_trailing_slash_is_tolerated() -> None:
    router = router_with("GET /", "GET /queues", "GET /queues/{queue}")
    assert _pattern(router, b"/queues/") == "/queues"
    assert _pattern(router, b"/queues/orders/") == "/queues/{queue}"
    assert _pattern(router, b"/") == "/"


def test_a_parameter_is_never_empty() -> None:
    router = router_with("GET /queues/{queue}/partitions/{partition}")
    assert answer(router.match(b"GET", b"/queues//partitions/p")).status == 404


def test_an_unknown_path_is_not_found() -> None:
    match = router_with("GET /queues").match(b"GET", b"/nothing?a=b")
    assert match.route is None
    response = answer(match)
    assert (response.status, msgspec.json.decode(response.body)) == (404, {"error": "Not Found"})


def test_a_known_path_with_another_method_names_the_methods_it_has() -> None:
    router = router_with("GET /queues/{queue}", "DELETE /queues/{queue}", "POST /queues/special")
    response = answer(router.match(b"PUT", b"/queues/special"))
    assert response.status == 405
    assert response.headers == ((b"Allow", b"DELETE, GET, HEAD, OPTIONS, POST"),)


def test_head_is_served_by_the_get_route() -> None:
    match = router_with("GET /health").match(b"HEAD", b"/health")
    assert match.route is not None
    assert (match.method, match.route.method) == ("HEAD", "GET")


def test_options_is_answered_for_any_path() -> None:
    for target in (b"/queues", b"/nothing", b"*"):
        match = router_with("GET /queues").match(b"OPTIONS", target)
        assert (match.route, answer(match).status) == (None, 204)


def test_the_absolute_form_of_a_target_is_understood() -> None:
    router = router_with("GET /", "GET /queues/{queue}")
    match = router.match(b"GET", b"http://example.org:6632/queues/orders?a=1")
    assert (match.params, match.query, match.path) == ({"queue": "orders"}, {"a": "1"}, "/queues/orders")
    assert _pattern(router, b"http://example.org") == "/"
    assert _pattern(router, b"HTTP://example.org?a=1") == "/"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (b"", {}),
        (b"a=1&b=2", {"a": "1", "b": "2"}),
        (b"a=1&a=2", {"a": "1"}),
        (b"a=x+y%2Bz%26", {"a": "x y+z&"}),
        (b"a&b=&=c&&d==e", {"a": "", "b": "", "d": "=e"}),
        (b"a%20b=caf%C3%A9", {"a b": "café"}),
        (b"a=1#fragment", {"a": "1"}),
    ],
)
def test_queries_are_decoded(query: bytes, expected: dict[str, str]) -> None:
    assert router_with("GET /q").match(b"GET", b"/q?" + query).query == expected


def test_a_repeated_target_is_resolved_once() -> None:
    router = router_with("GET /queues/{queue}")
    assert router.match(b"GET", b"/queues/a") is router.match(b"GET", b"/queues/a")


def test_a_target_in_use_survives_many_others_and_an_unused_one_is_forgotten() -> None:
    router = router_with("GET /queues/{queue}")
    used, unused = router.match(b"GET", b"/queues/used"), router.match(b"GET", b"/queues/unused")
    for number in range(CACHED_TARGETS * 3):
        router.match(b"GET", b"/queues/%d" % number)
        router.match(b"GET", b"/queues/used")
    assert router.match(b"GET", b"/queues/used") is used
    assert router.match(b"GET", b"/queues/unused") is not unused


def test_a_route_added_later_is_found_at_once() -> None:
    router = router_with("GET /groups/{group}")
    assert _pattern(router, b"/groups/lagging") == "/groups/{group}"
    router.add("GET", "/groups/lagging", handler, Access.PUBLIC)
    assert _pattern(router, b"/groups/lagging") == "/groups/lagging"


def test_the_fallback_serves_what_no_route_knows_and_is_public() -> None:
    router = router_with("GET /queues")
    router.fallback = lambda request: Response(200, b"file", b"text/plain")
    match = router.match(b"GET", b"/assets/app.js")
    assert match.route is not None
    assert (match.route.access, answer(match).body) == (Access.PUBLIC, b"file")
    assert answer(router.match(b"POST", b"/queues")).status == 405
    router.fallback = None
    assert answer(router.match(b"GET", b"/assets/app.js")).status == 404


def test_a_route_that_says_nothing_of_access_is_for_admins() -> None:
    router = Router()
    router.add("GET", "/secret", handler)
    assert [(route.pattern, route.access) for route in router.routes] == [("/secret", Access.ADMIN)]
    assert Access.PUBLIC < Access.READ_ONLY < Access.READ_WRITE < Access.ADMIN


def test_the_same_route_twice_is_refused() -> None:
    router = router_with("GET /queues/{queue}")
    with pytest.raises(ValueError, match="already served"):
        router.add("GET", "/queues/{name}", handler, Access.PUBLIC)


@pytest.mark.parametrize("pattern", ["queues", "/queues/", "/a//b", "/a/{}", "/a/x{y}", "/a/{b", "/{a}{b}"])
def test_a_pattern_that_makes_no_sense_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="the pattern"):
        Router().add("GET", pattern, handler, Access.PUBLIC)


def test_an_http_error_becomes_an_error_object() -> None:
    response = HttpError(429, "Too many requests", ((b"Retry-After", b"2"),)).response()
    assert (response.status, response.body) == (429, b'{"error":"Too many requests"}')
    assert response.headers == ((b"Retry-After", b"2"),)


def _pattern(router: Router, target: bytes) -> str:
    route = router.match(b"GET", target).route
    assert route is not None
    return route.pattern
