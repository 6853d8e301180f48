"""The command line: serve, check or predict. Every setting is CAPSERVE_<NAME>, and a flag of the commands that use it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError

from service import commands, faults
from service.errors import StartError
from service.manifest import BundleError
from service.process import logs
from service.settings import KEY, NAME_CUTOFF, PREFIX, Settings

logger = logging.getLogger(__name__)

SERVE_SETTINGS = tuple(name for name in Settings.model_fields if name != "api_key")  # every user of the machine can see flags
CHECK_SETTINGS = ("models", "model", "variant", "device", "cuda_graphs", "cuda_memory", "threads")
PREDICT_SETTINGS = (*CHECK_SETTINGS, "max_pixels", "max_body")
FLAGS = "[--FLAG VALUE ...]"  # in the usage line; --help lists them


def run(arguments: Sequence[str] | None) -> int:
    """Runs the command and returns the exit status."""
    parsed, unknown = _parser().parse_known_args(arguments)
    options = vars(parsed)
    parser = options.pop("parser")
    if unknown:
        parser.error(_unknown_arguments_message(unknown, map(_flag, options)))
    command = options.pop("command")
    flags = {name: options.pop(name) for name in Settings.model_fields if name in options}
    for name, value in flags.items():
        if value == "":
            parser.error(f"{_flag(name)}: expected a value, found none; leave it out for the default")
    try:
        settings = Settings(**{name: value for name, value in flags.items() if value is not None})
        return int(command(settings, **options))
    except ValidationError as error:
        for sentence in faults.sentences(Settings, error, "settings"):
            name, _, rest = sentence.partition(":")
            typed = _flag(name) if flags.get(name) is not None else f"{PREFIX}{name.upper()}"
            _report(f"{typed}:{rest}", _logs_json(flags))
    except (BundleError, StartError) as error:
        _report(str(error), as_json=False)  # serve logs its own
    return 2


def _unknown_arguments_message(words: Sequence[str], flags: Iterable[str]) -> str:
    """What to say about unknown flags, without their values: one might be a key."""
    typed = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not typed:
        return f"expected flags, found {' '.join(words)}"
    if typed[0] == _flag("api_key"):
        return f"there is no {typed[0]}, which everybody on this machine could read: set {KEY} in the environment"
    if os.path.exists(typed[0]):
        return f"{typed[0]} would be a flag; as a file it is ./{typed[0]}"
    meant = get_close_matches(typed[0], flags, n=1, cutoff=NAME_CUTOFF)
    return f"there is no {typed[0]} here; " + (f"expected {meant[0]}" if meant else "--help after the command lists the flags")


def _logs_json(flags: Mapping[str, str | None]) -> bool:
    """Whether the server was to log JSON, as far as invalid settings can tell."""
    return "log_format" in flags and (flags["log_format"] or os.environ.get(f"{PREFIX}LOG_FORMAT")) == "json"


def _report(message: str, as_json: bool) -> None:
    if as_json:
        logs.configure("json", "error")
        logger.error(message)
    else:
        print(f"capserve: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="capserve", description="Capsule Networks as a service.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"capserve {version('capserve')}")
    subparsers = parser.add_subparsers(required=True, metavar="serve | check | predict")

    def add_command(name: str, command: Callable[..., int], settings: Sequence[str], help_text: str, usage_end: str = "") -> Any:
        usage = f"%(prog)s {FLAGS}{usage_end}"
        subparser = subparsers.add_parser(name, parents=[_flags(settings)], usage=usage, help=help_text, allow_abbrev=False)
        subparser.set_defaults(command=command, parser=subparser)
        return subparser

    add_command("serve", commands.serve, SERVE_SETTINGS, "answer over HTTP")
    add_command("check", commands.check, CHECK_SETTINGS, "load and replay all bundles, and say what runs them")
    predict = add_command(
        "predict", commands.predict, PREDICT_SETTINGS, "answer for picture files, without a server", " FILE ..."
    )
    predict.add_argument("files", nargs="+", metavar="FILE", help="a picture; - is standard input")
    for name, default, help_text in (
        ("normalise", True, "make pictures look like the training set (default: on)"),
        ("reconstruct", False, "put drawings into the answer (default: off)"),
        ("input", False, "put what the network was shown into the answer (default: off)"),
    ):
        predict.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=help_text)
    return parser


def _flags(names: Sequence[str]) -> argparse.ArgumentParser:
    """A flag for each of these settings."""
    flags = argparse.ArgumentParser(add_help=False)
    for name in names:
        field = Settings.model_fields[name]
        help_text = f"{field.description} (default: {field.default})".replace("%", "%%")
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if field.annotation is bool else {"metavar": "VALUE"}
        flags.add_argument(_flag(name), default=None, help=help_text, **options)
    return flags


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
