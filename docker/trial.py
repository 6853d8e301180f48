"""`make docker-test`: the images and the compose files, tried on a real engine. Needs Docker with compose and Python, no package.

Builds the image for CPUs, runs two replicas of it behind one port with Prometheus and Grafana, looks at what README and
SECURITY.md promise of the containers, and renews the replicas under load. --gpu builds the GPU's image too, sees it end with a
plain word where it is given no GPU, and run where there is one; --no-build takes images that are here; --without-grafana leaves
it out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILES = ["-f", "docker-compose.yml", "-f", "docker/compose.cpu.yml", "-f", "docker/compose.replicas.yml"]
PROJECT = "capserve-trial"
REPLICAS = 2
CLIENTS = 4
PATIENCE = 90  # seconds to wait for anything
LARGEST_IMAGE = 400  # megabytes: the goal for the CPU image, on Docker Hub's python:slim


class Trial:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ports = {name: free_port() for name in ("CAPSERVE", "PROMETHEUS", "GRAFANA")}
        ports = {f"{name}_PUBLISH": str(port) for name, port in self.ports.items()}
        self.environment = {**os.environ, **ports, "COMPOSE_PROJECT_NAME": PROJECT, "CAPSERVE_REPLICAS": str(REPLICAS)}

    def run(self) -> None:
        try:
            self.start()
            self.check_prediction()
            self.check_containers()
            self.check_monitoring()
            self.check_rollout()
            self.stop()
        except BaseException:
            subprocess.run(self._compose_command("logs", "--tail", "30"), cwd=ROOT, env=self.environment)
            raise
        finally:
            self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
        if self.options.gpu:
            self.check_gpu_image()

    def start(self) -> None:
        services = ["capserve", "proxy", "prometheus"] + ([] if self.options.without_grafana else ["grafana"])
        if not self.options.no_build:
            building = self._compose_command("build", "capserve")  # its output is shown: it takes minutes, and says why it fails
            subprocess.run(building, cwd=ROOT, env=self.environment, check=True)
        pull = ["--pull", "never"] if self.options.no_build else []
        self.compose("up", "--detach", "--wait", "--no-build", *pull, *services)
        size = int(docker("image", "inspect", "--format", "{{.Size}}", "capserve:cpu")) / 1e6
        goal = "" if size <= LARGEST_IMAGE else f", and {LARGEST_IMAGE} is the goal"
        say(f"{REPLICAS} replicas are healthy; the image has {size:.0f} MB{goal}")

    def check_prediction(self) -> None:
        """A prototype drawn by the service must be recognised as its own class."""
        with opened(self.url("CAPSERVE", "/reconstruct?label=7")) as answer:
            self.seven = answer.read()
        expect("label of a seven", "7", self.predict(HTTPConnection("127.0.0.1", self.ports["CAPSERVE"], timeout=30))["label"])

    def check_containers(self) -> None:
        for replica in self.replicas():
            shell = partial(in_shell, replica)
            expect("user", "10001", shell("id -u"))
            expect(
                "capabilities, and new privileges",
                ["0" * 16, "1"],
                shell("awk '/CapBnd|NoNewPrivs/ {print $2}' /proc/1/status").split(),
            )
            expect("a file outside /tmp", True, "Read-only file system" in shell("touch /opt/capserve/file"))
            expect("a file in /models", True, "Read-only file system" in shell("touch /models/file"))
            expect("a file in /tmp", "", shell("touch /tmp/file"))
            unwanted = "cc gcc g++ make captrain"
            expect("a compiler, or what trains", "", shell(f"for each in {unwanted}; do command -v $each; done"))
            count_threads = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
            expect("threads of a process that imports numpy", "1", shell(f'python -c "{count_threads}"').strip())
            expect("torch", True, "No module named 'torch'" in shell("python -c 'import torch'"))
            list_packages = (
                "from importlib.metadata import distributions as d; print(*(f'{e.name}=={e.version}' for e in d()), sep=chr(10))"
            )
            found = docker("exec", replica, "python", "-c", list_packages).replace("-", "_").lower().split()
            pinned = (ROOT / "constraints.txt").read_text().replace("-", "_").lower().split()
            expect("packages that no pin covers", [], [each for each in found if each not in pinned and "capserve" not in each])
            limits = json.loads(docker("inspect", "--format", "{{json .HostConfig}}", replica))
            expect("limits of memory and processes", [True, True], [limits["Memory"] > 0, limits["PidsLimit"] > 0])
        say("no root, no capabilities, no compiler, no torch; writes to /tmp alone")

    def check_monitoring(self) -> None:
        wait("Prometheus to scrape both replicas", lambda: self.query('up{job="capserve"}') == [1.0] * REPLICAS)
        wait("both to be ready in its eyes", lambda: self.query("sum(capserve_ready)") == [REPLICAS])
        wait("rules to be evaluated", lambda: {rule["health"] for rule in self.rules()} == {"ok"})
        say(f"Prometheus: up is 1 for {REPLICAS} replicas, {len(self.rules())} rules evaluate")
        if not self.options.without_grafana:
            wait("Grafana's dashboard", lambda: self.grafana("/api/dashboards/uid/capserve")["dashboard"]["title"] == "capserve")
            query = "/api/datasources/proxy/uid/prometheus/api/v1/query?query=sum(capserve_ready)"
            wait("Grafana to reach Prometheus", lambda: self.grafana(query)["status"] == "success")
            say("Grafana shows the dashboard and reaches Prometheus")

    def check_rollout(self) -> None:
        before, results, stop = self.replicas(), Counter[str](), threading.Event()
        clients = [threading.Thread(target=self.load, args=(results, stop)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(2)
        try:
            expect(
                "exit status of a rollout that cannot start", 1, self.rollout(CAPSERVE_MODEL="no-such-model", ROLLOUT_WAIT="15")
            )
            expect("replicas after it", before, self.replicas())
            expect("exit status of a rollout", 0, self.rollout())
            time.sleep(2)
        finally:
            stop.set()
            for client in clients:
                client.join()
        after = self.replicas()
        expect("replicas after the rollout", REPLICAS, len(after))
        expect("old replicas among them", set(), before & after)
        expect("what became of the requests", {"200"}, set(results))
        say(
            f"all {REPLICAS} replicas renewed under load, and none by a rollout that failed: {results['200']} requests, none lost"
        )
        wait("Prometheus to scrape the new ones", lambda: self.query('up{job="capserve"} == 1') == [1.0] * REPLICAS)

    def rollout(self, **settings: str) -> int:
        return subprocess.run(["docker/rollout.sh", *FILES], cwd=ROOT, env=self.environment | settings).returncode

    def load(self, results: Counter[str], stop: threading.Event) -> None:
        connection = HTTPConnection("127.0.0.1", self.ports["CAPSERVE"], timeout=30)
        while not stop.is_set():
            try:
                expect("label under load", "7", self.predict(connection)["label"])
                results["200"] += 1
            except (OSError, HTTPException, AssertionError) as error:
                results[f"{type(error).__name__}: {error}"] += 1
                connection.close()

    def predict(self, connection: HTTPConnection) -> dict[str, Any]:
        connection.request("POST", "/predict?reconstruct=false", self.seven, {"Content-Type": "image/png"})
        answer = connection.getresponse()
        body = answer.read()
        expect("status", (200, b""), (answer.status, b"" if answer.status == 200 else body))
        found: dict[str, Any] = json.loads(body)
        return found

    def stop(self) -> None:
        replicas = self.replicas()
        self.compose("stop", "capserve")
        for replica in replicas:
            expect("exit status after SIGTERM", "0", docker("inspect", "--format", "{{.State.ExitCode}}", replica))
        say("told to stop, they end with 0")

    def check_gpu_image(self) -> None:
        if not self.options.no_build:
            build = ["-f", "docker/service.Dockerfile", "--target", "gpu", "-t", "capserve:gpu", "."]
            subprocess.run(["docker", "build", *build], cwd=ROOT, check=True)
        size = int(docker("image", "inspect", "--format", "{{.Size}}", "capserve:gpu")) / 1e6
        without_gpu = ["docker", "run", "--rm", "--runtime", "runc", "capserve:gpu"]  # NVIDIA's runtime may be the default
        done = subprocess.run(without_gpu, capture_output=True, text=True, timeout=120)
        expect("exit status without a GPU", 2, done.returncode)
        last = done.stderr.strip().splitlines()[-1]
        expect("what is missing, named", True, "libcuda.so.1 is missing, a part of the NVIDIA driver" in last)
        say(f"the GPU's image has {size:.0f} MB, and without a GPU ends with: {last}")
        if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0:
            say(docker("run", "--rm", "--gpus", "all", "capserve:gpu", "check"))

    def replicas(self) -> set[str]:
        return set(self.compose("ps", "--quiet", "capserve").split())

    def query(self, expr: str) -> list[float]:
        with opened(self.url("PROMETHEUS", f"/api/v1/query?query={urllib.parse.quote(expr)}")) as answer:
            return [float(series["value"][1]) for series in json.load(answer)["data"]["result"]]

    def rules(self) -> list[dict[str, Any]]:
        with opened(self.url("PROMETHEUS", "/api/v1/rules")) as answer:
            return [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]

    def grafana(self, path: str) -> Any:
        with opened(self.url("GRAFANA", path)) as answer:
            return json.load(answer)

    def url(self, name: str, path: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}{path}"

    def compose(self, *words: str) -> str:
        done = subprocess.run(
            self._compose_command(*words), cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    def _compose_command(self, *words: str) -> list[str]:
        return ["docker", "compose", *FILES, *words]


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def in_shell(container: str, line: str) -> str:
    """What a shell line prints in a container, whether it fails there or not."""
    return docker("exec", container, "sh", "-c", f"{line} 2>&1 || true")


@contextmanager
def opened(url: str) -> Iterator[Any]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        yield answer


def wait(what: str, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            if condition():
                return
        except (OSError, KeyError, ValueError):
            pass
        if time.monotonic() > until:
            raise AssertionError(f"waited {PATIENCE} seconds in vain for {what}")
        time.sleep(0.5)


def expect(what: str, expected: object, found: object) -> None:
    if found != expected:
        raise AssertionError(f"{what}: expected {expected!r}, found {found!r}")


def say(line: str) -> None:
    print(f"docker-test: {line}", flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for flag in ("--no-build", "--without-grafana", "--gpu"):
        parser.add_argument(flag, action="store_true")
    try:
        Trial(parser.parse_args()).run()
    except (AssertionError, subprocess.CalledProcessError) as error:
        sys.exit(f"docker-test: {error}")
    say("all as it should be")
