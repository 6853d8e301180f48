"""The way past FastAPI's layers answers exactly what they would."""

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match

from service.web.shortcut import Shortcut
from tests.service.conftest import serving, settings

REQUESTS = [
    ("POST", "/predict", {"content": b"", "headers": {"Content-Type": "image/png"}}),
    ("POST", "/predict?normalise=some", {"content": b"x"}),
    ("POST", "/predict?model=none", {"content": b"x"}),
    ("POST", "/predict/batch", {"json": {"images": []}}),
    ("GET", "/predict", {}),
    ("HEAD", "/reconstruct?label=7", {}),
    ("GET", "/reconstruct?label=7&dim=3&delta=0.05", {}),
    ("GET", "/reconstruct?label=7&dim=99&delta=0.05", {}),
    ("GET", "/reconstruct/sweep?label=7&steps=1", {}),
]


@pytest.mark.parametrize(("method", "path", "sent"), REQUESTS)
def test_the_shortcut_answers_exactly_like_fastapi(
    method: str, path: str, sent: dict[str, object], client: httpx.Client, slow_way: httpx.Client
) -> None:
    short, long = (each.request(method, path, **sent) for each in (client, slow_way))  # type: ignore[arg-type]
    assert short.status_code == long.status_code
    assert short.content == long.content
    changing = {"date", "x-request-id", "server-timing"}
    assert {k: v for k, v in short.headers.items() if k not in changing} == {
        k: v for k, v in long.headers.items() if k not in changing
    }


@pytest.fixture(scope="module")
def slow_way(nets: dict[str, object]) -> httpx.Client:  # type: ignore[misc]
    """A server whose shortcut knows no routes."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Shortcut, "__init__", _without_routes)
    with serving(settings(), nets) as client:  # type: ignore[arg-type]
        yield client
    patch.undo()


def _without_routes(self: Shortcut, app: object, routers: object, handlers: object) -> None:
    self._app, self._routes = app, {}  # type: ignore[assignment]


def test_both_ways_count_the_same_route(client: httpx.Client, slow_way: httpx.Client) -> None:
    for each in (client, slow_way):
        each.get("/reconstruct?label=7")
        assert 'capserve_requests_total{route="/reconstruct",status="200"}' in each.get("/metrics").text


@pytest.mark.parametrize(("method", "path"), [("POST", "/predict"), ("POST", "/predict/batch"), ("GET", "/reconstruct?label=7")])
def test_the_shortcut_skips_the_route_search(
    method: str, path: str, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[object] = []
    monkeypatch.setattr(APIRoute, "matches", lambda self, scope: searched.append(self) or (Match.NONE, {}))
    client.request(method, path)
    assert not searched
    client.get("/models")
    assert searched
