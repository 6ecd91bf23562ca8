"""`semel status`, `semel history` and `semel cut`: what the ledger knows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from semel.cli.options import MOST_ROWS, option
from semel.cli.preamble import command, looking
from semel.cli.render import (
    WRITERS,
    Field,
    Line,
    Rows,
    Shape,
    at,
    bold,
    column,
    counted,
    document,
    facts,
    lasting,
    listed,
    pairs,
    red,
    start_of,
)
from semel.cli.target import Target
from semel.errors import Misuse
from semel.operate.status import (
    Cuts,
    Files,
    History,
    ScopeStatus,
    SinkCut,
    SourceEnd,
    Status,
    cuts_of,
    history_of,
    range_words,
    status_of,
)
from semel.pipeline.ledger import AttemptRecord, LedgerAct
from semel.pipeline.txn import Scope


def age_seconds(record: AttemptRecord) -> float:
    """Since it was planned."""
    return max(0.0, time.time() - record.planned_at)


def staging_seconds(record: AttemptRecord) -> float | None:
    """From the plan to the decision."""
    return None if record.decided_at is None else max(0.0, record.decided_at - record.planned_at)


def committing_seconds(record: AttemptRecord) -> float | None:
    """From the decision until every sink showed it."""
    if record.decided_at is None or record.finished_at is None:
        return None
    return max(0.0, record.finished_at - record.decided_at)


def what_was_read(record: AttemptRecord) -> list[str]:
    """What the batch read, in words."""
    return range_words(record.range)


WRITERS[Scope] = str

ATTEMPT = Shape(
    AttemptRecord,
    Field("cycle", "txn.cycle.label", head="cycle"),
    Field("attempt", "txn.attempt", head="attempt", cell=start_of),
    Field("state", head="state"),
    Field("planned_at", head="planned", cell=at),
    Field("staging_seconds", staging_seconds, head="staging", cell=lasting, right=True),
    Field("committing_seconds", committing_seconds, head="committing", cell=lasting, right=True),
    Field("rows", head="rows", means="By sink."),
    Field("read", what_was_read, head="read"),
    Field("reason", head="reason"),
    Field("epoch"),
    Field("decided_at"),
    Field("finished_at"),
    Field("age_seconds", age_seconds),
)


def what_was_resolved(act: LedgerAct) -> str:
    """What became of a cycle's sinks: ``g1.b42: entries abandon``."""
    detail = act.detail if isinstance(act.detail, dict) else {}
    found = [
        f"{one['sink']} {one['did']}" + ("" if one["is_done"] else " (not done)")
        for one in detail.get("sinks", ())
        if isinstance(one, dict) and one.get("did", "nothing") != "nothing"
    ]
    return f"{detail.get('cycle')}: {', '.join(found)}" if found else ""


ACT = Shape(
    LedgerAct,
    Field("at", head="when", cell=at),
    Field("who", head="who"),
    Field("act", head="act"),
    Field("why", head="why"),
    column("did", what_was_resolved),
    Field("detail"),
)
SINK_CUT = Shape(
    SinkCut,
    Field("sink", head="sink"),
    Field("mark", head="shows up to"),
    Field("agrees", head="agrees"),
    Field("reason", head="reason"),
)
Shape(
    ScopeStatus,
    Field("scope"),
    Field("app", "scope.app"),
    Field("query", "scope.query"),
    Field("needs_attention"),
    Field("advice"),
    whole=True,
)


@command("status", looking, Status)
def status(
    target: Target,
    *,
    files: Annotated[
        bool, option("--files", "Count the committed files, which may take a while.")
    ] = False,
) -> None:
    """Show who owns each scope, and where it stands.

    With --pipeline also whether there are too many claims for the way they are kept.
    Exit code 1: a scope has open cycles and no process works on them.

    Example: semel status --ledger sqlite:///payments.ledger
    """
    counting = Files.COUNTED if files else Files.LEFT_OUT
    sinks = target.pipeline.sinks if target.pipeline else ()
    found = status_of(target.ledger, target.scopes, counting, sinks=sinks)
    target.answer.reply(found, _status_lines)


@command("history", looking, History)
def history(
    target: Target,
    *,
    limit: Annotated[
        int, option("--limit -n", "How many attempts of each scope.", min=1, max=MOST_ROWS)
    ] = 20,
    cycle: Annotated[str | None, option("--cycle", "All attempts of one cycle.", "g1.b42")] = None,
) -> None:
    """List the newest attempts at cycles, with rows and durations, and what operators did.

    Example: semel history --ledger sqlite:///payments.ledger --limit 50
    """
    target.answer.reply(history_of(target.ledger, target.scopes, limit, cycle), _history_lines)


@command("cut", looking, Cuts)
def cut(
    target: Target,
    *,
    to: Annotated[
        Path | None,
        option("--to", "Also put the cut of the one scope there, as JSON, in one step.", "FILE"),
    ] = None,
) -> None:
    """Show through which cycle, and which offsets, every sink is visible.

    Readers that need the same rows in several sinks read no further than this cycle.  With
    --pipeline each sink is asked, too.  Exit code 1: one does not answer, or shows less.

    Example: semel cut --ledger sqlite:///payments.ledger --app payments --to cut.json
    """
    sinks = target.pipeline.sinks if target.pipeline else ()
    found = cuts_of(target.ledger, target.scopes, sinks)
    if to is not None:
        if len(found.scopes) != 1:
            raise Misuse(f"--to is for one scope, and there are {len(found.scopes)}: give --app")
        write_new(to, json.dumps(document(found.scopes[0])))
    target.answer.reply(found, _cut_lines)


def write_new(file: Path, text: str) -> None:
    """Replace a file, so that its readers see the old text or the new one.

    Raises:
        Misuse: its folder cannot be written.
    """
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_text(text + "\n")
        unfinished.replace(file)
    except OSError as error:
        raise Misuse(f"--to {file}: {error.strerror}") from error


def _cut_lines(found: Cuts) -> Iterator[Line | Rows]:
    yield f"ledger {found.ledger}"
    for scope in found.scopes:
        yield None
        yield bold(scope.scope)
        since = "" if scope.finished_at is None else f", since {at(scope.finished_at)}"
        through = f"{scope.cycle}{since}" if scope.cycle else "nothing finished yet"
        ends = {f"source {one.source}": _position_words(one) for one in scope.positions}
        yield facts({"all sinks through": through, **ends})
        if scope.sinks:
            yield SINK_CUT.table(scope.sinks)


def _status_lines(status: Status) -> Iterator[Line | Rows]:
    yield f"ledger {status.ledger}  (id {status.ledger_id})"
    if not status.scopes:
        yield "no scope has ever had an owner here"
    for scope in status.scopes:
        yield None
        yield bold(scope.scope)
        yield facts(dict(_scope_facts(scope)))


def _scope_facts(scope: ScopeStatus) -> Iterator[tuple[str, object]]:
    owner, generation, last = scope.owner, scope.generation, scope.last
    left = f", lease {lasting(owner.lease_left_seconds)} left" if owner.is_live else ""
    yield "owner", f"{owner}{left}, epoch {owner.epoch}"
    opened = generation and (
        f"{generation.number}, checkpoint {generation.checkpoint}, since {at(generation.opened_at)}"
    )
    yield "generation", opened or "none yet"
    yield "mark", scope.mark or "nothing finished yet"
    oldest = scope.oldest_open_seconds
    age = "" if oldest is None else f" (the oldest for {lasting(oldest)})"
    yield "open cycles", f"{pairs(scope.open)}{age}"
    for source in scope.positions:
        yield f"source {source.source}", _position_words(source)
    if last:
        rows = f"; rows: {pairs(last.rows)}" if last.rows else ""
        why = f"; {last.reason}" if last.reason else ""
        ago = f"{lasting(age_seconds(last))} ago"
        yield "last cycle", f"{last.txn.cycle.label} {last.state}, {ago}{rows}{why}"
    if scope.rejected:
        yield "rejected rows", pairs(scope.rejected)
    if scope.given_up:
        yield "given up rows", pairs(scope.given_up)
    for words in scope.outgrown:
        yield "outgrown", words
    if scope.advice:
        yield "next", red(scope.advice)


def _position_words(source: SourceEnd) -> str:
    words = []
    if source.ends:
        ends = [f"{name} {end:,}".strip() for name, end in source.ends.items()]
        words.append(f"{counted(len(ends), 'partition')}: {listed(ends)}")
    if source.files is not None:
        words.append(counted(source.files, "committed file"))
    return ", ".join(words) or "files (count them with --files)"


def _history_lines(history: History) -> Iterator[Line | Rows]:
    yield f"ledger {history.ledger}"
    for scope in history.scopes:
        yield None
        yield bold(scope.scope)
        yield ATTEMPT.table(scope.attempts)
        if scope.acts:
            yield None
            yield f"what operators did in {scope.scope}"
            yield ACT.table(scope.acts)
