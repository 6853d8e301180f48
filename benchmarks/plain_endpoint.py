"""What most people write first, and what serving.py compares with: FastAPI, Pillow and one ONNX Runtime session, all defaults.

ENCODER=models/compact/encoder.onnx uvicorn benchmarks.plain_endpoint:app
"""

import os

import numpy as np
import onnxruntime
from fastapi import FastAPI, UploadFile
from PIL import Image

app = FastAPI()
session = onnxruntime.InferenceSession(os.environ["ENCODER"], providers=["CPUExecutionProvider"])


@app.post("/predict")
def predict(file: UploadFile) -> dict[str, object]:
    picture = Image.open(file.file).convert("L").resize((28, 28))
    images = np.asarray(picture, np.float32)[None, None] / 255
    (lengths,) = session.run(["lengths"], {"images": images})
    return {"label": int(lengths[0].argmax()), "probabilities": lengths[0].tolist()}
