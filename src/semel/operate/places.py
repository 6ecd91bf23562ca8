"""The names and places of sinks and apps: an operator changes one, and the records follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from semel.errors import Misuse, NeedsOperator
from semel.lease import Owner, Takeover
from semel.operate.status import Pipeline
from semel.pipeline.ledger import Ledger, ScopeLease
from semel.pipeline.recovery import check_ledger, places_of
from semel.pipeline.sink import KnowsItsPlace, Tenant, TwoPhaseSink
from semel.pipeline.txn import Scope


@dataclass(frozen=True, slots=True)
class Renamed:
    """The answer of `rename_sink`, `move_sink` and `rename_app`."""

    scope: Scope
    what: str
    """sink, place or app."""

    before: str
    after: str
    who: str
    why: str


def rename_sink(
    pipeline: Pipeline,
    old: str,
    new: str,
    *,
    who: str,
    why: str,
    takeover: Takeover = Takeover.WAIT,
) -> Renamed:
    """Give the records of the sink that was called *old* to the one that is called *new* now.

    Cycles that are finished keep the old name in the ledger's history.

    Raises:
        Misuse: *new* is not a sink of the pipeline, or *old* still is.
        NeedsOperator: cycles are open.
        LeaseHeld: the pipeline is running.
    """
    scope, sink = pipeline.scope, _sink(pipeline, new)
    if any(other.name == old for other in pipeline.sinks):
        raise Misuse(f"sink {old!r} is still configured: its records are its own")
    known = places_of(pipeline.ledger, scope)
    if not isinstance(sink, KnowsItsPlace):
        raise Misuse(f"sink {new!r} cannot say where it writes, so it has no records to rename")
    place = sink.find_place()
    if known.get(old, place) != place:
        raise Misuse(f"sink {old!r} wrote to {known[old]}, and {new!r} writes to {place}")
    with _settled(pipeline, scope, takeover):
        sink.rename(Tenant(scope, old), Tenant(scope, new))
        places = {name: at for name, at in known.items() if name != old} | {new: place}
        detail = {"from": old, "to": new, "places": places}
        pipeline.ledger.record_act(scope, who, "sink-rename", why, detail)
    return Renamed(scope, "sink", old, new, who, why)


def move_sink(
    pipeline: Pipeline, name: str, *, who: str, why: str, takeover: Takeover = Takeover.WAIT
) -> Renamed:
    """Accept that a sink writes to its place from now on, even if others have written there.

    What it wrote elsewhere stays there.  Cycles that are not committed may be open: recovery
    needs the new place, and gives them up.

    Raises:
        Misuse: it is not a sink of the pipeline, or cannot say where it writes.
        NeedsOperator: a committed cycle is open: what it holds is at the old place.  Or another
            ledger's cycles of this app are at the new one.
        LeaseHeld: the pipeline is running.
    """
    scope, sink = pipeline.scope, _sink(pipeline, name)
    place = sink.find_place() if isinstance(sink, KnowsItsPlace) else ""
    if not place:
        raise Misuse(f"sink {name!r} has no lasting place")
    with _owned(pipeline, scope, takeover):
        known = places_of(pipeline.ledger, scope)
        _refuse_committed(pipeline.ledger, scope, name, known.get(name, ""))
        check_ledger(pipeline.ledger, scope, [sink])
        moved = {"sink": name, "from": known.get(name), "to": place}
        detail = {**moved, "places": {**known, name: place}}
        pipeline.ledger.record_act(scope, who, "sink-move", why, detail)
    return Renamed(scope, "place", known.get(name, ""), place, who, why)


def rename_app(
    pipeline: Pipeline, old: str, *, who: str, why: str, takeover: Takeover = Takeover.WAIT
) -> Renamed:
    """Give everything of the app that was called *old* to the pipeline, which has the new name.

    First the records in the sinks, then the ledger in one transaction; repeatable after a
    crash in between.

    Raises:
        Misuse: the ledger has no such app, or it is the pipeline's own.
        NeedsOperator: cycles are open, or the new name has cycles of its own.
        LeaseHeld: the pipeline is running under the old name.
    """
    ledger, new = pipeline.ledger, pipeline.scope
    before = Scope(new.ledger, old, new.query)
    if old == new.app or ledger.scope_record(before) is None:
        raise Misuse(f"ledger {ledger.url} has no other scope {before}; see `semel status`")
    if ledger.generations(new) or ledger.history(new, 1):
        raise NeedsOperator(f"{new} has cycles of its own, and cannot take those of {before}")
    with _settled(pipeline, before, takeover) as lease:
        ledger.record_act(before, who, "app-rename", why, {"from": old, "to": new.app})
        for sink in pipeline.sinks:
            if isinstance(sink, KnowsItsPlace):
                sink.rename(Tenant(before, sink.name), Tenant(new, sink.name))
        ledger.rename_app(lease, new.app)
    return Renamed(new, "app", old, new.app, who, why)


def _sink(pipeline: Pipeline, name: str) -> TwoPhaseSink:
    for sink in pipeline.sinks:
        if sink.name == name:
            return sink
    names = ", ".join(sink.name for sink in pipeline.sinks)
    raise Misuse(f"the pipeline has no sink {name!r}; it has: {names}")


def _refuse_committed(ledger: Ledger, scope: Scope, name: str, known: str) -> None:
    """Refuse to leave a place that may hold rows of a committed cycle, invisible until now."""
    for attempt in ledger.open_attempts(scope):
        if name in attempt.tokens and attempt.state.is_committed:
            cycle = attempt.txn.cycle.label
            raise NeedsOperator(
                f"{scope}: cycle {cycle} is committed, and sink {name!r} has prepared its rows at "
                f"{known}: set the place back and start. If that place is gone, first finish the "
                f"cycle at the new one with `semel cycle resolve --cycle {cycle}`: --retry if it "
                f"is a copy that has the rows, --without {name} if they are lost"
            )


@contextmanager
def _owned(pipeline: Pipeline, scope: Scope, takeover: Takeover) -> Iterator[ScopeLease]:
    ledger = pipeline.ledger
    lease = ledger.acquire(scope, Owner.here(), pipeline.settings.lease_seconds, takeover)
    try:
        yield lease
    finally:
        if ledger.scope_record(scope) is not None:
            ledger.release(lease)


@contextmanager
def _settled(pipeline: Pipeline, scope: Scope, takeover: Takeover) -> Iterator[ScopeLease]:
    """Own *scope*, in which nothing is open."""
    with _owned(pipeline, scope, takeover) as lease:
        for attempt in pipeline.ledger.open_attempts(scope):
            raise NeedsOperator(
                f"{scope}: cycle {attempt.txn.cycle} is {attempt.state}; settle it with "
                f"`semel recover`, with the names and places as they were"
            )
        yield lease
