"""Whether a ledger is the one that its sinks were filled under.

An operator's `adopt` accepts what other ledgers have committed in the sinks so
far.  The first start after it notes how far that is, and whatever another ledger
commits later is refused again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from semel.errors import NeedsOperator
from semel.pipeline.ledger import Ledger
from semel.pipeline.sink import RemembersScopes, TwoPhaseSink
from semel.pipeline.txn import Scope

ADOPT: Final = "adopt"
ACCEPT: Final = "accept ledgers"
"""The act of the first start after an adoption."""


def check_ledger(ledger: Ledger, scope: Scope, sinks: Iterable[TwoPhaseSink]) -> bool:
    """Refuse a scope whose sinks another ledger has filled, beyond what was adopted.

    Returns whether there is an adoption for which nobody has called `accept_ledgers` yet.

    Raises:
        NeedsOperator: everything that was committed under the other ledger would be repeated.
    """
    accepted = _accepted(ledger, scope)
    if accepted is None:
        return True
    for sink in sinks:
        for other, mark in _others(sink, scope):
            if accepted.get(sink.name, {}).get(other) != mark:
                raise NeedsOperator(
                    f"sink {sink.name!r} holds cycles of {scope} that were decided in another "
                    f"ledger ({other}), which {ledger.url} knows nothing of: use the other "
                    f"ledger, restore a backup of it, or accept this one with "
                    f"`semel adopt`"
                )
    return False


def accept_ledgers(ledger: Ledger, scope: Scope, sinks: Iterable[TwoPhaseSink]) -> None:
    """Note how far other ledgers have come: what they commit from now on is not adopted."""
    found = {sink.name: dict(_others(sink, scope)) for sink in sinks}
    why = "the first start after an adoption"
    ledger.record_act(scope, "semel", ACCEPT, why, {"marks": found})


def _accepted(ledger: Ledger, scope: Scope) -> Mapping[str, Mapping[str, str]] | None:
    """The marks of other ledgers that are accepted, by sink; None if all are, after `adopt`."""
    for act in ledger.acts(scope):
        if act.act == ADOPT:
            return None
        if act.act == ACCEPT:
            marks: Mapping[str, Mapping[str, str]] = act.detail["marks"]
            return marks
    return {}


def _others(sink: TwoPhaseSink, scope: Scope) -> Iterator[tuple[str, str]]:
    """The other ledgers that have committed here for this app and query, each with its mark."""
    if not isinstance(sink, RemembersScopes):
        return
    for other in sink.scopes_of(scope.app, scope.query):
        if other != scope:
            mark = sink.mark(other)
            yield other.ledger, mark.label if mark else ""


def check_marks(ledger: Ledger, scope: Scope, sinks: Iterable[TwoPhaseSink]) -> None:
    """Refuse a ledger that is older than its sinks.

    A generation that an operator adopted says that this ledger is right about all before it.

    Raises:
        NeedsOperator: a sink has committed a cycle of this scope that the ledger does not know.
    """
    for sink in sinks:
        mark = sink.mark(scope)
        if mark is None:
            continue
        known = ledger.committed(mark.cycle)
        record = ledger.scope_record(scope)
        newest = record.mark if record else None
        if known is not None and known.txn == mark:
            continue
        if known is None and newest is not None and mark.cycle < newest.cycle:
            continue  # pruned from the ledger; the mark says that it was finished
        if mark.cycle.generation < _adopted_generation(ledger, scope):
            continue
        raise NeedsOperator(
            f"sink {sink.name!r} has committed cycle {mark.cycle} (attempt {mark.attempt[:8]}), "
            f"which ledger {ledger.url} does not know as committed: the ledger is older than its "
            f"sinks, probably restored from a backup; restore a newer one, or accept this one with "
            f"`semel adopt`, as generation {mark.cycle.generation + 1} or later"
        )


def _adopted_generation(ledger: Ledger, scope: Scope) -> int:
    """The newest generation that an operator adopted; 0 if none was."""
    adopted = [act.detail for act in ledger.acts(scope) if act.act == ADOPT]
    return max((int(detail["generation"]) for detail in adopted), default=0)
