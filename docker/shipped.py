"""Lists the pinned packages in an image of the service (python docker/shipped.py cpu|gpu), or asks whether one is unsafe (audit).

They are all that capserve needs, directly and indirectly, as installed here, at the versions of constraints.txt. The CUDA and
cuDNN wheels, which a machine without a GPU does not install, are those that constraints-cuda.txt names.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
RUNTIMES = {"cpu": "onnxruntime", "gpu": "onnxruntime-gpu"}  # which need the same, but for CUDA
LINUX = {"sys_platform": "linux", "platform_system": "Linux"}

Dependency = dict[str, Any]


def shipped(target: str) -> list[str]:
    """One requirement for each package."""
    known = pinned("constraints.txt")
    runtime = RUNTIMES[target]
    names = {runtime} | needed("capserve") | next(needed(each) for each in RUNTIMES.values() if installed(each))
    cuda = pinned("constraints-cuda.txt").values() if target == "gpu" else ()
    return sorted([*(known[name] for name in names), *cuda])


def pinned(file: str) -> dict[str, str]:
    """The file's requirements by package name."""
    lines = (ROOT / file).read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines if "==" in line}


def needed(package: str) -> set[str]:
    """The names of all that a package needs on Linux, without extras, except for our own that images have (otel)."""
    names: set[str] = set()
    rest = [package]
    while rest:
        for requirement in map(Requirement, requires(rest.pop()) or ()):
            name = canonicalize_name(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({**LINUX, "extra": "otel"})
            if applies and name not in names:
                names.add(name)
                rest.append(name)
    return names


def installed(package: str) -> bool:
    try:
        requires(package)
    except PackageNotFoundError:
        return False
    return True


def audit() -> tuple[int, str]:
    """The exit status and the message for it. Asks about one package first, in case no index answers."""
    pins = sorted({each for target in RUNTIMES for each in shipped(target)})
    first = judge(report(pins[:1]))
    return first if first == SKIPPED else judge(report(pins))


SKIPPED = (0, "skipped, no index that knows of vulnerabilities answers")


def report(pins: Sequence[str]) -> list[Dependency]:
    """pip-audit's report, a row for each package; empty if it could not ask."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins))
        file.flush()
        args = ["-m", "pip_audit", "-r", file.name, "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        done = subprocess.run([sys.executable, *args], capture_output=True, text=True)
    try:
        dependencies: list[Dependency] = json.loads(done.stdout)["dependencies"]
    except ValueError:  # a traceback instead of a report: most likely there is no network
        return []
    return dependencies


def judge(dependencies: Sequence[Dependency]) -> tuple[int, str]:
    unknown = [each["name"] for each in dependencies if "skip_reason" in each]
    if len(unknown) == len(dependencies):
        return SKIPPED
    vulnerable = [
        f"{each['name']} {each['version']}: {fault['id']}, mended in {', '.join(fault['fix_versions']) or 'no version yet'}"
        for each in dependencies
        for fault in each.get("vulns", ())
    ]
    lines = vulnerable or [f"{len(dependencies) - len(unknown)} packages without a known vulnerability"]
    if unknown:
        lines.append(f"not known there: {', '.join(unknown)}")
    return int(bool(vulnerable)), "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["audit"]:
        status, message = audit()
        print(f"pip-audit: {message}")
        sys.exit(status)
    print("\n".join(shipped(sys.argv[1])))
