from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.engine import CapsNet, Perception
from service.errors import Busy, NotAnImage, TooLate
from service.metrics import GraphObserver, Metrics, PredictionObserver
from tests.service.conftest import drawn, encoded, reaching, serving, settings
from tests.service.launching import started


def samples(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names...) -> value"""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (each.name, *dict(sorted(each.labels.items())).values()): each.value for family in families for each in family.samples
    }


def test_metrics_count_requests_stages_and_predictions(nets: dict[str, CapsNet], seven: bytes) -> None:
    with serving(settings(), nets) as client:
        for _ in range(3):
            client.post("/predict", files={"file": seven})
        client.post("/predict/batch", files=[("file", seven), ("file", encoded(drawn("1")))])
        client.post("/predict", content=b"nonsense", headers={"Content-Type": "image/png"})
        client.get("/reconstruct?label=1")
        client.get("/no/such/path")
        seen = samples(client)
    assert seen["capserve_requests_total", "/predict", "200"] == 3
    assert seen["capserve_requests_total", "/predict", "415"] == 1
    assert seen["capserve_requests_total", "none", "404"] == 1
    assert seen["capserve_request_duration_seconds_count", "/predict"] == 4
    for stage, count in {"decode": 5, "queue": 5, "encode": 4, "reconstruct": 5}.items():
        assert seen["capserve_stage_duration_seconds_count", stage] == count, stage
    assert seen["capserve_batch_images_sum", "encoder", "tiny"] == 5
    assert seen["capserve_batch_images_sum", "decoder", "tiny"] == 1
    assert seen["capserve_predictions_total", "7", "tiny"] == 4
    assert seen["capserve_predictions_total", "1", "tiny"] == 1
    assert sum(value for name, value in seen.items() if name[0] == "capserve_verdicts_total") == 5
    assert seen["capserve_winner_length_count", "tiny"] == 5
    assert seen["capserve_reconstruction_error_count", "tiny"] == 5
    assert seen["capserve_rejections_total", "NotAnImage"] == 1
    assert seen["capserve_queue_images", "encoder", "tiny"] == 0
    assert seen["capserve_ready",] == 1


def test_the_time_of_a_slow_upload_is_not_in_the_request_duration(nets: dict[str, CapsNet], seven: bytes) -> None:
    """Nor is that of an upload that never ends; either would wake somebody who can do nothing about it."""

    def slowly(whole: bool) -> Iterator[bytes]:
        yield seven[:10]
        time.sleep(1.2)
        yield seven[10:] if whole else b""
        time.sleep(0 if whole else 3)

    with serving(settings(patience=2.0), nets) as client:
        assert client.post("/predict", content=slowly(True), headers={"Content-Type": "image/png"}).status_code == 200
        assert client.post("/predict", content=slowly(False), headers={"Content-Type": "image/png"}).status_code == 408
        seen = samples(client)
    assert seen["capserve_request_duration_seconds_count", "/predict"] == 2
    assert seen["capserve_request_duration_seconds_sum", "/predict"] < 1


@pytest.mark.parametrize(("outputs", "drawn"), [(["lengths"], 0), (["lengths", "reconstructions"], 2), ([], 2)])
def test_tensors_count_as_pictures_do(nets: dict[str, CapsNet], outputs: list[str], drawn: int) -> None:
    """The error and the verdict need a drawing, which is made only when it is asked for."""
    images = {"name": "images", "shape": [2, 1, 28, 28], "datatype": "FP32", "data": [0.5] * 2 * 784}
    asked = {"inputs": [images], "outputs": [{"name": name} for name in outputs]}
    with serving(settings(), nets) as client:
        assert client.post("/v2/models/tiny/infer", json=asked).status_code == 200
        seen = samples(client)
    assert sum(value for name, value in seen.items() if name[0] == "capserve_predictions_total") == 2
    assert seen["capserve_winner_length_count", "tiny"] == 2
    assert seen["capserve_reconstruction_error_count", "tiny"] == drawn
    assert sum(value for name, value in seen.items() if name[0] == "capserve_verdicts_total") == drawn


def test_each_rejection_is_counted_once_by_its_reason() -> None:
    metrics = Metrics()
    for error in (Busy("no memory", "bodies"), TooLate("too late", "late"), NotAnImage("a poem")):
        metrics.count_refusal(error)
    metrics.count_departure()
    lines = metrics.text().decode().splitlines()
    assert sorted(line for line in lines if line.startswith("capserve_rejections_total{")) == [
        'capserve_rejections_total{reason="NotAnImage"} 1.0',
        'capserve_rejections_total{reason="bodies"} 1.0',
        'capserve_rejections_total{reason="gone"} 1.0',
        'capserve_rejections_total{reason="late"} 1.0',
    ]


def test_metrics_report_the_model_and_its_execution_provider(client: httpx.Client, net: CapsNet) -> None:
    seen = samples(client)
    assert seen["capserve_model_info", "tiny", "tiny", net.variant, net.manifest.version] == 1
    assert seen["capserve_execution_provider_info", "tiny", "CPUExecutionProvider"] == 1
    assert seen["capserve_execution_provider_nodes", "tiny", "CPUExecutionProvider"] > 10


def test_metrics_report_the_queue_limits(nets: dict[str, CapsNet]) -> None:
    with serving(settings(max_queue=7), nets) as client:
        seen = samples(client)
    assert seen["capserve_queue_limit_images", "encoder", "tiny"] == 7
    assert seen["capserve_queue_limit_images", "decoder", "tiny"] == 4096


def test_reference_histograms_use_manifest_shares_and_live_bucket_bounds(client: httpx.Client, net: CapsNet) -> None:
    client.post("/predict", files={"file": encoded(drawn("1"))})
    seen = samples(client)
    for name in ("winner_length", "reconstruction_error"):
        shares = {key[1]: value for key, value in seen.items() if key[0] == f"capserve_reference_{name}_bucket"}
        assert shares.keys() == {key[1] for key in seen if key[0] == f"capserve_{name}_bucket"}
        assert list(shares.values()) == sorted(shares.values())
        assert shares["+Inf"] == seen[f"capserve_reference_{name}_count", "tiny"] == pytest.approx(1, abs=1e-3)
    lengths = net.manifest.references.winner_length.shares
    assert seen["capserve_reference_winner_length_bucket", "0.9", "tiny"] == pytest.approx(sum(lengths[:18]))
    errors = net.manifest.references.reconstruction_error
    bins = zip(errors.shares, errors.edges, errors.edges[1:], strict=False)
    middle = sum(share * (low + high) / 2 for share, low, high in bins)
    assert seen["capserve_reference_reconstruction_error_sum", "tiny"] == pytest.approx(middle)


def test_models_can_be_added_and_removed_while_metrics_are_collected(net: CapsNet) -> None:
    """Metrics are written in a thread of their own, while the event loop may reload models."""
    metrics, over = Metrics(), threading.Event()
    others = [replace(net, manifest=net.manifest.model_copy(update={"name": f"m{number}"})) for number in range(20)]

    def come_and_go() -> None:
        while not over.is_set():
            for each in others:
                metrics.references.remember(each.manifest)
            for each in others:
                metrics.references.forget(each.manifest)

    coming = threading.Thread(target=come_and_go)
    coming.start()
    try:
        for _ in range(300):
            list(metrics.references.collect())
    finally:
        over.set()
        coming.join()


def test_metrics_report_a_fallback_to_the_cpu(client: httpx.Client, net: CapsNet) -> None:
    assert samples(client)["capserve_cpu_fallback", "tiny"] == 0
    metrics = Metrics()
    metrics.describe(replace(net, device=replace(net.device, fell_back=True)))
    assert 'capserve_cpu_fallback{model="tiny"} 1.0' in metrics.text().decode()


def test_two_apps_in_one_process_count_separately(nets: dict[str, CapsNet], client: httpx.Client, seven: bytes) -> None:
    client.post("/predict", files={"file": seven})
    with serving(settings(), nets) as other:
        assert ("capserve_requests_total", "/predict", "200") not in samples(other)


def test_a_single_process_ignores_prometheus_multiproc_dir(tmp_path: Path, seven: bytes) -> None:
    """PROMETHEUS_MULTIPROC_DIR may be in the environment for another server of the same container."""
    with started(tmp_path / "log", PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "nowhere")) as (_, url), reaching(url) as client:
        assert client.post("/predict", content=seven).status_code == 200
        assert samples(client)["capserve_requests_total", "/predict", "200"] == 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus package) is not installed")
def test_promtool_finds_no_fault_in_the_metrics(client: httpx.Client) -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=client.get("/metrics").content, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_forgetting_a_model_resets_its_cpu_fallback(net: CapsNet) -> None:
    counted = Metrics()
    fallen = replace(net, device=replace(net.device, fell_back=True))
    for change, told in ((counted.describe, 1), (counted.forget, 0)):
        change(fallen)
        assert counted.registry.get_sample_value("capserve_cpu_fallback", {"model": "tiny"}) == told


def test_each_stage_is_recorded_with_its_duration() -> None:
    counted = Metrics()
    counted.count_answer("/predict", 200, 0.5, {"decode": 0.25, "queue": 0.125})
    for stage, taken in (("decode", 0.25), ("queue", 0.125)):
        assert counted.registry.get_sample_value("capserve_stage_duration_seconds_sum", {"stage": stage}) == taken


def test_each_object_of_a_picture_is_counted(net: CapsNet) -> None:
    counted, shape = Metrics(), (1, 2, *net.manifest.image_shape)
    lengths = np.eye(10, dtype=np.float32)[[3]] + 0.9 * np.eye(10, dtype=np.float32)[[5]]
    blank = np.zeros(shape, np.float32)
    seen = Perception(lengths, np.zeros((1, 10, 6)), np.array([[3, 5]]), np.ones((1, 2), bool), blank, np.zeros(1), np.ones(1))
    PredictionObserver(counted, "tiny", net.manifest.classes).record(seen, ["digit"])
    told = [counted.registry.get_sample_value("capserve_predictions_total", {"model": "tiny", "label": each}) for each in "357"]
    assert told == [1, 1, 0]


def test_last_reload_counts_as_successful_before_any_reload() -> None:
    assert Metrics().registry.get_sample_value("capserve_last_reload_successful") == 1


def test_model_failures_start_at_zero(net: CapsNet) -> None:
    """Prometheus sees only increases between two scrapes, so a counter that began at the first failure would hide it."""
    counted = Metrics()
    counted.describe(net)
    assert counted.registry.get_sample_value("capserve_model_failures_total", {"model": "tiny"}) == 0


def test_forgetting_a_model_zeroes_its_queue_gauges(net: CapsNet) -> None:
    counted = Metrics()
    for graph in ("encoder", "decoder"):
        counted.queue_images.labels("tiny", graph).set(3)
        counted.queue_limit.labels("tiny", graph).set(512)
    counted.forget(net)
    for name in ("images", "limit_images"):
        for graph in ("encoder", "decoder"):
            assert counted.registry.get_sample_value(f"capserve_queue_{name}", {"model": "tiny", "graph": graph}) == 0


def test_each_batch_is_recorded_with_its_size_and_duration() -> None:
    counted = Metrics()
    GraphObserver(counted, "tiny", "encoder", lambda _: None).batch_ran(4, 0.25)
    labels = {"model": "tiny", "graph": "encoder"}
    told = [counted.registry.get_sample_value(f"capserve_batch_{what}_sum", labels) for what in ("images", "duration_seconds")]
    assert told == [4, 0.25]
