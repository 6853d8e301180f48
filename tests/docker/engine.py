"""Stands for `docker`, as far as docker/rollout.sh uses it: the containers are entries of the JSON file that $ENGINE names."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def answered(engine: dict[str, Any], words: list[str]) -> Iterator[str]:
    containers: dict[str, dict[str, Any]] = engine["containers"]
    named = [word for word in words if word in containers]
    match words:
        case ["compose", *rest] if "config" in rest:
            yield "name: trial"
            yield f"      CAPSERVE_API_KEY: {json.dumps(engine['key'])}"
        case ["compose", *rest] if "up" in rest:
            (wanted,) = (int(word.removeprefix("capserve=")) for word in rest if word.startswith("capserve="))
            for place in range(wanted - sum(not each["oneoff"] for each in containers.values())):
                containers[f"new{place}"] = container(engine["key"], health=engine["health"])
        case ["ps", *rest]:
            filters = [word.removeprefix("--filter=") for word in rest if "=" in word]
            states = {each.removeprefix("status=") for each in filters if each.startswith("status=")}
            for name, each in containers.items():
                if each["oneoff"] and "label=com.docker.compose.oneoff=False" in filters:
                    continue
                if each["state"] in states if states else "--all" in rest or each["state"] == "running":
                    yield name
        case ["inspect", "--format", what, *_]:
            for name in named:
                yield containers[name]["health" if "Health" in what else "env"]
        case ["stop", *_]:
            time.sleep(engine["patience"])
            for name in named:
                containers[name]["state"] = "exited"
        case ["rm", *_]:
            for name in named:
                del containers[name]


def container(key: str | None, health: str = "healthy", state: str = "running", oneoff: bool = False) -> dict[str, Any]:
    return {"env": f"PATH=/bin\nCAPSERVE_API_KEY={key or ''}", "health": health, "state": state, "oneoff": oneoff}


if __name__ == "__main__":
    place = Path(os.environ["ENGINE"])
    engine = json.loads(place.read_text())
    for line in answered(engine, sys.argv[1:]):
        print(line)
    changed = place.with_suffix(".changed")
    changed.write_text(json.dumps(engine))
    changed.replace(place)  # a reader finds either the old file or the new
