"""Prints README's table of errors: each shipped bundle on its 10,000 test pictures in ONNX Runtime, beside the public copies.

    python -m benchmarks.accuracy

The weights of a bundle's other seeds are not kept: their errors are those that `captrain evaluate --record` wrote into its
manifest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from service.bundle import Bundle
from service.manifest import ErrorRate
from training.evaluate import evaluate, fixed_batches
from training.export import measurement
from training.subjects import opened

MODELS = Path(__file__).parents[1] / "models"
SHIPPED = ("compact", "paper", "overlap")  # any others in that folder are the reader's own
DRAWS = 5
HEAD = ("model", "parameters", "files", "test error, float32", "int8", "mean of seeds", "epochs", "trained on")

# What others report: (source, parameters, test error, epochs). Errors with a deviation are means of several runs.
OTHERS = (
    ("[Sabour et al. 2017](https://arxiv.org/abs/1710.09829)", "8.2 M", "0.25 % (0.005)", ""),
    ("[XifengGuo/CapsNet-Pytorch](https://github.com/XifengGuo/CapsNet-Pytorch)", "8.2 M", "0.34 % (0.029), best 0.30 %", "50"),
    ("[XifengGuo/CapsNet-Keras](https://github.com/XifengGuo/CapsNet-Keras)", "8.2 M", "0.34 % (0.009)", "30"),
    ("[gram-ai/capsule-networks](https://github.com/gram-ai/capsule-networks)", "8.2 M", "0.3 % at its best epoch", "443"),
    ("[naturomics/CapsNet-Tensorflow](https://github.com/naturomics/CapsNet-Tensorflow)", "8.2 M", "0.36 %", ""),
    (
        "[EscVM/Efficient-CapsNet](https://github.com/EscVM/Efficient-CapsNet), the original rebuilt",
        "8.2 M",
        "0.36 % at best",
        "",
    ),
    ("[Mazzia et al. 2021](https://arxiv.org/abs/2101.12491), without dynamic routing", "161,000 in the encoder", "0.26 %", ""),
    ("[Byerly et al. 2020](https://arxiv.org/abs/2001.09136), capsules without routing", "1.5 M", "0.17 % at best", ""),
)


def main() -> None:
    print("\n".join(table({name: measured(folder) for name, folder in bundles().items()})))
    print(f"\n`overlap` in int8 on {DRAWS} other draws of its test pairs: {', '.join(map(_rate, redrawn(MODELS / 'overlap')))}")


def bundles() -> dict[str, Path]:
    return {name: MODELS / name for name in SHIPPED}


def measured(folder: Path) -> tuple[Bundle, dict[str, ErrorRate]]:
    """The bundle, and the errors of each of its encoders on the test set, measured now."""
    with opened(folder) as subject:
        assert subject.bundle is not None
        rates = {name: measurement(found).error for name, found in subject.evaluations(subject.data(None, its_own=True))}
        return subject.bundle, rates


def redrawn(folder: Path) -> Iterator[ErrorRate]:
    """The errors on other draws of the test pairs than the one used everywhere else: other digits, other shifts."""
    with opened(folder) as subject:
        test, settings = subject.data(None, its_own=True).test, subject.config.training
        for seed in range(1, 1 + DRAWS):
            batches = fixed_batches(test, settings.pairs, seed=seed)
            yield measurement(evaluate(subject.models["int8"], batches, len(subject.classes))).error


def recorded(bundle: Bundle) -> tuple[Bundle, dict[str, ErrorRate]]:
    """The same from the manifest."""
    return bundle, {variant: found.error for variant, found in bundle.manifest.metrics.test.items()}


def table(results: Mapping[str, tuple[Bundle, Mapping[str, ErrorRate]]]) -> Iterator[str]:
    yield _line(*HEAD)
    yield _line(*["---"] * len(HEAD))
    for name, (bundle, rates) in results.items():
        training = bundle.manifest.training
        files = sum(file.stat().st_size for file in bundle.folder.iterdir())
        yield _line(
            f"`{name}`" + ("" if bundle.manifest.max_objects == 1 else ", two digits a picture"),
            f"{training.parameters:,}",
            f"{files / 1e6:.1f} MB",
            _rate(rates["fp32"]),
            _rate(rates["int8"]) if "int8" in rates else "",
            _mean([rates["fp32"], *(other.test for other in bundle.manifest.metrics.other_seeds)]),
            str(training.epochs),
            f"{training.hardware}, {training.seconds / 60:.0f} minutes",
        )
    for source, parameters, error, epochs in OTHERS:
        yield _line(source, parameters, "", error, "", "", epochs, "")


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rate(rate: ErrorRate) -> str:
    return f"{rate.percent:.2f} % ({rate.low:.2f} to {rate.high:.2f})"


def _mean(seeds: list[ErrorRate]) -> str:
    """For three seeds, for example: 0.30 % (0.28, 0.30, 0.32)."""
    if len(seeds) == 1:
        return "one seed"
    percents = [rate.percent for rate in seeds]
    return f"{statistics.mean(percents):.2f} % ({', '.join(f'{percent:.2f}' for percent in percents)})"


if __name__ == "__main__":
    main()
