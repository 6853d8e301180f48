"""One model at work: a network behind its two queues, and whether it can be trusted at the moment. Knows no HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time

import numpy as np
from numpy.typing import NDArray

from service import sessions
from service.batcher import Batcher
from service.bundle import Array
from service.engine import CapsNet, Labels, Perception
from service.errors import TurnedAway
from service.metrics import GraphObserver, Metrics, PredictionObserver
from service.settings import Settings
from service.visits import Stages

logger = logging.getLogger(__name__)

HOPELESS = 5  # failures in a row after which the process asks to be restarted
HANGING = 60.0  # seconds that no batch takes: after so many the runtime hangs, and the process asks for the same


class Served(GraphObserver):
    """One model: its network, its queues, its health."""

    def __init__(self, net: CapsNet, settings: Settings, metrics: Metrics) -> None:
        name = net.manifest.name
        super().__init__(metrics, name, "encoder")
        self.net, self.manifest = net, net.manifest
        # Of graphs and prototypes both: the version names the graphs alone.
        self.digest = hashlib.blake2s(net.manifest.model_dump_json().encode(), digest_size=12).hexdigest()
        self.observer = PredictionObserver(metrics, name, net.manifest.classes)
        self.failures_in_a_row = 0
        self.hangs = False
        self._deadline = settings.deadline
        self._metrics = metrics
        self._batcher = Batcher(
            self._run,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            observer=self,
            runners=net.encoder.runners,
        )
        # Drawings are small beside encodings, and a sweep wants a hundred at once; the largest allowed fits in whole.
        most = sessions.BUCKETS[-1]
        self._drawer = Batcher(
            lambda poses, classes: (net.reconstruct(poses, classes),),
            max_batch=most,
            max_queue=max(64 * most, settings.max_queue),
            observer=_Drawings(metrics, name, self),
        )

    def start(self) -> None:
        self._batcher.start()
        self._drawer.start()

    def admit(self, images: int = 1) -> None:
        """Raises Busy when the queue is full, before anybody decodes a picture."""
        self._batcher.admit(images)

    async def perceive(self, images: Array, arrived: float, drawn: bool = True) -> tuple[Perception, Stages]:
        """(n, C, H, W) -> what was seen, and where the time went; `arrived` is the request's time.monotonic()."""
        wanted = np.full(len(images), drawn)
        answer = await self._batcher.submit(images, wanted, deadline=arrived + self._deadline)
        perception = Perception(*answer.outputs)
        encode, reconstruct = perception.seconds[list(answer.firsts)].sum(axis=0).tolist()
        return perception, {"queue": answer.queue_seconds, "encode": encode, "reconstruct": reconstruct}

    async def draw(self, poses: Array, classes: Labels, arrived: float) -> tuple[Array, Stages]:
        """Poses (n, D) of classes (n,) -> drawings (n, C, H, W), and where the time went."""
        answer = await self._drawer.submit(poses, classes, deadline=arrived + self._deadline)
        return answer.outputs[0], {"queue": answer.queue_seconds, "reconstruct": answer.run_seconds}

    async def drain(self, timeout: float) -> bool:
        return all(await asyncio.gather(self._batcher.drain(timeout), self._drawer.drain(timeout)))

    @property
    def sound(self) -> bool:
        return self.failures_in_a_row == 0 and not self.hangs

    @property
    def hopeless(self) -> bool:
        return self.failures_in_a_row >= HOPELESS or self.hangs

    def sweep(self) -> None:
        """Lets go of those whom a runtime that hangs would keep for ever."""
        found = [batcher.sweep(HANGING) for batcher in (self._batcher, self._drawer)]
        if any(found) and not self.hangs:
            self._failures.inc()
            logger.error("model %s hangs: a batch has been at work for more than %g s", self.manifest.name, HANGING)
        self.hangs = any(found)

    def measure(self) -> None:
        for graph, batcher in (("encoder", self._batcher), ("decoder", self._drawer)):
            self._metrics.queue_images.labels(self.manifest.name, graph).set(batcher.queued)
            self._metrics.queue_limit.labels(self.manifest.name, graph).set(batcher.max_queue)

    # What the batchers tell

    def failed(self, error: Exception) -> None:
        super().failed(error)
        self.failures_in_a_row += 1
        logger.error("model %s failed, %d in a row: %s", self.manifest.name, self.failures_in_a_row, error)

    def _run(self, images: Array, drawn: NDArray[np.bool_]) -> Perception:
        """On a runner. Only where both graphs worked are the failures over: a broken decoder is not mended by an encoder."""
        perception = self.net.perceive(images, drawn)
        if drawn.any():
            self.failures_in_a_row = 0
        return perception

    async def probe(self) -> None:
        """One picture through the queue: nobody sends requests to a server that is not ready, so it must ask itself."""
        blank = np.zeros((1, *self.manifest.image_shape), np.float32)
        try:
            async with asyncio.timeout(self._deadline):
                await self.perceive(blank, time.monotonic())
        except (TurnedAway, TimeoutError) as error:
            logger.debug("probe of %s: %s", self.manifest.name, error or "no answer")


class _Drawings(GraphObserver):
    """The decoder's queue: its failures are its model's, but a drawing that works does not say that the encoder does."""

    def __init__(self, metrics: Metrics, model: str, served: Served) -> None:
        super().__init__(metrics, model, "decoder")
        self._served = served

    def failed(self, error: Exception) -> None:
        self._served.failed(error)
