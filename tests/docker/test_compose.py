"""docker-compose.yml and what goes over it, as `docker compose config` reads them; and the Dockerfiles' few facts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from service.catalogue import LONGEST_RELOAD
from service.process.workers import MARGIN
from service.settings import Settings

ROOT = Path(__file__).parents[2]
PLAIN = ("docker-compose.yml",)
CPU = (*PLAIN, "docker/compose.cpu.yml")
REPLICAS = (*CPU, "docker/compose.replicas.yml")


@cache
def services(files: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """As they will run, with all profiles."""
    if shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    chosen = [word for file in files for word in ("-f", file)]
    command = ["docker", "compose", *chosen, "--profile", "train", "config", "--format", "json"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("CAPSERVE_")}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
    return found


def test_the_default_compose_file_requires_a_gpu() -> None:
    capserve = services(PLAIN)["capserve"]
    assert capserve["build"]["target"] == "gpu"
    assert capserve["environment"]["CAPSERVE_DEVICE"] == "cuda"
    (device,) = capserve["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_the_cpu_override_requests_no_gpu() -> None:
    found = services(CPU)
    assert found["capserve"]["build"]["target"] == "cpu"
    assert found["capserve"]["environment"]["CAPSERVE_DEVICE"] == "cpu"
    assert not [name for name, service in found.items() if service["deploy"]["resources"].get("reservations")]


def test_replicas_are_reached_through_one_port() -> None:
    found = services(REPLICAS)
    assert "ports" not in found["capserve"]
    assert [port["target"] for port in found["proxy"]["ports"]] == [8080]
    assert "listen 8080;" in (ROOT / "docker/nginx/nginx.conf").read_text()


def test_monitoring_is_on_loopback_only_and_grafana_is_view_only() -> None:
    found = services(REPLICAS)
    for name in ("prometheus", "grafana"):
        assert {port["host_ip"] for port in found[name]["ports"]} == {"127.0.0.1"}, name
    assert found["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert found["grafana"]["environment"]["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


def test_only_the_replicas_override_sets_the_number_of_replicas() -> None:
    assert services(REPLICAS)["capserve"]["deploy"]["replicas"] == 2
    assert "replicas" not in services(CPU)["capserve"]["deploy"]


def test_bodies_cannot_fill_the_proxys_memory() -> None:
    """What it takes in waits in /tmp, which is memory: with more than its limit it is killed, and every request with it."""
    proxy = services(REPLICAS)["proxy"]
    (room,) = (int(each.removeprefix("/tmp:size=").removesuffix("m")) << 20 for each in proxy["tmpfs"])
    assert room < int(proxy["deploy"]["resources"]["limits"]["memory"])
    (largest,) = re.findall(r"client_max_body_size (\d+)m;", (ROOT / "docker/nginx/nginx.conf").read_text())
    assert Settings.model_fields["max_body"].default < int(largest) << 20 < room
    (many,) = re.findall(r"limit_conn large_bodies (\d+);", (ROOT / "docker/nginx/nginx.conf").read_text())
    (most,) = re.findall(r"limit_conn requests (\d+);", (ROOT / "docker/nginx/nginx.conf").read_text())
    assert int(many) * (int(largest) << 20) + int(most) * 100_000 < 0.9 * room  # one address leaves some for others


def test_the_proxy_waits_longer_than_a_replica_works() -> None:
    reload, others = map(int, re.findall(r"proxy_read_timeout (\d+)s;", (ROOT / "docker/nginx/nginx.conf").read_text()))
    assert reload > LONGEST_RELOAD
    assert others > Settings.model_fields["deadline"].default


@pytest.mark.parametrize("files", [PLAIN, CPU, REPLICAS], ids=["gpu", "cpu", "replicas"])
def test_containers_are_restricted_and_their_images_pinned(files: tuple[str, ...]) -> None:
    for name, service in services(files).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["deploy"]["resources"]["limits"].keys() >= {"memory", "pids"}, name
        assert re.search(r":\S*\d$|^capserve", service["image"]), f"{name} names no version: {service['image']}"
    (models,) = services(files)["capserve"]["volumes"]
    assert (models["target"], models["read_only"]) == ("/models", True)


def test_the_stop_grace_period_leaves_time_to_drain() -> None:
    grace = services(PLAIN)["capserve"]["stop_grace_period"]
    fields = Settings.model_fields
    assert int(grace.removesuffix("s")) >= fields["linger"].default + fields["drain"].default + MARGIN


def test_compose_passes_every_setting_except_those_fixed_by_the_image() -> None:
    environment = services(PLAIN)["capserve"]["environment"]
    given = {name.removeprefix("CAPSERVE_").lower() for name in environment if name.startswith("CAPSERVE_")}
    assert given == Settings.model_fields.keys() - {"host", "port", "models"}
    assert environment["CAPSERVE_LOG_FORMAT"] == "json"  # an empty one would be taken from the image


def test_the_guides_docker_commands_neither_kill_nor_mount_models() -> None:
    commands = re.findall(r"^    (docker .*)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        assert " kill " not in command  # a container that was sent any signal so is not restarted when it dies later
        assert ":/models" not in command  # the folder that compose mounts there stays


def test_the_guides_commands_swap_bundles_and_roll_back_repeatedly(tmp_path: Path) -> None:
    """By the lines of the guide, word by word."""
    guide = (ROOT / "docs" / "operations.md").read_text()
    forth, back = re.findall(r"^    ((?:rm -rf|test -d) models/.*\n    mv .*)$", guide, re.MULTILINE)
    served = tmp_path / "models" / "mine" / "which"
    made = tmp_path / "new-models" / "mine" / "which"
    for folder in (served.parent, made.parent):
        folder.mkdir(parents=True)
    served.write_text("first")

    def run(lines: str) -> str:
        subprocess.run(["bash", "-c", lines], cwd=tmp_path, check=True)
        assert all(path.is_file() for path in tmp_path.glob("models/*/*")), "one lies in another"
        return served.read_text()

    for name in ("second", "third"):
        made.write_text(name)
        assert run(forth) == name
    assert [run(back), run(back), run(back)] == ["second", "third", "second"]
    shutil.rmtree(tmp_path / "models" / "_before")
    with pytest.raises(subprocess.CalledProcessError):
        run(back)
    assert served.read_text() == "second"  # where there is nothing to go back to, what is served stays


@pytest.mark.parametrize("name", ["service", "training"])
def test_the_dockerfiles_default_to_the_package_version(name: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nARG VERSION={version}\n" in (ROOT / "docker" / f"{name}.Dockerfile").read_text()


@pytest.fixture(scope="module")
def shipped_script() -> ModuleType:
    """docker/shipped.py, which is a script."""
    spec = util.spec_from_file_location("shipped", ROOT / "docker" / "shipped.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_shipped_packages_are_pinned_and_exclude_those_of_training(shipped_script: ModuleType, target: str) -> None:
    names = {line.partition("==")[0] for line in shipped_script.shipped(target)}
    assert names >= {"fastapi", "numpy", "pillow", "uvicorn", "starlette", "pydantic_core"}
    assert names >= ({"onnxruntime"} if target == "cpu" else {"onnxruntime-gpu", "nvidia-cudnn-cu13"})
    assert not names & {"torch", "onnx", "pytest", "httpx"}


def test_nvidia_packages_are_pinned_in_a_separate_file(shipped_script: ModuleType) -> None:
    """torch for CUDA wants others than ONNX Runtime alone, so what torch is installed with must not name them."""
    assert not [name for name in shipped_script.pinned("constraints.txt") if name.startswith("nvidia-")]
    cuda = shipped_script.pinned("constraints-cuda.txt")
    assert "nvidia-cudnn-cu13" in cuda
    assert all(name.startswith("nvidia-") for name in cuda)


TORCH = "lib/python3.12/site-packages/torch"


@pytest.mark.parametrize(
    ("target", "runtime", "beside", "given"),
    [
        ("service", "gpu", None, True),
        ("service", "gpu", TORCH, False),
        ("test", "gpu", None, True),
        ("test", "gpu", TORCH, False),
        ("service", "cpu", None, False),
        ("all", "gpu", None, False),
    ],
)
def test_make_pins_cuda_only_for_gpu_installs_without_torch(
    tmp_path: Path, target: str, runtime: str, beside: str | None, given: bool
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-cuda.txt"):
        shutil.copy(ROOT / name, tmp_path)
    if beside is not None:
        (tmp_path / ".venv" / beside).mkdir(parents=True)
    command = ["make", "--dry-run", "--what-if=pyproject.toml", f".venv/{target}", f"RUNTIME={runtime}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (line,) = (each for each in done.stdout.splitlines() if " install " in each)
    assert f"'.[{runtime}" in line
    assert "-c constraints.txt" in line
    assert ("-c constraints-cuda.txt" in line) is given


def test_the_images_use_the_same_constraints_as_make() -> None:
    service, training = ((ROOT / "docker" / f"{name}.Dockerfile").read_text() for name in ("service", "training"))
    assert "install -r cpu -c constraints.txt \\" in service
    assert "install -r gpu -c constraints.txt -c constraints-cuda.txt \\" in service
    assert "constraints-cuda" not in training


def test_the_audit_covers_every_shipped_package(shipped_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def report(pins: Sequence[str]) -> list[dict[str, Any]]:
        asked[:] = pins
        return [{"name": pin, "version": "", "vulns": []} for pin in pins]

    monkeypatch.setattr(shipped_script, "report", report)
    assert shipped_script.audit()[0] == 0
    assert asked == sorted({*shipped_script.shipped("cpu"), *shipped_script.shipped("gpu")})


def test_the_audit_fails_on_a_vulnerability_but_not_without_an_answer(shipped_script: ModuleType) -> None:
    known = {"name": "pillow", "version": "1", "vulns": []}
    unsafe = {"name": "pillow", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}
    unheard = {"name": "numpy", "skip_reason": "not found"}
    assert shipped_script.judge([]) == shipped_script.judge([unheard]) == shipped_script.SKIPPED
    assert shipped_script.judge([known, unheard]) == (0, "1 packages without a known vulnerability\nnot known there: numpy")
    assert shipped_script.judge([known, unsafe]) == (1, "pillow 1: PYSEC-1, mended in 2")


def test_the_sbom_lists_the_shipped_packages(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "sbom", f"SBOM={tmp_path}/sbom.json", "-o", ".venv/test"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "sbom.json").read_text())
    assert found["bomFormat"] == "CycloneDX"
    assert found["metadata"]["component"]["name"] == "capserve"
    listed = subprocess.run([sys.executable, "docker/shipped.py", "cpu"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert sorted(f"{each['name']}=={each['version']}" for each in found["components"]) == listed
