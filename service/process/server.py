"""uvicorn adapted: it listens once bundles are checked, loses no request and exits with 0 on SIGTERM, reloads on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from service.app import create_app
from service.catalogue import Catalogue
from service.engine import CapsNet
from service.errors import StartError
from service.manifest import BundleError
from service.process import listening, siblings
from service.process.door import Door
from service.settings import Settings
from service.state import Service
from service.web.protocol import Protocol

logger = logging.getLogger(__name__)

BEAT = 1.0  # seconds between two beats
GRACE = 1.0  # seconds after the door closes in which the last clients to connect may still send a request
ORPHANED = "the process that started this worker is gone"


class Server(uvicorn.Server):
    """On SIGTERM or SIGINT it is not ready at once, waits `linger` seconds to be taken out of rotation, closes and drains."""

    def __init__(
        self, config: uvicorn.Config, catalogue: Catalogue, linger: float, listener: socket.socket, beat: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._catalogue, self._linger, self._listener, self._beat = catalogue, linger, listener, beat
        self._door: Door | None = None
        self._close_at: float | None = None
        self._was_ready = False
        self.status = 0  # the exit status
        self._reloads: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        try:
            self._open_the_door()
        except StartError:
            await self.lifespan.shutdown()  # otherwise it would be cancelled, and logged as a fault
            raise
        self._beating = asyncio.create_task(self._keep_beating())
        if siblings.hangup_reloads():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
            siblings.release_hangups()

    def _open_the_door(self) -> None:
        if not _supervised():
            raise StartError(ORPHANED)  # a new server may have the port by now
        door = Door(self._listener, self._new_protocol)
        try:
            door.open()
        except OSError as error:  # another program has started to listen there since we bound it
            raise listening.cannot_listen(*listening.numeric_address(self._listener.getsockname()), error) from error
        self._door = door

    async def _keep_beating(self) -> None:
        """Beat for as long as the event loop runs, whatever else it waits for."""
        while True:
            self._beat()
            await asyncio.sleep(BEAT)

    def _new_protocol(self) -> asyncio.Protocol:
        """Make the protocol of one connection, as uvicorn does for connections that it accepts itself."""
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _on_hangup(self) -> None:
        """Start a reload, unless one is at work and another waits for it: the latter will see the present state too."""
        if len(self._reloads) < 2:
            reload = asyncio.create_task(self._reload_models())
            self._reloads.add(reload)
            reload.add_done_callback(self._reloads.discard)

    async def _reload_models(self) -> None:
        try:
            await self._catalogue.reload()
        except (BundleError, StartError):
            pass  # the catalogue has logged it
        except Exception:  # nobody awaits this task: asyncio would report it only when the next one takes its place
            logger.exception("not reloaded, for a fault of the server's own")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._door is None:  # nothing has been accepted, and models may warm up for long
            os._exit(0)
        if self._close_at is None:
            self._catalogue.start_draining()
            self._close_at = time.monotonic() + self._linger
        elif sig == signal.SIGINT:  # Ctrl-C again: stop now
            self._catalogue.end_draining()
            self.should_exit = self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._door is not None:
            await self._door.close()
        until = time.monotonic() + GRACE
        while self._expects_requests() and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this then, and the app's end would be logged as a fault
            await self.lifespan.shutdown()

    def _expects_requests(self) -> bool:
        return any(isinstance(each, Protocol) and each.expects_request for each in self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        if self._close_at is None and multiprocessing.parent_process() is not None:
            self._end_if_useless()
        if self._close_at is not None and time.monotonic() >= self._close_at and not self.should_exit:
            logger.info("told to stop: finishing what was accepted")
            self.should_exit = True
        return await super().on_tick(counter)

    def _end_if_useless(self) -> None:
        """End this worker if its supervisor is gone, or if it was ready once and a model now hangs or fails again and again.

        Nobody outside can tell which worker's model fails: /healthz answers for whichever worker is asked. A worker that was
        never ready stays: if a model is broken for good another process would not help, and the other models are still served.
        """
        self._was_ready = self._was_ready or self._catalogue.ready
        if not _supervised():
            logger.error("%s: stopping", ORPHANED)
        elif self._was_ready and not self._catalogue.alive:
            logger.error("a model hangs, or fails again and again: this worker ends, and another replaces it")
            self.status = siblings.REPLACE_ME
        else:
            return
        self.handle_exit(signal.SIGTERM, None)


def _supervised() -> bool:
    """Whether this worker's supervisor is alive; true for a process that is no worker."""
    supervisor = multiprocessing.parent_process()
    return supervisor is None or supervisor.is_alive()


def serve(settings: Settings, nets: Mapping[str, CapsNet], listener: socket.socket, beat: Callable[[], None]) -> int:
    """Serve on a bound socket until told to stop and return the exit status; `beat` is called from when the server listens."""
    app = create_app(settings, nets)
    service: Service = app.state.service
    server = Server(uvicorn_config(app, settings), service.catalogue, settings.linger, listener, beat)
    server.run()
    return server.status


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    service: Service = app.state.service
    return uvicorn.Config(
        app,
        http=partial(Protocol, patience=settings.patience, count=service.metrics.count_refusal, bodies=service.bodies),  # type: ignore[arg-type]  # called as a class
        log_config=None,  # logs.py has configured logging
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here uses the client's address
        ws="none",
        timeout_keep_alive=75,  # longer than load balancers keep connections, so that they close first
        timeout_graceful_shutdown=math.ceil(settings.drain),
    )
