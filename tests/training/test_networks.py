from dataclasses import replace

import pytest
import torch

from training.config import PRESETS, CapsuleNet
from training.errors import SettingError
from training.networks import CapsuleEncoder, Decoder, Encoding, Network, parameters
from training.routing import lengths


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_encodes_and_draws(name: str) -> None:
    config = PRESETS[name].network
    encoding, drawings = Network(config)(torch.rand(3, *config.image_shape), torch.tensor([[0], [5], [9]]))
    assert encoding.lengths.shape == (3, config.classes)
    assert encoding.capsules.shape == (3, config.classes, config.pose_size)
    assert (encoding.lengths >= 0).all()
    assert (encoding.lengths <= 1).all()
    assert drawings.shape == (3, 1, *config.image_shape)


def test_parameter_counts_are_those_of_the_literature() -> None:
    """Sabour et al. 2017: 8.2 M with the decoder, 6.8 M without, baseline 35.4 M. Efficient-CapsNet: 161 thousand."""
    counted = {name: parameters(Network(PRESETS[name].network).encoder) for name in PRESETS}
    assert parameters(Network(PRESETS["paper"].network)) == 8_215_568
    assert counted["paper"] == 6_804_224
    assert counted["baseline"] == 35_445_522
    assert counted["compact"] <= 700_000
    assert 160_000 < counted["compact16"] < 162_000
    assert 250_000 < counted["shared"] < 290_000


def test_paper_routes_1152_capsules() -> None:
    encoder = Network(PRESETS["paper"].network).encoder
    assert encoder.primary(encoder.stem(torch.zeros(1, 1, 28, 28))).shape == (1, 1152, 8)


def test_shared_takes_any_image_size() -> None:
    encoder = Network(PRESETS["shared"].network).eval().encoder
    for size in ((28, 28), (28, 56), (36, 36)):
        assert encoder(torch.rand(1, 1, *size)).capsules.shape == (1, 10, 16)


def test_dropout_silences_whole_capsules_only_in_training() -> None:
    torch.manual_seed(0)
    encoder = Network(replace(PRESETS["tiny"].network, dropout=0.5)).encoder
    assert isinstance(encoder, CapsuleEncoder)
    heard: list[tuple[torch.Tensor, ...]] = []
    encoder.routed.register_forward_pre_hook(lambda _, given: heard.append(given))
    images = torch.rand(8, 1, 28, 28)
    said = encoder.train()(images)
    encoder.eval()(images)
    (votes,), (same, voices), (_,) = heard  # to draw, to classify, and outside training
    assert same is votes
    assert voices.shape == (8, votes.shape[2])  # one for each capsule
    assert 0.3 < (voices == 0).float().mean() < 0.7
    assert (voices[voices != 0] == 2).all()  # on average as loud as if none were silent
    torch.testing.assert_close(said.capsules, encoder.routed(votes))  # the pose to draw comes from all
    torch.testing.assert_close(said.lengths, lengths(encoder.routed(votes, voices)))


def test_the_decoder_sees_the_named_capsule_only() -> None:
    """The same pose of the named class draws the same, whatever the other capsules hold."""
    network = Network(PRESETS["tiny"].network).eval()
    capsules = torch.rand(1, 10, 6)
    others = torch.rand(1, 10, 6)
    others[:, 3] = capsules[:, 3]
    lengths = torch.zeros(1, 10)
    network.encoder.forward = lambda images: Encoding(lengths, images)  # type: ignore[assignment,method-assign]
    drawn = {name: network(each, torch.tensor([[3]]))[1] for name, each in (("one", capsules), ("other", others))}
    assert torch.equal(drawn["one"], drawn["other"])
    assert not torch.allclose(drawn["one"], network(capsules, torch.tensor([[4]]))[1])


def test_a_plain_net_does_not_learn_from_its_drawing() -> None:
    network = Network(PRESETS["pooled"].network)
    _, drawings = network(torch.rand(2, 1, 28, 28), torch.tensor([[1], [2]]))
    drawings.sum().backward()
    assert all(parameter.grad is None for parameter in network.encoder.parameters())
    assert all(parameter.grad is not None for parameter in network.decoder.parameters())


def test_building_a_network_leaves_batch_norm_untouched() -> None:
    network = Network(PRESETS["compact"].network)
    assert isinstance(PRESETS["compact"].network, CapsuleNet)
    tracked = [value for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")]
    assert tracked
    assert all(int(value) == 0 for value in tracked)
    assert network.training


@pytest.mark.parametrize("name", ["baseline", "pooled"])
def test_cnn_scores_do_not_depend_on_the_rest_of_the_batch(name: str) -> None:
    torch.manual_seed(0)
    encoder = Network(PRESETS[name].network).eval().encoder
    images = torch.rand(3, 1, 28, 28)
    together, alone = encoder(images).lengths, torch.cat([encoder(each).lengths for each in images.split(1)])
    torch.testing.assert_close(together, alone)
    if name == "baseline":
        torch.testing.assert_close(together.sum(dim=1), torch.ones(3))


def test_the_decoder_has_separate_weights_for_each_class() -> None:
    decoder = Decoder(replace(PRESETS["tiny"].network, decoder=replace(PRESETS["tiny"].network.decoder, sees_class=True)))
    poses = torch.rand(1, 6, requires_grad=True)
    decoder(poses, torch.tensor([3])).sum().backward()
    used = decoder.layers[0].weight.grad.any(dim=0).unflatten(0, (10, 6)).any(dim=1)
    assert used.nonzero().flatten().tolist() == [3]


def test_drawings_are_between_zero_and_one() -> None:
    torch.manual_seed(0)
    decoder = Decoder(PRESETS["tiny"].network)
    poses, classes = 1_000 * torch.randn(64, 6), torch.arange(64) % 10
    drawn = decoder(poses, classes)
    assert drawn.min() >= 0
    assert drawn.max() <= 1


@pytest.mark.parametrize("part", ["decoder", "encoder"])
def test_dense_layers_have_a_nonlinearity_between_them(part: str) -> None:
    """Otherwise they would equal one layer, however many there are."""
    torch.manual_seed(0)
    network = Network(PRESETS["pooled" if part == "encoder" else "compact"].network).eval()
    dense = network.encoder.head if part == "encoder" else network.decoder.layers
    first = next(each for each in dense if isinstance(each, torch.nn.Linear))
    there = torch.randn(4, first.in_features)
    layers = dense[:-1] if part == "decoder" else dense  # without the sigmoid

    def bent(given: torch.Tensor) -> torch.Tensor:
        return layers(given) + layers(-given) - 2 * layers(torch.zeros_like(given))

    assert bent(there).abs().max() > 1e-3


def test_pictures_that_are_too_small_for_a_network_are_rejected() -> None:
    with pytest.raises(SettingError, match="pictures of 1x4x4 are too small for this network"):
        Network(replace(PRESETS["tiny"].network, image_shape=(1, 4, 4)))
