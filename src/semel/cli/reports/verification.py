"""Rows staged, rows visible, rows in the source: per cycle and sink, counted and hashed.

source ──(--source)──▶ staged (in the token) ──▶ visible
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from semel.cli.reports.labels import cycle_of
from semel.cli.target import Pipeline
from semel.errors import Misuse, reason_of
from semel.pipeline.ledger import AttemptRecord
from semel.pipeline.sink import CountsVisibleRows, Tally, Token, TwoPhaseSink
from semel.pipeline.source import BatchRange
from semel.pipeline.states import CycleState

Reread: TypeAlias = Callable[[BatchRange], Mapping[str, Tally]]
"""Reads a cycle's source range again; returns each sink's tally, by name."""


class Verdict(StrEnum):
    """What the comparison says."""

    EQUAL = "equal"
    """The same number of rows, with the same hash."""

    EQUAL_ROWS = "equal_rows"
    """The same number of rows; one side has no hash to compare."""

    DIFFERENT = "different"
    CANNOT_TELL = "cannot_tell"
    """The sink cannot attribute rows to cycles; nothing is known to be wrong."""

    UNFINISHED = "unfinished"
    """Committed, and not yet visible everywhere."""

    NO_ANSWER = "no_answer"
    NOT_CONFIGURED = "not_configured"
    """The sink took part in the cycle and is not in the pipeline any more."""


_FINE = frozenset({Verdict.EQUAL, Verdict.EQUAL_ROWS, Verdict.CANNOT_TELL})


@dataclass(frozen=True, slots=True)
class TallyReport:
    """A row count and an order-independent hash."""

    rows: int
    hash: str | None
    """Sixteen hex digits."""


@dataclass(frozen=True, slots=True)
class SinkCheck:
    """One cycle in one sink."""

    cycle: str
    sink: str
    verdict: str
    """Staged against visible."""

    staged: TallyReport
    visible: TallyReport | None
    source_verdict: str | None
    """Source against staged; null without --source."""

    source: TallyReport | None
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The answer to `semel verify`."""

    scope: str
    ledger: str
    cycles: int
    checks: list[SinkCheck]

    @property
    def needs_attention(self) -> bool:
        """Tell whether a comparison failed, or could not be made for want of an answer."""
        return any(
            check.verdict not in _FINE or (check.source_verdict or "equal") not in _FINE
            for check in self.checks
        )


def cycles_to_verify(
    pipeline: Pipeline, newest: int, labels: Sequence[str] = ()
) -> list[AttemptRecord]:
    """Return the committed attempts of the *newest* cycles, or of those named.

    Raises:
        Misuse: a named cycle has no committed attempt in the ledger.
    """
    ledger, scope = pipeline.ledger, pipeline.scope
    if not labels:
        # Aborted attempts stand between the committed ones.
        records = ledger.history(scope, newest * 4)
        return [record for record in records if record.state.is_committed][:newest]
    found = []
    for label in labels:
        record = ledger.committed(cycle_of(scope, label))
        if record is None:
            raise Misuse(
                f"cycle {scope}/{label} has no committed attempt in ledger {ledger.url}: it was "
                f"never committed, or is pruned; see `semel history`"
            )
        found.append(record)
    return found


def verify_report(
    pipeline: Pipeline,
    records: Iterable[AttemptRecord],
    reread: Reread | None = None,
    progress: Callable[[], None] = lambda: None,
) -> VerifyReport:
    """Compare what was staged with what is visible, and with the source if it is read again."""
    sinks = {sink.name: sink for sink in pipeline.sinks}
    checks: list[SinkCheck] = []
    cycles = 0
    for record in records:
        cycles += 1
        source = _read_again(record, reread)
        for name, token in record.tokens.items():
            checks.append(_check(record, name, token, sinks.get(name), source))
        progress()
    return VerifyReport(str(pipeline.scope), pipeline.ledger.url, cycles, checks)


def staged_tally(token: Token, rows: int) -> tuple[int, int | None]:
    """Read the rows and the hash that a sink's token carries; *rows* is the ledger's own count."""
    row_hash = token.get("hash", token.get("row_hash"))
    return int(token.get("rows", rows)), None if row_hash is None else int(row_hash)


def compared(left: tuple[int, int | None], right: tuple[int, int | None]) -> Verdict:
    """Compare two tallies; a hash that is not there says nothing."""
    if left[0] != right[0]:
        return Verdict.DIFFERENT
    if left[1] is None or right[1] is None:
        return Verdict.EQUAL_ROWS
    return Verdict.EQUAL if left[1] == right[1] else Verdict.DIFFERENT


def _check(
    record: AttemptRecord,
    name: str,
    token: Token,
    sink: TwoPhaseSink | None,
    source: Mapping[str, Tally] | str | None,
) -> SinkCheck:
    staged = staged_tally(token, record.rows.get(name, 0))
    verdict, visible, reason = _visible(record, token, sink, staged)
    source_verdict: Verdict | None = None
    read: Tally | None = None
    if isinstance(source, str):
        source_verdict, reason = Verdict.NO_ANSWER, source
    elif source is not None:
        read = source.get(name)
        source_verdict = (
            Verdict.NOT_CONFIGURED if read is None else compared((read.rows, read.hash), staged)
        )
    return SinkCheck(
        cycle=record.txn.cycle.label,
        sink=name,
        verdict=verdict.value,
        staged=_told(*staged),
        visible=_told(visible.rows, visible.hash) if visible else None,
        source_verdict=source_verdict.value if source_verdict else None,
        source=_told(read.rows, read.hash) if read else None,
        reason=reason,
    )


def _visible(
    record: AttemptRecord, token: Token, sink: TwoPhaseSink | None, staged: tuple[int, int | None]
) -> tuple[Verdict, Tally | None, str]:
    if sink is None:
        return Verdict.NOT_CONFIGURED, None, "the sink is not in the pipeline any more"
    if record.state is not CycleState.FINISHED:
        return Verdict.UNFINISHED, None, "committed, and not yet finished; see `semel doctor`"
    if not isinstance(sink, CountsVisibleRows):
        return Verdict.CANNOT_TELL, None, "the sink cannot attribute rows to cycles"
    try:
        visible = sink.visible_tally(record.txn.cycle, token)
    except Exception as error:  # noqa: BLE001  one sink's silence must not hide the others' answers
        return Verdict.NO_ANSWER, None, reason_of(error)
    if visible is None:
        return (
            Verdict.CANNOT_TELL,
            None,
            "the sink, as configured, cannot attribute rows to cycles",
        )
    verdict = compared(staged, (visible.rows, visible.hash))
    return verdict, visible, _difference(verdict, staged, visible)


def _difference(verdict: Verdict, staged: tuple[int, int | None], visible: Tally) -> str:
    if verdict is not Verdict.DIFFERENT:
        return ""
    if visible.rows < staged[0]:
        return f"{staged[0] - visible.rows} rows are missing"
    if visible.rows > staged[0]:
        return f"{visible.rows - staged[0]} rows too many"
    return "as many rows, but not the same: somebody changed them after the commit"


def _read_again(record: AttemptRecord, reread: Reread | None) -> Mapping[str, Tally] | str | None:
    if reread is None:
        return None
    if record.range is None:
        return "the ledger does not know what the batch read"
    try:
        return reread(record.range)
    except Misuse:
        raise
    except Exception as error:  # noqa: BLE001  a file that is gone must not hide the other cycles
        return f"reading the source again failed: {reason_of(error)}"


def _told(rows: int, row_hash: int | None) -> TallyReport:
    return TallyReport(rows, None if row_hash is None else f"{row_hash:016x}")
