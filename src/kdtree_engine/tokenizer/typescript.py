"""Tool declarations in the TypeScript-like form that K2.5 and K2.6 were trained on.

The form is a fact about the models, taken from their own renderer's output and from public ports
of it (docs/prompts.md lists the rules). Where that renderer cannot express a schema, the models saw
the whole tool list as JSON, so the same schemas are refused here. A few Python spellings (True,
None) and unescaped strings of enums are part of the form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STEP = "  "
DEFS = "#/$defs/"
# What is printed of a schema's limits, by its type.
LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
# In a list of types these, and only these, may stand.
UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
ENUM_CLASSES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}


class Inexpressible(Exception):
    """A schema that the form cannot express; the models then saw JSON instead."""


def declare(tools: list[dict[str, Any]]) -> str | None:
    """The declaration text of all tools of type function; None where it must be JSON instead.

    tools: plain JSON with sorted keys (`messages.plain_tools`). None: no tool is a function, or a
    schema cannot be expressed (see docs/prompts.md).
    """
    try:
        functions = [tool.get("function", {}) for tool in tools if tool.get("type") == "function"]
        blocks = [_Function(function).text() for function in functions if function]
    except Inexpressible:
        return None
    if not blocks:
        return None
    return "\n".join(["# Tools\n", "## functions", "namespace functions {", *blocks, "}", ""])


class _Function:
    """One function's declaration. Definitions become known in the order in which they are met."""

    def __init__(self, function: Any) -> None:
        self.function = _mapping(function)
        self.known: dict[str, Any] = {}
        self.refers_to_itself = False

    def text(self) -> str:
        schema = _mapping(self.function.get("parameters") or {})
        body = self._object(schema, "")
        lines: list[str] = []
        if self.refers_to_itself:
            # Here, and only here, the members keep their order and extra keys go unsaid.
            members = ",\n".join(self._members(schema, STEP, required_first=False))
            lines.append(f"interface parameters {{\n{members}\n}}")
            body = "parameters"
        for name, definition in list(self.known.items()):
            kind = self._type(definition, "")
            note = _prose(_mapping(definition).get("description"), "")
            lines += [*note, f"interface {name} {kind}"]
        lines += _prose(self.function.get("description"), "")
        lines.append(f"type {self.function.get('name', 'function')} = (_: {body}) => any;")
        return "\n".join(lines)

    def _type(self, schema: Any, indent: str) -> str:
        """The type that a schema describes; continuation lines start at `indent`."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        schema = _mapping(schema)
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(one, indent) for one in _list(schema["anyOf"]))
        if "enum" in schema:
            return _enum(schema)
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_known_type(one) for one in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if isinstance(kind, str):
            return "number" if kind == "integer" else kind
        if schema:  # oneOf, const, properties and the like, without a type
            raise Inexpressible(schema)
        return "any"

    def _reference(self, target: Any) -> str:
        if target == "#":
            self.refers_to_itself = True
            return "parameters"
        if not isinstance(target, str) or not target.startswith(DEFS):
            raise Inexpressible(target)
        name = target.rpartition("/")[2]
        if name not in self.known:
            raise Inexpressible(target)
        return name

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items = schema.get("items")
        if not items:
            return "Array<any>"
        inner = indent + STEP
        notes = _notes(items, inner)
        if not notes:
            return f"Array<{self._type(items, indent)}>"
        return "\n".join(["Array<", *notes, inner + self._type(items, inner), indent + ">"])

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        self.known.update(_mapping(schema.get("$defs") or {}))
        inner = indent + STEP
        extra = schema.get("additionalProperties")
        rest: list[str] = []
        if extra is not None:
            if isinstance(extra, bool):
                kind = "any" if extra else "never"
            else:
                kind = self._type(_mapping(extra), inner)
            rest.append(f"{inner}[k: string]: {kind}")
        entries = [*self._members(schema, inner, required_first=True), *rest]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}" if entries else "{}"

    def _members(self, schema: Mapping[str, Any], indent: str, required_first: bool) -> list[str]:
        if "properties" not in schema:
            return []
        required = {name for name in _list(schema.get("required", [])) if isinstance(name, str)}
        members = sorted(_mapping(schema["properties"]).items())
        # Types in the order of the names, since that is the order in which definitions are met.
        lines = {name: self._member(name, one, indent, name in required) for name, one in members}
        if required_first:
            members.sort(key=lambda member: member[0] not in required)  # stable
        return [lines[name] for name, _ in members]

    def _member(self, name: str, schema: Any, indent: str, required: bool) -> str:
        notes = _notes(schema, indent)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            notes.append(f"{indent}// Default: {_default(default)}")
        mark = "" if required else "?"
        return "\n".join([*notes, f"{indent}{name}{mark}: {self._type(schema, indent)}"])


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Inexpressible(value)
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Inexpressible(value)
    return value


def _prose(text: Any, indent: str) -> list[str]:
    """Comment lines; an empty line of the text stays entirely empty."""
    if not text:
        return []
    if not isinstance(text, str):
        raise Inexpressible(text)
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")]


def _notes(schema: Any, indent: str) -> list[str]:
    """A schema's description and limits as comment lines."""
    if not isinstance(schema, Mapping):
        return []
    lines = _prose(schema.get("description"), indent)
    kind = schema.get("type")
    if isinstance(kind, str) and not any(key in schema for key in ("$ref", "anyOf", "enum")):
        limits = [f"{key}: {schema[key]}" for key in LIMITS.get(kind, ()) if key in schema]
        if limits:
            lines.append(f"{indent}// {', '.join(limits)}")
    return lines


def _default(value: Any) -> str:
    if isinstance(value, int | float):  # bool too: True and False, as Python spells them
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def _known_type(name: Any) -> str:
    if not isinstance(name, str) or name not in UNION:
        raise Inexpressible(name)
    return UNION[name]


def _enum(schema: Mapping[str, Any]) -> str:
    values = _list(schema["enum"])
    classes = ENUM_CLASSES.get(_enum_type(schema.get("type", "")))
    for value in values:
        if classes is not None and value is not None and not isinstance(value, classes):
            raise Inexpressible(value)
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)


def _enum_type(kind: Any) -> str:
    """The type that an enum's values must have; a list may only add null to one type."""
    if isinstance(kind, list):
        if len(kind) > 2 or not kind or (len(kind) == 2 and "null" not in kind):
            raise Inexpressible(kind)
        kind = kind[0] if kind[0] != "null" else kind[-1]
    return kind if isinstance(kind, str) else ""
