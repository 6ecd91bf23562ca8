"""The waiting room, its keys, and the requests that wait for a second person."""

from __future__ import annotations

from dataclasses import dataclass

from semel.cli.messages import Payload, headers_of, payload_of
from semel.messaging.records import WaitingFilter, WaitingMessage
from semel.operate.parking import inspect
from semel.operate.stores import Approval, OperatorDatabase, Revision


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """A waiting message in a list."""

    consumer: str
    message_id: str
    waits: str
    """``retry``: for its time; ``parked``: for a person; ``behind``: for an earlier message."""

    key: str | None
    label: str
    """What a person classified it as."""

    error_code: str
    exception: str
    reason: str
    attempts: int
    since: float
    due_at: float | None
    """For a retry."""

    source: str | None
    """Topic, partition and offset of the record."""

    erased: bool


@dataclass(frozen=True, slots=True)
class WaitingList:
    """The answer to `semel parking list`."""

    database: str
    total: int
    """How many match; the list may show fewer."""

    messages: list[WaitingLine]

    @property
    def needs_attention(self) -> bool:
        """A list needs none."""
        return False


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A key whose later messages queue up."""

    key: str
    head: WaitingLine
    """The message that must leave first."""

    behind: int
    since: float


@dataclass(frozen=True, slots=True)
class KeyList:
    """The answer to `semel parking keys`."""

    database: str
    consumer: str
    keys: list[KeyLine]
    has_more: bool
    """More are held than were asked for."""

    @property
    def needs_attention(self) -> bool:
        """A list needs none."""
        return False


@dataclass(frozen=True, slots=True)
class RevisionReport:
    """One state of a message's payload; number 0 is the original."""

    number: int
    actor: str
    reason: str
    ids: str
    """``keep-id`` or ``new-id``; empty for the original."""

    new_id: str | None
    at: float
    payload: Payload


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A deletion that was asked for."""

    number: int
    act: str
    consumer: str
    message_id: str
    asked_by: str
    reason: str
    asked_at: float
    decided_by: str | None
    decision: str
    """``approved`` or ``refused``; empty while it is open."""


@dataclass(frozen=True, slots=True)
class RequestList:
    """The answer to `semel parking requests`."""

    database: str
    requests: list[RequestReport]

    @property
    def needs_attention(self) -> bool:
        """A list needs none."""
        return False


@dataclass(frozen=True, slots=True)
class RequestAnswer:
    """The answer to commands that ask for a deletion, or decide one."""

    database: str
    request: RequestReport
    actor: str

    @property
    def needs_attention(self) -> bool:
        """What was done needs none."""
        return False


@dataclass(frozen=True, slots=True)
class WaitingReport:
    """The answer to `semel parking show`."""

    database: str
    message: WaitingLine
    claim: str | None
    """The state of its claim."""

    payload: Payload
    headers: dict[str, str]
    message_type: str
    schema_version: str
    correlation_id: str
    first_failed_at: float
    ahead: int
    """Messages of its key that must leave first."""

    behind: int
    """Messages of its key that wait for it."""

    revisions: list[RevisionReport]
    requests: list[RequestReport]
    acts: list[str]
    """What people did with it, in order."""

    @property
    def needs_attention(self) -> bool:
        """Looking needs none."""
        return False


@dataclass(frozen=True, slots=True)
class FixReport:
    """The answer to `semel parking fix`."""

    database: str
    consumer: str
    message_id: str
    handled_as: str
    """The id under which it will be handled."""

    revision: int
    diff: str
    """What changed, as a unified diff."""

    actor: str
    reason: str

    @property
    def needs_attention(self) -> bool:
        """What was done needs none."""
        return False


async def waiting_list(
    database: OperatorDatabase, name: str, which: WaitingFilter, limit: int
) -> WaitingList:
    """List waiting messages in the order they came."""
    async with database.begin() as unit:
        messages = await unit.waiting.find(which, limit)
        total = await unit.waiting.count(which)
    return WaitingList(name, total, [waiting_line(message) for message in messages])


async def key_list(database: OperatorDatabase, name: str, consumer: str, limit: int) -> KeyList:
    """List the keys that are held, the longest held first."""
    async with database.begin() as unit:
        keys = await unit.waiting.held_keys(consumer, limit + 1)
    lines = [KeyLine(key.key, waiting_line(key.head), key.behind, key.since) for key in keys]
    return KeyList(name, consumer, lines[:limit], len(lines) > limit)


async def request_list(
    database: OperatorDatabase, name: str, consumer: str | None, limit: int
) -> RequestList:
    """List the deletions that wait for a second person."""
    async with database.begin() as unit:
        requests = await unit.approvals.open_ones(consumer, limit)
    return RequestList(name, [request_report(request) for request in requests])


async def waiting_report(
    database: OperatorDatabase, name: str, consumer: str, message_id: str, actor: str
) -> WaitingReport:
    """Show one waiting message with its payload; who looked is written down."""
    found = await inspect(database, consumer, message_id, actor=actor)
    message = found.message
    return WaitingReport(
        database=name,
        message=waiting_line(message),
        claim=found.claim.state.value if found.claim else None,
        payload=payload_of(message.payload, message.payload_hash),
        headers=headers_of(message.headers),
        message_type=message.message_type,
        schema_version=message.schema_version,
        correlation_id=message.correlation_id,
        first_failed_at=message.first_failed_at,
        ahead=found.ahead,
        behind=found.behind,
        revisions=[_revision(revision) for revision in found.revisions],
        requests=[request_report(request) for request in found.approvals],
        acts=[f"{entry.act.act} by {entry.act.actor}" for entry in found.acts],
    )


def waiting_line(message: WaitingMessage) -> WaitingLine:
    """Put a waiting message on a line."""
    return WaitingLine(
        message.consumer,
        message.message_id,
        message.waits.value,
        message.key,
        message.label,
        message.error_code,
        message.exception,
        message.reason,
        message.attempts,
        message.since,
        message.due_at if message.waits.value == "retry" else None,
        str(message.source) if message.source else None,
        message.erased_at is not None,
    )


def request_report(request: Approval) -> RequestReport:
    """Put a request into a JSON document."""
    return RequestReport(
        request.number,
        request.act.value,
        request.consumer,
        request.message_id,
        request.asked_by,
        request.reason,
        request.asked_at,
        request.decided_by,
        request.decision.value,
    )


def _revision(revision: Revision) -> RevisionReport:
    return RevisionReport(
        revision.number,
        revision.actor,
        revision.reason,
        revision.id_policy,
        revision.new_id,
        revision.at,
        payload_of(revision.payload, revision.payload_hash),
    )
