"""create_app: wiring and lifespan, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI

from service import catalogue, cpus, openapi, problems
from service.bodies import Bodies
from service.catalogue import Catalogue
from service.crew import Crew
from service.engine import CapsNet
from service.envelope import Envelope
from service.metrics import Metrics
from service.routes import health, inference_protocol, models, predict, reconstruct
from service.settings import Settings
from service.shortcut import Shortcut
from service.state import Service

if TYPE_CHECKING:
    from service.tracing import Tracing

LARGEST_BODIES = 16  # in memory at once, or more of smaller ones


def create_app(settings: Settings, nets: Mapping[str, CapsNet] | None = None) -> FastAPI:
    """The app over `nets`, or over those that it loads itself: a bundle that is not sound raises here, before it listens."""
    metrics = Metrics()
    serving = Catalogue(catalogue.load(settings) if nets is None else nets, settings, metrics)
    crew, bodies = Crew(settings.threads or cpus.available(), settings.max_queue), Bodies(LARGEST_BODIES * settings.max_body)
    tracing = _tracing(settings)
    app = FastAPI(title="capserve", version=version("capserve"), summary="Capsule Networks as a service", lifespan=_lifespan)
    app.state.service = Service(settings, serving, metrics, crew, bodies)
    app.state.tracing = tracing
    app.add_middleware(Shortcut, routers=[predict.router, reconstruct.router], handlers=problems.HANDLERS)
    app.add_middleware(Envelope, settings=settings, metrics=metrics, catalogue=serving, bodies=bodies, tracing=tracing)
    for error, handler in problems.HANDLERS.items():
        app.add_exception_handler(error, handler)
    for routes in (predict, reconstruct, models, inference_protocol, health):
        app.include_router(routes.router)
    app.openapi = openapi.documented(app, serving.get(None))  # type: ignore[method-assign]
    return app


def _tracing(settings: Settings) -> Tracing | None:
    if settings.traces is None:
        return None
    from service.tracing import Tracing  # an extra

    return Tracing(settings.traces)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Listens at once, and is ready when the models are warm; answers what it accepted before it goes."""
    service: Service = app.state.service
    work = asyncio.create_task(service.catalogue.run())
    try:
        yield
    finally:
        await service.catalogue.drain()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        service.crew.close()
        if app.state.tracing is not None:
            await asyncio.to_thread(app.state.tracing.close)
