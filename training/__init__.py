"""Trains Capsule Networks and makes bundles of them."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before anything imports ONNX Runtime, which reads it on import
