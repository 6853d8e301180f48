"""docker/rollout.sh on an engine that is a file: which containers there are afterwards. docker/trial.py has a real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docker import engine
from tests.docker.engine import container
from tests.waiting import until

ROOT = Path(__file__).parents[2]
OLD = {"old0", "old1"}
NEW = {"new0", "new1"}
OTHERS = {"check", "checked"}  # made by `docker compose run`, and to be left alone


class Engine:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "engine.json"
        self.key: str | None = None
        self.health = "healthy"
        self.patience = 0.0  # seconds that a replica takes to stop
        docker = folder / "docker"
        docker.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {engine.__file__} "$@"\n')  # started twenty times a test
        docker.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "ENGINE": str(self.file), "ROLLOUT_WAIT": "1"}
        self.environment["TMPDIR"] = str(folder)

    def begin(self, key: str | None = None) -> None:
        """Begins with replicas that ask for this key, or for none."""
        containers = {name: container(key) for name in OLD}
        containers |= {"stopped": container(key, state="exited")}
        containers |= {"check": container(key, oneoff=True), "checked": container(key, state="exited", oneoff=True)}
        engine = {"containers": containers, "key": self.key, "health": self.health, "patience": self.patience}
        self.file.write_text(json.dumps(engine))

    def rollout(self, **settings: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["docker/rollout.sh"],
            cwd=ROOT,
            env=self.environment | settings,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    @property
    def containers(self) -> set[str]:
        return set(self._read())

    @property
    def running(self) -> set[str]:
        return {name for name, each in self._read().items() if each["state"] == "running"}

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text())["containers"]
        return found


@pytest.fixture
def host(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def ended(rollout: subprocess.Popen[str]) -> tuple[int, str]:
    told, _ = rollout.communicate(timeout=60)
    return rollout.returncode, told


def test_new_replicas_replace_the_old_ones(host: Engine) -> None:
    host.begin()
    status, told = ended(host.rollout(ROLLOUT_WAIT="60"))
    assert status == 0, told
    assert host.containers == NEW | OTHERS


def test_rollout_changes_nothing_when_no_replica_runs(host: Engine) -> None:
    """Containers that have ended still have the logs that say why."""
    host.file.write_text(json.dumps({"containers": {"ended": container(None, state="exited")}, "key": None, "health": "healthy"}))
    status, told = ended(host.rollout())
    assert (status, "nothing to renew" in told) == (1, True), told
    assert host.containers == {"ended"}


def test_new_replicas_that_do_not_become_ready_are_removed(host: Engine) -> None:
    host.health = "starting"
    host.begin()
    status, told = ended(host.rollout())
    assert (status, "did not become ready" in told) == (1, True), told
    assert host.containers == OLD | OTHERS
    assert host.running == OLD | {"check"}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_rollout_keeps_the_old_replicas(host: Engine, number: signal.Signals) -> None:
    host.health = "starting"
    host.begin()
    rollout = host.rollout(ROLLOUT_WAIT="60")
    until(lambda: host.containers >= NEW, seconds=60)
    rollout.send_signal(number)
    status, told = ended(rollout)
    assert status == 128 + number, told
    assert host.containers == OLD | OTHERS
    assert host.running == OLD | {"check"}


def test_a_rollout_that_is_stopping_old_replicas_ignores_sigterm(host: Engine) -> None:
    host.patience = 0.5
    host.begin()
    rollout = host.rollout(ROLLOUT_WAIT="60")
    assert rollout.stdout is not None
    for line in rollout.stdout:
        if line.startswith("stopping"):
            rollout.terminate()
            break
    status, told = ended(rollout)
    assert status == 0, told
    assert host.containers == NEW | OTHERS


def test_a_second_concurrent_rollout_exits_and_changes_nothing(host: Engine) -> None:
    host.health = "starting"
    host.begin()
    first = host.rollout(ROLLOUT_WAIT="60")
    until(lambda: host.containers >= NEW, seconds=60)
    status, told = ended(host.rollout())
    assert (status, told) == (1, "another rollout of trial is under way\n")
    assert host.containers == OLD | NEW | OTHERS
    first.terminate()
    ended(first)
    assert host.containers == OLD | OTHERS


def test_rollout_refuses_to_drop_the_api_key_silently(host: Engine) -> None:
    host.begin(key="secret")
    status, told = ended(host.rollout())
    assert (status, ".env" in told) == (1, True), told
    assert "secret" not in told
    assert host.containers == OLD | OTHERS
    assert host.running == OLD | {"check"}


@pytest.mark.parametrize(("before", "after"), [("secret", ""), (None, "secret")])
def test_the_api_key_may_be_removed_explicitly_or_introduced(host: Engine, before: str | None, after: str) -> None:
    host.key = after
    host.begin(key=before)
    status, told = ended(host.rollout(ROLLOUT_WAIT="60"))
    assert status == 0, told
    assert host.containers == NEW | OTHERS
