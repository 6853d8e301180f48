"""GET /healthz, /readyz and /metrics, for whatever looks after the process. They need no key."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from service import state
from service.routes.direct import Probed
from service.schemas import Liveness, Readiness

router = APIRouter(route_class=Probed, tags=["health"])


@router.get("/healthz", response_model=Liveness, responses={503: {"model": Liveness, "description": "restart the process"}})
async def live(request: Request) -> Response:
    """Whether a restart would be for the better: 503 once a model has failed again and again."""
    alive = state.of(request).catalogue.alive
    return JSONResponse({"live": alive}, 200 if alive else 503)


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness, "description": "send no requests here"}})
async def ready(request: Request) -> Response:
    """Whether to send requests here: 503 while warming, draining or failing."""
    catalogue = state.of(request).catalogue
    return JSONResponse({"ready": catalogue.ready, "state": catalogue.state}, 200 if catalogue.ready else 503)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
async def metrics(request: Request) -> Response:
    """For Prometheus. With several workers, the sum over all of them; on Ray Serve all replicas, each under its name."""
    service = state.of(request)
    service.measure()
    return Response(await service.scrapes.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


PATHS = frozenset(route.path for route in router.routes if isinstance(route, Probed))
