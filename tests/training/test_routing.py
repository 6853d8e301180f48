import pytest
import torch
from torch import Tensor

from training.capsules import Squash
from training.routing import ROUTINGS

BATCH, OUT, IN, POSE = 3, 10, 24, 16


@pytest.fixture
def votes() -> Tensor:
    return torch.randn(BATCH, OUT, IN, POSE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_gives_capsules_shorter_than_one_with_finite_gradients(name: str, iterations: int, votes: Tensor) -> None:
    votes.requires_grad_()
    capsules = ROUTINGS[name](votes, iterations, Squash("paper"))
    assert capsules.shape == (BATCH, OUT, POSE)
    assert (capsules.norm(dim=-1) < 1).all()
    capsules.square().sum().backward()
    assert votes.grad is not None
    assert votes.grad.isfinite().all()
    assert votes.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ROUTINGS)
def test_zero_votes_give_zero_capsules_and_no_nan(name: str) -> None:
    votes = torch.zeros(1, OUT, IN, POSE, requires_grad=True)
    capsules = ROUTINGS[name](votes, 3, Squash("paper"))
    capsules.sum().backward()
    assert (capsules == 0).all()
    assert votes.grad is not None
    assert votes.grad.isfinite().all()


def test_dynamic_is_procedure_1_of_the_paper(votes: Tensor) -> None:
    """Written out per sample, input and output, as the paper numbers its lines."""
    squash = Squash("paper")
    expected = torch.zeros(BATCH, OUT, POSE)
    for n in range(BATCH):
        b = torch.zeros(IN, OUT)
        for _ in range(3):
            c = torch.stack([b[i].exp() / b[i].exp().sum() for i in range(IN)])
            for j in range(OUT):
                s = sum((c[i, j] * votes[n, j, i] for i in range(IN)), torch.zeros(POSE))
                expected[n, j] = (s @ s / (1 + s @ s)) * s / (s @ s).sqrt()
            for i in range(IN):
                for j in range(OUT):
                    b[i, j] += votes[n, j, i] @ expected[n, j]
    torch.testing.assert_close(ROUTINGS["dynamic"](votes, 3, squash), expected, atol=1e-5, rtol=1e-4)


def test_agreement_replaces_its_logits_and_compares_directions(votes: Tensor) -> None:
    """Su 2018: o = normalised sums; b = <o, votes>, forgotten at each step."""
    o = torch.nn.functional.normalize(votes.mean(dim=2), dim=-1)
    b = torch.einsum("nop,noip->noi", o, votes)
    s = torch.einsum("noi,noip->nop", b.softmax(dim=1), votes)
    b = torch.einsum("nop,noip->noi", torch.nn.functional.normalize(s, dim=-1), votes)
    s = torch.einsum("noi,noip->nop", b.softmax(dim=1), votes)
    torch.testing.assert_close(ROUTINGS["agreement"](votes, 3, lambda sums: sums), s, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ROUTINGS)
def test_more_iterations_lengthen_the_capsule_whose_votes_agree(name: str) -> None:
    """Half of the inputs vote alike for class 0, all other votes scatter: routing makes that capsule longer than at the start."""
    generator = torch.Generator().manual_seed(2)
    votes = torch.randn(1, OUT, IN, POSE, generator=generator)
    votes[0, 0, : IN // 2] = torch.ones(POSE)
    first, last = (ROUTINGS[name](votes, iterations, Squash("paper")).norm(dim=-1)[0, 0] for iterations in (1, 3))
    assert last > first


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_gradient_flows_through_the_last_iteration_only(name: str, votes: Tensor) -> None:
    """With fixed couplings the last step is linear in the votes: the gradient of a pose's first value is the coupling itself."""
    votes.requires_grad_()
    ROUTINGS[name](votes, 3, lambda sums: sums)[:, :, 0].sum().backward()
    assert votes.grad is not None
    assert (votes.grad[..., 1:] == 0).all()  # a path through the logits would touch every value of a pose
    couplings = votes.grad[..., 0]
    torch.testing.assert_close(couplings.sum(dim=1), torch.ones(BATCH, IN))


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_voice_acts_like_scaling_the_votes_of_its_input(name: str, iterations: int, votes: Tensor) -> None:
    """Capsules and gradient are the same; a silent input has no influence."""
    voices = torch.rand(BATCH, IN, generator=torch.Generator().manual_seed(3)) * 2
    voices[:, ::3] = 0
    votes.requires_grad_()
    multiplied = ROUTINGS[name](votes * voices[:, None, :, None], iterations, Squash("paper"))
    voiced = ROUTINGS[name](votes, iterations, Squash("paper"), voices)
    torch.testing.assert_close(voiced, multiplied)
    expected, gradient = (torch.autograd.grad(capsules.sum(), votes)[0] for capsules in (multiplied, voiced))
    torch.testing.assert_close(gradient, expected)
    assert (gradient[:, :, ::3] == 0).all()
