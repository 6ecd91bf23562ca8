"""From YAML to plain values whose lines are known, and from pydantic's errors to our sentences.

    text ──▶ values ──▶ pydantic ──▶ model
               └ lines     └ errors ──▶ PolicyProblem: line, key, what was expected, what was meant

The only module that uses the YAML library.  Nothing is constructed from tags:
a text cannot name a Python class, and an alias is never copied.  What a
key expects is read from the JSON Schema, so messages and editors agree.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Final, TypeAlias

import yaml
from pydantic import ValidationError
from yaml.constructor import SafeConstructor

from semel.errors import Misuse

Path: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a value; a number is a place in a list."""

Schema: TypeAlias = Mapping[str, Any]
"""A JSON Schema whose references are `expanded`."""


def path_words(path: Path) -> str:
    """Write a path as people do: ``consumers.mailer.sideEffects[0].name``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that *word* most likely stands for; empty where none is near."""
    by_lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else ""


@dataclass(frozen=True, slots=True)
class PolicyProblem:
    """One reason why a policy file is invalid."""

    line: int | None
    """Counts from 1; None where the file as a whole is meant."""

    key: str
    """The path of the key, empty where the text is not even YAML."""

    what: str
    expected: str = ""
    suggestion: str = ""
    """The known word that is nearest to the one that was found."""

    def __str__(self) -> str:
        parts = [self.what]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.suggestion:
            parts.append(f"did you mean {self.suggestion}?")
        return (f"{self.key}: " if self.key else "") + "; ".join(parts)


class PolicyInvalid(Misuse):
    """A policy file cannot be read; nothing of it is in force."""

    def __init__(self, name: str, problems: Sequence[PolicyProblem]) -> None:
        super().__init__(name, tuple(problems))
        self.name = name
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(
            f"{self.name}:{problem.line}: {problem}" if problem.line else f"{self.name}: {problem}"
            for problem in sorted(self.problems, key=lambda problem: problem.line or 0)
        )


class PolicyNameUnknown(Misuse):
    """A policy has no consumer or topic of that name, or the one does not read the other."""

    def __init__(self, what: str, name: str, known: Sequence[str]) -> None:
        super().__init__(what, name, tuple(known))
        self.what = what
        self.name = name
        self.known = tuple(known)

    def __str__(self) -> str:
        near = nearest(self.name, self.known)
        meant = f"; did you mean {near}?" if near else ""
        return f"{self.what} {self.name!r}: known are {', '.join(self.known) or 'none'}{meant}"


def text_of_file(path: FilePath) -> str:
    """Return the text of a policy file.

    Raises:
        PolicyInvalid: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        problem = PolicyProblem(None, "", f"the file cannot be read: {error.strerror}")
        raise PolicyInvalid(str(path), [problem]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = PolicyProblem(line, "", "the file is not UTF-8")
        raise PolicyInvalid(str(path), [problem]) from error


def expanded(part: Any, defs: Mapping[str, Any]) -> Any:
    """Return a JSON Schema with every reference replaced by what it refers to."""
    if isinstance(part, list):
        return [expanded(one, defs) for one in part]
    if not isinstance(part, Mapping):
        return part
    made = {key: expanded(value, defs) for key, value in part.items() if key not in _REFERRING}
    # Before pydantic 2.10, a reference with a description stands in an allOf of its own.
    for referring in (part, *part.get("allOf", ())):
        if "$ref" in referring:
            made = expanded(defs[referring["$ref"].rpartition("/")[2]], defs) | made
    return made


_REFERRING: Final = ("$ref", "$defs", "allOf")


def schema_at(schema: Schema, path: Path) -> Schema:
    """Return the part of a schema that describes the value at *path*."""
    for step in path:
        known = schema.get("properties", {})
        schema = known.get(step) or schema.get("additionalProperties") or schema["items"]
    return schema


def expects(schema: Schema) -> str:
    """Say in a few words what may stand where *schema* holds."""
    if words := choices_of(schema):
        return f"one of {', '.join(words)}"
    if "properties" in schema:
        return f"the keys {', '.join(schema['properties'])}"
    if "items" in schema:
        return f"a list, each item {expects(schema['items'])}"
    if isinstance(each := schema.get("additionalProperties"), Mapping):
        return f"{schema['title']}, each with {expects(each)}"
    if schema.get("type") == "boolean":
        return "true or false"
    if schema.get("type") == "integer":
        return f"a whole number of {schema['minimum']} or more"
    return str(schema["title"])


def choices_of(schema: Schema) -> list[str]:
    """Return the words that *schema* allows; none where it is no choice."""
    listed = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    return [word if isinstance(word, str) else str(word).lower() for word in listed]


class Entries(dict[Any, Any]):
    """A mapping of the file, with its line and, by key, those of the key and of its value."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[Any, tuple[int, int]] = {}

    def add(self, key: Any, value: Any, lines: tuple[int, int]) -> None:
        """Add a value with the line of its key and its own."""
        self[key], self.lines[key] = value, lines


class Items(list[Any]):
    """A list of the file, with its line and, by place, those of its items."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[int, tuple[int, int]] = {}


def lines_in(values: Any, at: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield the path and the line of every key and item; of a valid file, as aliases multiply."""
    for step, (line, _) in getattr(values, "lines", {}).items():
        yield (*at, step), line
        yield from lines_in(values[step], (*at, step))


class Nothing:
    """The value of a key behind which nothing stands.  No type accepts it, unlike None."""


def found_words(value: Any) -> str:
    """Describe a value of the file."""
    match value:
        case Nothing():
            return "nothing stands here"
        case bool():
            return f"found {str(value).lower()}"
        case str():
            return f"found the text {value!r}"
        case Items():
            return "found a list"
        case Entries():
            return "found keys and values"
        case _:
            return f"found the number {value}"


_NAME: Final = "[key]"
"""The last step of pydantic's path to the name of an entry."""

PARTS: Final = "parts"
"""The type of a validator's error about several keys or items; its context has (step, sentence)."""


class Document:
    """The values of one policy file, and every problem with its line."""

    def __init__(self, text: str, schema: Schema) -> None:
        self.problems: list[PolicyProblem] = []
        self._schema = schema
        self.values = self._read(text)

    def wrong(
        self, at: Path, line: int | None, what: str, expected: str = "", suggestion: str = ""
    ) -> None:
        """Add a problem."""
        self.problems.append(PolicyProblem(line, path_words(at), what, expected, suggestion))

    def line_of(self, path: Path) -> int | None:
        """Return the line of the key or item at *path*."""
        around, _ = self._found(path[:-1])
        lines: tuple[int, int] = getattr(around, "lines", {}).get(path[-1], (None, None))
        return lines[0]

    def add_errors(self, invalid: ValidationError) -> None:
        """Translate what pydantic found into problems of this file."""
        errors = invalid.errors(include_url=False, include_input=False)
        # Unknown keys first: a misspelt key explains the one that is missing.
        for error in sorted(errors, key=lambda error: error["type"] != "extra_forbidden"):
            at, kind, context = error["loc"], error["type"], error.get("ctx", {})
            if kind == "extra_forbidden":
                known, key = schema_at(self._schema, at[:-1]), str(at[-1])
                meant = nearest(key, known["properties"]) or deeper(known, key)
                expected = f"one of {', '.join(known['properties'])}"
                self.wrong(at, self.line_of(at), "unknown key", expected, meant)
            elif at[-1:] == (_NAME,):
                self.wrong(at[:-2], self.line_of(at[:-1]), f"the name {at[-2]!r} is not text")
            elif kind == "missing":
                _, line = self._found(at[:-1])
                self.wrong(at, line, "the key is missing", expects(schema_at(self._schema, at)))
            elif kind == PARTS:
                _, line = self._found(at)
                for step, what in context["found"]:
                    self.wrong((*at, step), self.line_of((*at, step)) or line, what)
            else:
                self._wrong_value(at, kind, context.get("meant", ""))

    def _wrong_value(self, at: Path, kind: str, meant: str) -> None:
        value, line = self._found(at)
        schema = schema_at(self._schema, at)
        expected = expects(schema)
        if isinstance(value, str):
            meant = meant or nearest(value, choices_of(schema))
        elif isinstance(value, int | float):
            if kind == "string_type":
                meant = "the same in quotes"
            limits = [one.get("maximum") for one in (schema, *schema.get("anyOf", ()))]
            expected += "".join(
                f", and at most {most:.0f}" for most in limits if most and value > most
            )
        self.wrong(at, line, found_words(value), expected, meant)

    def _found(self, path: Path) -> tuple[Any, int]:
        """Return the value at *path*, and the line where it begins."""
        value, line = self.values, getattr(self.values, "line", 1)
        for step in path:
            value, (_, line) = value[step], value.lines[step]
        return value, line

    def _read(self, text: str) -> Any:
        """Return the values of *text*; None, and a problem, where it is no single document."""
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            return None if root is None else _Tree(self).value(root, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            said = ", ".join(part for part in (error.context, error.problem) if part)
            self.wrong((), mark.line + 1 if mark else 1, f"not YAML: {said}")
        except yaml.YAMLError as error:
            self.wrong((), 1, f"not YAML: {' '.join(str(error).split())}")
        except RecursionError:
            self.wrong((), 1, "not a policy: nested too deeply")
        return None


def deeper(schema: Schema, key: Any) -> str:
    """Return the path below *schema* at which *key* is known; empty where nowhere."""
    for name, inner in schema.get("properties", {}).items():
        if found := (key if key in inner.get("properties", ()) else deeper(inner, key)):
            return f"{name}.{found}"
    return ""


_TAG = "tag:yaml.org,2002:"


class _Tree:
    """Turns YAML's nodes into values; a node that several aliases name becomes one value."""

    def __init__(self, document: Document) -> None:
        self._wrong = document.wrong
        self._open: set[int] = set()
        self._done: dict[int, Any] = {}

    def value(self, node: yaml.Node, at: Path) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, at)
        if id(node) in self._done:
            return self._done[id(node)]
        if id(node) in self._open:
            self._wrong(at, _line(node), "an alias contains itself")
            return Nothing()
        self._open.add(id(node))
        is_mapping = isinstance(node, yaml.MappingNode)
        made = self._mapping(node, at) if is_mapping else self._list(node, at)
        self._open.discard(id(node))
        self._done[id(node)] = made
        return made

    def _list(self, node: yaml.Node, at: Path) -> Items:
        made = Items(_line(node))
        for number, item in enumerate(node.value):
            made.append(self.value(item, (*at, number)))
            made.lines[number] = (_line(item), _line(item))
        return made

    def _mapping(self, node: yaml.Node, at: Path) -> Entries:
        made, seen, merged = Entries(_line(node)), dict[str, int](), []
        for key_node, value_node in node.value:
            line, name = _line(key_node), key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self._wrong(at, line, "a key is a list or a mapping", "text")
            elif key_node.tag == f"{_TAG}merge":
                merged.append(value_node)
            elif name in seen:
                self._wrong((*at, name), line, f"the key stands in line {seen[name]} already")
            else:
                seen[name] = line
                if not isinstance(key := self._scalar(key_node, at), str | Nothing):
                    what = f"the name {key!r} is not text"
                    self._wrong(at, line, what, suggestion=f'"{name}"')
                made.add(name, self.value(value_node, (*at, name)), (line, _line(value_node)))
        for value_node in merged:
            self._merge(self.value(value_node, at), made, _line(value_node), at)
        return made

    def _merge(self, source: Any, into: Entries, line: int, at: Path) -> None:
        if isinstance(source, Entries):
            for key in [key for key in source if key not in into]:
                into.add(key, source[key], source.lines[key])
        elif isinstance(source, Items):
            for item in source:
                self._merge(item, into, line, at)
        else:
            self._wrong(at, line, "<< has nothing to merge", "an alias of a mapping")

    def _scalar(self, node: yaml.ScalarNode, at: Path) -> Any:
        text = str(node.value)
        try:
            match node.tag.removeprefix(_TAG):
                case "null":
                    return Nothing()
                case "bool":
                    return SafeConstructor.bool_values[text.lower()]
                case "int":
                    return SafeConstructor().construct_yaml_int(node)
                case "float":
                    return SafeConstructor().construct_yaml_float(node)
                # Dates are none of a policy's values, and "=" is an ordinary text.
                case "str" | "timestamp" | "value":
                    return text
        except (ValueError, KeyError):
            pass  # The value is not of the kind that its tag says.
        self._wrong(at, _line(node), f"the tag {node.tag} is not read here", "a plain value")
        return text


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
