"""Micro-batching between routes and engine: whatever has queued when the model becomes free runs together, with no added delay.

Counts images, not requests, and knows neither HTTP nor models: `run` is any function from arrays to arrays, row for row, that
also returns where its time went.
Requests arrive on the event loop. Threads of our own, the runners, share and run them (ONNX Runtime releases the GIL meanwhile)
and hand back a whole batch with one wake-up of the loop. Every counter has one writer: the loop, or whoever holds the picking
lock, which is a runner assembling its batch or the loop dropping overdue requests.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from service.errors import Broken, Busy, TooLarge, TooLate, TurnedAway
from service.pace import Pace
from service.visits import Stages

Array = NDArray[Any]
Arrays = tuple[Array, ...]


class Answer(NamedTuple):
    """A request's own rows of every output, and where its time went."""

    outputs: Arrays
    stages: Stages  # the queue, and the stages of the batches it was in


class Observer(Protocol):
    """Called on the event loop, once per batch."""

    def batch_ran(self, images: int, run_seconds: float) -> None: ...
    def batch_failed(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class _Request:
    """One submission, or as much of it as fits into a batch."""

    inputs: Arrays  # each (images, ...)
    images: int
    deadline: float
    queued_at: float  # time.monotonic()
    answer: asyncio.Future[Answer]

    def is_over(self, now: float) -> bool:
        """Whether nobody waits for the answer any more, or its deadline has passed."""
        return self.answer.done() or self.deadline <= now

    def refuse(self, error: TurnedAway) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class _Batch:
    requests: list[_Request] = field(default_factory=list)
    over: list[_Request] = field(default_factory=list)  # these need not run
    images: int = 0
    looks: int = 0  # how often the loop saw it running; written by the loop, like given_up
    given_up: bool = False  # its requests were refused while it was running


class Batcher:
    """`await submit(...)` from any task of the loop that called start()."""

    def __init__(
        self,
        run: Callable[..., tuple[Arrays, Stages]],
        *,
        max_batch: int,
        max_queue: int,
        max_wait: float,
        observer: Observer,
        runners: int = 1,
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self.max_queue = max_queue
        self._max_wait = max_wait
        self._pace, self._waited = Pace(), 0.0  # of batches, and seconds the last one waited; written by the loop
        self._observer = observer
        self._turn: list[_Request] = []  # arrived in this turn of the event loop
        self._arrivals: SimpleQueue[list[_Request] | None] = SimpleQueue()  # None: stop
        self._picking = threading.Lock()
        self._waiting: deque[_Request] = deque()  # arrived, not yet in a batch; guarded by _picking
        self._accepted = 0  # images in total; written by the loop
        self._dequeued = 0  # images in total that left _waiting; written under _picking
        self._unanswered = 0  # requests; written by the loop
        self._answered_all = asyncio.Event()
        self._reserved = 0  # images being decoded, to be submitted
        self._draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runners = runners
        self._at_work: list[_Batch | None] = [None] * runners  # each runner writes its own entry

    @property
    def queued(self) -> int:
        """Images that wait for the model."""
        return self._accepted - self._dequeued

    @property
    def limit(self) -> int:
        """Estimate of how many images may wait without any of them waiting too long; at most max_queue."""
        in_time = self._pace.pieces_in(self._max_wait) * self._max_batch * self._runners
        return max(1, int(min(in_time, self.max_queue)))

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for number in range(self._runners):
            threading.Thread(target=self._work, args=(number,), name=f"runner-{number}", daemon=True).start()

    async def submit(self, *inputs: Array, deadline: float = math.inf) -> Answer:
        """Runs arrays (n, ...) of equal n, batched with other waiting requests; `deadline` is a time.monotonic()."""
        images = len(inputs[0])
        self._expect_room(images)
        if images <= self._max_batch:
            return await self._enqueue(inputs, deadline)
        cuts = range(0, images, self._max_batch)
        parts = [self._enqueue(tuple(each[cut : cut + self._max_batch] for each in inputs), deadline) for cut in cuts]
        try:
            return _joined(await asyncio.gather(*parts))
        finally:
            while parts:  # if one failed nobody needs the rest; emptied, since the error's traceback keeps this frame alive
                parts.pop().cancel()

    def admit(self, images: int = 1) -> None:
        """Raises Busy if so many more images would wait too long or find no room. Called before pictures are decoded."""
        self._expect_room(images)
        # The batches measured need not have been full, and full ones take no less: this rather underestimates the wait.
        if wait := self._pace.excessive_wait(self._batches_waiting, self._waited, self._max_wait):
            estimate = f"the queue takes about {wait:.1f} s ({self.queued} images), longer than the limit of"
            raise self._queue_full(f"{estimate} {self._max_wait:g} s")

    def _expect_room(self, images: int) -> None:
        if self._draining:
            raise Busy("the server is shutting down; ask again, another will answer", "draining")
        if images > self.max_queue:
            raise TooLarge(f"{images} images at once are more than the queue holds; send at most {self.max_queue}")
        if (waiting := self.queued + self._reserved) + images > self.max_queue:
            raise self._queue_full(f"the queue holds {self.max_queue} images and already has {waiting}")

    @property
    def _batches_waiting(self) -> float:
        """Full batches that wait, per runner."""
        return self.queued / self._max_batch / self._runners

    def _queue_full(self, why: str) -> Busy:
        after = self._pace.seconds_until_room(self._batches_waiting, self._max_wait)
        return Busy(f"{why}; ask again after the seconds in Retry-After", "full", after)

    @contextmanager
    def reserved(self, images: int) -> Iterator[None]:
        """Reserves room in the queue during decoding; otherwise all would decode at once, most of them only to be refused."""
        self.admit(images)
        self._reserved += images
        try:
            yield
        finally:
            self._reserved -= images

    async def drain(self, timeout: float) -> bool:
        """Accepts nothing new, answers what was accepted, and stops the runners; returns False if the time did not suffice."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                while self._unanswered:
                    self._answered_all.clear()
                    await self._answered_all.wait()
        except TimeoutError:
            return False
        finally:
            for _ in range(self._runners):
                self._arrivals.put(None)
        # Both refer to our owner, and so to a model: without this reference cycle it is freed before the next garbage collection.
        self._run = self._observer = None  # type: ignore[assignment]
        return True

    def drop_overdue(self, looks: int) -> bool:
        """Refuses requests whose deadline passed while all runners were busy: a runner that hangs would never look at them.

        A batch seen running more than `looks` times hangs: its requests are refused too, and True is returned. Looks are counted,
        not seconds, which also pass while a whole container is paused.
        """
        if self._picking.acquire(blocking=False):  # otherwise a runner is picking, or waiting for a first request
            try:
                self._refuse_late(self._remove_overdue())
            finally:
                self._picking.release()
        at_work = list(filter(None, self._at_work))
        for batch in at_work:
            batch.looks += 1
        hung = [batch for batch in at_work if batch.looks > looks]
        for batch in hung:
            if not batch.given_up:
                batch.given_up = True
                for request in batch.requests:
                    request.refuse(Broken("the model hangs, and has not answered; ask another replica", "failed"))
                self._count_answered(len(batch.requests))
                self._refuse_late(batch.over)
        return bool(hung)

    def _remove_overdue(self) -> list[_Request]:
        """Takes out the requests that are over."""
        if not self._collect(wait=False):
            self._arrivals.put(None)  # that stop was meant for a runner
        now = time.monotonic()
        over = [request for request in self._waiting if request.is_over(now)]
        self._waiting = deque(request for request in self._waiting if not request.is_over(now))
        self._dequeued += sum(request.images for request in over)
        return over

    def _enqueue(self, inputs: Arrays, deadline: float) -> asyncio.Future[Answer]:
        assert self._loop is not None, "start() comes first"
        answer: asyncio.Future[Answer] = self._loop.create_future()
        images = len(inputs[0])
        self._accepted += images
        self._unanswered += 1
        if not self._turn:  # a runner is woken once per turn of the loop, not per request
            self._loop.call_soon(self._end_turn)
        self._turn.append(_Request(inputs, images, deadline, time.monotonic(), answer))
        return answer

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, []
        self._arrivals.put(turn)

    # The runners' side

    def _work(self, number: int) -> None:
        assert self._loop is not None
        while (batch := self._next_batch()) is not None:
            outputs: Arrays = ()
            stages: Stages = {}
            error: Exception | None = None
            started = time.monotonic()
            if batch.requests:
                self._at_work[number] = batch
                try:
                    outputs, stages = self._run(*_stacked(batch.requests))
                except Exception as failure:  # whatever the runtime raises: these requests fail, the next may not
                    error = failure
                self._at_work[number] = None
            finished = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._deliver, batch, outputs, stages, error, started, finished)
            except RuntimeError:  # the loop has closed: nobody is left to tell
                return
            del error  # its traceback holds this frame

    def _next_batch(self) -> _Batch | None:
        """Waits for a first request, then takes this runner's share of all that wait, without those that are over."""
        with self._picking:
            if not self._collect(wait=not self._waiting):
                return None
            now, most = time.monotonic(), self._share()
            batch = _Batch()
            while self._waiting:
                request = self._waiting[0]
                if request.is_over(now):
                    batch.over.append(request)
                elif batch.images and batch.images + request.images > most:
                    break
                else:
                    batch.requests.append(request)
                    batch.images += request.images
                self._waiting.popleft()
                self._dequeued += request.images
            return batch

    def _share(self) -> int:
        """Images per runner if those waiting are divided evenly, rounded up; never more than a batch may hold."""
        return min(self._max_batch, -(-self.queued // self._runners))

    def _collect(self, wait: bool) -> bool:
        """Moves arrivals to _waiting, with `wait` blocking for the first; returns False if a runner is to stop."""
        try:
            while (turn := self._arrivals.get(block=wait)) is not None:
                self._waiting.extend(turn)
                wait = False
        except Empty:
            return True
        return False

    # Back on the loop

    def _deliver(
        self, batch: _Batch, outputs: Arrays, stages: Stages, error: Exception | None, started: float, finished: float
    ) -> None:
        if batch.given_up:  # nobody waits any more, and the observer may be gone
            return
        if error is not None:
            self._observer.batch_failed(error)
        elif batch.requests:
            self._pace.record(finished - started)
            self._waited = started - batch.requests[0].queued_at
            self._observer.batch_ran(batch.images, finished - started)
        first = 0
        for request in batch.requests:
            last = first + request.images
            if error is not None:
                request.refuse(Broken("the model failed on this batch; ask again, or another replica", "failed"))
            elif not request.answer.done():  # otherwise the client left while the model ran
                rows = tuple(output[first:last] for output in outputs)
                request.answer.set_result(Answer(rows, {"queue": started - request.queued_at, **stages}))
            first = last
        self._count_answered(len(batch.requests))
        self._refuse_late(batch.over)

    def _refuse_late(self, over: list[_Request]) -> None:
        for request in over:
            request.refuse(TooLate("the deadline passed in the queue; ask again later, or for fewer pictures at once", "late"))
        self._count_answered(len(over))

    def _count_answered(self, requests: int) -> None:
        self._unanswered -= requests
        if not self._unanswered:
            self._pace, self._waited = Pace(), 0.0
            self._answered_all.set()


def _stacked(requests: list[_Request]) -> Arrays:
    """The inputs of all requests, concatenated; those of a single request are not copied."""
    if len(requests) == 1:
        return requests[0].inputs
    return tuple(np.concatenate(columns) for columns in zip(*(request.inputs for request in requests), strict=True))


def _joined(parts: Sequence[Answer]) -> Answer:
    """Joins the parts of one request as if they were one: it waited until the first began and ran until the last ended."""
    outputs = tuple(np.concatenate(columns) for columns in zip(*(part.outputs for part in parts), strict=True))
    ran: Stages = {}
    for stage, seconds in chain.from_iterable(part.stages.items() for part in parts):
        ran[stage] = ran.get(stage, 0.0) + seconds
    del ran["queue"]
    queue = parts[0].stages["queue"]
    passed = max(sum(part.stages.values()) for part in parts) - queue
    share = min(1.0, passed / (sum(ran.values()) or 1.0))  # below 1 if parts ran in parallel
    return Answer(outputs, {"queue": queue, **{stage: seconds * share for stage, seconds in ran.items()}})
