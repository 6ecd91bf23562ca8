"""The editors' schema accepts what the reader accepts, and nothing else."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml

from semel.policy.model import Policy, PolicyFile, key_schema, policy_schema
from semel.policy.reader import PolicyInvalid, Schema, schema_at
from semel.policy.sections import ConsumerPolicy, Section, TopicPolicy
from tests.unit.policy.policy_texts import TEMPLATE, merged, text_of

SCHEMA = policy_schema()


def accepts(schema: Mapping[str, Any], value: Any) -> bool:
    """Check *value* by the words that our schema uses, and by no others."""
    return all(CHECKS[word](wanted, value, schema) for word, wanted in schema.items())


def _is(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "number": int | float,
        "boolean": bool,
    }
    return isinstance(value, kinds[kind])


def _additional(wanted: Any, value: Any, schema: Mapping[str, Any]) -> bool:
    if not isinstance(value, dict):
        return True
    others = [v for k, v in value.items() if k not in schema.get("properties", {})]
    return not others if wanted is False else all(accepts(wanted, other) for other in others)


def _follow(reference: str) -> Mapping[str, Any]:
    found: Any = SCHEMA
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


CHECKS: dict[str, Any] = {
    "$schema": lambda *_: True,
    "$defs": lambda *_: True,
    "title": lambda *_: True,
    "description": lambda *_: True,
    "default": lambda *_: True,
    "examples": lambda *_: True,
    "x-default": lambda *_: True,
    "$ref": lambda wanted, value, _: accepts(_follow(wanted), value),
    "type": lambda wanted, value, _: _is(wanted, value),
    "enum": lambda wanted, value, _: any(type(w) is type(value) and w == value for w in wanted),
    "const": lambda wanted, value, _: type(wanted) is type(value) and wanted == value,
    "allOf": lambda wanted, value, _: all(accepts(one, value) for one in wanted),
    "anyOf": lambda wanted, value, _: any(accepts(one, value) for one in wanted),
    "pattern": lambda wanted, value, _: not isinstance(value, str) or re.search(wanted, value),
    "minLength": lambda wanted, value, _: not isinstance(value, str) or len(value) >= wanted,
    "minimum": lambda wanted, value, _: not _number(value) or value >= wanted,
    "maximum": lambda wanted, value, _: not _number(value) or value <= wanted,
    "exclusiveMinimum": lambda wanted, value, _: not _number(value) or value > wanted,
    "required": lambda wanted, value, _: not isinstance(value, dict) or {*wanted} <= value.keys(),
    "properties": lambda wanted, value, _: (
        not isinstance(value, dict)
        or all(accepts(wanted[key], one) for key, one in value.items() if key in wanted)
    ),
    "additionalProperties": _additional,
    "propertyNames": lambda wanted, value, _: (
        not isinstance(value, dict)
        or all(isinstance(key, str) and accepts(wanted, key) for key in value)
    ),
    "items": lambda wanted, value, _: (
        not isinstance(value, list) or all(accepts(wanted, one) for one in value)
    ),
    "uniqueItems": lambda _, value, __: (
        not isinstance(value, list) or len({json.dumps(one) for one in value}) == len(value)
    ),
}


def reader_accepts(text: str) -> bool:
    try:
        Policy.parse(text)
    except PolicyInvalid:
        return False
    return True


def verdicts(consumer: Any, topic: Any) -> set[bool]:
    """Return what reader and schema say of one document."""
    text = text_of(consumer, topic)
    return {reader_accepts(text), accepts(SCHEMA, yaml.safe_load(text))}


def sections_in(annotation: Any) -> Iterator[tuple[type[Section], tuple[str, ...]]]:
    """Yield the section that a field's type has, and the steps to it: ``*`` for a list or map."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation, ()
    for inner in get_args(annotation):
        step = ("*",) if get_origin(annotation) in (tuple, dict) else ()
        yield from ((section, (*step, *rest)) for section, rest in sections_in(inner))


def every_key(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of the model, sections included."""
    for field in section.model_fields.values():
        here = (*path, str(field.alias))
        yield here
        for inner, rest in sections_in(field.annotation):
            yield from every_key(inner, (*here, *rest))


SCHEMAS = {
    TopicPolicy: key_schema(("deliverySemantics", "topics", "t")),
    ConsumerPolicy: key_schema(("deliverySemantics", "consumers", "c")),
}


def example_of(schema: Schema) -> Any:
    """Return a value as a file may have it."""
    if "examples" in schema:
        return schema["examples"][0]
    if "enum" in schema or "const" in schema:
        return schema.get("enum", [schema.get("const")])[0]
    if "items" in schema:
        return [example_of(schema["items"])]
    if "properties" in schema:
        return required_in(schema) or {
            name: example_of(inner) for name, inner in [*schema["properties"].items()][:1]
        }
    assert schema["type"] == "boolean"
    return True


def required_in(schema: Schema) -> dict[str, Any]:
    return {name: example_of(schema["properties"][name]) for name in schema.get("required", ())}


def required_around(schema: Schema, path: tuple[str, ...]) -> dict[str, Any]:
    """Return the section's required keys at every step of *path*."""
    found = required_in(schema)
    inner = schema["properties"][path[0]]
    if len(path) > 1:
        found[path[0]] = required_around(inner, path[1:])
    return found


def at(section: type, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Make a section of this kind with one value at *path*."""
    nested = value
    for step in reversed(path):
        nested = {step: nested}
    return merged(required_around(SCHEMAS[section], path), nested)


KEYS = [
    pytest.param(
        section,
        path,
        ["t"] if path == ("topics",) else example_of(schema_at(SCHEMAS[section], path)),
        id=f"{section.__name__}-{'.'.join(path)}",
    )
    for section in SCHEMAS
    for path in every_key(section)
    if "*" not in path
]

WRONG = [{"oops": 1}, [[1]], "", "oops\x01", -7, 2.5, 1000.0, "7 days", math.nan, 10**30]


def judge(section: type, body: dict[str, Any]) -> set[bool]:
    return verdicts({}, body) if section is TopicPolicy else verdicts(body, {"key": "id"})


@pytest.mark.parametrize(("section", "path", "example"), KEYS)
def test_both_accept_the_example_of_every_key(section, path, example):
    assert judge(section, at(section, path, example)) == {True}


@pytest.mark.parametrize(("section", "path", "example"), KEYS)
def test_both_refuse_an_unknown_key_beside_every_key(section, path, example):
    body = at(section, path, example)
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    inner[f"{path[-1]}x"] = 1

    assert judge(section, body) == {False}


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize(("section", "path", "example"), KEYS)
def test_both_say_the_same_of_odd_values(section, path, example, value):
    assert len(judge(section, at(section, path, value))) == 1


@pytest.mark.parametrize("value", [0, -1, 1, 5, 5.0, math.inf, -math.inf, True, "5", -2])
def test_both_say_the_same_of_numbers_of_attempts(value):
    assert len(judge(ConsumerPolicy, {"retry": {"maxAttempts": value}})) == 1


@pytest.mark.parametrize(
    "text",
    [
        "a: 1",
        "[]",
        "deliverySemantics: {}",
        "deliverySemantics: []",
        "deliverySemantics: {topics: [], consumers: {}}",
        "deliverySemantics: {topics: {'': {}}}",
        "deliverySemantics: {consumer: {}}",
        TEMPLATE,
    ],
)
def test_both_say_the_same_of_whole_documents(text):
    assert reader_accepts(text) == accepts(SCHEMA, yaml.safe_load(text))


def test_the_schema_has_the_readers_keys_and_no_others():
    found = dict(schema_keys(SCHEMA, ()))

    assert set(found) == {*every_key(PolicyFile)}


def schema_keys(schema: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    for one in (schema, *schema.get("allOf", ())):
        if "$ref" in one:
            schema = _follow(one["$ref"])
    for name, inner in schema.get("properties", {}).items():
        yield (*path, name), inner
        yield from schema_keys(inner, (*path, name))
    for step in ("items", "additionalProperties"):
        if isinstance(schema.get(step), dict):
            yield from schema_keys(schema[step], (*path, "*"))


def test_the_schema_is_of_the_draft_that_it_names_and_is_plain_json():
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def test_every_key_is_explained():
    silent = [
        path
        for path in every_key(PolicyFile)
        if not key_schema(path).get("description", "").endswith(".")
    ]

    assert silent == []


def test_the_page_about_the_file_shows_every_key():
    page = (Path(__file__).parents[3] / "docs" / "howto" / "policy.md").read_text()
    found = re.search(r'^Path\("full.yaml"\).*?"""\\\n(.*?)"""\)$', page, re.M | re.S)
    assert found
    lines = Policy.parse(found[1]).source.lines
    written = {
        tuple("*" if isinstance(step, int) or n == 2 else step for n, step in enumerate(path))
        for path in lines
    }

    assert {*every_key(PolicyFile)} <= written
