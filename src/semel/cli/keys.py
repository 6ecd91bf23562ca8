"""The keys of every command's JSON document, read from the answers and their shapes.

`docs/reference/json.md` is this module's `page`; a test compares the two.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

import semel.cli.app  # noqa: F401  the commands declare the shapes of their records
from semel.cli.commands.explain import ClosedGaps, OpenGaps
from semel.cli.commands.policy import PolicySchema
from semel.cli.messages import Request
from semel.cli.render import WRITERS, Field, Shape
from semel.operate.acts import Acts
from semel.operate.adoption import Adoption
from semel.operate.audit import AuditEntries, Verified
from semel.operate.completeness import Completeness
from semel.operate.deadletters import DeadLetterList, LetterInspection
from semel.operate.deletion import OpenRequests
from semel.operate.doctor import Diagnosis
from semel.operate.dryrun import DryRuns
from semel.operate.explain import Explanation, LeasedClaims
from semel.operate.guarantee import PipelineGuarantee
from semel.operate.ledger import Backup, LedgerCheck, Restoration
from semel.operate.outbox import OutboxStatus, ParkedEntries
from semel.operate.parking import Fixed, HeldKeys, Inspection, WaitingList
from semel.operate.recovery import Recovered, RecoveryPlan
from semel.operate.replay import ReplayList, ReplayStatus
from semel.operate.resolution import Resolution
from semel.operate.retention import Erased, Pruned
from semel.operate.status import History, Status
from semel.operate.stores import SchemaChange, SchemaCheck
from semel.operate.verification import Verification
from semel.policy.effective import EffectivePolicies
from semel.policy.lint import Linted

REPORTS: Final[Mapping[str, type]] = {
    "status": Status,
    "history": History,
    "doctor": Diagnosis,
    "recover --dry-run": RecoveryPlan,
    "recover": Recovered,
    "verify": Verification,
    "lint": PipelineGuarantee,
    "adopt": Adoption,
    "cycle resolve": Resolution,
    "ledger check": LedgerCheck,
    "ledger backup": Backup,
    "ledger restore": Restoration,
    "policy lint": Linted,
    "policy show": EffectivePolicies,
    "policy schema": PolicySchema,
    "db create | upgrade": SchemaChange,
    "db check": SchemaCheck,
    "dlq list": DeadLetterList,
    "dlq show": LetterInspection,
    "dlq retry | park | skip": Acts,
    "dlq delete": Request,
    "parking list": WaitingList,
    "parking show": Inspection,
    "parking keys": HeldKeys,
    "parking classify | release | skip": Acts,
    "parking fix": Fixed,
    "parking requests": OpenRequests,
    "parking delete | approve": Request,
    "outbox status": OutboxStatus,
    "outbox parked": ParkedEntries,
    "outbox retry | drop": Acts,
    "audit list": AuditEntries,
    "audit verify": Verified,
    "erase": Erased,
    "retention": Pruned,
    "replay run | status | stop | abandon": ReplayStatus,
    "replay dry-run": DryRuns,
    "replay list": ReplayList,
    "explain": Explanation,
    "claims list": LeasedClaims,
    "gaps list": OpenGaps,
    "gaps close": ClosedGaps,
    "audit completeness": Completeness,
}
"""What each command answers with."""


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


_DATABASE: Final = ("database",)
_ACTED: Final = ("database", "act", "actor", "reason")

ADDED: Final[Mapping[str, tuple[str, ...]]] = {
    "db create | upgrade": _DATABASE,
    "db check": _DATABASE,
    "dlq list": _DATABASE,
    "dlq show": _DATABASE,
    "dlq retry | park | skip": ("consumer", *_ACTED),
    "dlq delete": _DATABASE,
    "parking list": _DATABASE,
    "parking show": _DATABASE,
    "parking keys": _DATABASE,
    "parking fix": ("database", "consumer", "message_id", "actor", "reason"),
    "parking requests": _DATABASE,
    "parking delete | approve": _DATABASE,
    "parking classify | release | skip": ("consumer", *_ACTED),
    "outbox status": _DATABASE,
    "outbox parked": _DATABASE,
    "explain": _DATABASE,
    "claims list": _DATABASE,
    "gaps list": _DATABASE,
    "gaps close": ("database", "actor", "reason"),
    "outbox retry | drop": ("outbox", *_ACTED),
    "audit list": _DATABASE,
    "audit verify": _DATABASE,
    "erase": ("database", "actor", "reason"),
    "retention": ("database", "consumer", "ttl_seconds", "shortest_seconds"),
    "replay run | status | stop | abandon": _DATABASE,
    "replay dry-run": _DATABASE,
    "replay list": _DATABASE,
    "audit completeness": _DATABASE,
}
"""Which of them each command adds (`Answer.reply`)."""

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


def _said_by(kind: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    said = {}
    for node, after in pairwise(body.body):
        match node, after:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                said[name] = " ".join(text.split())
    return said
