"""The waiting room: messages that are durable with us and not handled yet.

    RETRY    waits for its time
    PARKED   waits for a person
    BEHIND   waits for an earlier message of its key that is one of the other two

With order per key a waiting message holds its key: whatever comes later for the
key queues up BEHIND it, in order of arrival, and leaves in that order.  A key
is held exactly as long as the room has a message of it; the transaction that
takes the last one out lets the key go.  Only the version that others of its key
wait for overtakes them (`semel.messaging.overtaking`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from semel.message import Coordinates, Message, Partition

BEHIND: Final = "BEHIND"
"""The code of a claim whose message waits for an earlier one of its key."""


class Waits(StrEnum):
    """For what a message waits."""

    RETRY = "retry"
    """For its time."""

    PARKED = "parked"
    """For a person."""

    BEHIND = "behind"
    """For an earlier message of its key that is one of the other two."""


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """One message in the waiting room; one per consumer and message id."""

    consumer: str
    message_id: str
    waits: Waits
    key: str | None
    payload: bytes | None
    """The bytes to handle: the original, or the newest revision; None once erased."""

    place: int = 0
    """The order of arrival in the room; given by it."""

    held: bool = False
    """It holds its key (the consumer keeps order per key)."""

    due_at: float = 0.0
    attempts: int = 0
    reason: str = ""
    error_code: str = ""
    exception: str = ""
    since: float = 0.0
    headers: Mapping[str, bytes] = field(default_factory=dict)
    topic: str = ""
    partition: int | None = None
    offset: int | None = None
    timestamp: float = 0.0
    payload_hash: str = ""
    message_type: str = ""
    schema_version: str = ""
    correlation_id: str = ""
    first_failed_at: float = 0.0
    label: str = ""
    """What a person classified it as."""

    erased_at: float | None = None

    @property
    def source(self) -> Coordinates | None:
        """Where the record stood, if that is known."""
        if self.partition is None or self.offset is None:
            return None
        return Coordinates(self.topic, self.partition, self.offset)

    @classmethod
    def of(cls, consumer: str, message: Message, waits: Waits, *, held: bool) -> WaitingMessage:
        """Put *message* into words of the room."""
        source = message.source
        return cls(
            consumer=consumer,
            message_id=message.id,
            waits=waits,
            key=message.key,
            payload=message.raw,
            held=held,
            headers=message.headers,
            topic=source.topic if source else "",
            partition=source.partition if source else None,
            offset=source.offset if source else None,
            timestamp=message.timestamp,
            payload_hash=message.digest,
            message_type=message.type,
            schema_version=message.schema_version,
            correlation_id=message.correlation_id,
        )


@dataclass(frozen=True, slots=True)
class WaitingFilter:
    """Which waiting messages are meant; what is None does not matter."""

    consumer: str | None = None
    message_id: str | None = None
    conflicts_with: str | None = None
    """Conflicts that came with this id, and have a made-up one."""

    key: str | None = None
    waits: Waits | None = None
    label: str | None = None
    error_code: str | None = None
    since: float | None = None
    until: float | None = None
    after_place: int | None = None
    held: bool | None = None


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key whose later messages queue up."""

    consumer: str
    key: str
    head: WaitingMessage
    behind: int
    since: float


class WaitingRoom(Protocol):
    """The waiting messages, in one open transaction.

    The contract is executable: `semel.testing.contracts.WaitingContract`.
    """

    async def hold(self, consumer: str, keys: Sequence[str]) -> frozenset[str]:
        """Lock the keys, in sorted order, until the transaction ends; say which are held.

        Called with the claim by consumers that keep order per key: between this answer and
        the commit nobody else can begin to hold one of the keys.  Holding may end meanwhile:
        whoever queues up behind nobody has its turn at once.

        Raises:
            Locked: another transaction has one of the keys for longer than the lock timeout.
        """
        ...

    async def put(self, waiting: WaitingMessage, delay_seconds: float = 0.0) -> None:
        """Let a message in, at the end of the queue; one that is there already is updated.

        *delay_seconds* until it is due, on the database's clock.  An update says anew for what
        it waits, and after which failure; place, payload, label and the first failure's time
        stay.  An erased message stays parked.
        """
        ...

    async def take_due(
        self, consumer: str, limit: int, after_place: int = 0
    ) -> Sequence[WaitingMessage]:
        """Lock and return messages whose turn it is, in order of place, behind *after_place*.

        These are RETRY messages that are due, and BEHIND messages before which nothing of
        their key is left.  Only the first of each held key.  Messages that another
        transaction has locked are left out.
        """
        ...

    async def take(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Lock and return one message, if it is its turn; as `take_due` does with many.

        For a worker that took several and begins a transaction for each: whoever was quicker
        may have handled it, and a person may have changed it, meanwhile.
        """
        ...

    async def take_many(
        self, consumer: str, message_ids: Collection[str]
    ) -> Sequence[WaitingMessage]:
        """Lock and return those of several messages whose turn it is, in order of place."""
        ...

    async def seconds_to_next(self, consumer: str) -> float | None:
        """Return the seconds until `take_due` has something; None where nothing waits for time."""
        ...

    async def get(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Return one waiting message."""
        ...

    async def find(self, which: WaitingFilter, limit: int) -> Sequence[WaitingMessage]:
        """Return matching messages in order of place."""
        ...

    async def count(self, which: WaitingFilter) -> int:
        """Count matching messages."""
        ...

    async def held_keys(self, consumer: str, limit: int) -> Sequence[HeldKey]:
        """Return the keys that are held, the longest first."""
        ...

    async def remove(self, consumer: str, message_id: str) -> bool:
        """Take a message out; the last one of its key lets the key go."""
        ...

    async def remove_many(self, consumer: str, message_ids: Sequence[str]) -> None:
        """Take messages out, as `remove` does with one."""
        ...

    async def label(self, consumer: str, message_id: str, label: str) -> bool:
        """Write what a person classified it as."""
        ...

    async def release(self, consumer: str, message_id: str) -> bool:
        """Make a parked message a retry that is due, in its place; an operator's act.

        False, and nothing changed, where it is not parked, or was erased.
        """
        ...

    async def let_go(self, consumer: str, message_id: str) -> bool:
        """Give a message its turn whatever of its key is before it; it holds its key no more.

        What it waits for besides that, its time or a person, it goes on waiting for.
        """
        ...

    async def revise(
        self, consumer: str, message_id: str, payload: bytes, payload_hash: str, new_id: str
    ) -> bool:
        """Replace what will be handled, and under which id; the place in the queue stays.

        False, and nothing changed, where there is no such message or it was erased.
        """
        ...

    async def erase(self, which: WaitingFilter) -> int:
        """Remove payload, headers and reason of matching messages; hashes and error codes stay.

        What was erased cannot be handled: it is parked from now on.
        """
        ...

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[tuple[int, Waits]]:
        """Return the first offsets between two, both included, whose messages wait, in order.

        With what each waits for: for the audit of completeness.
        """
        ...

    async def forget_keys(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Delete at most *limit* locks of keys that are that old and that nobody has locked."""
        ...
