"""Every setting: from the environment as CAPSERVE_<NAME>, or as a flag of `capserve serve`."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

WantedVariant = Literal["auto", "fp32", "int8"]
WantedDevice = Literal["auto", "cpu", "cuda"]

LONGEST_KEY = 1_024  # characters: a proxy accepts 8 KB in a header
PREFIX = "CAPSERVE_"
NAME_CUTOFF = 0.75  # of 1: CAPSERVE_APIKEY and CAPSERVE_PROT are meant to be settings, CAPSERVE_MEMORY (docker compose's) is not
KEY, KEY_CUTOFF = f"{PREFIX}API_KEY", 0.9  # the same for the whole name, such as CAPSERVER_API_KEY
SECRET_WORDS = ("key", "token", "secret", "password")

CHECKOUT = Path(__file__).resolve().parent.parent


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, hide_input_in_errors=True)

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 means all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 is any free one")
    models: Path = Field(CHECKOUT / "models", description="folder with a bundle in each of its subfolders")
    model: str | None = Field(None, description="default model; if unset, compact, or else the first by name")
    variant: WantedVariant = Field("auto", description="encoder to run; auto is int8 on CPUs that run it faster")
    device: WantedDevice = Field("auto", description="auto uses CUDA if it works; cuda does not start otherwise")
    cuda_graphs: bool = Field(False, description="replay each batch size as one CUDA graph")
    cuda_memory: int = Field(2, ge=1, description="GiB of GPU memory ONNX Runtime may take per graph; a model has two")
    workers: int = Field(1, ge=1, le=1024, description="processes that share the port, each with its own models")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads per model; if unset, what cgroup and affinity allow, shared by workers"
    )
    max_batch: int = Field(16, ge=1, le=1024, description="most images in one batch")
    max_queue: int = Field(512, ge=1, description="images that may wait for a model; more are answered 503")
    max_wait: float = Field(
        1.0,
        gt=0,
        le=3600,
        description="longest estimated wait of a picture, in seconds; beyond it, 503",
    )
    max_images: int = Field(64, ge=1, description="images in one request of /predict/batch")
    max_body: int = Field(10 << 20, ge=1, description="bytes of a request's body")
    max_pixels: int = Field(25_000_000, ge=1, description="width times height of a picture")
    deadline: float = Field(
        10.0, gt=0, le=3600, description="seconds within which computation must begin after a request's last byte; else 504"
    )
    patience: float = Field(30.0, gt=0, le=3600, description="seconds for a head, a body (408), and between reads of an answer")
    linger: float = Field(0.5, ge=0, le=3600, description="seconds between SIGTERM, when /readyz turns 503, and closing the port")
    drain: float = Field(25.0, gt=0, le=3600, description="seconds that accepted requests have to finish after SIGTERM")
    api_key: SecretStr | None = Field(
        None,
        description="key required for all but health, metrics and the page's own files, or several, one per line, any of which "
        "will do; not a flag, which all users could see",
    )
    traces: str | None = Field(None, description="where OpenTelemetry spans go, such as http://collector:4318/v1/traces")
    log_format: Literal["console", "json"] = Field("console", description="per record, a readable line or a JSON object")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug also logs requests that went well")

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_misspelt(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Refuses names that would silently be ignored: the worst case is a server without its key."""
        for name in os.environ:
            if not name.upper().startswith(PREFIX) and get_close_matches(name.upper(), [KEY], cutoff=KEY_CUTOFF):
                raise ValueError(f"api_key: expected this name, found {name}")
        for name in (each.removeprefix(PREFIX).lower() for each in cls.unknown_variables()):
            for meant in get_close_matches(name, cls.model_fields, n=1, cutoff=NAME_CUTOFF):
                raise ValueError(f"{name}: there is no such setting; expected {PREFIX}{meant.upper()}")
            if any(word in name for word in SECRET_WORDS):  # however it is spelt, the server was not meant to be open
                raise ValueError(f"{name}: there is no such setting; the key is {KEY}")
        return values

    @classmethod
    def unknown_variables(cls) -> list[str]:
        """Variables with our prefix that are not settings: compose's, the training side's, Kubernetes', or misspelt."""
        ours = (name.upper() for name in os.environ if name.upper().startswith(PREFIX))
        return sorted(name for name in ours if name.removeprefix(PREFIX).lower() not in cls.model_fields)

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, api_key: SecretStr | None) -> SecretStr | None:
        """Checks that keys can be sent in a header and typed into the page; files and secrets often end with a line break."""
        if api_key is None:
            return None
        keys = [line.strip() for line in api_key.get_secret_value().strip().split("\n")]
        if not all(key and key.isascii() and key.isprintable() and len(key) <= LONGEST_KEY for key in keys):
            raise ValueError(
                f"api_key: expected printable ASCII, at most {LONGEST_KEY:,} characters per line and no blank line; "
                "what was found is kept secret"
            )
        return SecretStr("\n".join(keys))

    @field_validator("traces")
    @classmethod
    def _is_a_usable_url(cls, traces: str | None) -> str | None:
        if traces is not None and not _is_url(traces):
            raise ValueError("traces: expected a URL such as http://collector:4318/v1/traces; what was found is kept secret")
        if traces is not None and urlsplit(traces).query:  # OpenTelemetry's own log lines contain it
            raise ValueError("traces: expected a URL without a query; a key goes into OTEL_EXPORTER_OTLP_HEADERS, as api-key=KEY")
        return traces


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, a bracket left open
        return False
