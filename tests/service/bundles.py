"""Where the tests' bundles are, and bundles made wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import onnx

from service.manifest import MANIFEST, fingerprint

TINY = Path(__file__).parent.parent / "bundles" / "tiny"


def external(folder: Path) -> Path:
    """Tiny, its encoder's weights in a file beside it, and all checksums right."""
    shutil.copytree(TINY, folder)
    encoder = folder / "encoder.onnx"
    onnx.save_model(onnx.load(encoder), encoder, save_as_external_data=True, location="weights.bin", size_threshold=100)
    assert (folder / "weights.bin").stat().st_size > 10_000
    return signed(folder)


def renewed(folder: Path, note: str) -> Path:
    """Tiny in the place of whatever is there, of another version: its graphs carry a note."""
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


def signed(folder: Path) -> Path:
    """Name, checksums and version as they must be for what lies there."""
    manifest = folder / MANIFEST
    values = json.loads(manifest.read_text())
    values["name"] = folder.name
    values["files"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in values["files"]}
    values["version"] = fingerprint(values["files"]).hex()
    manifest.write_text(json.dumps(values))
    return folder
