"""A few threads for work that would block the event loop: decoding large pictures, writing large PNGs. Bounded.

Jobs run in the order in which their requests arrived. A request brings its pictures one after the other, so others get turns
between them. A job is given up at its request's deadline, unless the answer is computed and only has to be written. A job whose
client has left is not started; one that is running cannot be stopped, but its thread does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from itertools import count
from queue import PriorityQueue
from typing import Any, TypeVar

from service.errors import Busy, TooLate, release_frames
from service.pace import Pace

T = TypeVar("T")

LOOK = 0.02  # seconds between two looks whether a job has been timed
LATE = "the deadline passed before pictures were decoded or drawn; ask again later, or for fewer or smaller ones"


class Crew:
    def __init__(self, threads: int, most: int, max_wait: float, deadline: float) -> None:
        """Admits at most `most` jobs, waiting or running, and none that is estimated to wait longer than `max_wait` seconds.

        A job is given up `deadline` seconds after its whole request arrived.
        """
        self._threads = [threading.Thread(target=self._work, name=f"crew-{number}", daemon=True) for number in range(threads)]
        self._errands: PriorityQueue[tuple[float, int, _Errand | None]] = PriorityQueue()  # None: stop
        self._numbers = count()  # break ties: otherwise the queue would compare the errands themselves
        self._most, self._max_wait, self._deadline = most, max_wait, deadline
        self._pace, self._last_end = Pace(), 0.0  # of all threads together
        # When jobs began and ended, noted by the threads: a busy event loop learns of it late.
        self._timed: deque[tuple[float, float]] = deque(maxlen=100)
        # For the part of a job that makes many short calls from Python: two threads contending for the GIL are slower than one.
        self.lock = threading.Lock()
        self._jobs = 0
        self._unanswered: dict[_Errand, None] = {}  # in order of arrival
        self.lines: set[Line] = set()  # of requests that were admitted

    @property
    def at_work(self) -> bool:
        return self._jobs > 0

    @property
    def coming(self) -> int:
        """Jobs that admitted requests will still bring."""
        return sum(line.coming for line in self.lines)

    def admit(self, pictures: int = 1) -> None:
        """Raises Busy if a request that came now, with so many pictures, would find too many before its last one."""
        self._reset_if_idle()
        oldest = next((errand for errand in self._unanswered if not errand.started_at), None)
        waited = 0.0 if oldest is None else time.monotonic() - oldest.queued_at
        self._learn()
        before = self._jobs_before(pictures)
        wait = self._pace.excessive_wait(before, waited, self._max_wait, self._deadline)
        if before and not wait:  # there is time for those; is there also for its own?
            wait = self._pace.excessive_wait(self._until_last(before, pictures), 0.0, math.inf, self._deadline)
        if self._jobs >= self._most or wait:
            raise Busy(
                f"too many pictures wait to be decoded or drawn ({self._jobs}{f', for about {wait:.1f} s' if wait else ''}); "
                "ask again after the seconds in Retry-After",
                "crew",
                self._pace.seconds_until_room(before, self._max_wait, self._deadline),
            )

    def _learn(self) -> None:
        """Takes in what jobs took, each since the one before it ended: threads wait for each other during much of their work."""
        while self._timed:
            began, ended = self._timed.popleft()
            self._pace.record(max(0.0, ended - max(began, self._last_end)))
            self._last_end = ended

    def _jobs_before(self, pictures: int) -> int:
        """Jobs to be done before the first or between the others of a request with so many pictures; 0 if a thread is free."""
        coming = self.coming
        if sum(line.coming > 0 for line in self.lines) <= len(self._threads):  # they leave a turn to others after each picture
            coming = sum(min(line.coming, self._jobs + pictures - 1) for line in self.lines)
        return max(0, self._jobs + coming - len(self._threads) + 1)

    def _until_last(self, before: int, pictures: int) -> float:
        """Jobs done before the last of so many pictures, at the present pace: as many fewer as a free thread makes it faster."""
        jobs = before + pictures - 1
        return jobs * self._jobs / (self._jobs + 1) if 0 < self._jobs < len(self._threads) else jobs

    async def until_measured(self, pictures: int, complete: float) -> None:
        """Waits until a job has been timed, unless threads are free: otherwise many requests at once would all find room."""
        while not (self._pace.seconds or self._timed) and time.monotonic() < complete + self._deadline:
            if not self._jobs_before(pictures):
                break
            await asyncio.sleep(LOOK)

    @contextmanager
    def line(self, pictures: int = 1) -> Iterator[Line]:
        """For a request with so many pictures to decode, one after the other: admitting the first that comes here admits all."""
        line = Line(self, pictures - 1)
        try:
            yield line
        finally:
            self.lines.discard(line)

    async def do(self, job: Callable[[], T], complete: float | None = None) -> T:
        """Runs a job; `complete` is the time.monotonic() at which the whole request had arrived, None for a computed answer."""
        if not self._threads[0].ident:
            self._start()
        self._reset_if_idle()
        errand = _Errand(job, asyncio.get_running_loop(), self._timed.append)
        self._jobs += 1
        try:
            async with asyncio.timeout(None if complete is None else complete + self._deadline - time.monotonic()):
                await asyncio.sleep(0)  # a deadline that has already passed takes effect here
                self._unanswered[errand] = None
                self._errands.put((time.monotonic() if complete is None else complete, next(self._numbers), errand))
                result: T = await errand.answer
                return result
        except TimeoutError:
            raise TooLate(LATE, "late") from None
        finally:
            errand.job = None  # if it is still queued: it may hold a whole request's body
            self._unanswered.pop(errand, None)
            if errand.at_work:  # nobody waits for it any more, but its thread is busy
                errand.on_end = self._job_done
            else:
                self._job_done()
            del errand  # its error's traceback holds this frame, and a reference cycle is freed only much later

    def _job_done(self) -> None:
        self._jobs -= 1

    def _reset_if_idle(self) -> None:
        """Starts measuring afresh if there are no jobs, nor more to come: what was done for clients that left is no guide."""
        if not self._jobs and not self.lines:
            self._pace, self._last_end = Pace(), 0.0
            self._timed.clear()

    def close(self) -> None:
        """Has the threads end when the queue is empty, without waiting for them."""
        for _ in self._threads:
            self._errands.put((math.inf, next(self._numbers), None))

    def _start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while (errand := self._errands.get()[-1]) is not None:
            errand.run()
            del errand


async def in_own_thread(job: Callable[[], T]) -> T:
    """Runs a job in a thread of its own: if it hangs in a runtime, the process can end without it."""
    errand = _Errand(job, asyncio.get_running_loop())
    threading.Thread(target=copy_context().run, args=(errand.run,), name="own", daemon=True).start()  # logs name the request
    try:
        result: T = await errand.answer
        return result
    finally:
        del errand  # as in Crew.do


@dataclass(eq=False)
class Line:
    """One request's place: how many pictures it will still bring."""

    crew: Crew
    coming: int

    async def do(self, job: Callable[[], T], complete: float) -> T:
        if self not in self.crew.lines:
            if self.coming:
                await self.crew.until_measured(1 + self.coming, complete)
            self.crew.admit(1 + self.coming)
            self.crew.lines.add(self)
        return await self.crew.do(job, complete)

    def advance(self) -> None:
        """Notes that one of the pictures to come is here."""
        self.coming -= 1


class _Errand:
    """A job on its way from the event loop to a thread and back."""

    def __init__(
        self,
        job: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        note: Callable[[tuple[float, float]], None] = lambda _: None,
    ) -> None:
        self.job: Callable[[], Any] | None = job
        self.answer: asyncio.Future[Any] = loop.create_future()
        self.queued_at, self.started_at = time.monotonic(), 0.0  # `started_at` is 0 until it runs
        self.on_end: Callable[[], None] = lambda: None  # called on the loop after it has run
        self._finished = False
        self._loop, self._note = loop, note

    @property
    def at_work(self) -> bool:
        return self.started_at > 0 and not self._finished

    def run(self) -> None:
        job = self.job
        if job is None:
            return
        result, error, self.started_at = None, None, time.monotonic()
        try:
            result = job()
        except Exception as failure:  # passed on to whoever waits
            release_frames(failure)
            error = failure
        self._note((self.started_at, time.monotonic()))
        try:
            self._loop.call_soon_threadsafe(self._deliver, result, error)
        except RuntimeError:  # the loop has closed: nobody is left to tell
            pass
        del self, job, result, error  # an error's traceback holds this frame

    def _deliver(self, result: Any, error: Exception | None) -> None:
        self._finished = True
        self.on_end()
        if self.answer.done():
            return
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(result)
