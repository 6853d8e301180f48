"""README is true: its commands are run against a real server and their outputs compared, its tables against the code.

In an output, words and whole numbers must agree. Measures, tokens and picture data differ by machine or model, so are masked.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

from service.settings import Settings
from tests.service import processes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "localhost:8000"


class Step(NamedTuple):
    command: str
    output: str


def steps() -> list[Step]:
    """Every `$ command` of every console block, with the output that README promises."""
    return [
        Step(*part.split("\n", 1)) for block in FENCE.findall(README) for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[processes.Process]:
    with processes.process(models=ROOT / "models") as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the reader types: what one command writes, the next one reads."""
    return tmp_path_factory.mktemp("desk")


def shown(command: str, folder: Path, server: processes.Process) -> str:
    """Runs a command, and returns its output as if the server were at README's address."""
    place = server.url.removeprefix("http://")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    typed = command.replace(ADDRESS, place)
    done = subprocess.run(["bash", "-c", typed], cwd=folder, capture_output=True, text=True, env=environment, timeout=60)
    return (done.stdout + done.stderr).replace(place, ADDRESS).strip("\n")


def masked(output: str) -> str:
    output = re.sub(r'"pose":\s*"[^"]*"', '"pose":TOKEN', output)
    output = re.sub(r"\b[0-9a-f]{16,}\b", "FINGERPRINT", output.replace("encoder.int8.onnx", "encoder.onnx"))
    output = re.sub(r"-?\d+\.\d+(e-?\d+)?|-?\d+e-\d+", "MEASURE", output)
    return re.sub(r"fp32|int8|\d+(?= nodes)", "VARIANT", output)


def comparable(output: str, promised: str) -> list[tuple[str, str]]:
    """Pairs each line of the output with README's, both masked."""
    lines = zip_longest(output.split("\n"), promised.split("\n"), fillvalue="")
    return [(masked(line), masked(wanted)) for line, wanted in lines]


@pytest.mark.skipif(shutil.which("file") is None or shutil.which("curl") is None, reason="needs the programs `file` and `curl`")
def test_every_command_prints_what_readme_says(server: processes.Process, folder: Path) -> None:
    found = steps()
    assert len(found) > 10
    for step in found:
        for line, expected in comparable(shown(step.command, folder, server), step.output.strip("\n")):
            assert line == expected, step.command


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs the program `curl`")
def test_the_python_examples_print_what_their_comments_say(server: processes.Process, folder: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert shown(steps()[0].command, folder, server)  # makes seven.png
    for lines in blocks:
        (folder / "lines.py").write_text(lines.replace(ADDRESS, server.url.removeprefix("http://")))
        assert shown("python lines.py", folder, server).split("\n") == re.findall(r"\)  # (.*)$", lines, re.MULTILINE)


def test_readme_names_the_python_versions_of_the_package() -> None:
    first, above = re.findall(r"3\.(\d+)", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    assert f"needs Python 3.{first} to 3.{int(above) - 1} on" in README


def test_the_settings_table_matches_the_settings() -> None:
    rows = re.findall(r"^\| `CAPSERVE_(\w+)` \| (.*?) \| (.*?) \|$", README, re.MULTILINE)
    expected = []
    for name, field in Settings.model_fields.items():
        default = "models" if name == "models" else field.default
        expected.append((name.upper(), "" if default is None else f"`{default}`", field.description))
    assert rows == expected


@pytest.mark.parametrize("package", ["service", "training"])
def test_contributing_md_describes_every_module_as_its_docstring_does(package: str) -> None:
    """Each file has a row, and its docstring begins with it."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition(f"`{package}/`: ")[2].partition("\n\n`")[0]
    rows = dict(re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", table, re.MULTILINE))
    for path in (ROOT / package).rglob("*.py"):
        if path.name != "__init__.py":
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert " ".join(docstring.split()).startswith(rows[str(path.relative_to(ROOT / package))])


def anchors(page: str) -> set[str]:
    """What GitHub calls a page's headings: in small letters, without punctuation, with hyphens for spaces."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/operations.md", "docs/speed.md", "models/README.md"]
)
def test_relative_links_and_anchors_exist(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
        leads = ROOT / page if not target else (ROOT / page).parent / target
        assert leads.exists(), target
        assert not anchor or anchor in anchors(leads.read_text()), f"{target}#{anchor}"


def test_anchors_are_named_as_github_names_them() -> None:
    page = "# A `name`, or two\n\n```console\n# no heading\n```\n\n## What's new?\n### GPU-trouble \n"
    assert anchors(page) == {"a-name-or-two", "whats-new", "gpu-trouble"}
