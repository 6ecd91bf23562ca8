"""The generation of a checkpoint, and whether it may continue where the ledger ends.

A new checkpoint starts at batch 0 again, so a batch number means nothing
without its checkpoint.  The positions decide whether a new one may follow; an
operator can adopt one that the ledger would refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from semel.errors import NeedsOperator
from semel.lease import Owner, Takeover
from semel.pipeline.ledger import Generation, Ledger, ScopeLease, mark_of
from semel.pipeline.source import (
    BatchRange,
    Position,
    Positions,
    SourceKind,
    SourceRange,
    discontinuities,
)
from semel.pipeline.txn import CycleId, Scope


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """The state of a checkpoint when a batch starts."""

    id: str
    batch: int
    """The batch that is about to run."""

    range: BatchRange
    """What that batch reads."""

    last_finished: int | None
    """The highest batch that Spark has marked as done; None if there is none."""

    is_stateful: bool


class CheckpointRefused(NeedsOperator):
    """The checkpoint and the ledger contradict each other."""

    def __init__(self, scope: str, problem: str, way_out: str) -> None:
        super().__init__(scope, problem, way_out)
        self.scope = scope
        self.problem = problem
        self.way_out = way_out

    def __str__(self) -> str:
        return f"{self.scope}: {self.problem}; {self.way_out}"


TOPICS_CHANGED: Final = "topics changed"
"""The recorded act of a start that found topics with other ids."""


def note_topics(ledger: Ledger, scope: Scope, batch: BatchRange) -> None:
    """Record which topics of *batch* have another id than the committed ones.

    An operator's `adopt` has no connection to the broker, and must tell what it means.
    """
    ends = ledger.positions(scope, BatchRange()).ends
    changed: dict[str, list[str]] = {}
    for source in batch.sources:
        for partition in source.spans:
            topic = partition.rpartition("/")[0]
            at, found = ends.get((source.source, partition)), source.topic_ids.get(topic)
            if at is not None and at.topic_id and found and at.topic_id != found:
                changed[topic] = [at.topic_id, found]
    if changed and changed != changed_topics(ledger, scope):
        why = "a start found topics that were deleted and created again"
        ledger.record_act(scope, "semel", TOPICS_CHANGED, why, {"topics": changed})


def changed_topics(ledger: Ledger, scope: Scope) -> dict[str, list[str]]:
    """Return the topics that a start since the last adoption found with other ids: old, new."""
    for act in ledger.acts(scope):
        if act.act == "adopt":
            break
        if act.act == TOPICS_CHANGED:
            return dict(act.detail["topics"])
    return {}


def owner_of_checkpoint(ledger: Ledger, scope: Scope, checkpoint: str) -> Scope | None:
    """Return the other scope of this ledger that has used *checkpoint*.

    One without any attempt has only adopted it: under a mistyped name, it must be possible to
    adopt it again under the right one.
    """
    for other in ledger.scopes():
        has_it = any(g.checkpoint == checkpoint for g in ledger.generations(other))
        if has_it and other != scope and ledger.history(other, 1):
            return other
    return None


def _refuse_owned(ledger: Ledger, scope: Scope, checkpoint: str) -> None:
    owner = owner_of_checkpoint(ledger, scope, checkpoint)
    if owner is None:
        return
    way_out = (
        f"if the app has a new name, use `semel app rename --from {owner.app}`"
        if owner.query == scope.query
        else f"if it is the same query, call it {owner.query!r} again: under a new name and with a "
        f"new checkpoint its records would come twice; a second query needs one of its own"
    )
    raise CheckpointRefused(str(scope), f"this checkpoint belongs to {owner}", way_out)


def settle_generation(ledger: Ledger, lease: ScopeLease, view: CheckpointView) -> Generation:
    """Return the generation of *view*'s checkpoint; open a new one if that is safe.

    Raises:
        CheckpointRefused: continuing would repeat or skip records.
    """
    scope = lease.scope
    note_topics(ledger, scope, view.range)
    known = ledger.generations(scope)
    for generation in reversed(known):
        if generation.checkpoint == view.id:
            if generation.number < known[-1].number:
                raise CheckpointRefused(
                    str(scope),
                    f"checkpoint {view.id} is generation {generation.number}, and generation "
                    f"{known[-1].number} has been used since",
                    "start with the newest checkpoint, or accept this one with `semel adopt`",
                )
            _check_finished(ledger, scope, generation, view)
            return generation
    _refuse_owned(ledger, scope, view.id)
    if view.last_finished is not None:
        raise CheckpointRefused(
            str(scope),
            f"checkpoint {view.id} has run batches up to {view.last_finished} that are not in "
            f"this ledger",
            "take it over with `semel adopt`",
        )
    positions = ledger.positions(scope)
    # Adopted, and no cycle has finished since: the operator accepted the batches before.
    has_adopted = not positions.is_empty or any(generation.first_batch for generation in known)
    if known and (mark_of(ledger, scope) is not None or has_adopted):
        _check_successor(scope, positions, view)
    return ledger.open_generation(lease, view.id, first_batch=view.batch)


def _check_finished(
    ledger: Ledger, scope: Scope, generation: Generation, view: CheckpointView
) -> None:
    last = view.last_finished
    if last is None or last < generation.first_batch:
        return
    cycle = CycleId(scope, generation.number, last)
    if not _is_committed(ledger, cycle):
        raise CheckpointRefused(
            str(scope),
            f"Spark has marked batch {last} as done, but the ledger has no COMMIT for {cycle}",
            "the batch ran without semel, or the ledger was restored: compare with `semel history` "
            "and `semel doctor`, then accept it with `semel adopt`",
        )


def _is_committed(ledger: Ledger, cycle: CycleId) -> bool:
    """Return whether the cycle has a COMMIT, which may be pruned."""
    mark = mark_of(ledger, cycle.scope)
    return (mark is not None and cycle <= mark.cycle) or ledger.committed(cycle) is not None


def _check_successor(scope: Scope, positions: Positions, view: CheckpointView) -> None:
    if view.is_stateful:
        raise CheckpointRefused(
            str(scope),
            "the checkpoint is new, and with the old one a stateful query has lost its state",
            "restore the old checkpoint, or accept the loss with `semel adopt --state-lost`",
        )
    if any(source.kind is SourceKind.EPHEMERAL for source in view.range.sources):
        raise CheckpointRefused(
            str(scope),
            "the checkpoint is new, and a source without durable positions cannot continue where "
            "the old one ended",
            "restore the old checkpoint, or accept lost or repeated records with `semel adopt`",
        )
    found = discontinuities(positions, view.range) or [*_elsewhere(positions, view.range)]
    if found:
        raise CheckpointRefused(
            str(scope),
            f"the checkpoint is new and does not start where the ledger ends: {'; '.join(found)}",
            "set the source's start accordingly, or accept it with `semel adopt`",
        )


def _elsewhere(positions: Positions, batch: BatchRange) -> Iterator[str]:
    """Describe partitions that the ledger has under another source, or not from the start.

    A source is identified by its place in the query.  A new checkpoint may come with a query
    whose sources have another order, and then their records would look new.
    """
    topics = {
        (source, partition.rpartition("/")[0]) for source, partition in positions.ends if partition
    }
    for source in batch.sources:
        for partition, span in source.spans.items():
            if (
                source.kind is not SourceKind.OFFSETS
                or (source.source, partition) in positions.ends
            ):
                continue
            where = f"source {source.source} {partition}"
            others = sorted(s for s, known in positions.ends if known == partition)
            if others:
                yield f"{where}: the ledger has it as source {others[0]}, the order has changed"
            elif span.start and (source.source, partition.rpartition("/")[0]) in topics:
                yield f"{where}: gap, 0 to {span.start} of a new partition was never committed"
        if source.kind is SourceKind.FILES:
            yield from _files_elsewhere(positions, source)


def _files_elsewhere(positions: Positions, source: SourceRange) -> Iterator[str]:
    for other, paths in sorted(positions.paths.items()):
        for path in sorted(set(source.paths) & set(paths)):
            yield (
                f"source {source.source}: {path} is committed already, as one of source {other}: "
                f"the order of the sources has changed"
            )


ADOPT_LEASE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Adoptable:
    """Where a checkpoint would continue."""

    checkpoint: str
    first_batch: int
    """The first batch that semel will run."""

    positions: Mapping[tuple[str, str], Position]
    """Where that batch starts, by (source, partition)."""

    is_stateful: bool

    paths: Mapping[str, Collection[str]] = field(default_factory=dict)
    """The files that batches before it have read, by source."""


def adopt(
    ledger: Ledger,
    scope: Scope,
    found: Adoptable,
    *,
    who: str,
    why: str,
    state_lost: bool = False,
    repeat_files: bool = False,
    topic_recreated: bool = False,
    takeover: Takeover = Takeover.WAIT,
) -> Generation:
    """Make *found* the scope's next generation and its start the scope's positions.

    Files that the checkpoint has read count as committed from now on.  *repeat_files*
    forgets all others, so that a file source may read them again.  *topic_recreated* accepts
    that topics were deleted and created again.  Records who did it and why.

    Raises:
        LeaseHeld: the pipeline is running.
        NeedsOperator: something must be settled first, or a loss accepted; or the checkpoint
            belongs to another scope.
    """
    _refuse_owned(ledger, scope, found.checkpoint)
    changed = changed_topics(ledger, scope)
    read = {partition.rpartition("/")[0] for _, partition in found.positions}
    if (again := sorted(read & changed.keys())) and not topic_recreated:
        raise NeedsOperator(
            f"{scope}: topic {again[0]} was deleted and created again (its id was "
            f"{changed[again[0]][0]} and is {changed[again[0]][1]}); what the checkpoint skips of "
            f"the new one is never read: see --dry-run, and accept it with --topic-recreated"
        )
    earlier = ledger.generations(scope)
    new = bool(earlier) and earlier[-1].checkpoint != found.checkpoint
    if new and found.is_stateful and not state_lost:
        raise NeedsOperator(
            f"{scope}: the query keeps state, and checkpoint {found.checkpoint} does not have the "
            f"state of generation {earlier[-1].number}; accept the loss with --state-lost"
        )
    lease = ledger.acquire(scope, Owner.here(), ADOPT_LEASE_SECONDS, takeover)
    try:
        open_cycles = ledger.open_attempts(scope)
        if open_cycles:
            raise NeedsOperator(
                f"{scope}: cycle {open_cycles[0].txn.cycle} is {open_cycles[0].state}; settle it "
                f"with `semel recover` before adopting a checkpoint"
            )
        _refuse_repetition(ledger, scope, found)
        standing = ledger.positions(scope)
        known = {} if repeat_files else standing.paths
        paths = {
            source: {*known.get(source, ()), *found.paths.get(source, ())}
            for source in {*known, *found.paths}
        }
        generation = ledger.adopt_generation(
            lease,
            found.checkpoint,
            found.first_batch,
            {
                where: replace(at, topic_id=_topic_id(where, at, standing, changed))
                for where, at in found.positions.items()
            },
            paths,
        )
        detail = {
            "checkpoint": found.checkpoint,
            "generation": generation.number,
            "first_batch": found.first_batch,
            "positions": {f"{s} {p}": at.end for (s, p), at in found.positions.items()},
            "state_lost": state_lost,
            "repeat_files": repeat_files,
            "topics_recreated": {topic: changed[topic] for topic in again},
        }
        ledger.record_act(scope, who, "adopt", why, detail)
    finally:
        ledger.release(lease)
    return generation


def _topic_id(
    where: tuple[str, str], at: Position, standing: Positions, changed: Mapping[str, list[str]]
) -> str:
    """Return the id that the next batch must find: a topic created again is never taken on."""
    topic = where[1].rpartition("/")[0]
    if topic in changed:
        return changed[topic][1]
    known = standing.ends.get(where)
    return at.topic_id or (known.topic_id if known else "")


def _refuse_repetition(ledger: Ledger, scope: Scope, found: Adoptable) -> None:
    """Refuse if the ledger has committed the checkpoint's next batch: a start marks it done."""
    for generation in ledger.generations(scope)[-1:]:
        if generation.checkpoint != found.checkpoint:
            continue
        cycle = CycleId(scope, generation.number, found.first_batch)
        if _is_committed(ledger, cycle):
            raise NeedsOperator(
                f"{scope}: cycle {cycle} is committed, and Spark has not marked it as done yet: "
                f"start the query, which skips it; adopting would repeat it"
            )
