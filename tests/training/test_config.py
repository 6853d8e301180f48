import dataclasses
import json

import pytest

from training.config import PRESETS, Config, preset
from training.errors import UnknownNameError


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


def test_differences_name_both_values() -> None:
    other = dataclasses.replace(PRESETS["paper"], training=dataclasses.replace(PRESETS["paper"].training, epochs=3))
    assert PRESETS["paper"].differences(other) == ["training.epochs: 12 against 3"]
