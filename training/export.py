"""A finished run -> a bundle: graphs, parity with torch, what is usual, an example to replay, the manifest.

Reads training and validation pictures only. The test set is `captrain evaluate`'s.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from service import bundle
from service.bundle import Bundle
from service.manifest import (
    DECODER_FILE,
    ENCODER_FILES,
    EXAMPLE,
    MANIFEST,
    BundleError,
    ErrorRate,
    Measured,
    OtherSeed,
    Variant,
    check_name,
    record,
)
from training import graphs
from training.augment import AUGMENTATIONS
from training.checkpoint import Checkpoint
from training.config import CapsuleNet, Config
from training.data import DataSet, Digits
from training.dimensions import aligned, dimensions, poses_of_objects
from training.errors import DataError, ExportError
from training.evaluate import Evaluation, TorchModel, drawings_of, evaluate, fixed_batches, objects
from training.networks import Network, parameters
from training.pairs import Batch, arrangement
from training.quantise import int8
from training.runtime import OnnxModel
from training.statistics import usual

PARITY = 1e-4  # the most that torch and ONNX Runtime may differ, with the same weights
PARITY_BATCHES = (1, 5)
CALIBRATION = 1_000  # training pictures that show the quantiser usual activations
TURNED = 2_000  # validation pictures whose poses are turned to see what each dimension does
EXAMPLES = 6


def export(checkpoint: Checkpoint, data: DataSet, folder: Path, quantised: bool, say: Callable[[str], None]) -> Bundle:
    """Writes the bundle beside its place first, so that a failure leaves what was there."""
    check_name(folder.name)
    if folder.exists() and not (folder / MANIFEST).exists():
        raise ExportError(f"{folder} is there and is no bundle; only a bundle is replaced by a bundle")
    if data.digest != checkpoint.data:
        raise DataError(
            f"this run learned other pictures (sha256 {checkpoint.data[:12]}) than these ({data.digest[:12]}), and a bundle is "
            "measured on those held out from its own; pass the --data it was trained with"
        )
    kept = _other_seeds(folder, checkpoint, say)
    done, asked = len(checkpoint.history), checkpoint.config.training.all_epochs
    if done < asked:
        say(f"this run is at epoch {done} of {asked}: exporting what it has learned so far")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as work:
        draft = Path(work) / folder.name
        draft.mkdir()
        _build(checkpoint, data, draft, quantised, kept, say)
        if folder.exists():
            folder.rename(Path(work) / "before")  # goes with the temporary folder, once the new one stands
        draft.rename(folder)
    return bundle.read(folder)


def _other_seeds(folder: Path, checkpoint: Checkpoint, say: Callable[[str], None]) -> tuple[OtherSeed, ...]:
    """What the bundle to be replaced knows of seeds beside this run's: their weights are gone, they cannot be had again."""
    try:
        before = bundle.read(folder).manifest if folder.exists() else None
    except BundleError as error:
        say(f"replacing a damaged bundle: {error}")
        return ()
    if before is None:
        return ()
    if before.metrics.test:
        say(f"its test figures go with the bundle that is replaced: `captrain evaluate {folder} --record` counts them again")
    pictures = before.training.data in (None, checkpoint.data)
    same = pictures and not Config.from_dict(before.config).differences(checkpoint.config)
    return before.metrics.other_seeds if same else ()


def _build(
    checkpoint: Checkpoint,
    data: DataSet,
    folder: Path,
    quantised: bool,
    other_seeds: tuple[OtherSeed, ...],
    say: Callable[[str], None],
) -> None:
    config, (learn, validation) = checkpoint.config, data.split(checkpoint.config.training.validation)
    trained = checkpoint.restored()
    if not all(bool(weights.isfinite().all()) for weights in trained.state_dict().values()):
        raise ExportError("expected finite weights, found some that are no number: there is nothing to export in this run")
    samples = partial(_samples, validation, checkpoint)
    network = graphs.storable(aligned(trained, poses_of_objects(TorchModel(trained), samples())))
    say("writing encoder.onnx and decoder.onnx")
    models = write_graphs(network, checkpoint, folder, calibration_pictures(learn, checkpoint) if quantised else None)
    worst = parity(network, models["fp32"], config.network.image_shape)
    if not worst <= PARITY:  # a NaN is not
        raise ExportError(f"torch and ONNX Runtime differ by {worst:.2g}; expected at most {PARITY}")
    say(f"parity with torch: {worst:.1e}; measuring on {len(validation)} validation pictures")
    batches = partial(fixed_batches, validation, config.training.pairs)
    usually = usual(models["fp32"], batches(), data.classes)
    measured = {variant: measurement(evaluate(model, batches(), len(data.classes))) for variant, model in models.items()}
    found = [f"{variant} {each.error.percent:.2f} %" for variant, each in measured.items()]
    say(f"validation error: {', '.join(found)}")
    turns = dimensions(models["fp32"], poses_of_objects(models["fp32"], samples()))
    _write_example(models, torch.tensor(usually.prototypes), folder)
    net = config.network
    bundle.write(
        folder,
        {
            "classes": data.classes,
            "image_shape": net.image_shape,
            "pose_size": net.pose_size,
            "max_objects": arrangement(config.training.pairs).objects,
            "boxed": data.boxed and arrangement(config.training.pairs).boxed,
            "routing": {"algorithm": net.routing, "iterations": net.iterations} if isinstance(net, CapsuleNet) else None,
            "preset": config.preset,
            "dataset": data.name,
            "config": config.to_dict(),
            "training": _record(checkpoint, trained),
            "metrics": {"parity": worst, "validation": measured, "other_seeds": other_seeds},
            "thresholds": usually.thresholds,
            "prototypes": usually.prototypes,
            "dimensions": turns,
            "references": usually.references,
        },
    )


def write_graphs(network: Network, checkpoint: Checkpoint, folder: Path, calibration: Tensor | None) -> dict[Variant, OnnxModel]:
    """The graph files of a bundle, opened again by ONNX Runtime; int8 too where calibration pictures are given."""
    config = checkpoint.config.network
    encoder = graphs.encoder_graph(network, config)
    graphs.save_halved(graphs.decoder_graph(network, config), folder / DECODER_FILE)
    written = {"fp32": encoder} if calibration is None else {"fp32": encoder, "int8": int8(encoder, calibration)}
    models: dict[Variant, OnnxModel] = {}
    for variant, file in ENCODER_FILES.items():
        if variant in written:
            graphs.save_halved(written[variant], folder / file)
            models[variant] = OnnxModel(folder / file, folder / DECODER_FILE)
    return models


def parity(network: Network, model: OnnxModel, image_shape: tuple[int, int, int]) -> float:
    """Largest difference over all outputs, for small batches of random pictures; NaN if one of them is."""
    generator, reference = torch.Generator().manual_seed(0), TorchModel(network)
    differences = []
    for count in PARITY_BATCHES:
        images = torch.rand(count, *image_shape, generator=generator)
        expected, found = reference.classify(images), model.classify(images)
        winners = objects(expected.lengths, 1)
        drawn = drawings_of(reference, expected.capsules, winners), drawings_of(model, expected.capsules, winners)
        for ours, theirs in (*zip(expected, found, strict=True), drawn):
            differences.append((ours - theirs).abs().max())
    return float(torch.stack(differences).max())


def calibration_pictures(learn: Digits, checkpoint: Checkpoint) -> Tensor:
    settings = checkpoint.config.training
    batches = fixed_batches(learn[:CALIBRATION], settings.pairs)
    return torch.cat([batch.images for batch in batches])


def _samples(validation: Digits, checkpoint: Checkpoint) -> Iterator[Batch]:
    """Validation pictures as varied as training made them: their poses show what each dimension does."""
    settings = checkpoint.config.training
    return fixed_batches(validation[:TURNED], settings.pairs, augment=AUGMENTATIONS[settings.augment])


def measurement(evaluation: Evaluation) -> Measured:
    return Measured(error=_rate(evaluation), reconstruction_error=evaluation.reconstruction_error)


def record_test(made: Bundle, measured: Mapping[str, Evaluation], others: Mapping[int, Evaluation]) -> None:
    """Adds test figures to a bundle's manifest, its own and by seed those of others, beside what is known of yet others; its
    graphs, version and fingerprint stay."""
    metrics = made.manifest.metrics
    seeds = {each.seed: each for each in metrics.other_seeds}
    seeds |= {seed: OtherSeed(seed=seed, test=_rate(evaluation)) for seed, evaluation in others.items()}
    found = {
        "test": {variant: measurement(evaluation) for variant, evaluation in measured.items()},
        "other_seeds": tuple(seeds[seed] for seed in sorted(seeds)),
    }
    record(made.folder, made.manifest.model_copy(update={"metrics": metrics.model_copy(update=found)}))


def _rate(evaluation: Evaluation) -> ErrorRate:
    low, high = evaluation.interval
    return ErrorRate(errors=evaluation.errors, count=evaluation.count, percent=evaluation.error, low=low, high=high)


def _record(checkpoint: Checkpoint, network: Network) -> dict[str, Any]:
    settings = checkpoint.config.training
    return {
        "epochs": len(checkpoint.history),
        "seed": settings.seed,
        "hardware": ", ".join(filter(None, (checkpoint.hardware, checkpoint.precision))),
        "seconds": round(checkpoint.seconds, 1),
        "data": checkpoint.data,
        "parameters": parameters(network),
        "encoder_parameters": parameters(network.encoder),
        "history": [{key: float(f"{value:.5g}") for key, value in row.items()} for row in checkpoint.history],
    }


def _write_example(models: dict[Variant, OnnxModel], prototypes: Tensor, folder: Path) -> None:
    """The prototypes' drawings in, what each encoder makes of them out: pictures of our own, not of the data set.

    Every other lies over the one before it: so much ink makes sums that overflow where a processor's int8 arithmetic does.
    """
    poses, classes = prototypes[:EXAMPLES], torch.arange(len(prototypes))[:EXAMPLES]
    drawings = models["fp32"].reconstruct(poses, classes)
    images = drawings.clone()
    images[1::2] = (drawings[1::2] + drawings[:-1:2]).clamp(max=1)
    images = (images * 255).round() / 255  # as a PNG would hold them
    outputs = {"reconstructions": drawings}
    for variant, model in models.items():
        encoding = model.classify(images)
        outputs |= {f"lengths.{variant}": encoding.lengths, f"capsules.{variant}": encoding.capsules}
    # Outputs to 1/8192: far finer than any replay tolerance, and half the bytes.
    arrays = {"images": images, "poses": poses, "classes": classes}
    arrays |= {name: (values * 8192).round() / 8192 for name, values in outputs.items()}
    np.savez_compressed(folder / EXAMPLE, allow_pickle=False, **{name: values.numpy() for name, values in arrays.items()})
