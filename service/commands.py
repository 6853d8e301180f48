"""The commands serve, check and predict. Each returns an exit status. Faults a person can fix are raised, or logged by serve."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from service.errors import ServiceError, StartError, TooLarge, Unprocessable
from service.manifest import BundleError
from service.process import allocator, interpreter, listening, logs, siblings, workers
from service.settings import Settings

if TYPE_CHECKING:  # it imports ONNX Runtime
    from service.engine import CapsNet

logger = logging.getLogger(__name__)

STDIN = "-"
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")  # reachable from this machine only


def serve(settings: Settings) -> int:
    several = settings.workers > 1
    _configure_process(settings, at_once=not several)  # a supervisor has files to remove, and imports nothing large
    if unknown := settings.unknown_variables():
        logger.info("in the environment, but not settings: %s", ", ".join(unknown))
    if settings.api_key is None and settings.host not in LOOPBACK_HOSTS:
        logger.info("no key is set: anyone who reaches %s is answered (CAPSERVE_API_KEY)", settings.host)
    return _run_to_exit(partial(workers.run, settings, run_worker) if several else partial(_serve_in_this_process, settings))


def _serve_in_this_process(settings: Settings) -> int:
    with listening.bind(settings.host, settings.port) as listener:
        claim = listening.claim(*listening.numeric_address(listener.getsockname()))  # until it listens
        logger.info("loading %s, for %s", settings.models, listening.url(listener.getsockname()))
        return _serve_on(settings, listener, beat=claim.close)


def run_worker(settings: Settings, place: int, address: tuple[str, int], beats: workers.Beats) -> None:
    """Serves as one of several processes."""

    def beat() -> None:
        beats[place] += 1

    def serve_as_worker() -> int:
        from service import metrics

        metrics.keep_in_files(place)
        with listening.join(address) as listener:
            return _serve_on(settings, listener, beat)

    _configure_process(settings, at_once=True)
    sys.exit(_run_to_exit(serve_as_worker))


def _serve_on(settings: Settings, listener: socket.socket, beat: Callable[[], None]) -> int:
    """Serves on `listener`. The models load while the HTTP modules are imported: loading is mostly not Python's work."""
    from service import catalogue  # imported here, so that --help and a supervisor do without onnxruntime

    allocator.return_large_blocks()
    interpreter.shorten_switch_interval()
    with ThreadPoolExecutor(1, "loading") as loader:
        loading = loader.submit(catalogue.load, settings)
        from service.process import server
    return server.serve(settings, loading.result(), listener, beat)


def check(settings: Settings) -> int:
    """Loads and replays every bundle, and prints for each what runs it or what is wrong."""
    from service import bundle, catalogue

    _restore_sigpipe()
    open_bundle, status = catalogue.opener(settings), 0
    nets: dict[str, CapsNet] = {}
    for folder in catalogue.folders(settings):
        try:
            source = bundle.read(folder)
            net = catalogue.add(nets, open_bundle(source), folder)
            others = [f"; {each.variant} within {each.replay:.1e}" for each in catalogue.other_encoders(settings, source, net)]
        except (BundleError, StartError) as error:
            fault = "broken" if isinstance(error, BundleError) else "does not match the settings"
            _print_line(f"{folder.name}: {fault}: {error}")
            status = 2
        else:
            name = net.manifest.name if net.manifest.name == folder.name else f"{net.manifest.name} (in {folder.name})"
            nodes = ", ".join(f"{count} nodes on {provider}" for provider, count in net.nodes.items())
            sound = f"{name}: sound: version {net.manifest.version}, {net.variant}, {nodes}, replay within {net.replay:.1e}"
            _print_line(sound + "".join(others))
    if nets:
        catalogue.default(settings, nets)  # raises what serve would
    if settings.traces is not None:
        from service import tracing  # this too raises, without the extra capserve[otel]

        tracing.expect_headers()
    return status


def predict(settings: Settings, files: list[str], normalise: bool, reconstruct: bool, input: bool) -> int:
    """Prints a line of JSON for each file, with what POST /predict would answer."""
    from service import answer, catalogue, images
    from service.engine import expect_numbers
    from service.verdict import Judge

    _restore_sigpipe()
    nets, status = catalogue.load(settings), 0
    net = nets[catalogue.default(settings, nets)]
    judge = Judge(net.manifest)
    for file in files:
        try:
            image = images.decoded(_read_file(file, settings.max_body), settings.max_pixels, net.manifest, normalise)
            perception = net.perceive(image[None], np.array([True]))
            expect_numbers(net.manifest.name, "picture", perception.lengths, perception.capsules, perception.drawings)
        except (OSError, ServiceError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"capserve: {file}: {reason}", file=sys.stderr)
            status = 1
        else:
            (verdict,) = judge.verdicts(perception)
            input_image = image if input else None
            fields = answer.prediction(net.manifest, perception, 0, verdict, reconstruct, input_image)
            _print_line(json.dumps({"file": file, **fields}))
    return status


def _read_file(file: str, most: int) -> bytes:
    """Reads a picture file, or standard input for `-`."""
    if file == STDIN:
        content = b"" if sys.stdin is None else sys.stdin.buffer.read(most + 1)  # None if it was closed
    elif Path(file).is_dir():
        raise Unprocessable("a folder; name the pictures in it")
    else:
        with open(file, "rb") as opened:
            content = opened.read(most + 1)
    if len(content) > most:
        raise TooLarge(f"larger than {most:,} bytes; send a smaller picture, or raise CAPSERVE_MAX_BODY")
    return content


def _print_line(line: str) -> None:
    """Prints a line at once; raises StartError if it cannot be written, as on a full disk."""
    if sys.stdout is None:
        raise StartError("standard output cannot be written: it is closed")
    try:
        print(line, flush=True)
    except OSError as error:
        sys.stdout = None  # what it has buffered would fail again when the interpreter exits
        raise StartError(f"standard output cannot be written: {error.strerror}") from error


def _restore_sigpipe() -> None:
    """Lets SIGPIPE end the process, as in other programs, when `| head` has read enough, instead of a traceback."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _run_to_exit(run: Callable[[], int]) -> int:
    """Runs a server and returns the exit status; with a thread still in a runtime, ends the process here.

    An interpreter that shuts down around such a thread would abort.
    """
    try:
        status = run()
    except (BundleError, StartError) as error:
        logger.error("%s", error)  # in the log's format, unlike what cli.py prints
        status = workers.CANNOT_START
    except Exception:  # anything else: in the log's format too, not as a bare traceback
        logger.exception("a fault of the server's own")
        status = 1
    if any(thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(status)
    return status


def _configure_process(settings: Settings, at_once: bool) -> None:
    """Configures the process, with signal handlers that hold until the server sets its own.

    Told to stop, it ends: with `at_once`, without an exception, which a library being imported might catch. Told to reload, it
    does so once it serves.
    """
    siblings.hold_hangups()
    listening.raise_file_limit()
    signal.signal(siblings.RELOAD_ALL, signal.SIG_IGN)  # a supervisor sets its own handler; others would be ended by it
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0) if at_once else sys.exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked in a worker since its start
    logs.configure(settings.log_format, settings.log_level)
