"""What Prometheus sees: a registry per app, an attribute per metric.

Several worker processes write to files (process/tallies.py), and whichever is scraped adds them all up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import isfinite
from typing import get_args

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from service.engine import CapsNet, Perception
from service.errors import Broken, TurnedAway
from service.manifest import Manifest, Shares
from service.process import tallies
from service.process.tallies import Across
from service.verdict import Verdict
from service.visits import Stage

MILLISECONDS = (0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 25, 50, 75, 100, 250, 500, 1_000, 2_500, 5_000, 10_000)
SECONDS = tuple(bound / 1_000 for bound in MILLISECONDS)
TWENTIETHS = tuple(step / 20 for step in range(1, 21))  # like the manifests' reference histograms
ERRORS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)

values.ValueClass = values.MutexValue  # in memory until keep_in_files: PROMETHEUS_MULTIPROC_DIR may be set for other programs
disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series, to say when each began


def keep_in_files(place: int) -> None:
    """Keeps this worker's metrics in files named by its place, not by its process: its replacement continues counting there."""
    values.ValueClass = values.MultiProcessValue(lambda: place)  # type: ignore[no-untyped-call]


class Metrics:
    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, description: str, *labels: str) -> Counter:
            return Counter(f"capserve_{name}", description, labels, registry=registry)

        def gauge(name: str, description: str, *labels: str, across: Across) -> Gauge:
            return Gauge(f"capserve_{name}", description, labels, registry=registry, multiprocess_mode=across)

        def histogram(name: str, description: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(f"capserve_{name}", description, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests_total", "Requests answered, by route and status.", "route", "status")
        self.request_seconds = histogram("request_duration_seconds", "From a request's last byte to its answer.", "route")
        self.stage_seconds = histogram(
            "stage_duration_seconds", "Parts of a request: decode, queue, encode, reconstruct.", "stage"
        )
        self.rejections = counter(
            "rejections_total",
            "Requests not answered as asked: full, late, crew, bodies, loop, gone, draining, warming, failed, replicas, errors.",
            "reason",
        )
        self.body_bytes = gauge("body_bytes", "Bytes of requests' bodies in memory.", across="livesum")
        self.unread_bytes = gauge("unread_bytes", "Bytes of answers in memory that clients do not read.", across="livesum")

        self.batch_images = histogram("batch_images", "Images that ran together.", "model", "graph", buckets=IMAGES)
        self.batch_seconds = histogram(
            "batch_duration_seconds", "What a batch took to run; an encoder's, with the drawing of what it saw.", "model", "graph"
        )
        self.queue_images = gauge("queue_images", "Images that wait for a model.", "model", "graph", across="livesum")
        self.queue_limit = gauge(
            "queue_limit_images",
            "Images that may wait for a model now; more are turned away.",
            "model",
            "graph",
            across="livesum",
        )
        self.failures = counter("model_failures_total", "Batches on which the runtime itself failed.", "model")

        self.predictions = counter(
            "predictions_total", "Objects named in answers, by label, whatever the verdict.", "model", "label"
        )
        self.verdicts = counter("verdicts_total", "Pictures by what they were taken for.", "model", "verdict")
        self.winner_length = histogram(
            "winner_length",
            "Length of the winning capsule; of a model of two objects, the second longest.",
            "model",
            buckets=TWENTIETHS,
        )
        self.reconstruction_error = histogram(
            "reconstruction_error",
            "Mean squared error between a picture and its drawing; it drifts with the traffic.",
            "model",
            buckets=ERRORS,
        )

        self.ready = gauge("ready", "1 while every model is warm, sound and not draining.", across="livemin")
        self.reloaded = gauge(
            "last_reload_successful",
            "0 while the previous models still serve, because those in the models folder cannot be served.",
            across="livemin",
        )
        self.reloaded.set(1)
        self.workers = gauge("workers", "Processes that answer on this port.", across="livesum")
        self.workers_wanted = gauge("workers_wanted", "How many should.", across="livemax")
        self.model_info = gauge(
            "model_info",
            "1 for each model served, 0 for one that another has replaced.",
            *("model", "version", "variant", "preset"),
            across="livemax",
        )
        self.provider_info = gauge(
            "execution_provider_info", "1 for the provider that runs a model.", "model", "provider", across="livemax"
        )
        self.provider_nodes = gauge(
            "execution_provider_nodes", "Nodes of a model's graphs that a provider runs.", "model", "provider", across="livemax"
        )
        self.fell_back = gauge(
            "cpu_fallback",
            "1 for a model that runs on the CPU because CUDA, which is installed and was not ruled out, does not work.",
            "model",
            across="livemax",
        )
        self.references = ReferenceHistograms()
        registry.register(self.references)
        self._stages = {stage: self.stage_seconds.labels(stage) for stage in get_args(Stage)}
        self._route_metrics = cache(
            lambda route, status: (self.requests.labels(route, status), self.request_seconds.labels(route))
        )
        self._files = None if values.ValueClass is values.MutexValue else os.environ[tallies.FOLDER_VARIABLE]
        self.start_time: Gauge | None = None
        if self._files is None:
            ProcessCollector(registry=registry)
        else:  # of ProcessCollector's metrics, the one that several processes can report together
            description = "Start time of the process since unix epoch in seconds; of several workers, of the last that began."
            self.start_time = Gauge("process_start_time_seconds", description, registry=registry, multiprocess_mode="max")

    def worker_started(self, workers: int) -> None:
        """Notes that this process begins to answer, as one of so many `workers`."""
        self.workers.set(1)
        if self.start_time is not None:
            self.start_time.set_to_current_time()
        self.workers_wanted.set(workers)

    def count_answer(self, route: str, status: int, seconds: float, stages: Mapping[Stage, float]) -> None:
        requests, duration = self._route_metrics(route, status)
        requests.inc()
        duration.observe(seconds)
        for stage, seconds_taken in stages.items():
            self._stages[stage].observe(seconds_taken)

    def count_refusal(self, error: Exception) -> None:
        """Counts a request that was not computed."""
        self.rejections.labels(error.reason if isinstance(error, TurnedAway) else type(error).__name__).inc()

    def count_departure(self) -> None:
        """Counts a client that left before its answer came."""
        self.rejections.labels("gone").inc()

    def text(self) -> bytes:
        if self._files is None:
            return generate_latest(self.registry)
        if not os.path.isdir(self._files):
            raise Broken("the folder of the workers' metrics was removed; restart the server", "failed")
        all_workers = CollectorRegistry()
        all_workers.register(self.references)
        MultiProcessCollector(all_workers, self._files)  # type: ignore[no-untyped-call]
        return generate_latest(all_workers)

    def describe(self, net: CapsNet) -> None:
        self._set_info(net, served=True)
        self.failures.labels(net.manifest.name)  # starts at 0: an increase is only seen between two scrapes
        self.references.remember(net.manifest)

    def forget(self, net: CapsNet) -> None:
        """Sets the gauges of a model that is no longer served to 0: labels cannot be removed from several processes' files."""
        self._set_info(net, served=False)
        for graph in ("encoder", "decoder"):
            self.queue_images.labels(net.manifest.name, graph).set(0)
            self.queue_limit.labels(net.manifest.name, graph).set(0)
        self.references.forget(net.manifest)

    def _set_info(self, net: CapsNet, served: bool) -> None:
        manifest = net.manifest
        self.model_info.labels(manifest.name, manifest.version, net.variant, manifest.preset).set(served)
        self.provider_info.labels(manifest.name, net.device.provider).set(served)
        for provider, nodes in net.nodes.items():
            self.provider_nodes.labels(manifest.name, provider).set(nodes * served)
        self.fell_back.labels(manifest.name).set(net.device.fell_back and served)


class ReferenceHistograms(Collector):
    """What validation pictures looked like to each model, as histograms beside those of live traffic: drift is their distance.

    Holds the manifests' shares at the live histograms' bounds; within a manifest's bin pictures count as evenly spread.
    """

    def __init__(self) -> None:
        self._manifests: dict[str, Manifest] = {}

    def remember(self, manifest: Manifest) -> None:
        self._manifests[manifest.name] = manifest

    def forget(self, manifest: Manifest) -> None:
        self._manifests.pop(manifest.name, None)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        lengths = HistogramMetricFamily(
            "capserve_reference_winner_length", "capserve_winner_length of validation pictures, as shares.", labels=["model"]
        )
        errors = HistogramMetricFamily(
            "capserve_reference_reconstruction_error",
            "capserve_reconstruction_error of validation pictures, as shares.",
            labels=["model"],
        )
        for name, manifest in list(self._manifests.items()):  # a reload may change them meanwhile, in another thread
            _add_reference(lengths, name, manifest.references.winner_length, TWENTIETHS)
            _add_reference(errors, name, manifest.references.reconstruction_error, ERRORS)
        yield from (lengths, errors)


def _add_reference(family: HistogramMetricFamily, model: str, reference: Shares, bounds: Sequence[float]) -> None:
    edges, shares = np.array(reference.edges), np.array(reference.shares)
    below = np.interp(bounds, edges, np.concatenate([[0.0], shares.cumsum()]))
    mean = float(shares @ (edges[:-1] + edges[1:]) / 2)
    names = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
    buckets = list(zip(names, below.tolist(), strict=True))
    family.add_metric([model], [*buckets, ("+Inf", float(shares.sum()))], sum_value=mean)


class GraphObserver:
    """A batcher's Observer for one graph of one model, its labels looked up once; failures go to `batch_failed`."""

    def __init__(self, metrics: Metrics, model: str, graph: str, batch_failed: Callable[[Exception], None]) -> None:
        self._images = metrics.batch_images.labels(model, graph)
        self._seconds = metrics.batch_seconds.labels(model, graph)
        self.batch_failed = batch_failed

    def batch_ran(self, images: int, run_seconds: float) -> None:
        self._images.observe(images)
        self._seconds.observe(run_seconds)


class PredictionObserver:
    """What one model saw, its labels looked up once."""

    def __init__(self, metrics: Metrics, model: str, classes: Sequence[str]) -> None:
        self._labels = [metrics.predictions.labels(model, label) for label in classes]
        self._verdicts = {verdict: metrics.verdicts.labels(model, verdict) for verdict in get_args(Verdict)}
        self._length = metrics.winner_length.labels(model)
        self._error = metrics.reconstruction_error.labels(model)

    def record(self, perception: Perception, verdicts: Sequence[Verdict]) -> None:
        for row, (error, verdict) in enumerate(zip(perception.errors.tolist(), verdicts, strict=True)):
            for label in perception.objects(row):
                self._labels[label].inc()
            # The shortest capsule that could be an object's: with two objects the second longest, as in the references.
            self._length.observe(float(perception.lengths[row, perception.winners[row, -1]]))
            if isfinite(error):  # it is not if nothing was drawn, and the verdict depends on it
                self._error.observe(error)
                self._verdicts[verdict].inc()
