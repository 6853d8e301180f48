"""Several server processes on one port: started together, replaced when one dies, stopped together. Loads no model itself."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess

from prometheus_client.multiprocess import mark_process_dead

from service import listening
from service.settings import Settings

logger = logging.getLogger(__name__)

CANNOT_START = 2  # exit status of a worker that would fail again
MARGIN = 5.0  # seconds beyond linger and drain before a worker is killed


def run(settings: Settings, work: Callable[[Settings, tuple[str, int]], None]) -> int:
    """Runs `work` in each process until a signal; gives the exit status."""
    with (
        tempfile.TemporaryDirectory(prefix="capserve-metrics-") as files,
        listening.reserve(settings.host, settings.port) as reserved,
    ):
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = files  # the workers' metrics add up there
        address = reserved.getsockname()[:2]
        logger.info("%d workers on http://%s:%d", settings.workers, *address)
        return _Crowd(settings, work, address).run()


class _Crowd:
    def __init__(self, settings: Settings, work: Callable[[Settings, tuple[str, int]], None], address: tuple[str, int]) -> None:
        self._settings, self._work, self._address = settings, work, address
        self._spawn = multiprocessing.get_context("spawn")  # threads and ONNX Runtime do not survive a fork
        self._processes: list[SpawnProcess] = []
        self._stopping = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        for _ in range(self._settings.workers):
            self._start()
        while not self._stopping:
            wait([process.sentinel for process in self._processes], timeout=0.2)
            if self._bury() == CANNOT_START and not self._stopping:
                self._end()
                return CANNOT_START
        return self._end()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _start(self) -> None:
        process = self._spawn.Process(target=self._work, args=(self._settings, self._address))
        process.start()
        self._processes.append(process)

    def _bury(self) -> int:
        """Replaces the dead, unless one says that it cannot start at all: gives the worst exit status."""
        worst = 0
        for process in [each for each in self._processes if not each.is_alive()]:
            self._processes.remove(process)
            mark_process_dead(process.pid)  # type: ignore[no-untyped-call]
            worst = max(worst, process.exitcode or 0)
            if process.exitcode != CANNOT_START and not self._stopping:
                logger.error("worker %s died with status %s; starting another", process.pid, process.exitcode)
                time.sleep(0.5)  # it may die again
                self._start()
        return worst

    def _end(self) -> int:
        for process in self._processes:
            process.terminate()
        until = time.monotonic() + self._settings.linger + self._settings.drain + MARGIN
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                logger.error("worker %s did not stop in time and is killed", process.pid)
                process.kill()
                process.join()
        return int(any(process.exitcode for process in self._processes))
