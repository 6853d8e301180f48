"""import-linter's layers, in pyproject.toml, leave no module out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("package", ["service", "training"])
def test_every_module_has_its_layer(package: str) -> None:
    """Otherwise import-linter would let it import anything."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers" and each["layers"][0].startswith(package))
    named = {name for layer in layers for name in layer.split(" | ")}
    modules = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"}
    lost = [".".join(each.parts) for each in modules if not {".".join(each.parts[:end]) for end in range(2, 5)} & named]
    assert lost == []
