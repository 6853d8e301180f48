"""ONNX Runtime as used on every device: how it is imported, with telemetry off, and set up, and what it made of a graph."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from service import bundle
from service.bundle import GraphSpec
from service.errors import StartError
from service.manifest import Manifest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read on import; otherwise it reports our sessions to its makers
try:
    import onnxruntime
except ModuleNotFoundError as error:
    raise StartError("onnxruntime is not installed; `pip install '.[cpu]'` in the checkout installs it, or [gpu]") from error

ort = onnxruntime  # others get it from here, so that nobody imports it before the setting above
Arrays = list[NDArray[Any]]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class Session(Protocol):
    nodes: Mapping[str, int]  # provider -> how many nodes of the graph it runs
    runners: int = 1  # how many threads should call run() at once

    def run(self, *inputs: NDArray[Any]) -> Arrays: ...

    def warm(self, *inputs: NDArray[Any]) -> None:
        """Runs everything that a later run() of this size may use."""
        self.run(*inputs)


def options(threads: int) -> Any:
    """Session options for every device."""
    session_options = ort.SessionOptions()
    session_options.log_severity_level = 3  # errors; its warnings are for whoever made the graph
    session_options.intra_op_num_threads = threads  # set even when it is the default: that also stops ORT from pinning threads
    session_options.inter_op_num_threads = 1
    session_options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # Idle threads would burn CPU time that others need.
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session_options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return session_options


def check(session: Any, spec: GraphSpec, manifest: Manifest, path: Path) -> None:
    bundle.check_signature(spec, manifest, session.get_inputs(), session.get_outputs(), path)


def nodes(session: Any) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] += len(part.get_nodes())
    return counts
