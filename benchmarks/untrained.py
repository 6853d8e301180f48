"""A preset's bundle with random weights: as fast as a trained one, made in seconds and without a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from service import bundle
from service.bundle import Bundle
from service.manifest import EXAMPLE
from training import config, graphs
from training.export import parity, write_graphs
from training.networks import Network

CALIBRATION = 50


def bundle_of(preset: str, folder: Path, template: Bundle) -> Bundle:
    """Writes folder/<preset>; what only training can tell (thresholds, references) is copied from another bundle."""
    torch.manual_seed(0)
    chosen = config.preset(preset)
    net = chosen.network
    target = folder / preset
    target.mkdir(parents=True)
    network = graphs.storable(Network(net))
    models = write_graphs(network, net, target, torch.rand(CALIBRATION, *net.image_shape))
    images, labels = torch.rand(3, *net.image_shape), torch.arange(3)
    poses = torch.rand(3, net.pose_size)
    arrays = {"images": images, "poses": poses, "classes": labels, "reconstructions": models["fp32"].reconstruct(poses, labels)}
    for variant, model in models.items():
        encoding = model.classify(images)
        arrays |= {f"lengths.{variant}": encoding.lengths, f"capsules.{variant}": encoding.capsules}
    np.savez(target / EXAMPLE, allow_pickle=False, **{name: values.numpy() for name, values in arrays.items()})
    values = template.manifest.model_dump(exclude={"format", "name", "version", "files", "dimensions"})
    return bundle.write(
        target,
        values
        | {
            "preset": preset,
            "config": chosen.to_dict(),
            "pose_size": net.pose_size,
            "prototypes": [[0.0] * net.pose_size] * net.classes,
            "metrics": {"parity": parity(network, models["fp32"], net.image_shape)},
        },
    )
