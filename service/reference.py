"""Renders the OpenAPI document as one page, /docs: without scripts, so it works offline and under any policy. Knows no HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

JSON = "application/json"
LONGEST_TEXT, LONGEST_LIST = 80, 10  # in examples

Schema = dict[str, Any]
Groups = dict[str, list[tuple[str, str, Schema]]]  # by tag: method, path, operation


def page(document: dict[str, Any], base: str, keyed: bool) -> str:
    """`base` is the server's address, for commands to copy; `keyed` says whether it requires a key."""
    groups: Groups = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation.get("tags", ["other"])[0], []).append((method.upper(), path, operation))
    definitions = document["components"]["schemas"]
    curl = 'curl -s -H "X-API-Key: $CAPSERVE_API_KEY"' if keyed else "curl -s"
    sections = "".join(_section(tag, operations, definitions, base, curl) for tag, operations in groups.items())
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: reference</title>
<link rel="icon" href="playground/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="playground/style.css">
<link rel="stylesheet" href="playground/reference.css">
</head>
<body class="reference">
<header class="top"><a class="name" href="./">{escape(info["title"])}</a><p>{escape(info.get("summary", ""))}</p>
<nav aria-label="Elsewhere"><a href="./">Playground</a>
<a href="openapi.json">openapi.json</a> <a href="metrics">Metrics</a></nav>
</header>
<nav class="contents" aria-label="Endpoints">{_contents(groups)}</nav>
<main>
<h1>Reference</h1>
<p>Every answer carries <code>X-Request-ID</code> and <code>Server-Timing</code>, a model's also
<code>X-Execution-Provider</code>.
Errors are problem+json (<a href="https://www.rfc-editor.org/rfc/rfc9457">RFC 9457</a>): <code>detail</code> says what to do.</p>
{sections}
</main>
</body>
</html>
"""


def _contents(groups: Groups) -> str:
    def entries(operations: list[tuple[str, str, Schema]]) -> str:
        return "".join(
            f'<li><a href="#{_anchor(method, path)}"><b>{method}</b> {_breakable(path)}</a></li>'
            for method, path, _ in operations
        )

    return "".join(f"<h2>{escape(tag)}</h2><ul>{entries(operations)}</ul>" for tag, operations in groups.items())


def _section(tag: str, operations: list[tuple[str, str, Schema]], definitions: Schema, base: str, curl: str) -> str:
    articles = "".join(_operation(method, path, operation, definitions, base, curl) for method, path, operation in operations)
    return f"<section><h2>{escape(tag)}</h2>{articles}</section>"


def _operation(method: str, path: str, operation: Schema, definitions: Schema, base: str, curl: str) -> str:
    parameters = operation.get("parameters", [])
    request = operation.get("requestBody", {}).get("content", {})
    response = operation["responses"].get("200", {}).get("content", {})
    description: str = operation.get("description") or operation["summary"]
    parts = [
        f'<h3><b class="{method.lower()}">{method}</b> <code>{_breakable(path)}</code></h3>',
        f"<p>{escape(description)}</p>",
        _parameters(parameters, definitions),
        f"<p>Takes {_codes(request)}.</p>" if request else "",
        _command(method, path, parameters, request, base, curl),
        _example("What is sent", request),
        f"<p>Gives {_codes(response)}.</p>" if response else "",
        _fields(response.get(JSON, {}).get("schema", {}), definitions),
        _example("An answer", response),
        _statuses(operation["responses"]),
    ]
    return f'<article id="{_anchor(method, path)}">{"".join(parts)}</article>'


def _parameters(parameters: list[Schema], definitions: Schema) -> str:
    rows = [
        (each["name"], _type(each["schema"], definitions), _default(each), each.get("description", "")) for each in parameters
    ]
    return _table(("parameter", "type", "default", "what it is"), rows)


def _fields(schema: Schema, definitions: Schema) -> str:
    """A table of an answer's fields; those of its parts are named with their path: `objects[].pose`."""
    return _table(("field", "type", "what it is"), list(_field_rows(schema, definitions, "")))


def _field_rows(schema: Schema, definitions: Schema, prefix: str) -> Iterator[tuple[str, str, str]]:
    schema = _resolved(schema, definitions)
    for name, field in schema.get("properties", {}).items():
        yield prefix + name, _type(field, definitions), field.get("description", "")
        many = field.get("type") == "array"
        part = _resolved(field.get("items", {}) if many else field, definitions)
        if "properties" in part:
            yield from _field_rows(part, definitions, f"{prefix}{name}{'[]' if many else ''}.")


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    found: Schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return found


def _type(schema: Schema, definitions: Schema) -> str:
    schema = _resolved(schema, definitions)
    if "anyOf" in schema:
        return " or ".join(_type(each, definitions) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), definitions)}"
    limits = [str(schema[limit]) for limit in ("minimum", "maximum") if limit in schema]
    return f"{schema.get('type', 'anything')}{', ' + ' to '.join(limits) if len(limits) == 2 else ''}"


def _default(parameter: Schema) -> str:
    if parameter.get("required"):
        return "required"
    default = parameter["schema"].get("default")
    return "" if default is None else json.dumps(default).strip('"')


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    heads = "".join(f'<th scope="col">{escape(each)}</th>' for each in head)
    body = "".join(
        f'<tr><th scope="row"><code>{escape(name)}</code></th>' + "".join(f"<td>{escape(each)}</td>" for each in rest) + "</tr>"
        for name, *rest in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _command(method: str, path: str, parameters: list[Schema], request: Schema, base: str, curl: str) -> str:
    """A curl command that works as it is, if the parameters have examples."""
    known = [each for each in parameters if "example" in each]
    path = path.format_map({each["name"]: quote(each["example"]) for each in known if each["in"] == "path"})
    query = urlencode({each["name"]: each["example"] for each in known if each["in"] == "query"}, doseq=True)
    address = f"{path}{'?' + query if query else ''}"
    options, note = "", ""
    if "multipart/form-data" in request:
        options = " -F file=@seven.png"
    elif request:
        options, note = f" -H 'Content-Type: {JSON}' -d @request.json", "request.json: as below, whole in openapi.json."
    elif method != "GET":
        options = f" -X {method}"
    elif path.startswith("/reconstruct"):
        options = " -o drawing.png"
    link = f' <a href="{escape(address.lstrip("/"))}">open it</a>' if method == "GET" else ""
    line = escape(f"{curl}{options} '{base}{address}'")
    return f'<pre tabindex="0"><code>{line}</code></pre>{link}' + (f"<p>{note}</p>" if note else "")


def _example(title: str, content: Schema) -> str:
    if "example" not in content.get(JSON, {}):
        return ""
    text = json.dumps(_shortened(content[JSON]["example"]), indent=1, ensure_ascii=False)
    return f'<details><summary>{title}</summary><pre tabindex="0"><code>{escape(text)}</code></pre></details>'


def _shortened(value: Any) -> Any:
    """Shortens pictures and tensors, which say nothing to a reader."""
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_shortened, value[:LONGEST_LIST]), *(["..."] if len(value) > LONGEST_LIST else [])]
    return f"{value[:LONGEST_TEXT]}..." if isinstance(value, str) and len(value) > LONGEST_TEXT else value


def _statuses(responses: Schema) -> str:
    statuses = ", ".join(
        f"<b>{status}</b> {escape(each['description'])}" for status, each in responses.items() if status != "200"
    )
    return f'<p class="statuses">Otherwise {statuses}.</p>' if statuses else ""


def _codes(names: Schema) -> str:
    return ", ".join(f"<code>{escape(name)}</code>" for name in names)


def _anchor(method: str, path: str) -> str:
    return escape(f"{method.lower()}{path.replace('/', '-').replace('{', '').replace('}', '')}")


def _breakable(path: str) -> str:
    return escape(path).replace("/", "<wbr>/")
