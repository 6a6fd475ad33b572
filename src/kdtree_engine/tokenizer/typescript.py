"""Tool declarations in the TypeScript-like form that K2.5 and K2.6 were trained on.

The form is a fact about the models, read off their own renderer's output (see the golden cases);
keys are sorted, required members come before optional ones, and a few Python spellings (True, None)
are part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdtree_engine.errors import TokenizerError

Schema = Mapping[str, Any]

STEP = "  "
CONSTRAINTS = (
    "maxItems",
    "maxLength",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
)
PLAIN = {"string": "string", "boolean": "boolean", "null": "null"}
NUMERIC = {"number": "number", "integer": "number"}
UNSUPPORTED = ("oneOf", "allOf", "not", "const", "patternProperties", "prefixItems")
DEFS = "#/$defs/"


class ForeignReference(Exception):
    """A $ref that the form cannot express; the models then saw JSON instead."""


def declare(tools: Sequence[Schema]) -> str | None:
    """The declaration text of all tools of type function; None where it must be JSON instead.

    None: no tool has the type function, or a `$ref` is neither `#` nor `#/$defs/NAME`.
    Raises TokenizerError for a schema feature that is not supported yet.
    """
    functions = [tool.get("function") for tool in tools if tool.get("type") == "function"]
    if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in functions):
        raise TokenizerError("a tool of type function needs a 'function' with a 'name'")
    if not functions:
        return None
    try:
        blocks = [_function(function) for function in functions if function is not None]
    except ForeignReference:
        return None
    return "\n".join(["# Tools\n", "## functions", "namespace functions {", *blocks, "}", ""])


def _function(function: Schema) -> str:
    schema = function.get("parameters") or {}
    lines: list[str] = []
    for name, definition in sorted(schema.get("$defs", {}).items()):
        lines += [*_comments(definition, ""), f"interface {name} {_type(definition, '')}"]
    body = _object(schema, "")
    if "#" in _references(schema):
        # Observed: here, and only here, the members keep the order of their names.
        lines.append(f"interface parameters {_object(schema, '', required_first=False)}")
        body = "parameters"
    lines += _prose(function.get("description"), "")
    lines.append(f"type {function['name']} = (_: {body}) => any;")
    return "\n".join(lines)


def _references(value: Any) -> Iterator[str]:
    """Every $ref inside a schema."""
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _prose(text: str | None, indent: str) -> list[str]:
    """Comment lines; an empty line of the text stays entirely empty."""
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []


def _literal(value: Any) -> str:
    if isinstance(value, str | Mapping | list):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    return str(value)


def _comments(schema: Any, indent: str) -> list[str]:
    if not isinstance(schema, Mapping):
        return []  # _type refuses it
    lines = _prose(schema.get("description"), indent)
    limits = [f"{key}: {schema[key]}" for key in CONSTRAINTS if key in schema]
    if limits:
        lines.append(f"{indent}// {', '.join(limits)}")
    if "default" in schema:
        if schema["default"] is None:
            raise TokenizerError("a tool parameter with the default null is not supported yet")
        lines.append(f"{indent}// Default: {_literal(schema['default'])}")
    return lines


def _type(schema: Any, indent: str) -> str:
    """The type that a schema describes; continuation lines start at `indent`."""
    if not isinstance(schema, Mapping):
        raise TokenizerError(f"a tool schema must be an object, not {schema!r}")
    for key in UNSUPPORTED:
        if key in schema:
            raise TokenizerError(f"a tool schema uses {key!r}, which is not supported yet")
    if "$ref" in schema:
        return _reference(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(choice, indent) for choice in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(_literal(value) for value in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_type({**schema, "type": one}, indent) for one in kind)
    if kind == "object" or (kind is None and "properties" in schema):
        return _object(schema, indent)
    if kind == "array":
        return _array(schema, indent)
    if kind is None:
        return "any"
    name = PLAIN.get(kind) or NUMERIC.get(kind)
    if name is None:
        raise TokenizerError(f"a tool schema has the unknown type {kind!r}")
    return name


def _reference(target: str) -> str:
    if target == "#":
        return "parameters"
    if not target.startswith(DEFS):
        raise ForeignReference(target)
    return target.removeprefix(DEFS)


def _array(schema: Schema, indent: str) -> str:
    items = schema.get("items")
    if not items:
        return "Array<any>"
    inner = indent + STEP
    notes = _comments(items, inner)
    if not notes:
        return f"Array<{_type(items, indent)}>"
    return "\n".join(["Array<", *notes, inner + _type(items, inner), indent + ">"])


def _object(schema: Schema, indent: str, required_first: bool = True) -> str:
    members = sorted(schema.get("properties", {}).items())
    required = set(schema.get("required", ()))
    inner = indent + STEP
    entries: list[str] = []
    if required_first:
        members.sort(key=lambda member: member[0] not in required)  # stable: names stay in order
    for name, member in members:
        mark = "" if name in required else "?"
        line = f"{inner}{name}{mark}: {_type(member, inner)}"
        entries.append("\n".join([*_comments(member, inner), line]))
    extra = schema.get("additionalProperties")
    if extra is not None:
        kind = _type(extra, inner) if isinstance(extra, Mapping) else "any" if extra else "never"
        entries.append(f"{inner}[k: string]: {kind}")
    if not entries:
        return "{}"
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
