"""The encoder behind BentoML, as in its documentation: adaptive batches of up to 16, no access log.

ENCODER=models/compact/encoder.int8.onnx WORKERS=1 bentoml serve benchmarks.bentoml_endpoint:Digits
"""

import os

import bentoml
import numpy as np
import onnxruntime
from PIL import Image

PATIENCE = 1_000  # milliseconds for a batch; with 20 it refused two thirds of the load


@bentoml.service(workers=int(os.environ["WORKERS"]), logging={"access": {"enabled": False}})
class Digits:
    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # as capserve does for an encoder this fast
        self.session = onnxruntime.InferenceSession(os.environ["ENCODER"], options, providers=["CPUExecutionProvider"])

    @bentoml.api(batchable=True, max_batch_size=16, max_latency_ms=PATIENCE)
    def predict(self, file: list[Image.Image]) -> list[dict]:
        images = np.stack([np.asarray(picture.convert("L").resize((28, 28)), np.float32)[None] / 255 for picture in file])
        (lengths,) = self.session.run(["lengths"], {"images": images})
        return [{"label": int(each.argmax()), "probabilities": each.tolist()} for each in lengths]
