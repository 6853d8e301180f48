"""uvicorn as we want it: bundles are checked before it listens, SIGTERM loses no request and exits with 0, SIGHUP reloads."""

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

BEAT = 1.0  # seconds from one to the next
UNASKED = 1.0  # seconds after the door's closing for a request of those who came last
ORPHANED = "the process that started this worker is gone"


class Server(uvicorn.Server):
    """On SIGTERM or SIGINT: not ready at once, then `linger` seconds to be taken out of rotation, then closed and drained."""

    def __init__(
        self, config: uvicorn.Config, catalogue: Catalogue, linger: float, listener: socket.socket, beat: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._catalogue, self._linger, self._listener, self._beat = catalogue, linger, listener, beat
        self._door: Door | None = None
        self._closing: float | None = None
        self._was_ready = False
        self.status = 0  # the process's, at its end
        self._reloads: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        try:
            self._open_the_door()
        except StartError:
            await self.lifespan.shutdown()  # else it would be cancelled, and logged as a fault
            raise
        self._beating = asyncio.create_task(self._beat_on())
        if siblings.reload_on_hangup():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)
            siblings.let_hangups_in()

    def _open_the_door(self) -> None:
        if not _supervised():
            raise StartError(ORPHANED)  # the next may have the port by now
        door = Door(self._listener, self._protocol)
        try:
            door.open()
        except OSError as error:  # another program listens there since we have bound it
            raise listening.cannot_listen(*listening.numbers(self._listener.getsockname()), error) from error
        self._door = door

    async def _beat_on(self) -> None:
        """To the very end, whatever else this loop waits for."""
        while True:
            self._beat()
            await asyncio.sleep(BEAT)

    def _protocol(self) -> asyncio.Protocol:
        """Of one connection, as uvicorn makes it for those that it accepts itself."""
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    def _hang_up(self) -> None:
        """However often: while one reload is at work and another waits for it, the latter sees what there is now."""
        if len(self._reloads) < 2:
            reload = asyncio.create_task(self._reload_models())
            self._reloads.add(reload)
            reload.add_done_callback(self._reloads.discard)

    async def _reload_models(self) -> None:
        try:
            await self._catalogue.reload()
        except (BundleError, StartError):
            pass  # which the catalogue has told
        except Exception:  # nobody awaits this task: asyncio would tell of it when the next one takes its place
            logger.exception("not reloaded, for a fault of the server's own")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._door is None:  # nothing has been accepted, and models may warm up for long
            os._exit(0)
        if self._closing is None:
            self._catalogue.retire()
            self._closing = time.monotonic() + self._linger
        elif sig == signal.SIGINT:  # Ctrl-C again: now
            self._catalogue.hurry()
            self.should_exit = self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._door is not None:
            await self._door.close()
        until = time.monotonic() + UNASKED
        while self._expects_requests() and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out then, and the app's end would be logged as a fault
            await self.lifespan.shutdown()

    def _expects_requests(self) -> bool:
        return any(isinstance(each, Protocol) and each.begins for each in self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        if self._closing is None and multiprocessing.parent_process() is not None:
            self._end_if_useless()
        if self._closing is not None and time.monotonic() >= self._closing and not self.should_exit:
            logger.info("told to stop: finishing what was accepted")
            self.should_exit = True
        return await super().on_tick(counter)

    def _end_if_useless(self) -> None:
        """As a worker whom nobody would replace or stop, or whom another would do better than.

        Nobody outside could tell whose model fails: /healthz is of whichever worker is asked. One that never was ready stays:
        where a model is broken for good another process would not help, and the other models are still answered.
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
    """Or nobody's worker."""
    supervisor = multiprocessing.parent_process()
    return supervisor is None or supervisor.is_alive()


def serve(settings: Settings, nets: Mapping[str, CapsNet], listener: socket.socket, beat: Callable[[], None]) -> int:
    """Serves on a bound socket until it is told to stop, and gives the exit status; from when it answers there it beats."""
    app = create_app(settings, nets)
    service: Service = app.state.service
    server = Server(configured(app, settings), service.catalogue, settings.linger, listener, beat)
    server.run()
    return server.status


def configured(app: FastAPI, settings: Settings) -> uvicorn.Config:
    service: Service = app.state.service
    return uvicorn.Config(
        app,
        http=partial(Protocol, patience=settings.patience, count=service.metrics.refused, bodies=service.bodies),  # type: ignore[arg-type]  # called as a class
        log_config=None,  # logs.py has set it
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody here asks who the client is
        ws="none",
        timeout_keep_alive=75,  # longer than load balancers keep theirs, so that it is they who close
        timeout_graceful_shutdown=math.ceil(settings.drain),
    )
