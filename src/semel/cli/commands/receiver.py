"""`semel receiver check`: does a receiver of HTTP sinks keep the contract?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from semel.cli.answer import Answer, answering
from semel.cli.options import option
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Rows, Shape, counted, items, red
from semel.errors import Misuse, reason_of


@dataclass(frozen=True, slots=True)
class KeptRule:
    """One rule of the contract, and whether the receiver keeps it."""

    rule: str
    kept: bool
    reason: str
    """What the receiver did instead; empty if it keeps the rule."""


@dataclass(frozen=True, slots=True)
class ReceiverReport:
    """The answer of `semel receiver check`."""

    receiver: str
    """Its URL."""

    rules: list[KeptRule]

    @property
    def needs_attention(self) -> bool:
        """Return whether a rule is broken."""
        return not all(one.kept for one in self.rules)


def _said(kept: bool) -> str:
    return "kept" if kept else "broken"


RULE = Shape(
    KeptRule,
    Field("rule", head="rule"),
    Field("kept", head="", cell=_said, style=lambda kept: "green" if kept else "bold red"),
    Field("reason"),
)


@command("receiver check", answering, ReceiverReport)
def check(
    answer: Answer,
    *,
    url: Annotated[str, typer.Argument(help="Where the receiver is.", metavar="URL")],
    header: Annotated[
        list[str] | None,
        option("--header", "A header for every request; repeatable.", "'NAME: VALUE'"),
    ] = None,
    ca_file: Annotated[
        str | None, option("--ca-file", "The certificates that TLS trusts.", "FILE")
    ] = None,
) -> None:
    """Check by requests alone that a receiver keeps the contract of two phases.

    It sends rows of its own, with an id and a text, which stay where the receiver puts them: check
    one whose rows do not matter.  Exit code 1: a rule is broken.

    Example: semel receiver check https://entries.example.com/semel
    --header "Authorization: Bearer $TOKEN"
    """
    from semel.testing import ReceiverContract

    headers = dict(map(_pair, header or ()))
    for value in headers.values():
        answer.hide(value)
    there = {"url": url, "headers": partial(dict, headers), "ca_file": ca_file}
    contract: Any = type("ReceiverAtUrl", (ReceiverContract,), there)
    # The answer to one question first: without it every rule would wait for its own.
    contract().expect(200, "GET", "/scopes")
    broken: Mapping[str, BaseException] = contract.violations()
    rules = [
        KeptRule(
            _sentence(name), name not in broken, reason_of(broken[name]) if name in broken else ""
        )
        for name in contract.rules()
    ]
    answer.reply(ReceiverReport(url, rules), _lines)


def _pair(header: str) -> tuple[str, str]:
    name, colon, value = header.partition(":")
    if not colon or not name.strip():
        raise Misuse("--header is written NAME: VALUE")
    return name.strip(), value.strip()


def _sentence(rule: str) -> str:
    return rule.removeprefix("test_").replace("_", " ")


def _lines(report: ReceiverReport) -> Iterator[Line | Rows]:
    yield RULE.table(report.rules)
    broken = [f"{one.rule}: {one.reason}" for one in report.rules if not one.kept]
    yield from items(red("broken"), broken)
    yield f"{report.receiver}: {counted(len(report.rules), 'rule')}, {len(broken)} broken"
