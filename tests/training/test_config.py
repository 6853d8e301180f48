import dataclasses
import json

import pytest

from training.config import PRESETS, Config, preset
from training.errors import SettingError, UnknownNameError


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name: str) -> None:
    config = PRESETS[name]
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_presets_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["paper"].training.epochs = 1  # type: ignore[misc]


def test_an_unknown_preset_names_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown preset 'papier'; choose one of: baseline, compact, .*paper.*tiny"):
        preset("papier")


@pytest.mark.parametrize("name", ["compact", "pooled"])
def test_cross_entropy_is_for_a_softmax(name: str) -> None:
    """Lengths and sigmoids are independent: it would leave all of them long."""
    training = dataclasses.replace(PRESETS[name].training, loss="cross_entropy")
    with pytest.raises(SettingError, match=rf"cross_entropy is for outputs that sum to 1, and those of {name} do not"):
        dataclasses.replace(PRESETS[name], training=training)


def test_networks_without_votes_have_no_rate_for_them() -> None:
    training = dataclasses.replace(PRESETS["baseline"].training, transform_rate=4)
    with pytest.raises(SettingError, match="transform-rate is of the matrices that make votes, and baseline has none"):
        dataclasses.replace(PRESETS["baseline"], training=training)


def test_differences_name_both_values() -> None:
    other = dataclasses.replace(PRESETS["paper"], training=dataclasses.replace(PRESETS["paper"].training, epochs=3))
    assert PRESETS["paper"].differences(other) == ["training.epochs: 12 against 3"]
