"""How a dataclass says which keys of the file its fields are.

    max_attempts: Annotated[int, Key("How often a message is tried.", Attempts())] = 5

The key's name is the field's in camel case, and its kind follows from the
field's type, where nothing else is said.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import timedelta
from enum import StrEnum
from functools import cache
from typing import Any, Protocol, Union, get_args, get_origin, get_type_hints

from semel.policy.document import Entries, Node, Notes
from semel.policy.kinds import Choice, Duration, Flag, Kind, Text, refuse
from semel.policy.problems import Path, nearest


@dataclass(frozen=True, slots=True)
class Key:
    """What a field means in the file."""

    meaning: str
    kind: Kind | None = None
    default: str = ""
    """The default in words, where it follows from other keys."""

    name: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """One key of a section."""

    name: str
    attribute: str
    kind: Kind
    meaning: str
    default: Any
    """`dataclasses.MISSING` where the key is required."""

    default_words: str

    @property
    def required(self) -> bool:
        """Tell whether the section is invalid without it."""
        return self.default is MISSING

    @property
    def default_shown(self) -> str:
        """Say what holds where the file says nothing."""
        if self.required:
            return "required"
        if self.default_words:
            return self.default_words
        return "-" if self.default is None else self.kind.words(self.default)


@cache
def keys_of(section: type) -> Mapping[str, Spec]:
    """Return the keys of a section, by name, in the order of its fields."""
    hints = get_type_hints(section, include_extras=True)
    return {
        spec.name: spec
        for field in fields(section)
        for key in getattr(hints[field.name], "__metadata__", ())
        if isinstance(key, Key)
        for spec in [_spec(field, key, get_args(hints[field.name])[0])]
    }


def _spec(field: Any, key: Key, hint: Any) -> Spec:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    kind = key.kind or kind_of(hint)
    name = key.name or camel_case(field.name)
    return Spec(name, field.name, kind, key.meaning, default, key.default)


def camel_case(name: str) -> str:
    """Turn a field's name into the file's."""
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def kind_of(hint: Any) -> Kind:
    """Return the kind that a type has by itself."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (one for one in get_args(hint) if one is not types.NoneType)
    if is_dataclass(hint) and isinstance(hint, type):
        return Section(hint)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Choice({member.value: member for member in hint})
    by_type: Mapping[Any, Kind] = {bool: Flag(), str: Text(), timedelta: Duration()}
    return by_type[hint]


class Contradicts(Protocol):
    """A section whose keys can contradict each other."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield the key and what is wrong about it."""
        ...


@dataclass(frozen=True, slots=True)
class Section:
    """Keys and values that a dataclass describes."""

    of: type

    @property
    def expects(self) -> str:
        """Name the keys."""
        return f"the keys {', '.join(keys_of(self.of))}"

    @property
    def example(self) -> Any:
        """The required keys, or the first one."""
        specs = list(keys_of(self.of).values())
        shown = [spec for spec in specs if spec.required] or specs[:1]
        return {spec.name: spec.kind.example for spec in shown}

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the dataclass, without the values that are wrong."""
        if not isinstance(node, Entries):
            return refuse(self, node, at, notes)
        before = len(notes.problems)
        specs = keys_of(self.of)
        values: dict[str, Any] = {}
        for key, value in node.entries:
            spec = specs.get(key.value) if isinstance(key.value, str) else None
            if spec is None:
                self._unknown(str(key.value), key.line, at, notes)
                continue
            place = (*at, spec.name)
            notes.lines[place] = key.line
            values[spec.attribute] = spec.kind.read(value, place, notes)
        for spec in specs.values():
            if spec.required and spec.attribute not in values:
                values[spec.attribute] = None
                notes.wrong((*at, spec.name), node.line, "the key is missing", spec.kind.expects)
        made = self.of(**values)
        if len(notes.problems) == before and hasattr(made, "contradictions"):
            self._check(made, node, at, notes)
        return made

    def words(self, value: Any) -> str:
        """Write the keys that are not as by default."""
        said = [
            f"{spec.name}: {spec.kind.words(found)}"
            for spec in keys_of(self.of).values()
            if (found := getattr(value, spec.attribute)) != spec.default and found is not None
        ]
        return "{" + ", ".join(said) + "}" if said else "-"

    def schema(self) -> dict[str, Any]:
        """State an object with these keys and no others."""
        specs = keys_of(self.of).values()
        stated: dict[str, Any] = {
            "type": "object",
            "properties": {spec.name: _described(spec) for spec in specs},
            "additionalProperties": False,
        }
        required = [spec.name for spec in specs if spec.required]
        return stated | ({"required": required} if required else {})

    def _unknown(self, key: str, line: int, at: Path, notes: Notes) -> None:
        here = list(keys_of(self.of))
        meant = nearest(key, here) or deeper(self.of, key)
        notes.wrong((*at, key), line, "unknown key", f"one of {', '.join(here)}", meant)

    def _check(self, made: Contradicts, node: Entries, at: Path, notes: Notes) -> None:
        for key, what in made.contradictions():
            place = (*at, key)
            notes.wrong(place, notes.lines.get(place, node.line), what)


def deeper(section: type, key: str) -> str:
    """Return the path below *section* at which *key* is known; empty where nowhere."""
    for spec in keys_of(section).values():
        if isinstance(spec.kind, Section):
            inner = keys_of(spec.kind.of)
            if found := (key if key in inner else deeper(spec.kind.of, key)):
                return f"{spec.name}.{found}"
    return ""


def _described(spec: Spec) -> dict[str, Any]:
    stated = spec.kind.schema() | {"description": spec.meaning}
    if not spec.required and not spec.default_words and isinstance(spec.default, bool | int | str):
        stated["default"] = spec.default
    return stated


@dataclass(frozen=True, slots=True)
class MapOf:
    """Sections by names that the file gives."""

    each: Section
    named: str
    """What the names are names of."""

    @property
    def expects(self) -> str:
        """Say what the names are."""
        return f"{self.named} by name, each with {self.each.expects}"

    @property
    def example(self) -> Any:
        """One of them."""
        return {f"some-{self.named.removesuffix('s')}": self.each.example}

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return a dictionary."""
        if not isinstance(node, Entries):
            return refuse(self, node, at, notes)
        found = {}
        for key, value in node.entries:
            if not isinstance(key.value, str) or not key.value:
                shown = repr(key.value)
                notes.wrong(
                    at, key.line, f"the name {shown} is no text", suggestion=f'"{key.value}"'
                )
                continue
            place = (*at, key.value)
            notes.lines[place] = key.line
            found[key.value] = self.each.read(value, place, notes)
        return found

    def words(self, value: Any) -> str:
        """Write the names."""
        return ", ".join(value) or "none"

    def schema(self) -> dict[str, Any]:
        """State an object of sections."""
        return {
            "type": "object",
            "additionalProperties": self.each.schema(),
            "propertyNames": {"minLength": 1},
        }
