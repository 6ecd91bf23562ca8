"""Claims between Python and their table: a message as statements name it, a row as it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Row

from semel.messaging.audit import plain
from semel.messaging.claims import ClaimRequest, ClaimRow, ClaimState, Failure
from semel.messaging.ids import original_id, stored_id
from semel.sqlalchemy.faults import DatabaseConflict
from semel.sqlalchemy.origins import seconds_or_none
from semel.sqlalchemy.times import to_seconds, to_us

# Each turn means that another transaction changed or removed the claim between two of our
# statements; whoever loses five times in a row comes back later.
MOST_TURNS: Final = 5


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """One message of one consumer, as the statements name it."""

    consumer: str
    request: ClaimRequest
    id: str

    @classmethod
    def of(cls, consumer: str, request: ClaimRequest) -> Asked:
        """Name the message as it is stored."""
        return cls(consumer, request, stored_id(request.message_id))

    def key(self) -> dict[str, Any]:
        """Return the parameters of a statement about the one row."""
        return {"by": self.consumer, "id": self.id}

    def key_and_hash(self) -> dict[str, Any]:
        """Return those of a statement that compares the payload, too."""
        return {**self.key(), "digest": self.request.payload_hash}

    def new(self) -> dict[str, Any]:
        """Return those of a new row."""
        more = {"original": self.original, "source": self.source}
        return {**self.key_and_hash(), **more}

    @property
    def source(self) -> str:
        """Where the delivery stood, as it is kept."""
        return plain(self.request.source)

    @property
    def original(self) -> str | None:
        """What is kept beside a hashed id."""
        asked = self.request.message_id
        return None if asked == self.id else original_id(asked)

    def row(self, found: Row[Any]) -> ClaimRow:
        """Read the row."""
        return row_of(self.consumer, self.request.message_id, found)

    def changes_all_the_time(self) -> DatabaseConflict:
        """Say that others were faster, every time."""
        return DatabaseConflict(
            f"{self}: other transactions changed the claim {MOST_TURNS} times between asking and "
            f"taking; nothing was changed here, it comes back"
        )

    def __str__(self) -> str:
        return f"consumer {self.consumer}: message {self.request.message_id!r}"


def row_of(consumer: str, message_id: str, found: Row[Any]) -> ClaimRow:
    """Read a row of the message with this id."""
    return ClaimRow(
        consumer,
        message_id,
        ClaimState(found.state),
        found.attempts,
        found.owner,
        found.fence,
        to_seconds(found.lease_until),
        to_seconds(found.due_at),
        found.payload_hash,
        to_seconds(found.first_seen_at),
        to_seconds(found.updated_at),
        found.error_code,
        found.result,
        found.source,
        seconds_or_none(found.failed_at),
        seconds_or_none(found.erased_at),
        found.result_key,
    )


def written(failure: Failure) -> dict[str, Any]:
    """Return the parameters of a statement that writes a failure."""
    return {
        "into": failure.state.value,
        "tried": failure.attempts,
        "code": failure.error_code,
        "delay_us": to_us(failure.delay_seconds),
    }
