"""Exports a run as a bundle: graphs, parity with torch, what is usual, an example to replay, the manifest.

Reads training and validation pictures only; the test set is left to `captrain evaluate`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from torch import Tensor

from service import bundle
from service.bundle import Bundle
from service.manifest import (
    DECODER_FILE,
    ENCODER_FILES,
    EXAMPLE,
    FILES,
    MANIFEST,
    BundleError,
    Dimension,
    ErrorRate,
    Measured,
    OtherSeed,
    Variant,
    check_name,
    write_manifest,
)
from training import graphs
from training.augment import AUGMENTATIONS
from training.checkpoint import Checkpoint
from training.config import CapsuleNet, Config, PlainNet, Training
from training.data import DataSet, Digits
from training.dimensions import aligned, dimensions, poses_of_objects
from training.errors import ExportError, TrainingError
from training.evaluate import Evaluation, Model, TorchModel, drawings_of, evaluate, fixed_batches, objects
from training.networks import Network, parameters
from training.pairs import Batch, arrangement
from training.quantise import int8, may_keep_capsules_float
from training.runtime import OnnxModel
from training.statistics import Statistics, usual_statistics

PARITY = 1e-4  # the most by which torch and ONNX Runtime may differ, with the same weights
PARITY_BATCHES = (1, 5)
HIGH_ERROR = 20  # percent of errors on validation pictures, above which verdicts based on them are not to be trusted
ROUNDING_LIMIT = 1e-3  # largest root mean square change of lengths with which the layer that makes capsules is in int8 too
CALIBRATION = 1_000  # training pictures that show the quantiser usual activations
POSE_PICTURES = 2_000  # validation pictures whose poses are moved to see what each dimension does
EXAMPLES = 6
IMAGE_SHARE = 0.9  # share of EXAMPLE_LIMIT for pictures and drawings; lengths and capsules are small


class _Findings(NamedTuple):
    """What running a bundle's graphs tells."""

    parity: float
    statistics: Statistics
    errors: dict[Variant, Measured]  # on validation pictures
    dimensions: tuple[Dimension, ...]


def export(checkpoint: Checkpoint, data: DataSet, folder: Path, quantised: bool, say: Callable[[str], None]) -> Bundle:
    """Write the bundle into a temporary folder first, so that a failure leaves what was in its place."""
    check_name(folder.name)
    _check_is_bundle(folder)
    data.expect(checkpoint.digest)  # measurements need the pictures that the run held out
    other_seeds = _other_seeds(folder, checkpoint, say)
    done, planned = len(checkpoint.history), checkpoint.config.training.all_epochs
    if done < planned:
        say(f"this run is at epoch {done} of {planned}: exporting what it has learned so far")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Cleanup errors are ignored: once the new bundle is in place, they must not be reported as if the old one still were.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-", ignore_cleanup_errors=True) as work:
            draft = Path(work) / folder.name
            draft.mkdir()
            findings = _build(checkpoint, data, draft, quantised, say)
            written = bundle.write(draft, _manifest(checkpoint, data, findings, other_seeds))
            for variant in written.manifest.variants:
                written.example(variant)  # raises unless a service can read it
            _swap(draft, folder, aside=Path(work) / "before")  # deleted with the temporary folder
    except OSError as error:  # on a full disk, some name no file
        raise ExportError(f"could not write {folder}: {error.strerror or error}; what stood there is as it was") from error
    exported = bundle.read(folder)
    if not exported.manifest.boxed:
        say("its pictures are not ink in a box, as MNIST's are: normalise=auto will only scale pictures, not find ink")
    return exported


def _check_is_bundle(folder: Path) -> None:
    """Raise if a folder is there that is no bundle, since it would be replaced; other programs have a manifest.json too."""
    if not folder.exists():
        return
    if not (folder / MANIFEST).exists():
        raise ExportError(f"{folder} exists and is not a bundle; export replaces only bundles")
    unknown = sorted({path.name for path in folder.iterdir()} - FILES - {MANIFEST, f"{MANIFEST}.part"})
    if unknown:
        raise ExportError(f"{folder} holds {', '.join(unknown[:5])}, and bundles do not; move it away, or choose another folder")


def _swap(draft: Path, folder: Path, aside: Path) -> None:
    """Move the draft to `folder`; what is there is moved aside first, and moved back if that fails."""
    try:
        if folder.exists():
            folder.rename(aside)
        draft.rename(folder)
    except BaseException:
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        raise


def _other_seeds(folder: Path, checkpoint: Checkpoint, say: Callable[[str], None]) -> tuple[OtherSeed, ...]:
    """What the bundle to be replaced knows of other seeds, whose weights are gone, so that it cannot be measured again."""
    if not folder.exists():
        return ()
    try:
        before = bundle.read(folder).manifest
    except BundleError as error:
        say(f"replacing a damaged bundle: {error}")
        return ()
    classes = [f"the classes {', '.join(each)}" for each in (before.classes, checkpoint.classes)]
    for there, here in ((before.preset, checkpoint.config.preset), classes):
        if there != here:
            raise ExportError(
                f"{folder} holds a bundle of {there}, and this run is of {here}: remove it, or choose another folder"
            )
    contents = f"{before.preset}, {' and '.join(before.variants)}, seed {before.training.seed}, {before.training.epochs} epochs"
    say(f"replacing the bundle in {folder} ({contents})")
    if before.metrics.test:
        say(f"its test figures are lost with the replaced bundle: `captrain evaluate {folder} --record` counts them again")
    try:
        config = Config.from_dict(before.config)
    except TrainingError as error:
        say(f"what it knows of other seeds is lost with the replaced bundle: {error}")
        return ()
    others = before.metrics.other_seeds
    if before.training.data not in (None, checkpoint.digest):
        differences = ["other training pictures"]
    else:
        differences = config.differences(checkpoint.config)
    if len(checkpoint.history) < checkpoint.config.training.all_epochs:
        differences.append("a run that has not ended")
    if others and differences:
        say(f"what it knows of {len(others)} other seeds is lost with the replaced bundle: {'; '.join(differences)}")
    return () if differences else others


def _build(checkpoint: Checkpoint, data: DataSet, folder: Path, quantised: bool, say: Callable[[str], None]) -> _Findings:
    """Write the graphs and the example into the folder, and return what running them tells."""
    config, settings = checkpoint.config, checkpoint.config.training
    training, validation = data.split(settings.validation)
    network = graphs.storable(_turned(_finite_network(checkpoint), _samples(validation, settings), config, say))
    say("writing encoder.onnx and decoder.onnx")
    models = write_graphs(network, config.network, folder, calibration_pictures(training, settings) if quantised else None, say)
    worst = parity(network, models["fp32"], config.network.image_shape)
    if not worst <= PARITY:  # NaN fails too
        raise ExportError(f"torch and ONNX Runtime differ by {worst:.5g}; expected at most {PARITY}; has it learned anything?")
    say(f"parity with torch: {worst:.1e}; measuring on {len(validation)} validation pictures")
    findings = _measure(models, validation, settings, data.classes, worst)
    errors = [f"{variant} {each.error.percent:.2f} %" for variant, each in findings.errors.items()]
    say(f"validation error: {', '.join(errors)}")
    if any(each.error.percent > HIGH_ERROR for each in findings.errors.values()):
        say("it has learned little: its thresholds for what is usual, and so its verdicts, mean as little")
    _write_example(models, torch.tensor(findings.statistics.prototypes), folder)
    return findings


def _turned(trained: Network, samples: Iterator[Batch], config: Config, say: Callable[[str], None]) -> Network:
    """Rotate pose axes to give them a meaning, unless that changes answers: a custom routing may look at single axes."""
    turned = aligned(trained, poses_of_objects(TorchModel(trained), samples))
    images = torch.rand(PARITY_BATCHES[-1], *config.network.image_shape, generator=torch.Generator().manual_seed(0))
    before, after = (TorchModel(network).classify(images).lengths for network in (trained, turned))
    moved = float((before - after).abs().max())
    if moved <= PARITY:
        return turned
    say(f"this routing looks at single axes of a pose (turning them changes lengths by {moved:.2g}): they stay as learned")
    return trained


def _finite_network(checkpoint: Checkpoint) -> Network:
    """Return the run's network, or raise if a weight is not finite."""
    network = checkpoint.restored()
    if not all(bool(weights.isfinite().all()) for weights in network.state_dict().values()):
        raise ExportError("expected finite weights, found some that are not: this run has nothing to export")
    return network


def _measure(
    models: Mapping[Variant, OnnxModel], validation: Digits, settings: Training, classes: tuple[str, ...], worst: float
) -> _Findings:
    """Measure the models on ONNX Runtime, as the service will run them."""
    batches = partial(fixed_batches, validation, settings.pairs)
    for variant, model in models.items():
        not_finite = sum(int((~model.classify(batch.images).lengths.isfinite().all(dim=1)).sum()) for batch in batches())
        if not_finite:
            raise ExportError(
                f"{variant} gives no finite numbers for {not_finite} of {len(validation)} validation pictures: nothing to serve"
            )
    return _Findings(
        parity=worst,
        statistics=usual_statistics(models["fp32"], batches(), classes),
        errors={variant: measurement(evaluate(model, batches(), len(classes))) for variant, model in models.items()},
        dimensions=measured_dimensions(models["fp32"], validation, settings),
    )


def _manifest(checkpoint: Checkpoint, data: DataSet, findings: _Findings, other_seeds: tuple[OtherSeed, ...]) -> dict[str, Any]:
    """The manifest's values, except for those that bundle.write takes from the folder itself."""
    config, net = checkpoint.config, checkpoint.config.network
    pairs = arrangement(config.training.pairs)
    return {
        "classes": data.classes,
        "image_shape": net.image_shape,
        "pose_size": net.pose_size,
        "max_objects": pairs.objects,
        "boxed": data.boxed and pairs.boxed,
        "routing": {"algorithm": net.routing, "iterations": net.iterations} if isinstance(net, CapsuleNet) else None,
        "preset": config.preset,
        "dataset": data.name,
        "config": config.to_dict(),
        "training": _training_record(checkpoint),
        "metrics": {"parity": findings.parity, "validation": findings.errors, "other_seeds": other_seeds},
        "thresholds": findings.statistics.thresholds,
        "prototypes": findings.statistics.prototypes,
        "dimensions": findings.dimensions,
        "references": findings.statistics.references,
    }


def write_graphs(
    network: Network,
    config: CapsuleNet | PlainNet,
    folder: Path,
    calibration: Tensor | None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[Variant, OnnxModel]:
    """Write the graph files of a bundle, int8 too if calibration pictures are given, and open them with ONNX Runtime."""
    encoder = graphs.encoder_graph(network, config)
    graphs.save_halved(graphs.decoder_graph(network, config), folder / DECODER_FILE)

    def save_and_open(variant: Variant, graph: onnx.ModelProto) -> OnnxModel:
        graphs.save_halved(graph, folder / ENCODER_FILES[variant])
        return OnnxModel(folder / ENCODER_FILES[variant], folder / DECODER_FILE)

    models: dict[Variant, OnnxModel] = {"fp32": save_and_open("fp32", encoder)}
    if calibration is not None:
        models["int8"] = save_and_open("int8", int8(encoder, calibration, capsules=True))
        difference = models["int8"].classify(calibration).lengths - models["fp32"].classify(calibration).lengths
        moved = float(difference.square().mean().sqrt())
        if not moved <= ROUNDING_LIMIT and may_keep_capsules_float(encoder):
            say(f"in int8 lengths move by {moved:.2g}, more than {ROUNDING_LIMIT:g}: the layer that makes capsules stays float")
            models["int8"] = save_and_open("int8", int8(encoder, calibration, capsules=False))
    return models


def parity(network: Network, model: OnnxModel, image_shape: tuple[int, int, int]) -> float:
    """Largest difference over all outputs, for small batches of random pictures and a blank one; NaN if any difference is."""
    generator, reference = torch.Generator().manual_seed(0), TorchModel(network)
    differences = []
    for count in PARITY_BATCHES:
        images = torch.rand(count, *image_shape, generator=generator)
        images[1:2] = 0
        expected, found = reference.classify(images), model.classify(images)
        winners = objects(expected.lengths, 1)
        drawn = drawings_of(reference, expected.capsules, winners), drawings_of(model, expected.capsules, winners)
        for ours, theirs in (*zip(expected, found, strict=True), drawn):
            differences.append((ours - theirs).abs().max())
    return float(torch.stack(differences).max())


def calibration_pictures(training: Digits, settings: Training) -> Tensor:
    batches = fixed_batches(training.sample(CALIBRATION), settings.pairs)
    return torch.cat([batch.images for batch in batches])


def _samples(validation: Digits, settings: Training) -> Iterator[Batch]:
    """Validation pictures augmented as in training, whose poses show what each dimension does."""
    return fixed_batches(validation.sample(POSE_PICTURES), settings.pairs, augment=AUGMENTATIONS[settings.augment])


def measured_dimensions(model: Model, validation: Digits, settings: Training) -> tuple[Dimension, ...]:
    """What each pose dimension does to drawings of validation pictures."""
    return dimensions(model, poses_of_objects(model, _samples(validation, settings)))


def measurement(evaluation: Evaluation) -> Measured:
    return Measured(error=_rate(evaluation), reconstruction_error=evaluation.reconstruction_error)


def record_test(model_bundle: Bundle, measured: Mapping[str, Evaluation], others: Mapping[int, Evaluation]) -> None:
    """Add test results to a bundle's manifest: its own, and by seed those of `others`, which join or replace the seeds known.

    Its graphs, version and fingerprint stay the same.
    """
    metrics, count = model_bundle.manifest.metrics, measured["fp32"].count
    seeds = {each.seed: each for each in metrics.other_seeds if each.test.count == count}  # else of other test pictures
    seeds |= {seed: OtherSeed(seed=seed, test=_rate(evaluation)) for seed, evaluation in others.items()}
    results = {
        "test": {variant: measurement(evaluation) for variant, evaluation in measured.items()},
        "other_seeds": tuple(seeds[seed] for seed in sorted(seeds)),
    }
    write_manifest(model_bundle.folder, model_bundle.manifest.model_copy(update={"metrics": metrics.model_copy(update=results)}))


def _rate(evaluation: Evaluation) -> ErrorRate:
    low, high = evaluation.interval
    return ErrorRate(errors=evaluation.errors, count=evaluation.count, percent=evaluation.error, low=low, high=high)


def _training_record(checkpoint: Checkpoint) -> dict[str, Any]:
    """The manifest's record of how the weights were trained."""
    network = checkpoint.restored()
    return {
        "epochs": len(checkpoint.history),
        "seed": checkpoint.config.training.seed,
        "hardware": ", ".join(filter(None, (checkpoint.hardware, checkpoint.precision))),
        "software": checkpoint.software,
        "seconds": round(checkpoint.seconds, 1),
        "data": checkpoint.digest,
        "parameters": parameters(network),
        "encoder_parameters": parameters(network.encoder),
        "history": [{key: float(f"{value:.5g}") for key, value in row.items()} for row in checkpoint.history],
    }


def _write_example(models: dict[Variant, OnnxModel], prototypes: Tensor, folder: Path) -> None:
    """Write the prototypes' drawings with the outputs of each encoder for them, so that no picture of the data set is shipped.

    Every second drawing is laid over the one before it: with so much ink, sums overflow on processors whose int8 arithmetic can.
    """
    poses, classes = prototypes[:EXAMPLES], torch.arange(len(prototypes))[:EXAMPLES]
    drawings = models["fp32"].reconstruct(poses, classes)
    count = max(1, int(IMAGE_SHARE * bundle.EXAMPLE_LIMIT) // (2 * drawings[0].nbytes))  # of large pictures, with a drawing each
    poses, classes, drawings = poses[:count], classes[:count], drawings[:count]
    images = drawings.clone()
    images[1::2] = (drawings[1::2] + drawings[:-1:2]).clamp(max=1)
    images = (images * 255).round() / 255  # as a PNG would hold them
    outputs = {"reconstructions": drawings}
    for variant, model in models.items():
        encoding = model.classify(images)
        outputs |= {f"lengths.{variant}": encoding.lengths, f"capsules.{variant}": encoding.capsules}
    # Outputs are rounded to 1/8192: far finer than any replay tolerance, and half the bytes.
    arrays = {"images": images, "poses": poses, "classes": classes}
    arrays |= {name: (values * 8192).round() / 8192 for name, values in outputs.items()}
    np.savez_compressed(folder / EXAMPLE, allow_pickle=False, **{name: values.numpy() for name, values in arrays.items()})
