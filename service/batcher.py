"""Micro-batching between routes and engine: what has queued when the model falls free runs together, with no delay added.

Counts images, not requests, and knows neither HTTP nor models: `run` is any function from arrays to arrays, row for row.
Requests arrive on the event loop; threads of our own, the runners, run them (ONNX Runtime lets go of the GIL meanwhile) and
hand a whole batch back with one wake-up of the loop. What has queued is shared among the runners. Every counter has one
writer, the loop or whichever runner is picking its batch, and one lock sees to it that one picks at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from service.errors import Broken, Busy, TooLarge, TooLate

Array = NDArray[Any]
Arrays = tuple[Array, ...]
Drop = Literal["full", "draining", "late", "gone"]


class Answer(NamedTuple):
    """A request's own rows of every output, and where its time went."""

    outputs: Arrays
    queue_seconds: float
    run_seconds: float
    firsts: Sequence[int] = (0,)  # a row of each batch that it was in: what a row says of its whole batch counts once for each


class Observer(Protocol):
    """Who wants to know; called on the event loop, once a batch where it can be."""

    def batch_ran(self, images: int, run_seconds: float) -> None: ...
    def dropped(self, reason: Drop, images: int) -> None: ...
    def failed(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class _Whole:
    """What was submitted at once, of which one larger than a batch is several requests."""

    images: int
    told: bool = False  # of its end, which is told once


@dataclass(slots=True, eq=False)
class _Request:
    whole: _Whole
    inputs: Arrays  # each (images, ...)
    images: int
    deadline: float | None
    arrived: float
    answer: asyncio.Future[Answer]


class _Batch(NamedTuple):
    requests: list[_Request]
    late: list[_Request]
    gone: list[_Request]
    images: int


class Batcher:
    """`await submit(...)` from any task of the loop that called start()."""

    def __init__(
        self, run: Callable[..., Arrays], *, max_batch: int, max_queue: int, observer: Observer, runners: int = 1
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self.max_queue = max_queue
        self._observer = observer
        self._turn: list[_Request] = []  # arrived in this turn of the loop
        self._arrivals: SimpleQueue[list[_Request] | None] = SimpleQueue()  # None: stop
        self._picking = threading.Lock()
        self._waiting: deque[_Request] = deque()  # arrived, not yet in a batch; the picking runner's own
        self._accepted = 0  # images ever; written by the loop
        self._taken = 0  # images ever; written by the picking runner
        self._unanswered = 0  # requests; written by the loop
        self._answered_all = asyncio.Event()
        self._draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runners = [threading.Thread(target=self._work, args=(n,), name=f"runner-{n}", daemon=True) for n in range(runners)]
        self._at_work: list[tuple[float, _Batch] | None] = [None] * runners  # since when on what; each runner writes its own

    @property
    def queued(self) -> int:
        """Images that wait for the model."""
        return self._accepted - self._taken

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for runner in self._runners:
            runner.start()

    async def submit(self, *inputs: Array, deadline: float | None = None) -> Answer:
        """Runs arrays (n, ...) of equal n, beside whoever else is waiting; `deadline` is a time.monotonic()."""
        images = len(inputs[0])
        self.admit(images)
        whole = _Whole(images)
        if images <= self._max_batch:
            return await self._enqueue(whole, inputs, images, deadline)
        parts = [
            self._enqueue(whole, tuple(each[first : first + self._max_batch] for each in inputs), size, deadline)
            for first in range(0, images, self._max_batch)
            for size in (min(self._max_batch, images - first),)
        ]
        try:
            return _joined(await asyncio.gather(*parts))
        finally:
            for part in parts:  # one failed: nobody waits for the others
                part.cancel()

    def admit(self, images: int = 1) -> None:
        """Raises what submit would, so that a full house need not decode a picture first."""
        if self._draining:
            self._observer.dropped("draining", images)
            raise Busy("the server is shutting down; ask again, another will answer")
        if images > self.max_queue:
            raise TooLarge(f"{images} images at once are more than the queue holds; send at most {self.max_queue}")
        if self.queued + images > self.max_queue:
            self._observer.dropped("full", images)
            raise Busy(f"{self.queued} images are waiting already; ask again after the seconds in Retry-After")

    async def drain(self, timeout: float) -> bool:
        """Takes nothing new, answers what was accepted, stops the runners; False when the time did not suffice."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                while self._unanswered:
                    self._answered_all.clear()
                    await self._answered_all.wait()
        except TimeoutError:
            return False
        finally:
            for _ in self._runners:
                self._arrivals.put(None)
        return True

    def sweep(self, hanging: float) -> bool:
        """Answers those whose time passed while all runners were at work, since a runner that hangs looks at nobody. After
        `hanging` seconds also those who wait for what it hangs in; True while there is such a one."""
        if self._picking.acquire(blocking=False):  # else a runner picks, or waits for somebody to come
            try:
                self._deliver(self._in_vain(), (), None, 0.0, 0.0)
            finally:
                self._picking.release()
        since = time.monotonic() - hanging
        hung = [batch for began, batch in filter(None, self._at_work) if began < since]
        for request in (request for batch in hung for request in batch.requests if not request.answer.done()):
            request.whole.told = True
            request.answer.set_exception(Broken(f"the model did not answer within {hanging:g} seconds; ask another replica"))
        return bool(hung)

    def _in_vain(self) -> _Batch:
        """Those who wait for no answer any more, taken out."""
        if not self._collect(wait=False):
            self._arrivals.put(None)  # that was for a runner
        now, batch, waiting = time.monotonic(), _Batch([], [], [], 0), self._waiting
        self._waiting = deque(request for request in waiting if not _over(request, now, batch))
        self._taken += sum(request.images for request in (*batch.late, *batch.gone))
        return batch

    def _enqueue(self, whole: _Whole, inputs: Arrays, images: int, deadline: float | None) -> asyncio.Future[Answer]:
        assert self._loop is not None, "start() comes first"
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._accepted += images
        self._unanswered += 1
        if not self._turn:  # a runner is woken once a turn of the loop, not once a request
            self._loop.call_soon(self._end_turn)
        self._turn.append(_Request(whole, inputs, images, deadline, time.monotonic(), answer))
        return answer

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, []
        self._arrivals.put(turn)

    # The runners' side

    def _work(self, number: int) -> None:
        assert self._loop is not None
        while (batch := self._next_batch()) is not None:
            outputs: Arrays = ()
            error: Exception | None = None
            started = time.monotonic()
            if batch.requests:
                self._at_work[number] = started, batch
                try:
                    outputs = self._run(*_stacked(batch.requests))
                except Exception as failure:  # whatever a runtime throws: these requests fail, the next may not
                    error = failure
                self._at_work[number] = None
            finished = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._deliver, batch, outputs, error, started, finished)
            except RuntimeError:  # the loop has closed: nobody is left to tell
                return

    def _next_batch(self) -> _Batch | None:
        """Waits for a first request, then takes its share of all that are there, passing over those in vain."""
        with self._picking:
            if not self._collect(wait=not self._waiting):
                return None
            now, most = time.monotonic(), self._share()
            batch, images = _Batch([], [], [], 0), 0
            while self._waiting:
                request = self._waiting[0]
                if not _over(request, now, batch):
                    if images and images + request.images > most:
                        break
                    batch.requests.append(request)
                    images += request.images
                self._waiting.popleft()
                self._taken += request.images
            return batch._replace(images=images)

    def _share(self) -> int:
        """Images: as many as each runner would get of what waits, rounded up, and never more than a batch may hold."""
        return min(self._max_batch, -(-self.queued // len(self._runners)))

    def _collect(self, wait: bool) -> bool:
        """Moves arrivals to where they wait, if it is to wait the first of them too. False: this runner stops."""
        try:
            while (turn := self._arrivals.get(block=wait)) is not None:
                self._waiting.extend(turn)
                wait = False
        except Empty:
            return True
        return False

    # Back on the loop

    def _deliver(self, batch: _Batch, outputs: Arrays, error: Exception | None, started: float, finished: float) -> None:
        if error is not None:
            self._observer.failed(error)
        elif batch.requests:
            self._observer.batch_ran(batch.images, finished - started)
        first = 0
        for request in batch.requests:
            last = first + request.images
            if request.answer.done():
                pass  # left while the model ran
            elif error is not None:
                request.whole.told = True
                request.answer.set_exception(Broken("the model failed on this batch; ask again, or another replica"))
            else:
                rows = tuple(output[first:last] for output in outputs)
                request.answer.set_result(Answer(rows, started - request.arrived, finished - started))
            first = last
        for request in batch.late:
            self._tell("late", request.whole)
            if not request.answer.done():
                request.answer.set_exception(TooLate("the deadline passed in the queue; allow more time or ask again later"))
        for request in batch.gone:
            self._tell("gone", request.whole)
        self._unanswered -= len(batch.requests) + len(batch.late) + len(batch.gone)
        if not self._unanswered:
            self._answered_all.set()

    def _tell(self, reason: Drop, whole: _Whole) -> None:
        if not whole.told:
            whole.told = True
            self._observer.dropped(reason, whole.images)


def _over(request: _Request, now: float, batch: _Batch) -> bool:
    """Whether it need not run, and if so is noted with those who are too late or gone."""
    if request.answer.done():
        batch.gone.append(request)
    elif request.deadline is not None and request.deadline <= now:
        batch.late.append(request)
    else:
        return False
    return True


def _stacked(requests: list[_Request]) -> Arrays:
    """The inputs of all, row under row; one request's own arrays are not copied."""
    if len(requests) == 1:
        return requests[0].inputs
    return tuple(np.concatenate(columns) for columns in zip(*(request.inputs for request in requests), strict=True))


def _joined(parts: Sequence[Answer]) -> Answer:
    """What one request would have seen had its parts been one: it waited for the first and ran until the last."""
    outputs = tuple(np.concatenate(columns) for columns in zip(*(part.outputs for part in parts), strict=True))
    firsts = accumulate((len(part.outputs[0]) for part in parts[:-1]), initial=0)
    return Answer(outputs, parts[0].queue_seconds, sum(part.run_seconds for part in parts), tuple(firsts))
