"""Tool declarations: the rules of the TypeScript form, and where it gives way to JSON."""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import needs, shared_data

from kdtree_engine.errors import TokenizerError
from kdtree_engine.tokenizer import Tokenizer, encode_chat, render_chat
from kdtree_engine.tokenizer.messages import MAX_DEPTH, plain_tools
from kdtree_engine.tokenizer.typescript import declare

DATA = shared_data("kimi-tokenizer")


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def body(**parameters: Any) -> str | None:
    """The declaration of one function, without what is the same for all."""
    text = declare(plain_tools([tool(**parameters)], sort=True))
    if text is None:
        return None
    start = "# Tools\n\n## functions\nnamespace functions {\n"
    assert text.startswith(start) and text.endswith("\n}\n")
    return text[len(start) : -3]


def member(schema: Any) -> str | None:
    """What is declared of one optional member `a`."""
    text = body(type="object", properties={"a": schema})
    if text is None:
        return None
    start, end = "type f = (_: {\n", "\n}) => any;"
    assert text.startswith(start) and text.endswith(end)
    return text[len(start) : -len(end)]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (True, "  a?: any"),
        (False, "  a?: null"),
        ({}, "  a?: any"),
        ({"type": "date"}, "  a?: date"),
        ({"type": "string", "default": None}, "  a?: string"),
        ({"type": "string", "oneOf": [{"minLength": 1}], "const": "x"}, "  a?: string"),
        ({"type": "object", "patternProperties": {"^x": {}}, "not": {}}, "  a?: {}"),
        ({"type": "array", "prefixItems": [{"type": "string"}]}, "  a?: Array<any>"),
        ({"type": ["object", "array", "integer"]}, "  a?: {} | Array<any> | number"),
        ({"type": ["string", "null"], "maxLength": 3, "description": "d"}, None),
        ({"enum": ['q"', 1, 1.5, None, False]}, '  a?: "q"" | 1 | 1.5 | None | False'),
        ({"type": ["string", "null"], "enum": ["x", None]}, '  a?: "x" | None'),
        ({"anyOf": [{"type": "string", "minLength": 2}, {}]}, "  a?: string | any"),
        ({"type": "string", "maximum": 5, "minLength": 1}, "  // minLength: 1\n  a?: string"),
        ({"type": "integer", "minLength": 5}, "  a?: number"),
        ({"type": "string", "enum": ["x"], "minLength": 1}, '  a?: "x"'),
        (
            {"type": "array", "items": {"type": "string", "default": "x"}, "minItems": 1},
            "  // minItems: 1\n  a?: Array<string>",
        ),
        ({"type": "object", "default": {"b": 1, "a": [2]}}, None),
        ({"type": "number", "default": 1e22}, "  // Default: 1e+22\n  a?: number"),
        ({"type": "object", "additionalProperties": {}}, "  a?: {\n    [k: string]: any\n  }"),
    ],
)
def test_members(schema: Any, text: str | None) -> None:
    if schema == {"type": ["string", "null"], "maxLength": 3, "description": "d"}:
        text = "  // d\n  a?: string | null"
    elif text is None:
        text = '  // Default: {"a": [2], "b": 1}\n  a?: {}'
    assert member(schema) == text


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"allOf": [{"type": "string"}]},
        {"not": {"type": "string"}},
        {"const": 5},
        {"properties": {"b": {}}},
        {"description": "only prose"},
        {"type": ["string", "date"]},
        {"type": 5},
        {"type": "string", "enum": [5]},
        {"type": "integer", "enum": [1.5]},
        {"type": ["string", "integer"], "enum": ["x"]},
        {"$ref": "#/$defs/unknown"},
        {"$ref": "https://example.org/x"},
        {"$ref": 5},
        {"anyOf": {"type": "string"}},
        {"enum": "abc"},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"b": {}}, "required": True},
        {"type": "object", "additionalProperties": "x"},
        {"type": "string", "description": 5},
        "string",
        None,
        5,
    ],
    ids=str,
)
def test_schemas_that_become_json(schema: Any) -> None:
    assert member(schema) is None
    tools = [tool(type="object", properties={"a": schema}), tool()]
    compact = json.dumps(tools, sort_keys=True, separators=(",", ":"))
    text = render_chat([{"role": "user", "content": "x"}], tools)
    assert text.startswith(f"<|im_system|>tool_declare<|im_middle|>{compact}<|im_end|>")


def test_nested_definitions_follow_those_met_before() -> None:
    inner = {
        "type": "object",
        "$defs": {"A": {"type": "string"}},
        "properties": {"x": {"$ref": "#/$defs/A"}, "y": {"$ref": "#/$defs/B"}},
    }
    text = body(type="object", properties={"p": inner}, **{"$defs": {"B": {"type": "number"}}})
    assert text is not None
    assert text.startswith("interface B number\ninterface A string\ntype f = ")
    assert "    x?: A,\n    y?: B\n" in text
    # Met only after the reference: unknown there, so the whole is JSON.
    late = {"type": "object", "$defs": {"A": {"type": "string"}}}
    assert body(type="object", properties={"a": {"$ref": "#/$defs/A"}, "b": late}) is None


def test_recursion_between_definitions() -> None:
    defs = {
        "A": {"type": "object", "properties": {"b": {"$ref": "#/$defs/B"}}},
        "B": {"type": "array", "items": {"$ref": "#/$defs/A"}},
    }
    text = body(type="object", properties={"a": {"$ref": "#/$defs/A"}}, **{"$defs": defs})
    assert text == (
        "interface A {\n  b?: B\n}\ninterface B Array<A>\ntype f = (_: {\n  a?: A\n}) => any;"
    )


def test_self_reference_with_definitions_and_extra_keys() -> None:
    text = body(
        type="object",
        properties={"z": {"$ref": "#"}, "a": {"$ref": "#/$defs/D"}},
        required=["z"],
        additionalProperties=False,
        **{"$defs": {"D": {"type": "string", "description": "d"}}},
    )
    assert text == (
        "interface parameters {\n  a?: D,\n  z: parameters\n}\n// d\ninterface D string\n"
        "type f = (_: parameters) => any;"
    )


def test_keys_that_are_not_strings() -> None:
    text = body(type="object", properties={2: {"type": "string"}, True: {}, None: {}})
    assert text == "type f = (_: {\n  2?: string,\n  null?: any,\n  true?: any\n}) => any;"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("family", ["k2", "k2.5"])
def test_deep_schemas_are_refused_in_words(family: str) -> None:
    user = [{"role": "user", "content": "x"}]
    levels = (MAX_DEPTH - 4) // 2
    assert "a?: string" in render_chat(user, [tool(**deep(levels))])
    for more in (levels + 1, 10_000):
        with pytest.raises(TokenizerError, match=f"tools are nested more than {MAX_DEPTH} deep"):
            render_chat(user, [tool(**deep(more))], family=family)
    arguments: list[Any] = []
    for _ in range(10_000):
        arguments = [arguments]
    calls = [{"id": "f:0", "function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(TokenizerError, match="arguments are nested more"):
        render_chat([{"role": "assistant", "tool_calls": calls}], family=family)


KEYS = st.sampled_from(
    ["type", "properties", "items", "enum", "anyOf", "oneOf", "$ref", "$defs", "required"]
    + ["default", "description", "additionalProperties", "minimum", "pattern", "a", "const"]
)
VALUES = st.recursive(
    st.sampled_from(["string", "object", "array", "integer", "#", "#/$defs/a", "a"])
    | st.none()
    | st.booleans()
    | st.floats()
    | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_no_schema_crashes(schema: dict[str, Any]) -> None:
    for family in ("k2", "k2.5"):
        text = render_chat([{"role": "user", "content": "x"}], [tool(**schema)], family=family)
        assert text.startswith("<|im_system|>tool_declare<|im_middle|>")


def large_tools(size: int) -> list[dict[str, Any]]:
    """A tool list of about `size` bytes of JSON, made of words in several scripts."""
    draw = random.Random(5)
    words = ["returns", "the", "path", "of", "a", "file", "or", "nothing", "北京", "naïve", "x_y"]
    tools: list[dict[str, Any]] = []
    total = 0
    while total < size:
        prose = " ".join(draw.choices(words, k=30))
        properties = {
            f"p{i}": {"type": draw.choice(["string", "integer"]), "description": prose}
            for i in range(8)
        }
        one = tool(type="object", properties={"o": {"type": "object", "properties": properties}})
        one["function"] |= {"name": f"tool_{len(tools)}", "description": prose}
        tools.append(one)
        total += len(json.dumps(one, ensure_ascii=False).encode())
    return tools


@needs(DATA)
@pytest.mark.parametrize("family", ["k2.5", "k2-thinking"])
def test_a_large_tool_list_is_quick(family: str) -> None:
    kimi = Tokenizer.from_folder(DATA)
    tools = large_tools(200_000)
    user = [{"role": "user", "content": "x"}]
    start = time.perf_counter()
    ids = encode_chat(kimi, user, tools, family=family)
    seconds = time.perf_counter() - start
    print(
        f"{family}: {len(json.dumps(tools))} characters of tools, {len(ids)} ids, {seconds:.3f} s"
    )
    assert len(ids) > 30_000
    assert seconds < 1.0  # seen: 0.02 to 0.05
