"""`capserve`, or `python -m service`: serve | check | predict. Every setting is a flag too, and CAPSERVE_<NAME>."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service import commands
from service.bundle import BundleError
from service.errors import StartError
from service.settings import Settings

NO_FLAG = frozenset({"api_key"})  # flags are seen by everybody on the machine


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
    flags = {name: options.pop(name) for name in Settings.model_fields if name in options}
    try:
        settings = Settings(**{name: value for name, value in flags.items() if value is not None})
        return int(command(settings, **options))
    except ValidationError as error:
        for fault in error.errors():
            name = "_".join(map(str, fault["loc"])).upper()
            print(f"capserve: CAPSERVE_{name}: {fault['msg']}", file=sys.stderr)
    except (BundleError, StartError) as error:
        print(f"capserve: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    settings = argparse.ArgumentParser(add_help=False)
    for name, field in Settings.model_fields.items():
        if name not in NO_FLAG:
            told = f"{field.description} (default: {field.default})".replace("%", "%%")
            kind: dict[str, Any] = (
                {"action": argparse.BooleanOptionalAction} if field.annotation is bool else {"metavar": "VALUE"}
            )
            settings.add_argument(f"--{name.replace('_', '-')}", default=None, help=told, **kind)
    parser = argparse.ArgumentParser(prog="capserve", description="Capsule Networks as a service.")
    verbs = parser.add_subparsers(required=True, metavar="serve | check | predict")
    serve = verbs.add_parser("serve", parents=[settings], help="answer over HTTP")
    serve.set_defaults(command=commands.serve)
    check = verbs.add_parser("check", parents=[settings], help="load and replay all bundles, and say what runs them")
    check.set_defaults(command=commands.check)
    predict = verbs.add_parser("predict", parents=[settings], help="answer for picture files, without a server")
    predict.add_argument("files", nargs="+", type=Path, metavar="FILE")
    predict.add_argument("--normalise", action=argparse.BooleanOptionalAction, default=True, help="make pictures look like MNIST")
    predict.add_argument(
        "--reconstruct", action=argparse.BooleanOptionalAction, default=False, help="put drawings into the answer"
    )
    predict.set_defaults(command=commands.predict)
    return parser


if __name__ == "__main__":
    sys.exit(main())
