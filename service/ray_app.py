"""The same app on Ray Serve: replicas on one machine or many, as many as there is work for, each on a CPU or a share of a GPU.

Start it with `serve run service.ray_app:app max_replicas=4 num_gpus=0.25`. Settings come from that command's environment, those
it leaves unset from each node's own. Needs the extra `capserve[ray]`.
"""
# No `from __future__ import annotations`: Ray reads app's annotation, and needs the class itself.

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from prometheus_client import Metric, generate_latest
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.app import create_app
from service.crew import in_own_thread
from service.errors import Busy, MalformedRequest, NotReloaded, StartError
from service.manifest import BundleError
from service.process import allocator, interpreter, logs
from service.process.siblings import Siblings
from service.settings import Settings
from service.state import Service
from service.web.problems import problem

logger = logging.getLogger(__name__)

NAME = "capserve"
MOST_BATCHES = 8  # most that a replica is given, waiting and running
UPGRADE_ADVICE = (
    "Ray's proxy loses bodies that come with an offer of another protocol; send this without the header Upgrade, as curl does "
    "without --http2, and Java's HttpClient with version(HTTP_1_1)"
)
ATTEMPTS = 3  # more of them would not make a bundle sound
MARGIN = 5.0  # seconds beyond drain before Ray kills a replica
PATIENCE = 5.0  # seconds for all replicas to report their metrics


class Scale(BaseModel):
    """What `serve run` takes as key=value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_ongoing_requests: float = Field(16, gt=0)  # per replica, on average; with more, replicas are added
    num_cpus: float = Field(1, gt=0)  # per replica, which runs as many threads
    num_gpus: float = Field(0, ge=0)  # per replica; 0.25 puts four on a GPU


def app(scale: Scale) -> Any:
    """A Ray Serve application, which is built and loads its bundles wherever Ray starts a replica."""
    settings = Settings()  # type: ignore[call-arg]  # wrong ones raise here, before there are replicas
    given = settings.model_dump(exclude_unset=True)

    def build() -> FastAPI:
        replica_settings = fitted(Settings(**given), scale)
        logs.configure(replica_settings.log_format, replica_settings.log_level)
        allocator.return_large_blocks()
        interpreter.shorten_switch_interval()
        replica_app = create_app(replica_settings, siblings=Replicas())
        replica_app.add_middleware(without_request_id)
        replica_app.add_middleware(without_upgrades)
        return replica_app

    return serve.deployment(
        serve.ingress(build)(Replica),
        name=NAME,
        ray_actor_options=scale.model_dump(include={"num_cpus", "num_gpus"}),
        autoscaling_config=scale.model_dump(include={"min_replicas", "max_replicas", "target_ongoing_requests"}),
        # A proxy prefers its own node's replicas, and uses others when these have so many batches; the rest waits in the proxy.
        max_ongoing_requests=MOST_BATCHES * settings.max_batch,
        max_queued_requests=settings.max_queue,
        backpressure_config={"status_code": 503, "retry_after_s": 1},
        graceful_shutdown_timeout_s=settings.drain + MARGIN,
        max_constructor_retry_count=ATTEMPTS,
        max_surge_percent=25,  # in an update, new replicas start before old ones stop
    ).bind()


def fitted(settings: Settings, scale: Scale) -> Settings:
    """Fills in unset settings by what Ray gives a replica: a GPU that was asked for and does not work is an error."""
    threads = settings.threads or max(1, int(scale.num_cpus))
    device = settings.device if settings.device != "auto" else "cuda" if scale.num_gpus else "cpu"
    # Ray sends no more requests to a replica that it has told to stop, so there is no need to linger.
    return settings.model_copy(update={"threads": threads, "device": device, "workers": 1, "linger": 0.0})


def without_request_id(app: ASGIApp) -> ASGIApp:
    """Drops X-Request-ID from answers: Ray's proxy adds the same one itself."""

    async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
            await send(message)

        await app(scope, receive, send_without_id)

    return middleware


def without_upgrades(app: ASGIApp) -> ASGIApp:
    """Refuses bodies sent with an offer of another protocol: Ray's proxy loses them, or takes them for the next request."""

    async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]} if scope["type"] == "http" else set()
        if b"upgrade" in names and names & {b"content-length", b"transfer-encoding"}:
            refusal = problem(MalformedRequest.status, MalformedRequest.title, UPGRADE_ADVICE, {"Connection": "close"})
            return await refusal(scope, receive, send)
        await app(scope, receive, send)

    return middleware


class Replica:
    """What Ray calls in one process, besides requests."""

    app: FastAPI  # made by build()

    @property
    def _service(self) -> Service:
        service: Service = self.app.state.service
        return service

    async def check_health(self) -> None:
        """Ray waits for the first answer before it sends requests, and replaces a replica that fails three times."""
        while not self._service.catalogue.warm:
            await asyncio.sleep(0.05)
        if not self._service.catalogue.alive:
            raise RuntimeError("a model has failed again and again; see the log")

    async def measured(self) -> tuple[str, list[Metric]]:
        self._service.measure()
        return _replica_name(), list(self._service.metrics.registry.collect())

    async def reload(self) -> str | None:
        """Reloads the models; returns what went wrong, if anything did."""
        try:
            await self._service.catalogue.reload()
        except (BundleError, StartError) as error:
            return f"replica {_replica_name()}: {error}"
        return None


class Replicas(Siblings):
    """All replicas, as one of them reaches them: a proxy's port leads to any one, while a scrape is meant for all."""

    async def let_all_reload(self) -> None:
        results = await _broadcast("reload")
        for error in results:
            if isinstance(error, Exception):
                logger.error("a replica could not be told to reload: %s", error)
        faults = [fault for fault in results if isinstance(fault, str)]
        if faults:
            raise NotReloaded(f"{faults[0]}; it still serves the old models, and {_replica_name()} the new")
        if any(isinstance(error, Exception) for error in results):
            raise NotReloaded(f"a replica did not answer (see the log); {_replica_name()} serves the new models: ask again")

    async def metrics(self, own: Callable[[], Awaitable[bytes]]) -> bytes:
        try:
            reports = await _broadcast("measured", timeout_s=PATIENCE)
        except TimeoutError:
            raise Busy(f"a replica did not report its metrics within {PATIENCE:g} seconds; ask again", "replicas") from None
        for error in reports:
            if isinstance(error, Exception):
                logger.error("a replica did not report its metrics: %s", error)
        received = [each for each in reports if not isinstance(each, Exception)]
        return await in_own_thread(partial(exposition, received))  # takes 0.3 s for sixteen replicas


async def _broadcast(method: str, timeout_s: float | None = None) -> list[Any]:
    """What each replica returns or raises, this one's included."""
    handle = serve.get_deployment_handle(NAME, serve.get_replica_context().app_name)
    results: list[Any] = await handle.broadcast(method).results_async(timeout_s=timeout_s, return_exceptions=True)
    return results


def _replica_name() -> str:
    name: str = serve.get_replica_context().replica_tag
    return name


def exposition(reports: Iterable[tuple[str, list[Metric]]]) -> bytes:
    """The metrics of several replicas as Prometheus reads them, each series with the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, metrics in reports:
        for metric in metrics:
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            family.samples += [each._replace(labels={**each.labels, "replica": replica}) for each in metric.samples]
    return generate_latest(SimpleNamespace(collect=families.values))
