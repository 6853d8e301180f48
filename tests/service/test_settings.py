from __future__ import annotations

import argparse

import pytest
from pydantic import ValidationError

from service.__main__ import NO_FLAG, _parser
from service.settings import Settings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_MAX_BATCH", "7")
    monkeypatch.setenv("CAPSERVE_API_KEY", "secret")
    monkeypatch.setenv("CAPSERVE_THREADS", "")
    settings = Settings()
    assert (settings.max_batch, settings.threads) == (7, None)
    assert "secret" not in repr(settings)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1


def test_every_setting_is_described_and_a_flag() -> None:
    verbs = next(each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    flags = set(verbs.choices["serve"]._option_string_actions)
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert (f"--{name.replace('_', '-')}" in flags) == (name not in NO_FLAG)


@pytest.mark.parametrize("name", ["deadline", "patience", "linger", "drain"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1", "1e9"])
def test_times_are_finite(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"CAPSERVE_{name.upper()}", value)
    with pytest.raises(ValidationError):
        Settings()
