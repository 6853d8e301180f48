import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from training.config import PRESETS, Config, Decoder, preset
from training.errors import SettingError, TrainingError, UnknownNameError


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name: str) -> None:
    config = PRESETS[name]
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def objects(values: Any) -> Iterator[dict[str, Any]]:
    """Every object in a config as JSON, at any depth."""
    if isinstance(values, dict):
        yield values
    for value in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from objects(value)


@pytest.mark.parametrize(("name", "count"), [("compact", 10), ("baseline", 7)])
def test_an_unknown_field_at_any_depth_is_rejected(name: str, count: int) -> None:
    """If it were ignored, the config would silently load as something else."""
    whole = json.loads(json.dumps(PRESETS[name].to_dict()))
    found = list(objects(whole))
    assert len(found) == count
    for part in found:
        part["momentum"] = 0.9
        with pytest.raises(TrainingError, match=r"not a config of this version of captrain: .*momentum: Unexpected"):
            Config.from_dict(whole)
        del part["momentum"]
    assert Config.from_dict(whole) == PRESETS[name]


def test_a_missing_newer_field_gets_its_default() -> None:
    """As in bundles that were made before it."""
    values = PRESETS["tiny"].to_dict()
    del values["training"]["cycles"], values["network"]["dropout"], values["network"]["transform_scale"]
    assert Config.from_dict(values) == PRESETS["tiny"]


def test_presets_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["paper"].training.epochs = 1  # type: ignore[misc]


def test_an_unknown_preset_names_those_that_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown preset 'papier'; choose one of: baseline, compact, .*paper.*tiny"):
        preset("papier")


@pytest.mark.parametrize("name", ["compact", "pooled"])
def test_cross_entropy_is_rejected_for_outputs_that_do_not_sum_to_one(name: str) -> None:
    """Lengths and sigmoids are independent: this loss would leave all of them long."""
    training = dataclasses.replace(PRESETS[name].training, loss="cross_entropy")
    with pytest.raises(SettingError, match=rf"cross_entropy is for outputs that sum to 1, and those of {name} do not"):
        dataclasses.replace(PRESETS[name], training=training)


def test_a_preset_written_with_lists_equals_one_with_tuples(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = PRESETS["tiny"]
    network = dataclasses.replace(tiny.network, stem=list(tiny.network.stem), decoder=Decoder(hidden=[10]))  # type: ignore[arg-type]
    monkeypatch.setitem(PRESETS, "lists", dataclasses.replace(tiny, network=network))
    assert preset("lists") == tiny


def test_a_network_without_a_stem_is_rejected() -> None:
    with pytest.raises(SettingError, match="at least one convolution in the stem"):
        dataclasses.replace(PRESETS["tiny"].network, stem=())


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_transform_scale_that_is_not_positive_is_rejected(scale: float) -> None:
    with pytest.raises(SettingError, match="transform_scale must be above 0 and at most 10, got"):
        dataclasses.replace(PRESETS["tiny"].network, transform_scale=scale)


def test_transform_rate_is_rejected_for_networks_without_votes() -> None:
    training = dataclasses.replace(PRESETS["baseline"].training, transform_rate=4)
    with pytest.raises(SettingError, match="transform-rate is for the matrices that make votes, and baseline has none"):
        dataclasses.replace(PRESETS["baseline"], training=training)


def test_differences_name_both_values() -> None:
    other = dataclasses.replace(PRESETS["tiny"], training=dataclasses.replace(PRESETS["tiny"].training, epochs=3))
    assert PRESETS["tiny"].differences(other) == ["training.epochs: 5 against 3"]
