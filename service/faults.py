"""Turns pydantic's errors into sentences for the sender: what was expected, what was found. Knows no HTTP.

What was expected is read from the model's JSON schema, so that a range is given in full. What was found is shown only where
it cannot be a secret: numbers and choices, not texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError

MOST_SHOWN = 5  # faults that are shown
TOO_MANY = 1_000  # faults; more take long to look at, and nobody made them by hand
LONGEST_VALUE = 20  # characters of a value that are shown
# JSON in UTF-16, as PowerShell writes files, or in UTF-32
WIDE_STARTS = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff", b"{\0", b"\0{", b"\0\0\0{")
UNKNOWN = "extra_forbidden"  # pydantic's type of error for a name that the model does not have

Schema = Mapping[str, Any]

KINDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "text"}


def sentences(model: type[BaseModel], error: ValidationError, whole: str) -> list[str]:
    """`whole` is what to call the model itself, such as "the query"."""
    if error.error_count() > TOO_MANY:
        return [f"there are {error.error_count():,} faults in {whole}"]
    faults = error.errors(include_url=False)
    unknown = [str(fault["loc"][-1]) for fault in faults if fault["type"] == UNKNOWN]
    texts = [_sentence(_schema(model), fault, whole) for fault in faults if fault["type"] != UNKNOWN]
    if unknown:
        known = ", ".join(_schema(model)["properties"])
        texts.append(f"{whole} takes {known}, not {', '.join(name[:40] for name in unknown[:MOST_SHOWN])}")
    return texts[:MOST_SHOWN]


@lru_cache
def _schema(model: type[BaseModel]) -> Schema:
    return model.model_json_schema()


def _sentence(schema: Schema, fault: Mapping[str, Any], whole: str) -> str:
    if fault["type"] == "value_error":  # from a validator of ours, whose text is already a sentence
        return str(fault["ctx"]["error"])
    if fault["type"] == "json_invalid":
        wide = fault["input"].startswith(WIDE_STARTS)
        return f"{whole} is not JSON{' in UTF-8 but in UTF-16 or 32' if wide else ''}: {fault['ctx']['error']}"
    place, part = _locate(schema, fault["loc"], whole)
    if fault["type"] == "missing":
        return f"{place} is missing: give " + (f"the {part['description']}" if "description" in part else _expected(part))
    secret = part.get("type") == "string" and "enum" not in part
    found = _found(fault["input"], secret, wrong_type=fault["type"].endswith("_type"))  # "1" instead of 1, say
    return f"{place}: expected {_expected(part)}, found {found}"


def _locate(schema: Schema, path: Sequence[int | str], whole: str) -> tuple[str, Schema]:
    """The name and schema of what lies at a path; pydantic's path may go on into the alternatives of a union."""
    name, part = "", _resolved(schema, schema)
    for step in path:
        child = (
            part.get("items") if isinstance(step, int) else part.get("properties", {}).get(step, part.get("additionalProperties"))
        )
        if not isinstance(child, Mapping):
            break
        name += f"[{step}]" if isinstance(step, int) else f".{step[:40]}"
        part = _resolved(schema, child)
    return name.removeprefix(".") or whole, part


def _resolved(schema: Schema, part: Schema) -> Schema:
    """Follows references, and drops the null of an optional value."""
    if "$ref" in part:
        return _resolved(schema, schema["$defs"][part["$ref"].rpartition("/")[2]])
    choices = [each for each in part.get("anyOf", ()) if each.get("type") != "null"]
    return _resolved(schema, {**part, "anyOf": (), **choices[0]}) if len(choices) == 1 else part


def _expected(part: Schema) -> str:
    if part.get("anyOf"):
        return " or ".join(_expected(each) for each in part["anyOf"])
    if "enum" in part:
        return " or ".join(map(str, part["enum"]))
    kind = part.get("type")
    if kind == "array":
        return f"a list of at most {part['maxItems']:,} values" if "maxItems" in part else "a list"
    if kind == "string" and "maxLength" in part:
        return f"text of at most {part['maxLength']:,} characters"
    return KINDS.get(str(kind), "an object") + _range(part)


def _range(part: Schema) -> str:
    low, high, above = (part.get(name) for name in ("minimum", "maximum", "exclusiveMinimum"))
    if above is not None:
        return f" above {above}" + (f", at most {high}" if high is not None else "")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f" of at least {low}" if low is not None else f" of at most {high}" if high is not None else ""


def _found(value: object, secret: bool, wrong_type: bool) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, str) and (secret or len(value) > LONGEST_VALUE):
        return f"{'text of ' if wrong_type else ''}{len(value):,} characters"
    if isinstance(value, str):
        return ("the text " if wrong_type and value else "") + (value or "nothing")
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:LONGEST_VALUE]
    return "an object"
