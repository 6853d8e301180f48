"""The encoder behind Triton's server, in its Python backend, the one that can read pictures; dynamic batches of up to 16.

ENCODER=models/compact/encoder.int8.onnx WORKERS=1 python benchmarks/triton_endpoint.py 8000

Run as a program, it lays out a model repository with this file as the model and starts the server, which nvidia-pytriton brings.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(1, os.environ.get("PACKAGES", ""))  # Triton's interpreter has only the system's packages and ignores PYTHONPATH

import numpy as np
import onnxruntime
from PIL import Image

CONFIG = """
backend: "python"
max_batch_size: 16
dynamic_batching {{}}
input {{ name: "picture" data_type: TYPE_STRING dims: 1 }}
output {{ name: "label" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "lengths" data_type: TYPE_FP32 dims: 10 }}
instance_group {{ kind: KIND_CPU count: {workers} }}
"""


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # as capserve does for an encoder this fast
        self.session = onnxruntime.InferenceSession(os.environ["ENCODER"], options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        import triton_python_backend_utils as backend  # exists only where this file runs as a model

        pictures = [backend.get_input_tensor_by_name(each, "picture").as_numpy() for each in requests]
        images = [_read(picture) for each in pictures for picture in each.ravel()]
        (lengths,) = self.session.run(["lengths"], {"images": np.stack(images)})
        ends = np.cumsum([len(each) for each in pictures])[:-1]
        return [
            backend.InferenceResponse(
                [backend.Tensor("label", rows.argmax(axis=1, keepdims=True).astype(np.int32)), backend.Tensor("lengths", rows)]
            )
            for rows in np.split(lengths, ends)
        ]


def _read(picture):
    return np.asarray(Image.open(io.BytesIO(picture)).convert("L").resize((28, 28)), np.float32)[None] / 255


def _lay_out(work, packages):
    """Writes a model repository, and a copy of the backend with the stub for this Python's version."""
    triton = packages / "pytriton/tritonserver"
    version = work / "models/digits/1"
    version.mkdir(parents=True)
    shutil.copy(__file__, version / "model.py")
    (work / "models/digits/config.pbtxt").write_text(CONFIG.format(workers=os.environ["WORKERS"]))
    backend = work / "backends/python"
    shutil.copytree(triton / "backends/python", backend)
    stub = backend / "triton_python_backend_stub"
    shutil.copy(triton / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}" / stub.name, stub)
    stub.chmod(0o755)


def _serve(port, work, packages):
    command = [packages / "pytriton/tritonserver/bin/tritonserver", f"--model-repository={work}/models"]
    command += [f"--backend-directory={work}/backends", "--http-address=127.0.0.1", f"--http-port={port}", "--allow-grpc=false"]
    libraries = [packages / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR"))]
    environment = {"LD_LIBRARY_PATH": ":".join(map(str, libraries)), "PACKAGES": str(packages)}
    with subprocess.Popen([*command, "--allow-metrics=false"], env=os.environ | environment) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        work, packages = Path(folder), Path(sysconfig.get_path("purelib"))
        _lay_out(work, packages)
        _serve(sys.argv[1], work, packages)
