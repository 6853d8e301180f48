"""The encoder behind LitServe, as in its documentation: its workers decode and run, processes beside them handle HTTP.

ENCODER=models/compact/encoder.int8.onnx WORKERS=1 BATCH=16 python benchmarks/litserve_endpoint.py 8000
"""

import os
import sys

import litserve
import numpy as np
import onnxruntime
from PIL import Image

WAIT = 0.002  # seconds for a batch to fill; 0.005 and LitServe's fast queue were no faster


class Digits(litserve.LitAPI):
    def setup(self, device):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # as capserve does for an encoder this fast
        self.session = onnxruntime.InferenceSession(os.environ["ENCODER"], options, providers=["CPUExecutionProvider"])

    def decode_request(self, request):
        picture = Image.open(request["file"].file).convert("L").resize((28, 28))
        return np.asarray(picture, np.float32)[None] / 255

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, images):  # (n, 1, 28, 28), or a single picture if there are no batches
        return self.session.run(["lengths"], {"images": images.reshape(-1, 1, 28, 28)})[0]

    def unbatch(self, lengths):
        return list(lengths)

    def encode_response(self, lengths):
        return {"label": int(lengths.argmax()), "probabilities": lengths.ravel().tolist()}


if __name__ == "__main__":
    api = Digits(max_batch_size=int(os.environ["BATCH"]), batch_timeout=WAIT)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=int(os.environ["WORKERS"]))
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
