"""The dashboard and the rules are checked against the metrics that the service exports, by a real Prometheus if there is one."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from service.routes import health, inference_protocol, models, predict, reconstruct
from tests.service.conftest import drawn, encoded, serving, settings

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "docker" / "prometheus"
DASHBOARD = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "capserve.json").read_text())
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"] for rule in group["rules"]]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
ALERTS = [rule["alert"] for rule in RULES if "alert" in rule]
OPERATIONS = ROOT / "docs" / "operations.md"
PROMETHEUS_OWN = {"up"}
VARIABLES = {"$__rate_interval": "1m", "$job": "capserve", "$model": ".*"}

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian's package) is not installed")


class Target(NamedTuple):
    panel: str
    expr: str
    legend: str


TARGETS = [
    Target(panel["title"], target["expr"], target["legendFormat"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
]


def metrics_in(expr: str) -> set[str]:
    """The names of metrics in an expression, recorded ones too."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    return set(re.findall(r"\b(?:capserve|process)[_:][a-z0-9_:]+|\bup\b", bare))


def test_alerts_and_dashboard_exclude_the_probes_and_no_other_route() -> None:
    told = " ".join([*(rule["expr"] for rule in RULES), *(target.expr for target in TARGETS)])
    (left_out,) = set(re.findall(r'route!~"([^"]+)"', told))
    probes = health.PATHS | {route.path for route in inference_protocol.probes.routes}
    others = {route.path for each in (predict, reconstruct, models, inference_protocol) for route in each.router.routes}
    assert [path for path in probes | others if bool(re.fullmatch(left_out, path)) != (path in probes)] == []


@pytest.fixture(scope="module")
def service() -> Iterator[httpx.Client]:
    with serving(settings(max_queue=4, max_batch=1)) as client:
        visit(client)
        yield client


def visit(client: httpx.Client) -> None:
    """Sends something of everything that is counted: work, a mistake, and more than the queue holds."""
    seven = encoded(drawn("7"))
    client.post("/predict", files={"file": seven})
    client.post("/predict", content=b"nonsense", headers={"Content-Type": "image/png"})
    client.get("/reconstruct?label=1")
    with ThreadPoolExecutor(8) as crowd:
        many = [("file", encoded(drawn("1", 28)))] * 4
        answers = list(crowd.map(lambda _: client.post("/predict/batch?normalise=none", files=many).status_code, range(48)))
    assert set(answers) == {200, 503}


@pytest.fixture(scope="module")
def exported(service: httpx.Client) -> set[str]:
    """The names of all metrics and samples; a metric with labels has no samples until one of its events has happened."""
    families = list(text_string_to_metric_families(service.get("/metrics").text))
    names = {family.name + "_total" * (family.type == "counter") for family in families}
    return names | {sample.name for family in families for sample in family.samples}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.panel)
def test_every_dashboard_expression_uses_existing_metrics(target: Target, exported: set[str]) -> None:
    assert metrics_in(target.expr)
    assert metrics_in(target.expr) <= exported | RECORDED | PROMETHEUS_OWN


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or rule["alert"])
def test_every_rule_uses_existing_metrics(rule: dict[str, Any], exported: set[str]) -> None:
    assert metrics_in(rule["expr"])
    assert metrics_in(rule["expr"]) <= exported | RECORDED | PROMETHEUS_OWN


def test_every_capserve_metric_is_on_the_dashboard(exported: set[str]) -> None:
    """Any part of a histogram will do, and so will what a rule records of it."""
    recorded = {name for rule in RULES if "record" in rule for name in metrics_in(rule["expr"])}
    shown = {name for target in TARGETS for name in metrics_in(target.expr)} | recorded
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if name.startswith("capserve_")}
    assert ours <= families


def test_every_alert_is_explained() -> None:
    text = OPERATIONS.read_text()
    assert ALERTS == re.findall(r"^### (Capserve\w+)$", text, re.MULTILINE)


def test_every_metric_is_explained(exported: set[str]) -> None:
    explained = set(re.findall(r"^\| `(capserve_\w+)`", OPERATIONS.read_text(), re.MULTILINE))
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if name.startswith("capserve_")}
    assert explained == ours


def test_the_dashboard_queries_the_provisioned_data_source() -> None:
    source = yaml.safe_load((ROOT / "docker/grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    chosen = next(each for each in DASHBOARD["templating"]["list"] if each["name"] == "datasource")
    assert chosen["current"]["value"] == source["uid"]
    for panel in DASHBOARD["panels"]:
        assert panel["type"] == "row" or panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.fixture(scope="module")
def prometheus(service: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A real Prometheus that scrapes the service and evaluates our rules twice a second."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(PROMETHEUS / "rules.yml")]
    job = next(each for each in config["scrape_configs"] if each["job_name"] == "capserve")
    place = str(service.base_url).removeprefix("http://").rstrip("/")
    config["scrape_configs"] = [{"job_name": job["job_name"], "static_configs": [{"targets": [place]}]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(["prometheus", *flags], cwd=folder, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                wait_for(client, 'count_over_time(up{job="capserve"}[1m]) > 3', folder / "log")
                visit(service)  # a rate needs a before and an after
                wait_for(client, "capserve:overload:rate5m > 0 and on (job) capserve:errors:ratio_rate5m > 0", folder / "log")
                yield client
        finally:
            running.terminate()
            running.wait(20)


def wait_for(client: httpx.Client, expr: str, log: Path) -> None:
    until = time.monotonic() + 40
    while time.monotonic() < until:
        try:
            if evaluated(client, expr):
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"{expr} did not come to pass; Prometheus says:\n{log.read_text()[-2000:]}")


def evaluated(client: httpx.Client, expr: str) -> list[dict[str, Any]]:
    answer = client.get("/api/v1/query", params={"query": expr})
    if answer.status_code == 503:  # it is starting
        return []
    assert answer.json()["status"] == "success", answer.text
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


@needs_prometheus
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.panel)
def test_prometheus_answers_every_dashboard_expression(target: Target, prometheus: httpx.Client) -> None:
    expr = target.expr
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr
    found = evaluated(prometheus, expr)
    assert found
    for label in re.findall(r"{{(\w+)}}", target.legend):
        assert all(series["metric"].get(label) for series in found), f"{target.legend}: no {label} in {found[0]['metric']}"


@needs_prometheus
def test_prometheus_evaluates_every_rule_and_records_what_it_should(prometheus: httpx.Client) -> None:
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule["type"] == "alerting"] == ALERTS
    for name in RECORDED:
        assert evaluated(prometheus, name), name


@needs_prometheus
def test_drift_is_high_for_unusual_digits_and_at_most_one(prometheus: httpx.Client) -> None:
    """Digits drawn with a ruler are not what the network was trained on, and Prometheus pairs every bucket with its reference."""
    for name in ("winner_length", "reconstruction_error"):
        live, reference = (evaluated(prometheus, f"capserve_{prefix}{name}_bucket") for prefix in ("", "reference_"))
        assert {each["metric"]["le"] for each in live} == {each["metric"]["le"] for each in reference}
        (series,) = evaluated(prometheus, f"capserve:{name}:drift1h")
        assert 0.2 < float(series["value"][1]) <= 1


@needs_prometheus
def test_the_rules_pass_promtools_tests_and_every_alert_has_one() -> None:
    done = subprocess.run(["promtool", "test", "rules", PROMETHEUS / "rules.test.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = (PROMETHEUS / "rules.test.yml").read_text()
    assert all(f"alertname: {alert}\n" in tested for alert in ALERTS)
