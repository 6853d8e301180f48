"""Where the tests' bundle is, and bundles that tests make from it."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx

from service.manifest import EXAMPLE, MANIFEST, fingerprint

TINY = Path(__file__).parent.parent / "bundles" / "tiny"


def external(folder: Path) -> Path:
    """Copies tiny with its encoder's weights in a separate file, and all checksums right."""
    shutil.copytree(TINY, folder)
    encoder = folder / "encoder.onnx"
    onnx.save_model(onnx.load(encoder), encoder, save_as_external_data=True, location="weights.bin", size_threshold=100)
    assert (folder / "weights.bin").stat().st_size > 10_000
    return signed(folder)


def renewed(folder: Path, note: str) -> Path:
    """Replaces whatever is at `folder` with another version of tiny, whose graphs carry a note."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as work:
        draft = Path(work) / folder.name
        shutil.copytree(TINY, draft)
        for file in (draft / "encoder.onnx", draft / "decoder.onnx"):
            graph = onnx.load(file)
            graph.doc_string = note
            onnx.save(graph, file)
        signed(draft)
        if folder.exists():
            folder.rename(Path(work) / "before")
        draft.rename(folder)
    return folder


def wide(folder: Path) -> Path:
    """Turns tiny into a bundle for two digits in pictures twice as wide: it squeezes its input, and repeats its drawing."""
    shutil.copytree(TINY, folder)
    for file in folder.glob("encoder*.onnx"):
        model = onnx.load(file)
        (picture,) = model.graph.input
        picture.type.tensor_type.shape.dim[3].dim_value *= 2
        for node in model.graph.node:
            node.input[:] = ["squeezed" if name == picture.name else name for name in node.input]
        squeeze = onnx.helper.make_node("AveragePool", [picture.name], ["squeezed"], kernel_shape=[1, 2], strides=[1, 2])
        model.graph.node.insert(0, squeeze)
        onnx.save(model, file)
    model = onnx.load(folder / "decoder.onnx")
    (drawing,) = model.graph.output
    drawing.type.tensor_type.shape.dim[3].dim_value *= 2
    for node in model.graph.node:
        node.output[:] = ["drawn" if name == drawing.name else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Concat", ["drawn", "drawn"], [drawing.name], axis=3))
    onnx.save(model, folder / "decoder.onnx")
    with np.load(folder / EXAMPLE) as example:
        arrays = {name: example[name] for name in example.files}
    arrays["images"] = np.repeat(arrays["images"], 2, axis=3)
    arrays["reconstructions"] = np.tile(arrays["reconstructions"], 2)
    np.savez(folder / EXAMPLE, **arrays)
    values = json.loads((folder / MANIFEST).read_text())
    values |= {"image_shape": [1, 28, 56], "max_objects": 2, "boxed": False}
    (folder / MANIFEST).write_text(json.dumps(values))
    return signed(folder)


def signed(folder: Path) -> Path:
    """Updates the manifest's name, checksums and version to match the files in the folder."""
    manifest = folder / MANIFEST
    values = json.loads(manifest.read_text())
    values["name"] = folder.name
    values["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in values["files"]}
    values["version"] = fingerprint(values["files"]).hex()
    manifest.write_text(json.dumps(values))
    return folder
