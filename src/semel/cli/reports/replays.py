"""Replays and dry runs, as plain values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from semel.cli.messages import Payload, headers_of, payload_of
from semel.messaging.outcome import told
from semel.operate.dryrun import DryRun
from semel.operate.replay import ReplayReport, report_of
from semel.operate.replay_message import NoPayload, Turn
from semel.operate.stores import OperatorDatabase, ReplayRun, ReplayState


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """What became of a replay's messages."""

    handled: int
    duplicate: int
    """Handled before: nothing was done."""

    failed: int
    refused: int
    """Not to be replayed: a person has to look at them."""

    left: int
    """Waiting behind another one or for their time, or with another worker."""

    missing: int
    """Nobody has their payload any more."""


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    """The answer to `semel replay run` and `semel replay status`."""

    database: str
    name: str
    consumer: str
    state: str
    """running, stopped, failed, finished or abandoned."""

    why: str
    """Why it does not go on, where it has not finished."""

    counts: ReplayCounts
    refusals: dict[str, int]
    """Why messages were refused, and how many for each reason."""

    selection: dict[str, Any]
    """Which messages; ``kind`` is ids, letters, waiting, offsets or times."""

    actor: str
    began_at: float
    updated_at: float

    @property
    def needs_attention(self) -> bool:
        """Tell whether it failed, or left something for a person."""
        counts = self.counts
        return self.state == ReplayState.FAILED or bool(
            counts.failed or counts.refused or counts.missing
        )


@dataclass(frozen=True, slots=True)
class ReplayList:
    """The answer to `semel replay list`."""

    database: str
    replays: list[ReplayAnswer]

    @property
    def needs_attention(self) -> bool:
        """A list needs none."""
        return False


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """A row that the handler changed, or the rows that one of its statements changed."""

    change: str
    """insert, update or delete."""

    table: str
    key: str
    before: dict[str, Any]
    after: dict[str, Any]
    """New values; of a statement, its parameters.  Secrets are hidden."""

    rows: int | None
    statement: str
    """The SQL, where it was not an object's change."""


@dataclass(frozen=True, slots=True)
class OutgoingReport:
    """A message that the handler would send."""

    message_id: str
    topic: str
    key: str | None
    payload: Payload
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What handling one message would do."""

    message_id: str
    claim: str
    """How the message stands; empty where its consumer has never seen it."""

    outcome: str
    """What would become of it; empty where it cannot be handled."""

    why: str
    """Why it fails, or cannot be handled."""

    changes: list[ChangeReport]
    outgoing: list[OutgoingReport]


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """The answer to `semel replay dry-run`."""

    database: str
    consumer: str
    messages: list[Rehearsal]

    @property
    def needs_attention(self) -> bool:
        """Tell whether one of them fails."""
        return any(one.why for one in self.messages)


def replay_answer(
    database: str, run: ReplayRun, report: ReplayReport | None = None
) -> ReplayAnswer:
    """Put a replay into a JSON document."""
    known = report or report_of(run)
    counts = ReplayCounts(**{turn.value: known.counts[turn] for turn in Turn})
    return ReplayAnswer(
        database,
        run.name,
        run.consumer,
        known.state.value,
        known.why,
        counts,
        dict(known.refusals),
        json.loads(run.selection),
        run.actor,
        run.began_at,
        run.updated_at,
    )


async def replay_list(
    database: OperatorDatabase, name: str, consumer: str | None, limit: int
) -> ReplayList:
    """List replays, the newest first."""
    async with database.begin() as unit:
        runs = await unit.replays.find(consumer, limit)
    return ReplayList(name, [replay_answer(name, run) for run in runs])


def rehearsal(found: DryRun | NoPayload) -> Rehearsal:
    """Put a dry run into a JSON document."""
    if isinstance(found, NoPayload):
        return Rehearsal(found.message_id, "", "", found.why, [], [])
    failure = found.failure
    changes = [
        ChangeReport(
            change.change.value,
            change.table,
            change.key,
            dict(change.before),
            dict(change.after),
            change.rows,
            change.statement,
        )
        for change in found.changes
    ]
    outgoing = [
        OutgoingReport(
            entry.message_id,
            entry.topic,
            entry.key,
            payload_of(entry.value, ""),
            headers_of(entry.headers),
        )
        for entry in found.outgoing
    ]
    return Rehearsal(
        found.message_id,
        found.claim.value if found.claim else "",
        told(found.outcome).value,
        f"{failure.code}: {failure.reason}" if failure else "",
        changes,
        outgoing,
    )
