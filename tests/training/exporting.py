"""Untrained networks and their graphs, for tests of the export."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from training import graphs
from training.checkpoint import Checkpoint
from training.config import PRESETS, CapsuleNet, Config, PlainNet
from training.export import parity, write_graphs
from training.networks import Network

TINY = PRESETS["tiny"].network
assert isinstance(TINY, CapsuleNet)


def untrained(network: CapsuleNet | PlainNet) -> Checkpoint:
    """Random weights, and batch norm that has seen some pictures."""
    torch.manual_seed(0)
    made = Network(network)
    with torch.no_grad():
        made.encoder(torch.rand(2, *network.image_shape))
    config = Config("tiny", network, PRESETS["tiny"].training)
    return Checkpoint(config, tuple("0123456789"), "digest", "a machine", network=made.state_dict())


class Written(NamedTuple):
    """A network as a bundle holds it, its graphs, and by how much they differ."""

    network: Network
    folder: Path
    worst: float


def written(network: CapsuleNet | PlainNet, folder: Path) -> Written:
    made = graphs.storable(untrained(network).restored())
    models = write_graphs(made, network, folder, calibration=None)
    return Written(made, folder, parity(made, models["fp32"], network.image_shape))


def routed(routing: str, iterations: int = 3, squash: str = "paper") -> tuple[Network, CapsuleNet]:
    """Lengthens votes: untrained ones are so short that the number of iterations makes no difference."""
    config = replace(TINY, routing=routing, iterations=iterations, squash=squash)
    network = graphs.storable(untrained(config).restored())
    with torch.no_grad():
        network.encoder.routed.transforms *= 8
    return network, config
