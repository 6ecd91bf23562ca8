"""Verification: compare the rows staged, visible and in the source, per cycle and sink.

source ──(--source)──▶ staged (in the token) ──▶ visible
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from semel.errors import Misuse, reason_of
from semel.operate.status import Pipeline, cycle_of, undone
from semel.pipeline.ledger import AttemptRecord, CycleState
from semel.pipeline.sink import (
    CannotCountRows,
    CountsVisibleRows,
    Tally,
    Token,
    TwoPhaseSink,
)
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import Scope

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


FINE = frozenset({Verdict.EQUAL, Verdict.EQUAL_ROWS, Verdict.CANNOT_TELL})


@dataclass(frozen=True, slots=True)
class RowCount:
    """A row count and an order-independent hash."""

    rows: int
    hash: int | None = None

    @classmethod
    def of(cls, tally: Tally | None) -> RowCount | None:
        """Take a sink's tally, where there is one."""
        return None if tally is None else cls(tally.rows, tally.hash)


@dataclass(frozen=True, slots=True)
class SinkCheck:
    """One cycle in one sink."""

    cycle: str
    sink: str
    verdict: Verdict
    """Staged against visible."""

    staged: RowCount
    visible: RowCount | None
    source_verdict: Verdict | None
    """Source against staged; null without --source."""

    source: RowCount | None
    reason: str

    @property
    def verdicts(self) -> set[Verdict]:
        """Both comparisons, or the one that was made."""
        return {self.verdict, self.source_verdict or self.verdict}

    @property
    def needs_attention(self) -> bool:
        """Return whether a comparison failed, or a sink did not answer."""
        return not self.verdicts <= FINE


@dataclass(frozen=True, slots=True)
class Verification:
    """The answer of `verify`."""

    scope: Scope
    ledger: str
    cycles: int
    checks: list[SinkCheck]

    @property
    def needs_attention(self) -> bool:
        """Return whether one of the checks needs attention."""
        return any(check.needs_attention for check in self.checks)


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


def verify(
    pipeline: Pipeline,
    records: Iterable[AttemptRecord],
    reread: Reread | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Verification:
    """Compare what was staged with what is visible, and with the source if it is read again.

    *records* are the cycles to look at, as `cycles_to_verify` finds them; changes nothing.
    """
    sinks = {sink.name: sink for sink in pipeline.sinks}
    checks: list[SinkCheck] = []
    gone = undone(pipeline.ledger, pipeline.scope)
    cycles = 0
    for record in records:
        cycles += 1
        source = _read_again(record, reread)
        for name, token in record.tokens.items():
            is_gone = (record.txn.cycle, name) in gone
            checks.append(_check(record, name, token, sinks.get(name), source, is_gone))
        progress()
    return Verification(pipeline.scope, pipeline.ledger.url, cycles, checks)


def staged_rows(token: Token, rows: int) -> RowCount:
    """Read the rows and the hash that a sink's token carries; *rows* is the ledger's own count."""
    row_hash = token.get("hash", token.get("row_hash"))
    return RowCount(int(token.get("rows", rows)), None if row_hash is None else int(row_hash))


def compared(left: RowCount, right: RowCount) -> Verdict:
    """Compare two counts; a hash that is not there says nothing."""
    if left.rows != right.rows:
        return Verdict.DIFFERENT
    if left.hash is None or right.hash is None:
        return Verdict.EQUAL_ROWS
    return Verdict.EQUAL if left.hash == right.hash else Verdict.DIFFERENT


def _check(
    record: AttemptRecord,
    name: str,
    token: Token,
    sink: TwoPhaseSink | None,
    source: Mapping[str, Tally] | str | None,
    is_undone: bool,
) -> SinkCheck:
    staged = staged_rows(token, record.rows.get(name, 0))
    wanted = RowCount(0, 0) if is_undone else staged
    verdict, visible, reason = _visible(record, token, sink, wanted)
    reason = "; ".join(filter(None, ("it was undone" if is_undone else "", reason)))
    source_verdict, read = None, None
    if isinstance(source, str):
        source_verdict, reason = Verdict.NO_ANSWER, source
    elif source is not None:
        read = RowCount.of(source.get(name))
        source_verdict = Verdict.NOT_CONFIGURED if read is None else compared(read, staged)
    label = record.txn.cycle.label
    return SinkCheck(label, name, verdict, staged, visible, source_verdict, read, reason)


def _visible(
    record: AttemptRecord, token: Token, sink: TwoPhaseSink | None, staged: RowCount
) -> tuple[Verdict, RowCount | None, str]:
    if sink is None:
        return Verdict.NOT_CONFIGURED, None, "the sink is not in the pipeline any more"
    if record.state is not CycleState.FINISHED:
        return Verdict.UNFINISHED, None, "committed, and not yet finished; see `semel doctor`"
    if not isinstance(sink, CountsVisibleRows):
        why = "the sink cannot attribute rows to cycles"
        return (
            Verdict.CANNOT_TELL,
            None,
            sink.uncounted if isinstance(sink, CannotCountRows) else why,
        )
    try:
        visible = RowCount.of(sink.visible_tally(record.txn.cycle, token))
    except Exception as error:  # noqa: BLE001  one sink's silence must not hide the others' answers
        return Verdict.NO_ANSWER, None, reason_of(error)
    if visible is None:
        why = "the sink, as configured, cannot attribute rows to cycles"
        return Verdict.CANNOT_TELL, None, why
    verdict = compared(staged, visible)
    reason = _difference(staged, visible) if verdict is Verdict.DIFFERENT else ""
    return verdict, visible, reason


def _difference(staged: RowCount, visible: RowCount) -> str:
    if visible.rows < staged.rows:
        return f"{staged.rows - visible.rows} rows are missing"
    if visible.rows > staged.rows:
        return f"{visible.rows - staged.rows} rows too many"
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
