"""`captrain`: train, evaluate, export and draw Capsule Networks.

captrain train --preset compact --out runs/compact          # a checkpoint, history.csv, TensorBoard
captrain evaluate runs/compact                              # test error, on torch and on ONNX Runtime
captrain export runs/compact --bundle models/mine --int8
captrain figures models/mine --out figures
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Never

from service.manifest import BundleError
from training import torchrun
from training.config import PRESETS, Training, preset
from training.errors import StoppedError, TrainingError
from training.routing import ROUTINGS


def main(arguments: Sequence[str] | None = None) -> int:
    return _run_and_exit(arguments) if torchrun.several() else _run(arguments)


def _run_and_exit(arguments: Sequence[str] | None) -> Never:
    """Run as one of several processes, and end with os._exit.

    gloo's threads outlive their process group, and one that still runs while the interpreter shuts down aborts the process.
    """
    status = 1
    try:
        status = _run(arguments)
    except SystemExit as end:  # argparse's
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # the stream is closed, or was from the start
                stream.flush()
        os._exit(status)


def _run(arguments: Sequence[str] | None) -> int:
    # Set before torch is imported, so that its threads sleep while they wait for each other. Spinning is no faster on an idle
    # machine, and beside one busy process it keeps the thread that is waited for off the processor.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = parser().parse_args(arguments)
    try:
        options.run(options)
        print(end="", flush=True)  # flush here, where a closed pipe is still handled
    except TrainingError as error:
        return _report(error, error.exit_status)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit would fail again
        return 128 + signal.SIGPIPE
    except (BundleError, OSError) as error:
        return _report(error, TrainingError.exit_status)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        return _report(f"{package} is not installed; `make install` in the checkout installs it", TrainingError.exit_status)
    except KeyboardInterrupt:
        return StoppedError.exit_status
    return 0


def _report(error: object, status: int) -> int:
    print(f"captrain: {error}", file=sys.stderr)
    return status


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="captrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    _train_flags(commands.add_parser("train", help="train a preset", formatter_class=argparse.RawDescriptionHelpFormatter))
    _evaluate_flags(commands.add_parser("evaluate", help="count test errors of a run or a bundle"))
    _export_flags(commands.add_parser("export", help="make a bundle from a run"))
    _figures_flags(commands.add_parser("figures", help="draw a run's or a bundle's pictures"))
    for command in commands.choices.values():
        command.add_argument(
            "--data",
            type=Path,
            metavar="DIR",
            help="where the idx files or folders of pictures are (else $CAPSERVE_DATA, else downloaded)",
        )
    return top


def _train_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--preset", metavar="NAME", help=f"{', '.join(PRESETS)}; with --resume the run's own")
    command.add_argument("--out", required=True, type=Path, metavar="RUN", help="folder for the checkpoint and its history")
    command.add_argument("--resume", action="store_true", help="continue the run in --out with its original options")
    command.add_argument("--routing", metavar="NAME", help=f"routing instead of the preset's: {' or '.join(ROUTINGS)}")
    command.add_argument("--iterations", type=int, metavar="N", help="routing iterations instead of the preset's number")
    for entry in dataclasses.fields(Training):
        command.add_argument(
            f"--{entry.name.replace('_', '-')}",
            type={"int": int, "float": float, "str": str}[str(entry.type)],
            default=argparse.SUPPRESS,
            metavar=str(entry.type).upper(),
            help=f"{entry.metadata['help']} (default: the preset's)",
        )
    command.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> None:
    from training import checkpoint, data, devices, train

    config = checkpoint.load(options.out).config if options.resume else preset(_required_preset(options.preset))
    if options.resume and options.preset not in (None, config.preset):
        raise TrainingError(f"{options.out} is a run of {config.preset}, not of {options.preset}; omit --preset to continue")
    given = {entry.name: getattr(options, entry.name) for entry in dataclasses.fields(Training) if hasattr(options, entry.name)}
    network = {name: value for name in ("routing", "iterations") if (value := getattr(options, name)) is not None}
    try:
        config = replace(config, network=replace(config.network, **network), training=replace(config.training, **given))
    except TypeError as error:
        raise TrainingError(f"preset {config.preset} has no routing: --routing and --iterations do not apply") from error
    train.expect_known(config)
    data_set = data.load(config.training.dataset, options.data)
    with devices.place() as place, devices.explain_lack_of_memory(config.training.batch_size):
        train.train(config, data_set, options.out, place, resume=options.resume)


def _required_preset(name: str | None) -> str:
    if name is None:
        raise TrainingError(f"expected --preset with one of {', '.join(PRESETS)}, or --resume to continue the run in --out")
    return name


def _evaluate_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("sources", type=Path, nargs="+", metavar="RUN_OR_BUNDLE")
    command.add_argument(
        "--record",
        action="store_true",
        help="write the results into the manifest of the bundle, the first argument; runs of other seeds may follow",
    )
    command.set_defaults(run=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    from training import evaluate, export, subjects

    with ExitStack() as stack:
        opened = [stack.enter_context(subjects.opened(path)) for path in options.sources]
        bundle = subjects.seeds_of_one_bundle(opened) if options.record else None
        measured: list[dict[str, evaluate.Evaluation]] = []
        for path, subject in zip(options.sources, opened, strict=True):
            data = subject.data(options.data, its_own=options.record)
            if data.dark_on_light and data.digest != subject.digest:
                dark = f"the pictures in {data.folder} look dark on light"
                print(f"{dark} and are used as they are; if it learned light on dark, store 255 - x")
            measured.append({})
            for name, evaluation in subject.evaluations(data):
                measured[-1][name] = evaluation
                print(f"{path} ({name}) on the {len(data.test)} test pictures in {data.folder}")
                print(evaluation.report(data.classes), end="\n\n")
        if bundle is not None:
            others = zip(opened[1:], measured[1:], strict=True)
            seeds = {subject.config.training.seed: evaluations["fp32"] for subject, evaluations in others}
            export.record_test(bundle, measured[0], seeds)


def _export_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=Path, metavar="RUN")
    command.add_argument(
        "--bundle", required=True, type=Path, metavar="DIR", help="models/NAME; NAME is what the service calls it"
    )
    command.add_argument("--int8", action="store_true", help="add an int8 encoder, calibrated on training pictures")
    command.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from training import checkpoint, export, subjects

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that half-written files are cleaned up
    state = checkpoint.load(options.source)
    data = subjects.matching_data(state.config, state.classes, options.data)
    exported = export.export(state, data, options.bundle, options.int8, say=print)
    size = sum(file.stat().st_size for file in exported.folder.iterdir())
    print(f"{exported.folder}: {', '.join(exported.manifest.variants)}, {size / 1e6:.2f} MB, version {exported.manifest.version}")


def _figures_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=Path, metavar="RUN_OR_BUNDLE")
    command.add_argument("--out", required=True, type=Path, metavar="DIR")
    command.add_argument(
        "--redrawn", action="store_true", help="show no picture of the data set: first let the network redraw them"
    )
    command.set_defaults(run=_figures)


def _figures(options: argparse.Namespace) -> None:
    from training import evaluate, figures, subjects

    with subjects.opened(options.source) as subject:
        settings = subject.config.training
        _, held_out = subject.data(options.data).split(settings.validation)
        model, pictures = next(iter(subject.models.values())), evaluate.fixed_batches(held_out, settings.pairs)
        if options.redrawn:
            pictures = figures.redrawn(model, pictures)
        names = subject.bundle.manifest.dimensions if subject.bundle else ()
        for path in figures.figures(model, pictures, subject.classes, names, subject.history, options.out):
            print(path)


if __name__ == "__main__":
    raise SystemExit(main())
