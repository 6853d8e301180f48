import torch

from training.average import Average
from training.config import PRESETS
from training.networks import Network


def filled(value: float) -> Network:
    """A network whose weights and batch statistics all have one value."""
    network = Network(PRESETS["tiny"].network)
    with torch.no_grad():
        for values in network.state_dict().values():
            values.fill_(value)
    return network


def test_the_average_moves_towards_the_weights_by_a_decay_that_warms_up() -> None:
    average = Average(filled(0.0), decay=0.9)
    average.update(filled(1.0), step=0)  # decay 1/10
    weights = average.network.state_dict()
    assert all(torch.allclose(values, torch.tensor(0.9)) for values in weights.values() if values.is_floating_point())
    average.update(filled(1.0), step=10_000)  # decay 0.9
    assert all(torch.allclose(values, torch.tensor(0.91)) for values in weights.values() if values.is_floating_point())


def test_batch_statistics_are_averaged_and_counters_copied() -> None:
    average = Average(filled(0.0), decay=0.9)
    average.update(filled(5.0), step=10_000)
    weights = average.network.state_dict()
    assert torch.allclose(weights["encoder.stem.1.running_mean"], torch.tensor(0.5))
    assert int(weights["encoder.stem.1.num_batches_tracked"]) == 5


def test_the_average_is_a_copy_that_needs_no_gradient() -> None:
    network = filled(1.0)
    average = Average(network, decay=0.9)
    assert not any(parameter.requires_grad for parameter in average.network.parameters())
    with torch.no_grad():
        next(network.parameters()).fill_(7.0)
    assert float(next(average.network.parameters()).max()) == 1.0
