"""Where the tests' bundles are."""

from pathlib import Path

TINY = Path(__file__).parent.parent / "bundles" / "tiny"
