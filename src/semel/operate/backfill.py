"""A sink that joins a live pipeline gets the rows of the cycles that were committed without it.

    cycles without the sink ──▶ read again, one by one ──▶ a decision of their own ──▶ the sink

The past is a pipeline of its own, with one sink and the query ``<query>-fill-<sink>``: its
ledger records say which cycles are filled, so it may be stopped and started at any time, also
while the pipeline itself runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias

from semel.errors import Misuse, NeedsOperator, Retryable
from semel.lease import Takeover
from semel.operate.status import Pipeline, fill_scope, given_up, undone
from semel.pipeline.cycle import CommitAborted, CommitFatal
from semel.pipeline.driver import Driver, Heartbeat, Stage
from semel.pipeline.ledger import AttemptRecord, CycleState, Ledger, mark_of
from semel.pipeline.sink import Found, ReplacesRows, TwoPhaseSink
from semel.pipeline.source import BatchRange, SourceKind, SourceRange, Span
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

EVERY: Final = 10**9


class Forgotten(StrEnum):
    """What to do about cycles that the ledger has pruned."""

    REFUSED = "refused"
    FROM_THE_BEGINNING = "from the beginning"
    """Fill them as one cycle, which reads every source from its beginning."""


@dataclass(frozen=True, slots=True)
class PastCycle:
    """A cycle that was committed without the sink."""

    cycle: CycleId
    range: BatchRange
    """What it read."""


StagePast: TypeAlias = Callable[[TwoPhaseSink, PastCycle], Stage]
"""Returns how the rows of a past cycle are read again, and staged for the sink."""


@dataclass(frozen=True, slots=True)
class Backfill:
    """The answer of `add_sink`."""

    scope: Scope
    """The scope that decided about the past."""

    sink: str
    cycles: int
    """How many cycles were filled now."""

    rows: int
    """How many rows they have."""

    filled_before: int
    first: str | None
    last: str | None
    takes_part: bool
    """Whether the sink takes part in the pipeline's newest cycle: nothing more is missed."""

    who: str
    why: str

    @property
    def needs_attention(self) -> bool:
        """Return whether the pipeline still runs without the sink."""
        return not self.takes_part


def past_of(
    pipeline: Pipeline, sink: TwoPhaseSink, forgotten: Forgotten = Forgotten.REFUSED
) -> list[PastCycle]:
    """List the cycles that were committed without *sink*, oldest first, filled or not.

    Those that it lost, and that were given up by `semel cycle resolve`, are among them; those
    that were undone are not.

    Raises:
        NeedsOperator: the ledger has forgotten some, or a source cannot be read again.
    """
    ledger, scope = pipeline.ledger, pipeline.scope
    records = [one for one in ledger.history(scope, EVERY) if one.state.is_committed]
    records.sort(key=lambda one: one.txn.cycle)
    absent = [one for one in records if sink.name not in {*one.tokens, *one.rows}]
    lost = _lost(ledger, scope, sink, records)
    gone = {cycle for cycle, _ in undone(ledger, scope)}
    missed = [one for one in records if one in absent or one in lost]
    missed = [one for one in missed if one.txn.cycle not in gone]
    past = [PastCycle(one.txn.cycle, one.range or BatchRange()) for one in missed]
    for one in past:
        if any(source.kind is SourceKind.EPHEMERAL for source in one.range.sources):
            raise NeedsOperator(
                f"cycle {one.cycle} read a source without durable positions, which cannot be read "
                f"again: fill sink {sink.name!r} from another sink by hand"
            )
    if records and absent[:1] == records[:1] and (before := _forgotten(ledger, scope, records[0])):
        filled = mark_of(ledger, fill_scope(scope, sink.name))
        if filled is not None and filled.cycle >= before:
            return past
        if forgotten is Forgotten.REFUSED or filled is not None:
            raise NeedsOperator(_forgotten_words(scope, sink.name, before, filled))
        past.insert(0, PastCycle(before, _range_before(ledger, scope, records)))
    return past


def _lost(
    ledger: Ledger, scope: Scope, sink: TwoPhaseSink, records: Sequence[AttemptRecord]
) -> list[AttemptRecord]:
    """Return the finished cycles that were given up for the sink, and that it does not show."""
    without, lost = given_up(ledger, scope), []
    for one in records:
        if (one.txn.cycle, sink.name) not in without or one.state is not CycleState.FINISHED:
            continue
        finding = sink.look_up(one.txn, one.tokens[sink.name])
        if finding.found is Found.GONE:
            lost.append(one)
        elif finding.found is not Found.VISIBLE:
            raise NeedsOperator(
                f"{one.txn.cycle} was given up for sink {sink.name!r}, which answers "
                f"{finding.found.value!r} ({finding.evidence}): run `semel recover` first"
            )
    return lost


def _forgotten_words(scope: Scope, sink: str, last: CycleId, filled: SinkTxnId | None) -> str:
    if filled is None:
        return (
            f"{scope}: the ledger has forgotten the cycles up to {last.label}, and sink {sink!r} "
            f"has no rows of them: fill them as one with --from-beginning, which reads each "
            f"source from its beginning"
        )
    return (
        f"{scope}: the ledger has forgotten cycles after {filled.cycle.label}, up to which sink "
        f"{sink!r} was filled: empty the sink, give it another name and fill it from the beginning"
    )


def _forgotten(ledger: Ledger, scope: Scope, first: AttemptRecord) -> CycleId | None:
    """Return the last cycle before *first*, if there may have been one."""
    cycle, generations = first.txn.cycle, ledger.generations(scope)
    if (cycle.generation, cycle.batch) == (generations[0].number, generations[0].first_batch):
        return None
    if cycle.batch > 0:
        return CycleId(scope, cycle.generation, cycle.batch - 1)
    # Higher than every batch of the generation before, which may be unknown.
    return CycleId(scope, cycle.generation - 1, 10**12)


def _range_before(ledger: Ledger, scope: Scope, records: list[AttemptRecord]) -> BatchRange:
    """Return everything that was read before the oldest of *records*."""
    spans: dict[str, dict[str, Span]] = {}
    files: dict[str, set[str]] = {
        source: set(paths) for source, paths in ledger.positions(scope).paths.items()
    }
    for record in records:
        for source in record.range.sources if record.range else ():
            files.get(source.source, set()).difference_update(source.paths)
            for partition, span in source.spans.items():
                spans.setdefault(source.source, {}).setdefault(partition, Span(0, span.start))
    found = [SourceRange(s, SourceKind.OFFSETS, known) for s, known in spans.items()]
    found += [
        SourceRange(s, SourceKind.FILES, paths=(*sorted(paths),)) for s, paths in files.items()
    ]
    return BatchRange(tuple(sorted(found, key=lambda source: int(source.source))))


def add_sink(
    pipeline: Pipeline,
    name: str,
    stage_past: StagePast,
    *,
    who: str,
    why: str,
    forgotten: Forgotten = Forgotten.REFUSED,
    takeover: Takeover = Takeover.WAIT,
    progress: Callable[[PastCycle, int, int], None] = lambda cycle, done, of: None,
) -> Backfill:
    """Write the rows of every cycle that was committed without the sink *name*, once.

    May be stopped and repeated; *progress* gets each cycle, its number and how many there are.

    Raises:
        Misuse: it is not a sink of the pipeline.
        NeedsOperator: the past is not known any more, or would replace newer rows.
        LeaseHeld: another process fills the sink.
    """
    sink = _sink(pipeline, name)
    target = fill_scope(pipeline.scope, name)
    settings = replace(pipeline.settings, takeover=takeover)
    driver = Driver(target.app, pipeline.ledger, [sink], target.query, settings=settings)
    # It finishes first what was decided before a crash; only then is it known what is left.
    driver.start()
    beat = Heartbeat(pipeline.ledger, driver.lease).start()
    rows = 0
    try:
        past = past_of(pipeline, sink, forgotten)
        filled = mark_of(pipeline.ledger, target)
        left = [one for one in past if filled is None or _same(one, target) > filled.cycle]
        if left:
            _check_order(pipeline, sink)
        takes_part = _takes_part(pipeline, name)
        about = {"sink": name, "cycles": len(left), "query": target.query}
        pipeline.ledger.record_act(pipeline.scope, who, "sink-add", why, about)
        for number, one in enumerate(left, 1):
            rows += _fill(driver, name, _same(one, target), stage_past(sink, one))
            progress(one, number, len(left))
    finally:
        beat.stop()
        driver.stop()
    first = left[0].cycle.label if left else None
    last = left[-1].cycle.label if left else None
    before = len(past) - len(left)
    return Backfill(target, name, len(left), rows, before, first, last, takes_part, who, why)


def _check_order(pipeline: Pipeline, sink: TwoPhaseSink) -> None:
    mark = sink.mark(pipeline.scope)
    if mark is not None and isinstance(sink, ReplacesRows) and sink.replaces_rows:
        raise NeedsOperator(
            f"sink {sink.name!r} has taken part in cycle {mark.cycle.label}, and replaces rows by "
            f"their keys: the past would replace newer rows. Fill such a sink before it takes "
            f"part, or give it a version_column"
        )


def _takes_part(pipeline: Pipeline, sink: str) -> bool:
    """Return whether the newest committed cycle has the sink; aborted attempts lie between."""
    newest = pipeline.ledger.history(pipeline.scope, 1_000)
    committed = next((one for one in newest if one.state.is_committed), None)
    return committed is not None and sink in {*committed.tokens, *committed.rows}


def _sink(pipeline: Pipeline, name: str) -> TwoPhaseSink:
    for sink in pipeline.sinks:
        if sink.name == name:
            return sink
    names = ", ".join(sink.name for sink in pipeline.sinks)
    raise Misuse(f"the pipeline has no sink {name!r}; add it to the program first; it has: {names}")


def _same(past: PastCycle, scope: Scope) -> CycleId:
    """Return the cycle of the same number that decides about the past one."""
    return CycleId(scope, past.cycle.generation, past.cycle.batch)


def _fill(driver: Driver, sink: str, cycle: CycleId, stage: Stage) -> int:
    """Write the rows of one past cycle; return how many there are."""
    run_counted(driver, cycle, stage)
    record = driver.ledger.committed(cycle)
    return record.rows.get(sink, 0) if record else 0


def run_counted(driver: Driver, cycle: CycleId, stage: Stage) -> None:
    """Run a cycle of an operator's own pipeline, whose source is the count of its cycles.

    Raises:
        Retryable: it was aborted, and nothing of it is visible.
        NeedsOperator: only recovery can settle it: start again.
    """
    ledger, scope = driver.ledger, driver.scope
    for number in range(len(ledger.generations(scope)) + 1, cycle.generation + 1):
        ledger.open_generation(driver.lease, f"{scope.query}-{number}")
    # The source's own ranges have gaps where the sink took part in between.
    ends = ledger.positions(scope, BatchRange()).ends.values()
    at = max((position.end for position in ends), default=0)
    counted = BatchRange.of_offsets({"filled": (at, at + 1)})
    match driver.run_cycle(cycle, lambda: counted, stage):
        case CommitAborted(reason):
            raise NotFilled(str(cycle), reason)
        case CommitFatal(reason, cause=cause):
            raise FillStopped(str(cycle), reason) from cause


class NotFilled(Retryable):
    """A past cycle could not be written, or undone, now; what was done before it stays."""

    def __init__(self, cycle: str, reason: str) -> None:
        super().__init__(cycle, reason)
        self.cycle = cycle
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.cycle} was aborted: {self.reason}; run the command again to go on there"


class FillStopped(NeedsOperator):
    """A past cycle ended in a way that the next start settles."""

    def __init__(self, cycle: str, reason: str) -> None:
        super().__init__(cycle, reason)
        self.cycle = cycle
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.cycle}: {self.reason}; run the command again, which settles it first"
