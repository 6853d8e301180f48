import pytest

from training.config import Training
from training.schedules import SCHEDULES

CONFIG = Training(epochs=10, decay=0.9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_stays_within_its_highest_rate(name: str) -> None:
    factors = [SCHEDULES[name](step / 1000, CONFIG) for step in range(1000)]
    assert max(factors) == pytest.approx(1.0, abs=1e-3)
    assert min(factors) > 0


def test_one_cycle_rises_for_a_quarter_and_ends_near_zero() -> None:
    factors = [SCHEDULES["one_cycle"](step / 100, CONFIG) for step in range(101)]
    assert factors[:26] == sorted(factors[:26])
    assert factors[25:] == sorted(factors[25:], reverse=True)
    assert factors[0] == pytest.approx(0.04)
    assert factors[-1] < 0.001


def test_exponential_decays_once_an_epoch() -> None:
    assert SCHEDULES["exponential"](0.3, CONFIG) == pytest.approx(0.9**3)


def test_exponential_decays_by_the_epochs_of_a_cycle() -> None:
    assert SCHEDULES["exponential"](0.5, Training(epochs=4, cycles=3, decay=0.5)) == pytest.approx(0.25)
