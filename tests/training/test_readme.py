"""What README says about presets and the shipped bundles is true of them."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import accuracy
from service import bundle, pose
from training.config import PRESETS
from training.networks import Network, parameters

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_versions_checksums_and_tokens_are_those_of_the_shipped_bundles() -> None:
    """tests/test_readme.py, which tests the commands, masks these values; yet a token copied from README must work."""
    manifests = [bundle.read(folder).manifest for folder in accuracy.bundles().values()]
    assert set(re.findall(r"(?<!\.)\b[0-9a-f]{16}\b", README)) == {manifest.version for manifest in manifests}
    sums = set(re.findall(r"\b[0-9a-f]{64}\b", README))
    assert sums
    assert sums <= {each for manifest in manifests for each in manifest.files.values()}
    default = next(manifest for manifest in manifests if manifest.name == "compact")
    tokens = set(re.findall(r'"pose": ?"([\w-]+)"', README))
    assert {pose.decode(token, default).label for token in tokens} == {7}


def test_the_presets_table_matches_the_presets() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| ([\d,]+) \|$", README, re.MULTILINE))
    assert rows == {name: f"{parameters(Network(config.network).encoder):,}" for name, config in PRESETS.items()}


def test_the_accuracy_table_is_what_its_command_prints() -> None:
    """From the manifests, whose figures test_weights.py counts again."""
    found = {name: accuracy.recorded(bundle.read(folder)) for name, folder in accuracy.bundles().items()}
    assert "\n".join(accuracy.table(found)) in README
