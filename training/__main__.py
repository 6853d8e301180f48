"""`captrain`: train, evaluate, export and draw Capsule Networks.

captrain train --preset compact --out runs/compact          # a checkpoint, history.csv, TensorBoard
captrain evaluate runs/compact                              # test error, on torch and on ONNX
captrain export runs/compact --bundle models/compact --int8
captrain figures models/compact --out figures
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from service.bundle import BundleError
from training.config import PRESETS, Training, preset
from training.errors import StoppedError, TrainingError


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except TrainingError as error:
        return _told(error, error.exit_status)
    except (BundleError, OSError) as error:
        return _told(error, TrainingError.exit_status)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        extra = "cpu (or gpu)" if package == "onnxruntime" else "train"
        return _told(f"{package} is not installed; `pip install 'capserve[{extra}]'` brings it", TrainingError.exit_status)
    except KeyboardInterrupt:
        return StoppedError.exit_status
    return 0


def _told(error: object, status: int) -> int:
    print(f"captrain: {error}", file=sys.stderr)
    return status


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="captrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    each = commands.add_parser("train", help="train a preset", formatter_class=argparse.RawDescriptionHelpFormatter)
    each.add_argument("--preset", required=True, metavar="NAME", help=", ".join(PRESETS))
    each.add_argument("--out", required=True, type=Path, metavar="RUN", help="folder for the checkpoint and its history")
    each.add_argument("--resume", action="store_true", help="go on with the run in --out")
    each.add_argument("--routing", metavar="NAME", help="another routing than the preset's")
    each.add_argument("--iterations", type=int, metavar="N", help="another number of routing iterations than the preset's")
    for entry in dataclasses.fields(Training):
        flag = f"--{entry.name.replace('_', '-')}"
        kind = {"int": int, "float": float, "str": str}[str(entry.type)]
        note = entry.metadata["help"]
        each.add_argument(
            flag, type=kind, default=argparse.SUPPRESS, metavar=str(entry.type).upper(), help=f"{note} (default: the preset's)"
        )
    each.set_defaults(run=_train)

    each = commands.add_parser("evaluate", help="count test errors of a run or a bundle")
    each.add_argument("source", type=Path, metavar="RUN_OR_BUNDLE")
    each.add_argument("--record", action="store_true", help="write what was measured into the bundle's manifest")
    each.set_defaults(run=_evaluate)

    each = commands.add_parser("export", help="make a bundle of a run")
    each.add_argument("source", type=Path, metavar="RUN")
    each.add_argument("--bundle", required=True, type=Path, metavar="DIR", help="models/NAME; NAME is what the service calls it")
    each.add_argument("--int8", action="store_true", help="add an int8 encoder, calibrated on training pictures")
    each.set_defaults(run=_export)

    each = commands.add_parser("figures", help="draw a run's or a bundle's pictures")
    each.add_argument("source", type=Path, metavar="RUN_OR_BUNDLE")
    each.add_argument("--out", required=True, type=Path, metavar="DIR")
    each.set_defaults(run=_figures)

    for command in commands.choices.values():
        command.add_argument(
            "--data", type=Path, metavar="DIR", help="where the idx files are (else $CAPSERVE_DATA, else downloaded)"
        )
    return top


def _train(options: argparse.Namespace) -> None:
    from training import data, devices, train

    config = preset(options.preset)
    given = {entry.name: getattr(options, entry.name) for entry in dataclasses.fields(Training) if hasattr(options, entry.name)}
    network = {name: value for name in ("routing", "iterations") if (value := getattr(options, name)) is not None}
    try:
        config = replace(config, network=replace(config.network, **network), training=replace(config.training, **given))
    except TypeError as error:
        raise TrainingError(f"preset {options.preset} has no routing: --routing and --iterations do not apply") from error
    found = data.load(config.training.dataset, options.data)
    with devices.place() as place:
        train.train(config, found, options.out, place, resume=options.resume)


def _evaluate(options: argparse.Namespace) -> None:
    from training import evaluate, export, subjects

    with subjects.opened(options.source) as subject:
        if options.record and subject.bundle is None:
            raise TrainingError(f"{options.source} is a run; --record writes into the manifest of a bundle")
        found = subject.data(options.data)
        measured = {}
        for name, model in subject.models.items():
            batches = evaluate.fixed_batches(found.test, subject.config.training.pairs)
            measured[name] = evaluate.evaluate(model, batches, len(found.classes))
            print(f"{options.source} ({name}) on {len(found.test)} test pictures of {found.name}")
            print(measured[name].report(found.classes), end="\n\n")
        if options.record and subject.bundle is not None:
            export.record_test(subject.bundle, measured)


def _export(options: argparse.Namespace) -> None:
    from training import checkpoint, export, subjects

    finished = checkpoint.load(options.source)
    found = subjects.fitting(finished.config, finished.classes, options.data)
    made = export.export(finished, found, options.bundle, options.int8, say=print)
    size = sum(file.stat().st_size for file in made.folder.iterdir())
    print(f"{made.folder}: {', '.join(made.manifest.variants)}, {size / 1e6:.2f} MB, version {made.manifest.version}")


def _figures(options: argparse.Namespace) -> None:
    from training import figures, subjects

    with subjects.opened(options.source) as subject:
        _, held_out = subject.data(options.data).split(subject.config.training.validation)
        model = next(iter(subject.models.values()))
        for path in figures.figures(
            model, held_out, subject.config.training.pairs, subject.classes, subject.history, options.out
        ):
            print(path)


if __name__ == "__main__":
    raise SystemExit(main())
