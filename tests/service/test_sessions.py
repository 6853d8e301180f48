"""How ONNX Runtime is set up on the CPU: its threads, its int8, and who hears of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from service import bundle, runtime, sessions
from service.process import cpus
from tests.service.conftest import TINY
from tests.service.processes import ROOT


@pytest.mark.parametrize("dot_products", [True, False])
def test_int8_convolutions_are_computed_in_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dot_products: bool) -> None:
    """They are not computed as the file has them: rounded to int8, but multiplied in float."""
    monkeypatch.setattr(cpus, "has_dot_products", lambda: dot_products)
    options = sessions._options(1)
    options.optimized_model_filepath = str(tmp_path / "at_work.onnx")
    ort.InferenceSession(bundle.read(TINY).encoder("int8"), options, providers=["CPUExecutionProvider"])
    assert "QLinearConv" in {node.op_type for node in onnx.load(tmp_path / "at_work.onnx").graph.node}


def test_runtime_threads_match_the_setting_and_do_not_spin() -> None:
    options = runtime.options(threads=5)
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (5, 1)
    assert options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_a_quick_graph_runs_on_one_thread() -> None:
    made = bundle.read(TINY)
    quick = sessions.open_on_cpu(made.encoder("fp32"), bundle.ENCODER, made.manifest, most=2)
    assert isinstance(quick, sessions.CpuSession)
    assert quick.runners == 1


@pytest.mark.parametrize(("seconds", "slow"), [(5.0, 5), (0.0, 3)])
def test_a_quick_graph_is_not_judged_slow_because_of_another_process(
    seconds: float, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ran = sessions.CpuSession.run, []

    def disturbed(session: sessions.CpuSession, *inputs: np.ndarray) -> runtime.Arrays:
        ran.append(None)
        time.sleep(2 * sessions.QUICK)  # the other process has this core
        ends = time.thread_time() + 2 * sessions.QUICK
        while len(ran) <= slow and time.thread_time() < ends:  # and has emptied its caches
            pass
        return run(session, *inputs)

    monkeypatch.setattr(sessions.CpuSession, "run", disturbed)
    monkeypatch.setattr(sessions, "TRIAL_SECONDS", seconds)  # on a busy machine five runs may outlast the usual trial
    made = bundle.read(TINY)
    assert isinstance(sessions.open_on_cpu(made.encoder("fp32"), bundle.ENCODER, made.manifest, most=2), sessions.CpuSession)


def test_a_slow_graph_uses_all_cores_alone_and_one_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "QUICK", 0.0)
    made = bundle.read(TINY)
    slow = sessions.open_on_cpu(made.encoder("fp32"), bundle.ENCODER, made.manifest, most=2)
    assert isinstance(slow, sessions.CoresSession)
    assert slow.runners == 2
    images = np.random.default_rng(0).random((3, *made.manifest.image_shape), np.float32)
    both_in, used = threading.Barrier(2), []

    def watched(name: str, session: sessions.CpuSession) -> None:
        run = session.run

        def wait_inside(*inputs: np.ndarray) -> runtime.Arrays:
            used.append(name)
            if len(used) <= 2:
                both_in.wait(10)
            return run(*inputs)

        monkeypatch.setattr(session, "run", wait_inside)

    watched("joint", slow._joint)
    watched("single", slow._single)
    with ThreadPoolExecutor(2) as pool:
        outputs = [each.result() for each in (pool.submit(slow.run, images), pool.submit(slow.run, images))]
    outputs.append(slow.run(images))
    assert used == ["joint", "single", "joint"]
    slow.warm(images)
    assert used[3:] == ["single", "joint"]
    for lengths, capsules in outputs[1:]:
        np.testing.assert_allclose(lengths, outputs[0][0], atol=1e-5)
        np.testing.assert_allclose(capsules, outputs[0][1], atol=1e-5)


def test_onnx_runtime_telemetry_is_disabled_before_its_import(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 sends telemetry from Linux too, unless it is told not to before it is imported."""
    (tmp_path / "onnxruntime.py").write_text("import os, sys; print(os.environ['ORT_DISABLE_TELEMETRY']); sys.exit()")
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment["PYTHONPATH"] = str(tmp_path)
    command = [sys.executable, "-c", "import service.sessions"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("1\n", "")
