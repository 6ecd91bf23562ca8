"""A policy's text as a tree that remembers its lines.

The only module that knows the YAML library.  Nothing is constructed from
tags: a text can name no Python class, and an alias cannot multiply itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from semel.policy.problems import Path, PolicyProblem, path_words

if TYPE_CHECKING:
    import yaml

Plain: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Scalar:
    """One plain value."""

    value: Plain
    line: int


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Entries:
    """Keys with their values, in the order of the text."""

    entries: tuple[tuple[Scalar, Node], ...]
    line: int


Node: TypeAlias = Scalar | Items | Entries


@dataclass(slots=True)
class Notes:
    """What reading a text leaves besides its values: problems, and where each key stands."""

    problems: list[PolicyProblem] = field(default_factory=list)
    lines: dict[Path, int] = field(default_factory=dict)

    def wrong(
        self, at: Path, line: int | None, what: str, expected: str = "", suggestion: str = ""
    ) -> None:
        """Note a problem."""
        self.problems.append(PolicyProblem(line, path_words(at), what, expected, suggestion))


def read_document(text: str, notes: Notes) -> Node | None:
    """Read *text* into a tree; None, and a problem noted, where it is no single YAML document."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if root is None else _Tree(notes).node(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        notes.wrong((), mark.line + 1 if mark else 1, f"not YAML: {said}")
    except yaml.YAMLError as error:
        notes.wrong((), 1, f"not YAML: {' '.join(str(error).split())}")
    except RecursionError:
        notes.wrong((), 1, "not a policy: nested too deeply")
    return None


_TAG = "tag:yaml.org,2002:"


class _Tree:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._open: set[int] = set()
        self._done: dict[int, Node] = {}

    def node(self, raw: yaml.Node, at: Path) -> Node:
        import yaml

        line = raw.start_mark.line + 1
        if isinstance(raw, yaml.ScalarNode):
            return self._scalar(raw, at)
        if id(raw) in self._done:
            return self._done[id(raw)]
        if id(raw) in self._open:
            self._notes.wrong(at, line, "an alias contains itself")
            return Scalar(None, line)
        self._open.add(id(raw))
        made: Node
        if isinstance(raw, yaml.MappingNode):
            made = Entries(tuple(self._entries(raw, at)), line)
        else:
            items = (self.node(item, (*at, number)) for number, item in enumerate(raw.value))
            made = Items(tuple(items), line)
        self._open.discard(id(raw))
        self._done[id(raw)] = made
        return made

    def _entries(self, raw: yaml.MappingNode, at: Path) -> Iterator[tuple[Scalar, Node]]:
        """Yield the own entries, then those of ``<<`` that the own ones leave."""
        import yaml

        seen: dict[Plain, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in raw.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._notes.wrong(at, line, "a key is a list or a mapping", "text")
                continue
            if key_node.tag == f"{_TAG}merge":
                merged.append(value_node)
                continue
            key = self._scalar(key_node, at)
            name = key_node.value
            if name in seen:
                self._notes.wrong((*at, name), line, f"the key stands in line {seen[name]} already")
                continue
            seen[name] = line
            yield key, self.node(value_node, (*at, name))
        for node in merged:
            yield from self._merged(self.node(node, at), at, seen)

    def _merged(
        self, source: Node, at: Path, seen: dict[Plain, int]
    ) -> Iterator[tuple[Scalar, Node]]:
        match source:
            case Entries(entries):
                for key, value in entries:
                    if key.value not in seen:
                        seen[key.value] = key.line
                        yield key, value
            case Items(items):
                for item in items:
                    yield from self._merged(item, at, seen)
            case Scalar(_, line):
                self._notes.wrong(at, line, "<< has nothing to merge", "an alias of a mapping")

    def _scalar(self, raw: yaml.ScalarNode, at: Path) -> Scalar:
        from yaml.constructor import SafeConstructor

        line, text = raw.start_mark.line + 1, str(raw.value)
        try:
            match raw.tag.removeprefix(_TAG):
                case "null":
                    return Scalar(None, line)
                case "bool":
                    return Scalar(SafeConstructor.bool_values[text.lower()], line)
                case "int":
                    return Scalar(SafeConstructor().construct_yaml_int(raw), line)
                case "float":
                    return Scalar(SafeConstructor().construct_yaml_float(raw), line)
                # Dates are none of a policy's values, and "=" is an ordinary text.
                case "str" | "timestamp" | "value":
                    return Scalar(text, line)
        except (ValueError, KeyError):
            pass  # a tag that its own value belies
        self._notes.wrong(at, line, f"the tag {raw.tag} is not read here", "a plain value")
        return Scalar(text, line)
