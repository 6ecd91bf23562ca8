"""The keys of every command's JSON document, read from the reports themselves.

`docs/reference/json.md` is this module's `page`; a test compares the two.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from semel.cli.reports.adoption import AdoptReport
from semel.cli.reports.audit import (
    AuditList,
    AuditVerification,
    EraseReport,
    RetentionReport,
)
from semel.cli.reports.claims import ClaimList
from semel.cli.reports.completeness import CompletenessReport
from semel.cli.reports.db import TablesChange, TablesCheck
from semel.cli.reports.deadletters import LetterList, LetterReport
from semel.cli.reports.doctor import DoctorReport
from semel.cli.reports.explanation import ExplainReport, GapList, GapsClosed
from semel.cli.reports.guarantees import LintReport
from semel.cli.reports.history import HistoryReport
from semel.cli.reports.ledger import BackupReport, LedgerCheck, RestoreReport
from semel.cli.reports.messages import ActReport
from semel.cli.reports.outbox import OutboxActs, OutboxStatus, ParkedList
from semel.cli.reports.parking import (
    FixReport,
    KeyList,
    RequestAnswer,
    RequestList,
    WaitingList,
    WaitingReport,
)
from semel.cli.reports.policy import PolicyLintReport, SchemaReport
from semel.cli.reports.policy_show import PolicyShowReport
from semel.cli.reports.recovery import Recovered, RecoveryPlan
from semel.cli.reports.replays import DryRunReport, ReplayAnswer, ReplayList
from semel.cli.reports.resolution import ResolveReport
from semel.cli.reports.status import StatusReport
from semel.cli.reports.verification import VerifyReport

REPORTS: Final[Mapping[str, type]] = {
    "status": StatusReport,
    "history": HistoryReport,
    "doctor": DoctorReport,
    "recover --dry-run": RecoveryPlan,
    "recover": Recovered,
    "verify": VerifyReport,
    "lint": LintReport,
    "adopt": AdoptReport,
    "cycle resolve": ResolveReport,
    "ledger check": LedgerCheck,
    "ledger backup": BackupReport,
    "ledger restore": RestoreReport,
    "policy lint": PolicyLintReport,
    "policy show": PolicyShowReport,
    "policy schema": SchemaReport,
    "db create | upgrade": TablesChange,
    "db check": TablesCheck,
    "dlq list": LetterList,
    "dlq show": LetterReport,
    "dlq retry | park | skip": ActReport,
    "dlq delete": RequestAnswer,
    "parking list": WaitingList,
    "parking show": WaitingReport,
    "parking keys": KeyList,
    "parking classify | release | skip": ActReport,
    "parking fix": FixReport,
    "parking requests": RequestList,
    "parking delete | approve": RequestAnswer,
    "outbox status": OutboxStatus,
    "outbox parked": ParkedList,
    "outbox retry | drop": OutboxActs,
    "audit list": AuditList,
    "audit verify": AuditVerification,
    "erase": EraseReport,
    "retention": RetentionReport,
    "replay run | status | stop | abandon": ReplayAnswer,
    "replay dry-run": DryRunReport,
    "replay list": ReplayList,
    "explain": ExplainReport,
    "claims list": ClaimList,
    "gaps list": GapList,
    "gaps close": GapsClosed,
    "audit completeness": CompletenessReport,
}
"""What each command answers with."""

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
        sections.append(f"## `semel {command} --json`\n\n{_table(report)}")
        parts |= {part.__name__: part for part in _parts(report)}
    for name, part in sorted(parts.items()):
        said = inspect.getdoc(part) or ""
        sections.append(f"## {name}\n\n{said.splitlines()[0]}\n\n{_table(part)}")
    return "\n".join([_HEAD, *sections])


def _table(kind: type) -> str:
    hints, said = get_type_hints(kind), _said(kind)
    lines = ["| key | value | meaning |", "| --- | --- | --- |"]
    lines += [
        f"| `{f.name}` | {_words(hints[f.name])} | {said.get(f.name, '')} |" for f in fields(kind)
    ]
    return "\n".join(lines) + "\n"


def _parts(kind: type) -> Iterator[type]:
    for hint in get_type_hints(kind).values():
        for inner in _classes(hint):
            if is_dataclass(inner):
                yield inner
                yield from _parts(inner)


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for argument in get_args(hint):
        yield from _classes(argument)


def _words(hint: Any) -> str:
    """Say what a value is, in JSON's words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(one) for one in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {_words(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"object of {_words(get_args(hint)[1])}"
    if is_dataclass(hint):
        name = hint.__name__ if isinstance(hint, type) else str(hint)
        return f"[{name}](#{name.lower()})"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{one.value}`" for one in hint)
    named = {str: "text", int: "number", float: "number", bool: "true or false"}
    return "null" if hint is types.NoneType else named.get(hint, "anything")


def _said(kind: type) -> dict[str, str]:
    """Read the sentence below each field."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    said = {}
    for node, after in pairwise(body.body):
        match node, after:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                said[name] = " ".join(text.split())
    return said
