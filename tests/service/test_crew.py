"""Nobody waits for the crew longer than a request may wait, and it begins no job that nobody waits for."""

from __future__ import annotations

import asyncio
import gc
import json
import pkgutil
import threading
import time
import weakref
from contextlib import suppress
from functools import partial

import pytest

from service.app import create_app
from service.crew import Crew, in_own_thread
from service.engine import CapsNet
from service.errors import Busy, TooLate, Unprocessable
from service.state import Service
from service.visits import request_id
from tests.service.conftest import drawn, encoded, serving, settings


def test_do_returns_the_jobs_result_or_raises_its_error() -> None:
    async def both() -> None:
        crew = Crew(2, most=4, max_wait=60, deadline=10)
        assert await crew.do(lambda: threading.current_thread().name[:4], time.monotonic()) == "crew"

        def refuse() -> None:
            raise Unprocessable("no picture")

        with pytest.raises(Unprocessable, match="no picture"):
            await crew.do(refuse, time.monotonic())
        crew.close()

    asyncio.run(both())


def test_a_job_of_a_late_or_cancelled_request_is_not_started() -> None:
    begun: list[str] = []

    async def wait_in_vain() -> None:
        crew, free = Crew(1, most=4, max_wait=60, deadline=0.3), threading.Event()
        at_work = asyncio.create_task(crew.do(lambda: free.wait(10), time.monotonic() + 10))
        await asyncio.sleep(0.05)
        waits = asyncio.create_task(crew.do(lambda: begun.append("late"), time.monotonic()))
        leaves = asyncio.create_task(crew.do(lambda: begun.append("gone"), time.monotonic()))
        await asyncio.sleep(0.05)
        leaves.cancel()
        came = time.monotonic()
        with pytest.raises(TooLate, match="or for fewer or smaller ones"):
            await waits
        assert time.monotonic() - came < 2
        with pytest.raises(TooLate):
            await crew.do(lambda: begun.append("long late"), time.monotonic() - 5)
        free.set()
        assert await at_work
        assert await crew.do(lambda: "next", time.monotonic() + 10) == "next"
        crew.close()

    asyncio.run(wait_in_vain())
    assert begun == []


def test_a_cancelled_running_job_occupies_its_thread_until_done() -> None:
    async def leave() -> None:
        crew, free = Crew(1, most=1, max_wait=60, deadline=10), threading.Event()
        leaves = asyncio.create_task(crew.do(lambda: free.wait(10), time.monotonic()))
        await asyncio.sleep(0.1)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert crew.at_work
        with pytest.raises(Busy, match="too many pictures wait"):
            crew.admit()
        free.set()
        while crew.at_work:
            await asyncio.sleep(0.01)
        crew.admit()
        crew.close()

    asyncio.run(asyncio.wait_for(leave(), 10))


@pytest.mark.parametrize("at_work", ["service.images.sheet", "service.tensors.write"])
def test_a_computed_answer_is_written_even_past_the_deadline(
    at_work: str, nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is for the computation to begin; without an answer the model would have worked in vain."""
    write = pkgutil.resolve_name(at_work)

    def slowly(*values: object) -> object:
        time.sleep(1.0)
        return write(*values)

    monkeypatch.setattr(at_work, slowly)
    images = {"name": "images", "shape": [30, 1, 28, 28], "datatype": "FP32", "data": [0.5] * 30 * 784}
    with serving(settings(deadline=0.8), nets) as client:
        if "sheet" in at_work:
            answer = client.get("/reconstruct/sweep?label=5")
        else:
            answer = client.post("/v2/models/tiny/infer", json={"inputs": [images]})
    assert answer.status_code == 200, answer.text


def test_a_running_job_is_given_up_at_the_deadline() -> None:
    async def hang() -> None:
        crew, free = Crew(1, most=1, max_wait=60, deadline=0.1), threading.Event()
        with pytest.raises(TooLate):
            await crew.do(lambda: free.wait(10), time.monotonic())
        crew.close()  # which waits for no thread
        free.set()

    began = time.monotonic()
    asyncio.run(hang())
    assert time.monotonic() - began < 5


def test_the_result_of_a_finished_job_is_freed() -> None:
    async def work() -> None:
        crew = Crew(1, most=9, max_wait=60, deadline=10)
        made = weakref.ref(await crew.do(Picture, time.monotonic()))
        await crew.do(lambda: None)
        gc.collect()
        assert made() is None
        crew.close()

    asyncio.run(work())


class Picture:
    pass


@pytest.mark.parametrize("own", [False, True])
def test_a_failed_job_is_freed_without_garbage_collection(own: bool) -> None:
    """The collector seldom runs for so few objects, however large: a picture that cannot be decoded takes a hundred megabytes."""
    held: list[weakref.ref[object]] = []

    def decode() -> None:
        picture = Picture()
        held.append(weakref.ref(picture))
        try:
            raise ValueError("truncated")
        except ValueError as error:
            raise Unprocessable("damaged") from error

    async def fail() -> None:
        crew = Crew(1, most=9, max_wait=60, deadline=10)
        for _ in range(3):
            job = partial(decode)
            held.append(weakref.ref(job))
            try:
                await (in_own_thread(job) if own else crew.do(job, time.monotonic()))
            except Unprocessable as error:
                held.append(weakref.ref(error))
                assert held[-2]() is None  # while the error is still being handled
            del job
        await asyncio.sleep(0.05)  # a thread may hold it a little longer
        crew.close()

    gc.disable()
    try:
        asyncio.run(fail())
        assert [each() for each in held] == [None] * 9
    finally:
        gc.enable()


def test_a_job_in_its_own_thread_knows_its_request() -> None:
    """The log names the request."""

    async def ask() -> None:
        request_id.set("mine")
        assert await in_own_thread(request_id.get) == "mine"

    asyncio.run(ask())


def test_crew_threads_and_own_threads_are_daemons() -> None:
    async def wait() -> None:
        crew, free = Crew(1, most=9, max_wait=60, deadline=10), threading.Event()
        await crew.do(lambda: None)
        hangs = asyncio.create_task(in_own_thread(lambda: free.wait(10)))
        await asyncio.sleep(0)
        names = {thread.name: thread.daemon for thread in threading.enumerate()}
        free.set()
        await hangs
        crew.close()
        assert names["crew-0"]
        assert names["own"]

    asyncio.run(wait())


def test_jobs_run_in_order_of_their_requests_arrival() -> None:
    """A batch's pictures come one after the other, and later requests must not overtake each of them."""
    order: list[str] = []

    async def crowd() -> None:
        crew, free, now = Crew(1, most=9, max_wait=60, deadline=10), threading.Event(), time.monotonic()
        jobs = [asyncio.create_task(crew.do(lambda: free.wait(10), now))]
        await asyncio.sleep(0.05)
        for name, complete in (("late", now), ("later", now), ("early", now - 1), ("computed", None)):
            jobs.append(asyncio.create_task(crew.do(lambda name=name: order.append(name), complete)))
        await asyncio.sleep(0.05)
        free.set()
        await asyncio.gather(*jobs)
        crew.close()

    asyncio.run(crowd())
    assert order == ["early", "late", "later", "computed"]


def test_the_crew_refuses_jobs_beyond_its_limit() -> None:
    async def crowd() -> None:
        crew, free = Crew(1, most=2, max_wait=60, deadline=10), threading.Event()
        two = [asyncio.create_task(crew.do(lambda: free.wait(10), time.monotonic())) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match=r"too many pictures wait to be decoded or drawn \(2\)") as refused:
            crew.admit()
        assert refused.value.reason == "crew"  # which alerts refer to
        free.set()
        await asyncio.gather(*two)
        crew.close()

    asyncio.run(crowd())


def test_overload_refuses_requests_that_would_wait_too_long() -> None:
    async def crowd() -> None:
        crew, taken = Crew(1, most=1_000, max_wait=0.4, deadline=60), []

        async def keeps_coming() -> None:
            while True:
                crew.admit()
                taken.append(asyncio.create_task(crew.do(lambda: time.sleep(0.05), time.monotonic())))
                await asyncio.sleep(0.01)

        with pytest.raises(Busy, match=r"too many pictures wait to be decoded or drawn \(\d+, for about \d\.\d s\)") as refused:
            await asyncio.wait_for(keeps_coming(), 20)
        assert refused.value.reason == "crew"
        assert len(taken) > 8  # eight would be done in time
        await crew.do(lambda: None)  # what has been computed is still written
        await asyncio.gather(*taken)
        crew.admit()
        crew.close()

    asyncio.run(crowd())


def test_a_refusal_estimates_when_to_retry() -> None:
    async def crowd() -> None:
        crew = Crew(1, most=1_000, max_wait=0.1, deadline=60)
        jobs = [lambda: time.sleep(0.2)] * 2 + [lambda: None] * 12
        taken = [asyncio.create_task(crew.do(job, time.monotonic())) for job in jobs]
        await asyncio.sleep(0.3)
        with pytest.raises(Busy, match=r"\(13, for about 2\.\d s\)") as refused:
            crew.admit()
        assert refused.value.headers == {"Retry-After": "3"}
        await asyncio.gather(*taken)
        crew.close()

    asyncio.run(crowd())


def test_future_pictures_of_admitted_requests_count_as_waiting() -> None:
    async def crowd() -> None:
        crew = Crew(1, most=1_000, max_wait=0.4, deadline=60)

        async def batch(pictures: int) -> None:
            complete = time.monotonic()
            with crew.line(pictures) as line:
                for number in range(pictures):
                    if number:
                        line.advance()
                    await line.do(lambda: time.sleep(0.02), complete)

        batches = [asyncio.create_task(batch(40)) for _ in range(2)]
        await asyncio.sleep(0.05)
        crew.admit()  # nobody has waited long yet
        await asyncio.sleep(0.4)
        late = asyncio.create_task(crew.do(lambda: None, time.monotonic()))
        await asyncio.sleep(0.3)
        with pytest.raises(Busy, match=r"\([23], for about [01]\.\d s\)"):  # three jobs, and over forty pictures to come
            crew.admit()
        await asyncio.gather(*batches, late)  # a request that was let in is never refused because of others
        crew.admit()
        assert (crew._jobs, crew.coming) == (0, 0)
        crew.close()

    asyncio.run(crowd())


def test_batches_that_come_at_once_are_admitted_only_as_far_as_the_deadline_allows() -> None:
    """If all of them were, they would take turns, and none would be done by its deadline."""

    async def crowd() -> None:
        crew = Crew(2, most=1_000, max_wait=10, deadline=1.5)

        async def batch() -> None:
            complete = time.monotonic()
            with crew.line(10) as line:
                for number in range(10):
                    if number:
                        line.advance()
                    await line.do(lambda: time.sleep(0.05), complete)

        for _ in range(2):  # the second time, the first is forgotten
            began = time.monotonic()
            batches = [asyncio.create_task(batch()) for _ in range(8)]
            await asyncio.sleep(0.3)
            refused = [each for each in batches if each.done()]
            assert 4 <= len(refused) <= 6
            crew.admit()  # a single picture gets its turn between two of theirs
            assert await crew.do(time.monotonic, time.monotonic()) - began < 0.6
            results = await asyncio.gather(*batches, return_exceptions=True)
            assert [type(each) for each in results if each] == [Busy] * len(refused)
        crew.close()

    asyncio.run(crowd())


def test_pictures_that_a_request_never_brings_stop_counting() -> None:
    async def leave() -> None:
        crew = Crew(1, most=9, max_wait=1, deadline=10)
        with suppress(ValueError), crew.line(5) as line:
            await line.do(lambda: None, time.monotonic())
            line.advance()
            raise ValueError
        assert crew.coming == 0
        with crew.line(5) as line:  # none of them for the crew
            line.advance()
        assert crew.coming == 0
        crew.close()

    asyncio.run(leave())


def test_a_burst_is_admitted_regardless_of_earlier_slow_jobs() -> None:
    async def crowd() -> None:
        crew = Crew(2, most=1_000, max_wait=0.4, deadline=60)
        for seconds, many in ((0.5, 6), (0.02, 100)):
            await asyncio.sleep(0.1)
            taken = []
            for _ in range(many):
                crew.admit()
                taken.append(asyncio.create_task(crew.do(lambda seconds=seconds: time.sleep(seconds), time.monotonic())))
                await asyncio.sleep(0)
            await asyncio.gather(*taken)
        crew.close()

    asyncio.run(crowd())


@pytest.mark.parametrize("drawn", [False, True])
def test_jobs_of_cancelled_requests_do_not_affect_admission(drawn: bool) -> None:
    """Whether the next job must be admitted, or only writes what was drawn, which needs no admission."""

    async def crowd() -> None:
        crew, began = Crew(1, most=1_000, max_wait=60, deadline=1.0), threading.Event()

        def slow() -> None:
            began.set()
            time.sleep(0.5)

        gone = asyncio.create_task(crew.do(slow, time.monotonic()))
        await asyncio.to_thread(began.wait, 10)
        gone.cancel()
        await asyncio.sleep(0.6)  # its thread finishes, and is free again
        taken = [asyncio.create_task(crew.do(lambda: None))] if drawn else []
        await asyncio.sleep(0)
        for _ in range(5):
            crew.admit()
            taken.append(asyncio.create_task(crew.do(lambda: None, time.monotonic())))
            await asyncio.sleep(0)
        await asyncio.gather(*taken)
        crew.close()

    asyncio.run(crowd())


def test_a_long_running_job_does_not_count_as_waiting() -> None:
    async def crowd() -> None:
        crew, free = Crew(1, most=1_000, max_wait=0.2, deadline=60), threading.Event()
        long = asyncio.create_task(crew.do(lambda: free.wait(10), time.monotonic()))
        crew._pace.record(0.1)
        await asyncio.sleep(0.3)
        taken = []
        for _ in range(5):
            crew.admit()
            taken.append(asyncio.create_task(crew.do(lambda: None, time.monotonic())))
            await asyncio.sleep(0)
        free.set()
        await asyncio.gather(long, *taken)
        crew.close()

    asyncio.run(crowd())


def test_a_burst_is_admitted_only_as_far_as_the_deadline_allows() -> None:
    async def crowd() -> None:
        crew, taken = Crew(1, most=1_000, max_wait=10, deadline=1.0), []

        async def comes(seconds: float) -> None:
            taken.append(asyncio.create_task(crew.do(lambda: time.sleep(seconds), time.monotonic())))
            await asyncio.sleep(0)

        async def keeps_coming() -> None:
            while True:
                crew.admit()
                await comes(0.15)

        await comes(0.1)
        await comes(0.15)
        await taken[0]  # now it is known how long one takes
        with pytest.raises(Busy, match=r"\(\d+, for about 0\.\d s\)"):
            await keeps_coming()
        assert 4 <= len(taken) <= 7
        await asyncio.gather(*taken)
        crew.close()

    asyncio.run(crowd())


@pytest.mark.parametrize(("workers", "most"), [(1, 4), (2, 2), (8, 1)])
def test_few_large_pictures_are_decoded_at_once_however_many_cpus(nets: dict[str, CapsNet], workers: int, most: int) -> None:
    """Each takes hundreds of MB, and all workers share one memory."""
    service: Service = create_app(settings(threads=32, workers=workers), nets).state.service
    bodies = 16 // workers * service.settings.max_body
    service.bodies.admit(bodies)
    with pytest.raises(Busy) as refused:
        service.bodies.admit(bodies + 1)
    assert refused.value.reason == "bodies"  # which alerts refer to
    lock, counts = threading.Lock(), {"now": 0, "most": 0}

    def decode() -> None:
        with lock:
            counts["now"] += 1
            counts["most"] = max(counts.values())
        time.sleep(0.02)
        with lock:
            counts["now"] -= 1

    async def crowd() -> None:
        await asyncio.gather(*(service.crew.do(decode, time.monotonic()) for _ in range(32)))
        service.crew.close()

    asyncio.run(crowd())
    assert counts == {"now": 0, "most": most}


LARGE, SMALL = (encoded(drawn("7", side), compress_level=0) for side in (200, 28))


def test_a_batch_is_admitted_once_with_its_first_large_picture(nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures that are decoded already are not thrown away because others came meanwhile."""
    coming: list[int] = []
    admit = Crew.admit

    def noted(crew: Crew, pictures: int) -> None:
        coming.append(crew.coming)
        assert pictures == 2
        if len(coming) > 1:
            raise Busy("full", "crew")
        admit(crew, pictures)

    monkeypatch.setattr(Crew, "admit", noted)
    with serving(settings(), nets) as client:
        files = [("file", (f"{index}.png", each)) for index, each in enumerate((SMALL, LARGE, LARGE))]
        assert client.post("/predict/batch", files=files).status_code == 200
        assert coming == [0]
        refused = client.post("/predict/batch", files=files)
        assert (refused.status_code, coming) == (503, [0, 0])  # and nothing of the first request is still expected


def test_a_large_body_needs_admission_with_or_without_content_length(
    nets: dict[str, CapsNet], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(crew: Crew, pictures: int = 1) -> None:
        raise Busy("full", "crew")

    monkeypatch.setattr(Crew, "admit", refuse)
    tensor = {"name": "images", "shape": [20, 1, 28, 28], "datatype": "FP32", "data": [0.5] * 20 * 784}
    body = json.dumps({"inputs": [tensor]}).encode()
    with serving(settings(), nets) as client:
        for path, content in (("/v2/models/tiny/infer", body), ("/predict", LARGE)):
            assert client.post(path, content=content).status_code == 503
            assert client.post(path, content=iter([content])).status_code == 503
        assert client.post("/predict", content=SMALL).status_code == 200
