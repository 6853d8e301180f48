"""Batching with a gate instead of a model: the tests decide when a run ends."""

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from service.batcher import Arrays, Batcher
from service.errors import Broken, Busy, TooLarge, TooLate
from service.visits import Stages
from tests.waiting import until, until_soon


class Watcher:
    """Records what the batcher reports."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.failures: list[Exception] = []
        self.threads: set[int] = set()

    def batch_ran(self, images, run_seconds):
        self.batches.append(images)
        self.threads.add(threading.get_ident())

    def batch_failed(self, error):
        self.failures.append(error)


class Gate:
    """Doubles its input once `let` allows it; `entered` counts the runs that began."""

    def __init__(self) -> None:
        self.turns = threading.Semaphore(0)
        self.entered = 0
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, *inputs):
        self.entered += 1
        self.shapes.append(inputs[0].shape)
        assert self.turns.acquire(timeout=10)
        return (inputs[0] * 2, inputs[0].sum(axis=tuple(range(1, inputs[0].ndim)))), {"encode": 0.5}

    def let(self, runs: int = 1) -> None:
        self.turns.release(runs)


def pictures(count: int, value: float = 1.0):
    return np.full((count, 1, 2, 2), value, np.float32)


class House:
    """A started batcher with a gate for a model; `occupied` sends it one image, behind which others queue."""

    def __init__(
        self,
        run: Callable[..., tuple[Arrays, Stages]] | None = None,
        max_batch: int = 4,
        max_queue: int = 100,
        runners: int = 1,
        max_wait: float = 60,
    ) -> None:
        self.gate, self.watcher = Gate(), Watcher()
        bounds = {"max_batch": max_batch, "max_queue": max_queue, "max_wait": max_wait}
        self.batcher = Batcher(run or self.gate, **bounds, observer=self.watcher, runners=runners)
        self.batcher.start()

    async def occupied(self) -> asyncio.Task:
        first = self.send(1, 0)
        await until_soon(lambda: self.gate.entered == 1)
        return first

    def send(self, count: int, value: float = 1.0, **options) -> asyncio.Task:
        return asyncio.create_task(self.batcher.submit(pictures(count, value), **options))

    async def queued(self, images: int) -> None:
        await until_soon(lambda: self.batcher.queued == images)


def scenario(test):
    """Runs an async test to its end, with a limit."""

    def run():
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@scenario
async def test_queued_requests_run_together_and_each_gets_its_own_rows():
    house = House()
    first = await house.occupied()
    others = [house.send(count, value) for count, value in ((1, 3), (2, 5), (1, 7), (1, 9))]
    await house.queued(5)
    house.gate.let(3)
    answers = await asyncio.gather(*others)
    await first
    assert house.gate.shapes == [(1, 1, 2, 2), (4, 1, 2, 2), (1, 1, 2, 2)]  # images are counted: 1 + 2 + 1 fill four
    assert house.watcher.batches == [1, 4, 1]
    for answer, (count, value) in zip(answers, ((1, 3), (2, 5), (1, 7), (1, 9)), strict=True):
        np.testing.assert_array_equal(answer.outputs[0], pictures(count, 2 * value))
        np.testing.assert_array_equal(answer.outputs[1], np.full(count, 4 * value))
        assert answer.stages["queue"] > 0
    assert house.watcher.threads == {threading.get_ident()}
    assert await house.batcher.drain(1)


@scenario
async def test_each_of_several_inputs_is_stacked():
    runs = []

    def run(poses, classes):
        runs.append((poses.shape, classes.dtype))
        return (poses * classes[:, None],), {}

    batcher = Batcher(run, max_batch=8, max_queue=8, max_wait=60, observer=Watcher())
    batcher.start()
    poses = np.ones((1, 3), np.float32)
    answers = await asyncio.gather(*(batcher.submit(poses, np.array([label])) for label in range(3)))
    assert [answer.outputs[0][0, 0] for answer in answers] == [0, 1, 2]
    assert runs == [((3, 3), np.dtype(np.int64))]  # submitted in one turn of the loop: one batch


@scenario
async def test_a_lone_request_does_not_wait_for_others():
    house = House()
    house.gate.let(200)
    await house.send(1)
    waits = []
    for _ in range(100):
        waits.append((await house.send(1)).stages["queue"])
    assert sorted(waits)[50] < 0.005


@scenario
async def test_a_request_larger_than_a_batch_is_split_and_joined():
    house = House()
    house.gate.let(10)
    images = np.random.default_rng(0).random((11, 1, 2, 2), np.float32)
    answer = await house.batcher.submit(images)
    np.testing.assert_array_equal(answer.outputs[0], images * 2)
    assert house.watcher.batches == [4, 4, 3]
    assert 0 < answer.stages["queue"] < 5


def run_for_50_ms(images):
    time.sleep(0.05)
    return (images,), {"encode": 0.03, "reconstruct": 0.02}


@pytest.mark.parametrize("runners", [1, 4])
def test_stage_times_of_a_split_request_do_not_exceed_its_duration(runners: int):
    """The times of parts that ran one after the other add up; parts that ran side by side took less than their sum."""

    async def split() -> None:
        house = House(run_for_50_ms, runners=runners)
        began = time.monotonic()
        answer = await house.send(16)
        assert sum(answer.stages.values()) <= time.monotonic() - began
        assert answer.stages["encode"] == pytest.approx(1.5 * answer.stages["reconstruct"])
        assert answer.stages["encode"] == pytest.approx(0.12) or runners > 1
        assert await house.batcher.drain(1)

    asyncio.run(asyncio.wait_for(split(), 20))


@scenario
async def test_a_split_request_is_dropped_as_a_whole():
    house = House()
    await house.occupied()
    late = house.send(30, deadline=time.monotonic() + 0.01)
    gone = house.send(9)
    await house.queued(39)
    await asyncio.sleep(0.02)
    gone.cancel()
    house.gate.let(1)
    with pytest.raises(TooLate):
        await late
    await house.queued(0)
    assert await house.batcher.drain(1)
    assert house.watcher.batches == [1]


@scenario
async def test_the_remaining_parts_of_a_failed_request_do_not_run():
    def run(images):
        time.sleep(0.05)
        raise RuntimeError

    house = House(run)
    with pytest.raises(Broken):
        await house.send(40)
    assert await house.batcher.drain(1)
    assert len(house.watcher.failures) < 10


@scenario
async def test_pictures_being_decoded_reserve_room_in_the_queue():
    house = House(max_queue=5)
    with house.batcher.reserved(3):
        house.batcher.admit(2)
        with pytest.raises(Busy, match="the queue holds 5 images and already has 3"), house.batcher.reserved(3):
            pass
    with suppress(ValueError), house.batcher.reserved(5):
        raise ValueError
    house.batcher.admit(5)


@scenario
async def test_a_full_queue_refuses_at_once():
    house = House(max_queue=5)
    await house.occupied()
    waiting = [house.send(3), house.send(2)]
    await house.queued(5)
    began = time.perf_counter()
    with pytest.raises(Busy) as refusal:
        await house.batcher.submit(pictures(1))
    assert time.perf_counter() - began < 0.5
    assert (refusal.value.reason, refusal.value.headers) == ("full", {"Retry-After": "1"})
    with pytest.raises(Busy):
        house.batcher.admit()
    with pytest.raises(TooLarge, match="at most 5"):  # it will never fit, so asking again is no use
        await house.batcher.submit(pictures(6))
    house.gate.let(3)
    await asyncio.gather(*waiting)
    house.batcher.admit()


def slowly(images):
    time.sleep(0.05)
    return (images,), {}


@scenario
async def test_a_refusal_estimates_when_to_retry():
    house = House(slowly, max_batch=2, max_wait=0.1)
    taken = [house.send(2) for _ in range(30)]
    await until_soon(lambda: len(house.watcher.batches) >= 5)
    house.batcher.max_queue = house.batcher.queued + 1
    for images, told in ((1, r"takes about 1\.\d s"), (2, "the queue holds")):
        with pytest.raises(Busy, match=told) as refused:
            house.batcher.admit(images)
        assert refused.value.headers == {"Retry-After": "2"}
    await asyncio.gather(*taken)


@scenario
async def test_a_full_queue_without_a_limit_in_seconds_says_when_to_retry():
    """Such is the decoder's queue."""
    house = House(slowly, max_batch=2, max_wait=math.inf)
    taken = [house.send(2) for _ in range(4)]
    await asyncio.sleep(0)
    house.batcher.max_queue = house.batcher.queued + 1
    with pytest.raises(Busy, match="the queue holds") as refused:
        house.batcher.admit(2)
    assert refused.value.headers == {"Retry-After": "1"}
    await asyncio.gather(*taken)


@scenario
async def test_overload_refuses_requests_that_would_wait_too_long():
    house, taken = House(slowly, max_batch=2, max_queue=1_000, max_wait=0.4), []

    async def keeps_coming() -> None:
        while True:
            taken.append(house.send(2))
            await asyncio.sleep(0.01)
            house.batcher.admit()

    told = r"the queue takes about \d\.\d s \(\d+ images\), longer than the limit of 0.4 s"
    assert house.batcher.limit == 1_000
    with pytest.raises(Busy, match=told) as refused:
        await keeps_coming()
    assert refused.value.reason == "full"
    assert len(taken) > 8  # eight would be done in time
    assert 2 <= house.batcher.limit <= 16 < house.batcher.queued  # eight batches of two images
    await asyncio.gather(*taken)
    assert house.batcher.limit == 1_000
    crowd = []
    for _ in range(40):  # the load before it no longer counts
        house.batcher.admit()
        crowd.append(house.send(1))
        await asyncio.sleep(0)
    await asyncio.gather(*crowd)


@scenario
async def test_an_admitted_request_is_still_accepted_under_later_load():
    house, taken = House(slowly, max_batch=2, max_queue=1_000, max_wait=0.2), []
    house.batcher.admit()
    with suppress(Busy):
        while True:
            taken.append(house.send(2))
            await asyncio.sleep(0.01)
            house.batcher.admit()
    taken.append(house.send(1))
    await asyncio.gather(*taken)


@scenario
async def test_bursts_and_requests_beside_reserved_room_are_accepted():
    house = House(slowly, max_batch=2, max_queue=1_000, max_wait=0.4)
    await asyncio.gather(*(house.send(2) for _ in range(40)))
    with house.batcher.reserved(900):
        for _ in range(20):
            await house.send(1)


@scenario
async def test_a_request_past_its_deadline_is_dropped_before_it_runs():
    house = House()
    await house.occupied()
    late = house.send(2, deadline=time.monotonic() + 0.01)
    alive = house.send(1, deadline=time.monotonic() + 60)
    await house.queued(3)
    await asyncio.sleep(0.02)
    house.gate.let(2)
    with pytest.raises(TooLate) as refusal:
        await late
    assert refusal.value.reason == "late"
    await alive
    assert house.watcher.batches == [1, 1]
    assert house.batcher.queued == 0


@scenario
async def test_a_cancelled_request_is_dropped_before_it_runs():
    house = House()
    first = await house.occupied()
    gone, alive = house.send(3), house.send(1)
    await house.queued(4)
    gone.cancel()
    first.cancel()  # left while the model runs: nothing can be saved, and nothing breaks
    await asyncio.sleep(0)
    house.gate.let(2)
    await alive
    assert house.watcher.batches == [1, 1]
    assert await house.batcher.drain(1)


@scenario
async def test_a_batch_of_only_cancelled_requests_does_not_run():
    house = House()
    first = await house.occupied()
    gone = house.send(1)
    await house.queued(1)
    gone.cancel()
    house.gate.let(1)
    await first
    assert await house.batcher.drain(1)
    assert house.gate.entered == 1


@scenario
async def test_a_failure_fails_only_its_batch_and_is_reported():
    calls = []

    def run(images):
        calls.append(len(images))
        if images[0, 0, 0, 0] == 13:
            raise RuntimeError("CUDA error: the text is not for clients")
        return (images,), {}

    house = House(run, max_batch=1)
    good, bad, after = house.send(1), house.send(1, 13), house.send(1)
    await good
    with pytest.raises(Broken) as failure:
        await bad
    assert "CUDA" not in failure.value.detail
    await after
    assert [str(error) for error in house.watcher.failures] == ["CUDA error: the text is not for clients"]
    with pytest.raises(Broken):  # one part fails, and so does the whole
        await house.batcher.submit(np.concatenate([pictures(1), pictures(1, 13), pictures(1)]))
    assert await house.batcher.drain(1)


@scenario
async def test_draining_answers_accepted_requests_and_refuses_new_ones():
    before = set(threading.enumerate())
    house = House(runners=3)
    first = await house.occupied()
    waiting = [house.send(1) for _ in range(10)]
    await until_soon(lambda: house.gate.entered == 3)
    draining = asyncio.create_task(house.batcher.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="shutting down") as refusal:
        await house.batcher.submit(pictures(1))
    assert refusal.value.reason == "draining"
    house.gate.let(10)
    assert await draining
    assert all(task.done() and not task.exception() for task in (first, *waiting))
    await until_soon(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("fault", [None, "a fault, which holds the frames that it came through"])
@pytest.mark.parametrize("started", [True, False])
def test_the_owner_of_a_drained_batcher_is_freed_at_once(started: bool, fault: str | None):
    """It holds a model in memory, so it must not wait for the garbage collector."""

    class Owner(Watcher):
        def __init__(self) -> None:
            super().__init__()
            self.batcher = Batcher(self.run, max_batch=1, max_queue=1, max_wait=60, observer=self)

        def run(self, images):
            if fault:
                raise RuntimeError(fault)
            return (images,), {}

        def batch_failed(self, error):
            pass

    async def leave() -> weakref.ref[Owner]:
        owner = Owner()
        if started:
            owner.batcher.start()
            with suppress(Broken):
                await owner.batcher.submit(pictures(1))
        assert await owner.batcher.drain(1)
        assert await owner.batcher.drain(1)
        return weakref.ref(owner)

    async def gone() -> None:
        left = await leave()
        await until_soon(lambda: left() is None, seconds=2)

    gc.disable()
    try:
        asyncio.run(gone())
    finally:
        gc.enable()


@scenario
async def test_draining_gives_up_in_time():
    house = House()
    await house.occupied()
    began = time.perf_counter()
    assert not await house.batcher.drain(0.05)
    assert time.perf_counter() - began < 1
    house.gate.let()


@scenario
async def test_requests_behind_a_hanging_run_are_still_answered():
    house = House()
    hung = await house.occupied()
    late = house.send(1, deadline=time.monotonic() + 0.05)
    left, patient = house.send(2), house.send(3)
    await house.queued(6)
    left.cancel()
    await asyncio.sleep(0.1)
    for _ in range(2):  # looks count, not seconds: many pass while a container is paused
        assert not house.batcher.drop_overdue(looks=2)
    with pytest.raises(TooLate):
        await late
    assert house.batcher.queued == 3
    assert not hung.done()
    assert house.batcher.drop_overdue(looks=2)
    with pytest.raises(Broken, match="the model hangs"):
        await hung
    house.gate.let(2)  # it did not hang after all
    assert (await patient).outputs[0].shape[0] == 3
    assert not house.batcher.drop_overdue(looks=0)
    assert house.watcher.batches == [3]
    assert await house.batcher.drain(1)


@scenario
async def test_draining_does_not_wait_for_a_hanging_run():
    house = House()
    hung = await house.occupied()
    for _ in range(2):
        assert house.batcher.drop_overdue(looks=0)
    began = time.perf_counter()
    assert await house.batcher.drain(5)
    assert time.perf_counter() - began < 1
    with pytest.raises(Broken):
        await hung
    house.gate.let()  # it ends, with nobody left to tell
    await asyncio.sleep(0.1)
    assert house.watcher.batches == house.watcher.failures == []


@scenario
async def test_drop_overdue_keeps_requests_that_still_have_time():
    house = House()
    first = await house.occupied()
    other = house.send(1, deadline=time.monotonic() + 60)
    await house.queued(1)
    assert not house.batcher.drop_overdue(looks=60)
    house.gate.let(2)
    await asyncio.gather(first, other)
    assert not house.batcher.drop_overdue(looks=60)  # while the runner waits for requests
    assert await house.batcher.drain(1)


@scenario
async def test_the_loop_stays_free_while_the_model_runs():
    house = House()
    await house.occupied()
    began = time.perf_counter()
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert time.perf_counter() - began < 2
    assert house.gate.entered == 1
    house.gate.let()


@scenario
async def test_runners_share_the_queued_requests():
    house = House(max_batch=16, runners=2)
    firsts = [house.send(1), house.send(1)]
    await until_soon(lambda: house.gate.entered == 2)  # side by side
    others = [house.send(1) for _ in range(6)]
    await house.queued(6)
    house.gate.let(2)
    await until_soon(lambda: house.gate.entered == 4)
    shares = [shape[0] for shape in house.gate.shapes[:4]]
    assert shares[:2] == [1, 1]
    assert sorted(shares[2:]) == [2, 3]  # half of six, half of three, rounded up; either may come to the gate first
    large = house.send(8)  # one request's images stay together, whatever the share
    await house.queued(9)
    house.gate.let(20)
    await asyncio.gather(*firsts, *others, large)
    assert 8 in [shape[0] for shape in house.gate.shapes]
    assert await house.batcher.drain(1)


def test_thousands_of_requests_keep_their_rows():
    for runners in (1, 4):
        asyncio.run(asyncio.wait_for(_thousands(runners), 20))


async def _thousands(runners: int) -> None:
    watcher = Watcher()
    batcher = Batcher(
        lambda images: ((images * 2,), {}), max_batch=16, max_queue=10_000, max_wait=60, observer=watcher, runners=runners
    )
    batcher.start()

    async def client(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(100):
            images = random.random((random.integers(1, 20), 1, 2, 2), np.float32)
            answer = await batcher.submit(images)
            np.testing.assert_array_equal(answer.outputs[0], images * 2)

    await asyncio.gather(*(client(seed) for seed in range(32)))
    assert batcher.queued == 0
    assert max(watcher.batches) <= 16
    assert await batcher.drain(1)


@scenario
async def test_cancelling_during_a_run_does_not_fail_others_in_the_batch():
    house = House()
    first = await house.occupied()
    left, stays = house.send(1), house.send(1)
    await house.queued(2)
    house.gate.let(1)
    await first
    await until_soon(lambda: house.gate.entered == 2)
    left.cancel()
    await asyncio.sleep(0)
    house.gate.let(1)
    await asyncio.wait_for(stays, 2)
    assert await house.batcher.drain(1)


@scenario
async def test_a_request_late_at_the_start_of_a_hanging_batch_gets_too_late():
    house = House()
    first = await house.occupied()
    late, stuck = house.send(1, deadline=time.monotonic() + 0.01), house.send(1)
    await house.queued(2)
    await asyncio.sleep(0.02)
    house.gate.let(1)
    await first
    await until_soon(lambda: house.gate.entered == 2)
    assert house.batcher.drop_overdue(0)
    for task, error in ((stuck, Broken), (late, TooLate)):
        with pytest.raises(error):
            await asyncio.wait_for(task, 1)
    house.gate.let(1)
    assert await house.batcher.drain(1)


@scenario
async def test_a_hung_runner_ends_when_its_run_returns_after_draining():
    before = set(threading.enumerate())
    house = House()
    await house.occupied()
    assert not await house.batcher.drain(0.01)
    house.batcher.drop_overdue(0)
    house.gate.let(1)
    await until_soon(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("images", [1, 3])
def test_failed_requests_are_freed_without_garbage_collection(images):
    """The collector seldom runs for so few objects, and under overload many requests are refused."""
    held = []

    def fail(images):
        raise RuntimeError("no")

    async def refused() -> None:
        house = House(fail, max_batch=1)
        for deadline, error in ((0.0, TooLate), (np.inf, Broken)):
            sent = pictures(images)
            held.append(weakref.ref(sent))
            try:
                await house.batcher.submit(sent, deadline=deadline)
            except error as told:
                held.append(weakref.ref(told))
            del sent
        house.watcher.failures.clear()
        assert await house.batcher.drain(1)

    gc.disable()
    try:
        asyncio.run(refused())
        assert len(held) == 4
        until(lambda: all(each() is None for each in held))  # a runner that drain told to stop may not have ended yet
    finally:
        gc.enable()
