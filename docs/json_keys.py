"""The keys of every command's JSON document, read from the answers and their shapes.

`docs/reference/json.md` is this module's `page`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from semel.cli.app import GROUPS, PANELS
from semel.cli.preamble import COMMANDS
from semel.cli.render import WRITERS, Field, Shape


def _documents() -> Iterator[tuple[str, type, tuple[str, ...]]]:
    """Name the documents; commands of a group that answer alike share one: ``dlq park | skip``."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    order = [*PANELS, *GROUPS]
    for name in sorted(COMMANDS, key=lambda name: order.index(name.partition(" ")[0])):
        command, group = COMMANDS[name], name.partition(" ")[0]
        if command.rehearsal is not None:
            alike[group, command.rehearsal, command.adds] = [f"{name} --dry-run"]
        alike.setdefault((group, command.report, command.adds), []).append(name)
    for (group, report, adds), (first, *others) in alike.items():
        names = (first, *(name.removeprefix(f"{group} ") for name in others))
        yield " | ".join(names), report, adds


REPORTS: Final[Mapping[str, type]] = {name: report for name, report, _ in _documents()}
"""What each command answers with."""

ADDED: Final[Mapping[str, tuple[str, ...]]] = {name: adds for name, _, adds in _documents() if adds}
"""The keys that each command adds (`Answer.reply`)."""


class Added:
    """The keys that commands add to their answer: what was asked, and by whom."""

    database: str
    """Its URL, without the password."""

    consumer: str
    message_id: str
    outbox: str
    act: str
    """The command."""

    actor: str
    """Who did it."""

    reason: str
    ttl_seconds: float
    """How long claims are kept."""

    shortest_seconds: float
    """The shortest time to live that the windows allow."""


_HEAD: Final = """\
# The JSON of the commands

With `--json` a command prints one document on standard output. It begins with `command`,
`format` (1; keys are only added under one format) and `exit` (the exit code); then come the keys
below, or `error` alone. Times are seconds since 1970, durations seconds. Hashes of rows have
sixteen hex digits, those of payloads and audit entries sixty-four.
"""


def page() -> str:
    """Write the reference page."""
    parts: dict[str, type] = {}
    sections = []
    for command, report in REPORTS.items():
        sections.append(f"## `semel {command} --json`\n\n{_table(keys_of_command(command))}")
        parts |= {part.__name__: part for part in parts_of(report)}
    for name, part in sorted(parts.items()):
        said = inspect.getdoc(part) or ""
        sections.append(f"## {name}\n\n{said.splitlines()[0]}\n\n{_table(keys_of(part))}")
    return "\n".join([_HEAD, *sections])


class Key(NamedTuple):
    """One key of a document."""

    name: str
    hint: Any
    means: str


def keys_of_command(command: str) -> list[Key]:
    """List the keys of a command's document, without those that every document has."""
    added = [_key(Added, Field(name)) for name in ADDED.get(command, ())]
    return [*added, *keys_of(REPORTS[command])]


@cache
def keys_of(kind: type) -> list[Key]:
    """List the keys that a record of this kind has in JSON."""
    writer = WRITERS.get(kind)
    declared = writer.keys if isinstance(writer, Shape) else [Field(f.name) for f in fields(kind)]
    return [_key(kind, field) for field in declared]


def _key(kind: type, field: Field) -> Key:
    of = field.of or field.key
    if callable(of):
        hint, means = get_type_hints(of)["return"], _first_line(of)
    else:
        hint, means = kind, ""
        for name in of.split("."):
            hint, means = _attribute(hint, name)
    return Key(field.key, hint, field.means or means)


def _attribute(kind: Any, name: str) -> tuple[Any, str]:
    """Say what an attribute of a class is, and what it means."""
    found = getattr(kind, name, None)
    if isinstance(found, property):
        return get_type_hints(found.fget)["return"], _first_line(found)
    return get_type_hints(kind)[name], _said(kind).get(name, "")


def _first_line(of: object) -> str:
    return (inspect.getdoc(of) or "").partition("\n")[0]


def _table(keys: Iterable[Key]) -> str:
    lines = ["| key | value | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{key.name}` | {_words(key.hint)} | {key.means} |" for key in keys]
    return "\n".join(lines) + "\n"


def parts_of(kind: type) -> Iterator[type]:
    """Find the records inside a record of this kind, as JSON shows them."""
    for key in keys_of(kind):
        for inner in classes_of(key.hint):
            if is_object(inner):
                yield inner
                yield from parts_of(inner)


def is_object(kind: Any) -> bool:
    """Say whether a value of this kind is an object in JSON."""
    if not isinstance(kind, type):
        return False
    return isinstance(WRITERS.get(kind), Shape) or (is_dataclass(kind) and kind not in WRITERS)


def classes_of(hint: Any) -> Iterator[type]:
    """Find the classes in a type, such as both of ``list[Gap] | None``."""
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for argument in get_args(hint):
        yield from classes_of(argument)


def _words(hint: Any) -> str:
    """Say what a value is, in JSON's words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(one) for one in get_args(hint))
    if get_origin(hint) in (list, tuple, Sequence):
        return f"list of {_words(get_args(hint)[0])}"
    if get_origin(hint) in (dict, Mapping):
        return f"object of {_words(get_args(hint)[1])}"
    if is_object(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if hint in WRITERS:
        return "text"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{one.value}`" if one.value else "empty" for one in hint)
    named = {str: "text", int: "number", float: "number", bool: "true or false"}
    return "null" if hint is types.NoneType else named.get(hint, "anything")


def _said(kind: type) -> dict[str, str]:
    """Read the sentence below each field, in the class and in those it inherits from."""
    said: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        said |= _said_by(one) if one.__module__ != "builtins" else {}
    return said


@cache
def _said_by(kind: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    said = {}
    for node, after in pairwise(body.body):
        match node, after:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                said[name] = " ".join(text.split())
    return said
