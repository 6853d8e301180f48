"""One model at work: a network behind its two queues, and whether it can be trusted at the moment. Knows no HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.batcher import Batcher
from service.bundle import Array
from service.engine import LARGEST_DRAWING_BATCH, CapsNet, Labels, Perception, expect_numbers
from service.errors import TurnedAway, Unprocessable
from service.metrics import GraphObserver, Metrics, PredictionObserver
from service.settings import Settings
from service.verdict import Judge, Verdict
from service.visits import Stages

logger = logging.getLogger(__name__)

HOPELESS = 5  # failures in a row after which the process asks to be restarted
# Looks at a running batch, a second apart: none takes so long, so the runtime hangs, which asks for a restart too.
HANGING_LOOKS = 60
MOST_DRAWINGS = 4_096  # how many one request may ask for, and how many may wait at least


class Judged(NamedTuple):
    """What a request's pictures show, and where its time went."""

    perception: Perception
    verdicts: list[Verdict]
    stages: Stages


class Served:
    """One model: its network, its queues, its health."""

    def __init__(self, net: CapsNet, settings: Settings, metrics: Metrics) -> None:
        name = net.manifest.name
        self.net, self.manifest, self.judge = net, net.manifest, Judge(net.manifest)
        # Covers the whole manifest, prototypes too: the version identifies only the graphs.
        self.digest = hashlib.blake2s(net.manifest.model_dump_json().encode(), digest_size=12).hexdigest()
        self.failures_in_a_row = 0
        self.hangs = False
        self._deadline = settings.deadline
        self._metrics = metrics
        self._predictions = PredictionObserver(metrics, name, net.manifest.classes)
        self._encodings = Batcher(
            self._run_encoder,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            max_wait=settings.max_wait,
            observer=GraphObserver(metrics, name, "encoder", self.record_failure),
            runners=net.encoder.runners,
        )
        self._drawings = Batcher(
            self._run_decoder,
            max_batch=LARGEST_DRAWING_BATCH,
            max_queue=max(MOST_DRAWINGS, settings.max_queue),
            max_wait=math.inf,  # nobody is refused for a long wait
            observer=GraphObserver(metrics, name, "decoder", self.record_failure),
        )

    @property
    def provider(self) -> str:
        """ONNX Runtime's name for the provider that runs it."""
        return self.net.device.provider

    def start(self) -> None:
        self._encodings.start()
        self._drawings.start()

    def admit(self) -> None:
        """Raises Busy when the queue is full, before anybody decodes a picture."""
        self._encodings.admit()

    def reserved(self, images: int) -> AbstractContextManager[None]:
        return self._encodings.reserved(images)

    async def perceive(self, images: Array, complete: float, draw: bool = True) -> Judged:
        """Perceives and judges pictures (n, C, H, W) of a request whose last byte came at `complete`, a time.monotonic()."""
        perception, stages = await self._perceive(images, complete, draw)
        self._expect_numbers("picture", perception.lengths, perception.capsules, perception.drawings)
        verdicts = self.judge.verdicts(perception)
        self._predictions.record(perception, verdicts)
        return Judged(perception, verdicts, stages)

    def _expect_numbers(self, kind: str, *arrays: Array) -> None:
        try:
            expect_numbers(self.manifest.name, kind, *arrays)
        except Unprocessable:  # concerns this request only: others are answered
            logger.error("model %s gives no finite numbers for a %s", self.manifest.name, kind)
            raise

    async def draw(self, poses: Array, classes: Labels, complete: float) -> tuple[Array, Stages]:
        """Poses (n, D) of classes (n,) -> drawings (n, C, H, W), and where the time went."""
        answer = await self._drawings.submit(poses, classes, deadline=complete + self._deadline)
        (drawings,) = answer.outputs
        self._expect_numbers("pose", drawings)
        return drawings, answer.stages

    async def drain(self, timeout: float) -> bool:
        return all(await asyncio.gather(self._encodings.drain(timeout), self._drawings.drain(timeout)))

    @property
    def sound(self) -> bool:
        return self.failures_in_a_row == 0 and not self.hangs

    @property
    def hopeless(self) -> bool:
        return self.failures_in_a_row >= HOPELESS or self.hangs

    def drop_overdue(self) -> None:
        """Refuses requests that a hanging runtime would keep for ever, and notes whether it hangs."""
        hung = [batcher.drop_overdue(HANGING_LOOKS) for batcher in (self._encodings, self._drawings)]
        if any(hung) and not self.hangs:
            self._metrics.failures.labels(self.manifest.name).inc()
            logger.error("model %s hangs: a batch has been at work for more than %d s", self.manifest.name, HANGING_LOOKS)
        self.hangs = any(hung)

    def record_failure(self, error: Exception) -> None:
        self._metrics.failures.labels(self.manifest.name).inc()
        self.failures_in_a_row += 1
        logger.error("model %s failed, %d in a row: %s", self.manifest.name, self.failures_in_a_row, error)

    async def probe(self) -> None:
        """Sends a blank picture through the queue: a server that is not ready gets no requests, so it must test itself."""
        blank = np.zeros((1, *self.manifest.image_shape), np.float32)
        try:
            async with asyncio.timeout(self._deadline):
                await self._perceive(blank, time.monotonic(), draw=True)
        except (TurnedAway, TimeoutError) as error:
            logger.debug("probe of %s: %s", self.manifest.name, error or "no answer")

    def measure(self) -> None:
        for graph, batcher in (("encoder", self._encodings), ("decoder", self._drawings)):
            self._metrics.queue_images.labels(self.manifest.name, graph).set(batcher.queued)
            self._metrics.queue_limit.labels(self.manifest.name, graph).set(batcher.limit)

    async def _perceive(self, images: Array, complete: float, draw: bool) -> tuple[Perception, Stages]:
        answer = await self._encodings.submit(images, np.full(len(images), draw), deadline=complete + self._deadline)
        if draw:  # so both graphs worked: one that works says nothing about the other
            self.failures_in_a_row = 0
        return Perception(*answer.outputs), answer.stages

    # On the runners

    def _run_encoder(self, images: Array, to_draw: NDArray[np.bool_]) -> tuple[Perception, Stages]:
        started = time.perf_counter()
        lengths, capsules = self.net.classify(images)
        encoded = time.perf_counter()
        perception = self.net.perceive_encoded(images, lengths, capsules, to_draw)
        ended = time.perf_counter()
        if not to_draw.any():
            return perception, {"encode": ended - started}
        return perception, {"encode": encoded - started, "reconstruct": ended - encoded}

    def _run_decoder(self, poses: Array, classes: Labels) -> tuple[tuple[Array], Stages]:
        started = time.perf_counter()
        drawings = self.net.reconstruct(poses, classes)
        return (drawings,), {"reconstruct": time.perf_counter() - started}
