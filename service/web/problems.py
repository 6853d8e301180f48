"""Errors -> problem+json (RFC 9457), in one place. Nothing a client sends makes a 500, and nothing shows a traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from service import visits
from service.errors import Busy, ServiceError, release_frames
from service.state import Service

MEDIA_TYPE = "application/problem+json"
CLIENT_LEFT = 499  # as in nginx; for the metrics, since nobody reads this answer
REFUSED = "capserve.refused"  # in the scope of a request that the connection itself refused and counted: the status it sent


def body(status: int, title: str, detail: str) -> dict[str, str | int]:
    """`error` is where clients of the Open Inference Protocol look."""
    return {"type": "about:blank", "title": title, "status": status, "detail": detail, "error": detail}


def problem(status: int, title: str, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(body(status, title, detail), ensure_ascii=False)
    return Response(text.encode(errors="replace"), status, headers, MEDIA_TYPE)  # a folder's name may be no valid text


def of(error: ServiceError) -> Response:
    return problem(error.status, error.title, error.detail, error.headers)


async def on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    service: Service = request.app.state.service
    visit = visits.of(request.scope)
    visit.refusal = error.why
    service.metrics.count_refusal(error)
    release_frames(error)
    if isinstance(error, Busy):
        service.bodies.release(visit)
        if service.crew.at_work:
            await service.refusals.turn()
    return of(error)


async def on_http(request: Request, error: Exception) -> Response:
    """Answer a request for a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    title = HTTPStatus(error.status_code).phrase.lower()
    headers = dict(error.headers or {})
    detail, prefix = title, request.scope.get("root_path", "")  # below which path the app is, as on Ray with a prefix
    if error.status_code == 404:
        detail = f"there is nothing at this path; {prefix}/docs lists what there is"
        if request.url.path.endswith("/"):
            detail += ", without a slash at its end"
        elif request.url.path == prefix:
            detail += f"; the page is at {prefix}/"
    if error.status_code == 405:
        headers["Allow"] = _allowed(headers["Allow"])
        detail = f"this path takes {headers['Allow']} and not {request.method[:20]}; {prefix}/docs says how"
        if "access-control-request-method" in request.headers:  # a browser's preflight for another site's page
            detail = "pages of other origins get no answers here: put yours and this service behind one proxy, under one origin"
    return problem(error.status_code, title, detail, headers)


def _allowed(methods: str) -> str:
    """Add HEAD to methods that include GET."""
    found = {method.strip() for method in methods.split(",")}
    return ", ".join(sorted(found | {"HEAD"} if "GET" in found else found))


async def on_departure(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


HANDLERS = {
    ServiceError: on_service_error,
    HTTPException: on_http,
    ClientDisconnect: on_departure,
}
