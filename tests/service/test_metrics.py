from __future__ import annotations

import shutil
import subprocess

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.engine import CapsNet
from service.errors import Busy, NotAnImage, TooLate
from service.metrics import Metrics
from tests.service.conftest import drawn, encoded, serving, settings


def samples(client: httpx.Client) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names...) -> value"""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (each.name, *dict(sorted(each.labels.items())).values()): each.value for family in families for each in family.samples
    }


def test_what_happens_is_counted(nets: dict[str, CapsNet], seven: bytes) -> None:
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


def test_whoever_was_turned_away_is_counted_once() -> None:
    """Queues count what they refuse, with a reason of their own; all else is counted where it is answered."""
    metrics = Metrics()
    for error in (Busy("no memory", "bodies"), Busy("counted by a queue"), TooLate("so too"), NotAnImage("a poem")):
        metrics.refused(error)
    lines = metrics.text().decode().splitlines()
    assert [line for line in lines if line.startswith("capserve_rejections_total{")] == [
        'capserve_rejections_total{reason="bodies"} 1.0',
        'capserve_rejections_total{reason="NotAnImage"} 1.0',
    ]


def test_the_model_and_what_runs_it_are_told(client: httpx.Client, net: CapsNet) -> None:
    seen = samples(client)
    assert seen["capserve_model_info", "tiny", "tiny", net.variant, net.manifest.version] == 1
    assert seen["capserve_execution_provider_info", "tiny", "CPUExecutionProvider"] == 1
    assert seen["capserve_execution_provider_nodes", "tiny", "CPUExecutionProvider"] > 10


def test_two_apps_in_a_process_count_for_themselves(nets: dict[str, CapsNet], client: httpx.Client, seven: bytes) -> None:
    client.post("/predict", files={"file": seven})
    with serving(settings(), nets) as other:
        assert ("capserve_requests_total", "/predict", "200") not in samples(other)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus package) is not installed")
def test_promtool_has_nothing_to_say(client: httpx.Client) -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=client.get("/metrics").content, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
