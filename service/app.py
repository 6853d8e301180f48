"""create_app: wiring and lifespan, nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI

from service import catalogue, openapi
from service.brevity import Brevity
from service.catalogue import Catalogue
from service.crew import Crew, in_own_thread
from service.engine import CapsNet
from service.metrics import Metrics
from service.process import cpus, memory
from service.process.siblings import Siblings
from service.routes import health, inference_protocol, models, playground, predict, reconstruct
from service.scrapes import Scrapes
from service.settings import Settings
from service.state import Service
from service.web import problems
from service.web.bodies import Bodies
from service.web.envelope import OPEN_PATHS, Envelope
from service.web.refusals import Refusals
from service.web.shortcut import Shortcut

if TYPE_CHECKING:
    from service.tracing import Tracing

logger = logging.getLogger(__name__)

LARGEST_BODIES = 16  # bodies of max_body in memory at once, or more smaller ones; divided among workers
DECODERS = 4  # most decoding threads, divided among workers: each takes hundreds of MB for a picture of max_pixels


def create_app(settings: Settings, nets: Mapping[str, CapsNet] | None = None, siblings: Siblings | None = None) -> FastAPI:
    """Builds the app over `nets`, or loads them; a bundle that is not sound raises here, before the server listens."""
    nets = catalogue.load(settings) if nets is None else nets
    # Both may raise, so they come before Metrics, which with several workers leaves files that each scrape reads.
    catalogue.default(settings, nets)
    tracing = _tracing(settings)
    metrics = Metrics()
    serving = Catalogue(nets, settings, metrics)
    decoders = max(1, min(settings.threads or cpus.available(), DECODERS) // settings.workers)
    crew = Crew(decoders, settings.max_queue, settings.max_wait, settings.deadline)
    bodies = max(1, LARGEST_BODIES // settings.workers) * settings.max_body
    if warning := memory.shortage(settings, decoders * settings.workers, bodies * settings.workers):
        logger.warning(warning)
    app = FastAPI(
        title="capserve",
        version=version("capserve"),
        summary="Capsule Networks as a service",
        lifespan=_lifespan,
        openapi_url=None,  # routes/playground.py serves it and /docs: FastAPI's own pages load scripts from other servers
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,  # else generated clients have methods like predict_predict_post
        redirect_slashes=False,  # Starlette redirects to http:, even behind an https proxy, and clients send their keys along
        telemetry={"tracing": False, "metrics": False, "logs": False},  # tracing.py is our own and omits query strings
    )
    siblings = siblings or Siblings()
    scrapes = Scrapes(partial(siblings.metrics, partial(in_own_thread, metrics.text)))
    service = app.state.service = Service(
        settings, serving, metrics, crew, Brevity(), Bodies(bodies), Refusals(), siblings, scrapes
    )
    app.state.tracing = tracing
    app.add_middleware(Shortcut, routers=[predict.router, reconstruct.router], handlers=problems.HANDLERS)
    app.add_middleware(Envelope, service=service, tracing=tracing)
    for error, handler in problems.HANDLERS.items():
        app.add_exception_handler(error, handler)
    for routes in (predict, reconstruct, models, inference_protocol, health, playground):
        app.include_router(routes.router)
    app.include_router(inference_protocol.probes)
    app.openapi = openapi.document_maker(app, serving, None if settings.api_key is None else OPEN_PATHS)  # type: ignore[method-assign]
    return app


def _tracing(settings: Settings) -> Tracing | None:
    if settings.traces is None:
        return None
    from service.tracing import Tracing  # needs the extra capserve[otel]

    return Tracing(settings.traces)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Lets the server listen at once and become ready once the models are warm; answers what was accepted before it ends.

    One of several workers listens only when warm: the others answer meanwhile, and no client is told to retry.
    """
    service: Service = app.state.service
    if service.settings.workers > 1:
        await service.catalogue.warm_up()
    service.metrics.worker_started(service.settings.workers)
    work = asyncio.create_task(service.catalogue.run(service.measure))
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
