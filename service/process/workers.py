"""Several server processes on one port: started together, replaced when one dies or stands still, stopped together.

The supervisor loads no model itself.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from ctypes import Array, c_ulong
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from service.errors import StartError
from service.process import listening, siblings, tallies
from service.settings import Settings

logger = logging.getLogger(__name__)

CANNOT_START = 2  # exit status of a worker that would fail again until somebody corrects what it reported
# A worker too young to have a handler is ended by the signal itself; one that asks to be replaced was about to end anyway.
CLEAN_STATUSES = (0, -signal.SIGTERM, siblings.REPLACE_ME)
MARGIN = 5.0  # seconds beyond linger and drain before a worker is killed
TRIES = 5  # deaths and failed starts, for any reason, after which the supervisor gives up if no worker ever listened
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a dead worker is replaced; doubled if the new one dies young
LOOK = 0.2  # seconds between two looks at the workers
STILL = 30.0  # seconds without a beat after which a worker is killed, since its share of all new connections hangs with it
STILL_AT_END = 5.0  # the same for a worker that was told to stop
SLOW = 60.0  # seconds of starting after which the log says that it takes long
STUCK = 300.0  # seconds of starting after which a worker is killed, if others did start
TIMES_SLOWEST = 3.0  # a starting worker has at least this many times as long as the slowest of those took

Beats = Array[c_ulong]  # a counter for each worker, by place; it counts from when the worker listens
Work = Callable[[Settings, int, tuple[str, int], Beats], None]  # the second is the worker's place, from 0 on


def run(settings: Settings, work: Work) -> int:
    """Run `work` in each process until a signal comes, and return the exit status."""
    settings = settings.model_copy(update={"models": Path(os.path.abspath(settings.models))})
    with tallies.folder(), listening.reserve(settings.host, settings.port) as reserved:
        os.chdir("/")  # workers start in our current folder, and a release's folder may be removed
        address = listening.numeric_address(reserved.getsockname())
        with listening.claim(*address) as claim:
            logger.info("%d workers on %s", settings.workers, listening.url(address))
            return _Supervisor(settings, work, address, claim).run()


@dataclass
class _Worker:
    place: int  # its successor in the same place adds to what it has counted
    process: SpawnProcess
    started: float  # time.monotonic()
    beats: int  # at the last look
    listens: bool = False  # a beat of its own has been seen
    still: int = 0  # looks since its last beat; while we stood still too, as in a paused container, there were none


class _Supervisor:
    def __init__(self, settings: Settings, work: Work, address: tuple[str, int], claim: ExitStack) -> None:
        self._settings, self._work, self._address, self._claim = settings, work, address, claim
        self._spawn = multiprocessing.get_context("spawn")  # threads and ONNX Runtime do not survive a fork
        self._workers: list[_Worker] = []
        try:
            self._beats = self._spawn.RawArray(c_ulong, settings.workers)  # Array has a lock, which a killed worker could keep
        except OSError as error:  # not every sandbox has /dev/shm
            why = f"several workers share a few bytes of memory, in /dev/shm: {error.strerror}"
            raise StartError(f"{why}; make it writable, or use one worker (CAPSERVE_WORKERS=1)") from error
        self._due = dict.fromkeys(range(settings.workers), 0.0)  # place -> time.monotonic() at which to fill it
        self._slowest = 0.0  # seconds that the slowest start took
        self._pause = FIRST_PAUSE
        self._failures = 0
        self._stopping = self._ending = False  # told to stop; stopping

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(siblings.RELOAD_ALL, self._reload)
        if siblings.hangup_reloads():
            signal.signal(signal.SIGHUP, self._reload)
            siblings.release_hangups()
        try:
            could_start = self._watch()
        finally:  # whatever happens to us, no worker is left behind
            status = self._end()
        return status if could_start else CANNOT_START

    def _watch(self) -> bool:
        """Watch the workers until a signal comes; False when none can start and none ever did."""
        while not self._stopping:
            if not (self._start_due() and self._remove_dead()):
                return self._stopping
            ended = wait([worker.process.sentinel for worker in self._workers], timeout=LOOK)
            if not ended:  # otherwise looks may follow each other at once, until the kernel is done with those
                self._kill_the_still()
        return True

    def _reload(self, *_: object) -> None:
        for worker in list(self._workers):
            if worker.process.is_alive() and worker.process.pid is not None:
                with suppress(ProcessLookupError):  # this handler may run just as the worker's end is noted
                    os.kill(worker.process.pid, signal.SIGHUP)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _start(self, place: int) -> None:
        tallies.create_files(place)
        process = self._spawn.Process(target=self._work, args=(self._settings, place, self._address, self._beats))
        resource_tracker.ensure_running()  # here: started with a worker, it would unblock the signals that are blocked below
        with siblings.signals_blocked():
            process.start()
        self._workers.append(_Worker(place, process, time.monotonic(), self._beats[place]))

    def _kill_the_still(self) -> None:
        """Kill workers whose event loop has not run for long, or not yet: nothing else would notice, and clients cannot choose
        another worker."""
        for worker in self._workers:
            if (beats := self._beats[worker.place]) == worker.beats:
                worker.still += 1
                continue
            if not worker.listens:
                self._slowest = max(self._slowest, worker.still * LOOK)
            worker.beats, worker.listens, worker.still = beats, True, 0
        for worker in self._workers:
            if worker.still > (patience := self._patience(worker)) / LOOK:
                worker.process.kill()  # before it is logged: the log's reader may stand still as well
                logger.error("worker %d has stood still for %g s and is killed", worker.process.pid, patience)
                worker.still = 0  # one that waits for a disk, for example, dies only later
            elif not worker.listens and worker.still == SLOW / LOOK:
                logger.warning("worker %d does not listen yet, after %g s", worker.process.pid, SLOW)

    def _patience(self, worker: _Worker) -> float:
        """Return for how many seconds this worker may stand still."""
        if self._ending:
            return STILL_AT_END
        if worker.listens:
            return STILL
        return max(STUCK, TIMES_SLOWEST * self._slowest) if any(self._beats) else math.inf

    def _remove_dead(self) -> bool:
        """Remove dead workers, each to be replaced after a pause; False when that is pointless."""
        for worker in [each for each in self._workers if not each.process.is_alive()]:
            self._workers.remove(worker)
            process = worker.process
            mark_process_dead(worker.place)  # type: ignore[no-untyped-call]
            if not any(self._beats) and process.exitcode == CANNOT_START:
                return False
            if time.monotonic() - worker.started > LONGEST_PAUSE:
                self._pause = FIRST_PAUSE
            self._failures += 1
            if not self._retry_later([worker.place], f"worker {process.pid} died with status {process.exitcode}"):
                return False
        return True

    def _start_due(self) -> bool:
        """Start the workers that are due; False when that is pointless."""
        due = [place for place, when in self._due.items() if when <= time.monotonic()]
        while due and not self._stopping:
            try:
                self._start(due[-1])
            except OSError as error:  # no process can be created, or its files have no room
                self._failures += not self._workers  # while there are others it is too early to give up
                return self._retry_later(due, f"no worker can be started ({error.strerror})")
            del self._due[due.pop()]
        return True

    def _retry_later(self, places: list[int], reason: str) -> bool:
        """Fill these places after a pause; False to give up, after too many failures if no worker ever listened."""
        if not any(self._beats) and self._failures >= TRIES:
            logger.error("%s, as all did: giving up", reason)
            return False
        if not self._stopping:
            logger.error("%s; another in %g s", reason, self._pause)
        self._due |= dict.fromkeys(places, time.monotonic() + self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return True

    def _end(self) -> int:
        self._claim.close()
        self._ending = True
        for worker in self._workers:
            worker.still = 0  # a worker may have been loading for long
        processes = [worker.process for worker in self._workers]
        for process in processes:
            process.terminate()
        until = time.monotonic() + self._settings.linger + self._settings.drain + MARGIN
        while self._workers and time.monotonic() < until:
            if not wait([worker.process.sentinel for worker in self._workers], timeout=LOOK):
                self._kill_the_still()
            self._workers = [worker for worker in self._workers if worker.process.is_alive()]
        for process in processes:
            if process.is_alive():
                process.kill()
                logger.error("worker %s did not stop in time and is killed", process.pid)
                process.join()
        return int(any(process.exitcode not in CLEAN_STATUSES for process in processes))
