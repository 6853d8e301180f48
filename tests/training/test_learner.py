"""One step of learning: its own gradient, its own seed, and what it counts as right."""

from dataclasses import replace

import torch

from training.checkpoint import Checkpoint
from training.config import PRESETS
from training.data import DataSet
from training.devices import Place
from training.evaluate import fixed_batches
from training.learner import Learner
from training.networks import Encoding
from training.pairs import Batch


def learner(seed: int = 0, pairs: str = "none") -> Learner:
    tiny = PRESETS["tiny"]
    config = replace(tiny, training=replace(tiny.training, seed=seed, schedule="constant", pairs=pairs))
    return Learner(Checkpoint(config, tuple("0123456789"), "", precision="fp32"), Place(torch.device("cpu")))


def test_another_seed_begins_with_other_weights() -> None:
    one, other = (learner(seed).network.state_dict() for seed in (0, 1))
    assert not torch.equal(one["encoder.routed.transforms"], other["encoder.routed.transforms"])


def test_a_step_does_not_accumulate_earlier_gradients(data: DataSet) -> None:
    trained = learner()
    first, second = fixed_batches(data.train[:100], "none", size=50)
    trained.step(first, 0, 0.0, 1.0)
    trained.step(second, 1, 0.0, 0.0)  # the loss has weight 0
    assert all(weights.grad is not None and not weights.grad.any() for weights in trained.network.parameters())


def test_a_pair_counts_as_right_only_if_both_labels_are_found() -> None:
    trained = learner(pairs="side_by_side")
    lengths = torch.tensor([[0.9, 0.8, *[0.1] * 8]] * 2, requires_grad=True)
    made = Encoding(lengths, torch.zeros(2, 10, 6)), torch.zeros(2, 2, 1, 28, 28)
    trained.model = lambda images, labels: made  # type: ignore[assignment]
    trained.optimizers = {"adam": torch.optim.Adam([{"params": [torch.zeros(1)], "highest": 1.0}])}
    images = torch.zeros(2, 1, 28, 28)
    batch = Batch(images, torch.tensor([[1, 0], [0, 2]]), images[:, None].expand(-1, 2, -1, -1, -1))
    _, right = trained.step(batch, 0, 0.0, 1.0)
    assert right.tolist() == [True, False]
