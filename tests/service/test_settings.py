from __future__ import annotations

import argparse

import pytest
from pydantic import ValidationError

from service.cli import _parser
from service.settings import Settings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_MAX_BATCH", "7")
    monkeypatch.setenv("CAPSERVE_API_KEY", "secret")
    monkeypatch.setenv("CAPSERVE_THREADS", "")
    settings = Settings()
    assert (settings.max_batch, settings.threads) == (7, None)
    assert "secret" not in repr(settings)


@pytest.mark.parametrize("around", ["", "\n", " ", "\r\n"])
def test_a_key_may_end_in_the_line_break_of_its_file(around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_API_KEY", f"two words{around}")
    key = Settings().api_key
    assert key is not None
    assert key.get_secret_value() == "two words"


def test_api_key_may_hold_several_keys_one_per_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_API_KEY", "the new one \r\nthe old one\n")
    keys = Settings().api_key
    assert keys is not None
    assert keys.get_secret_value() == "the new one\nthe old one"


@pytest.mark.parametrize("key", ["schl\u00fcssel", "a\tb", "a\rb", "a\n\nb", "a" * 1_025])
def test_a_key_that_cannot_be_sent_is_rejected_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSERVE_API_KEY", key)
    with pytest.raises(ValidationError) as refused:
        Settings()
    assert key not in str(refused.value)


@pytest.mark.parametrize("name", ["DATA", "REPLICAS", "PUBLISH", "USER", "MEMORY", "CPUS", "PORT_8000_TCP", "SERVICE_HOST"])
def test_variables_that_others_use_are_not_taken_for_misspelt_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"CAPSERVE_{name}", "x")
    assert f"CAPSERVE_{name}" in Settings().unknown_variables()


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1


def flags(verb: str) -> set[str]:
    """The settings that are flags of this command."""
    verbs = next(each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    named = set(verbs.choices[verb]._option_string_actions)
    return {name for name in Settings.model_fields if f"--{name.replace('_', '-')}" in named}


def test_every_setting_has_a_description_and_a_serve_flag_unless_secret() -> None:
    assert all(field.description for field in Settings.model_fields.values())
    assert flags("serve") == Settings.model_fields.keys() - {"api_key"}


def test_check_and_predict_have_no_server_only_flags() -> None:
    model = {"models", "model", "variant", "device", "cuda_graphs", "cuda_memory", "threads"}
    assert flags("check") == model
    assert flags("predict") == model | {"max_pixels", "max_body"}


@pytest.mark.parametrize("name", ["deadline", "patience", "linger", "drain"])
@pytest.mark.parametrize("value", ["inf", "nan", "-1", "1e9"])
def test_infinite_negative_and_huge_times_are_rejected(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"CAPSERVE_{name.upper()}", value)
    with pytest.raises(ValidationError):
        Settings()
