"""Planned failures of the memory broker.

    broker.fail(Failure(Call.COMMIT, Failing.LOST_REPLY, after=2))

A failure applies to a number of calls of one kind; without a number, to all of them
until `heal`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum

from semel.errors import Retryable


class Call(StrEnum):
    """What can fail."""

    FETCH = "fetch"
    COMMIT = "commit"
    LOOK_UP = "look_up"
    """`Subscription.committed` and `Subscription.end`."""

    PUBLISH = "publish"
    """A whole batch: `Publisher.publish` raises."""

    MESSAGE = "message"
    """One message of a batch: the answer about it is the error."""

    APPEND = "append"
    """The request behind a batch; the idempotent publisher repeats it itself."""

    READ = "read"


class Failing(StrEnum):
    """What happens to the call, and to its answer."""

    REFUSED = "refused"
    """The call has no effect, and the answer says so."""

    LOST_REPLY = "lost_reply"
    """The call has its effect, and the answer is lost."""


@dataclass(slots=True)
class BrokerFailure:
    """Some calls that fail."""

    call: Call
    failing: Failing = Failing.REFUSED
    error: Exception = field(default_factory=lambda: Retryable("the broker does not answer"))
    """The exception: `Retryable` for an unavailable broker, `Permanent` for a refusal."""

    times: int | None = 1
    """How many calls fail; None: all of them, until `heal`."""

    after: int = 0
    """How many calls succeed first."""

    topic: str | None = None
    """Only messages of this topic; for `Call.MESSAGE`."""

    key: bytes | None = None
    """Only messages with this key; for `Call.MESSAGE`."""

    def strikes(self, call: Call, topic: str | None, key: bytes | None) -> bool:
        """Count a call, and return whether it fails."""
        if (
            call is not self.call
            or self.times == 0
            or self.topic not in (None, topic)
            or self.key not in (None, key)
        ):
            return False
        if self.after:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class Failures:
    """The planned failures; may be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[BrokerFailure] = []

    def plan(self, *failures: BrokerFailure) -> None:
        """Make calls fail from now on."""
        with self._lock:
            self._planned.extend(failures)

    def clear(self) -> None:
        """End all planned failures."""
        with self._lock:
            self._planned.clear()

    def take(self, call: Call, topic: str | None = None, key: bytes | None = None) -> Lot:
        """Count a call, and return its fate."""
        with self._lock:
            for failure in self._planned:
                if failure.strikes(call, topic, key):
                    return Lot(failure)
        return Lot(None)


@dataclass(frozen=True, slots=True)
class Lot:
    """The fate of one call."""

    failure: BrokerFailure | None

    def read(self) -> None:
        """Raise if the call fails in any way; a read without an answer changes nothing."""
        if self.failure:
            raise self.failure.error

    def before(self) -> None:
        """Raise if the call is refused."""
        if self.failure and self.failure.failing is Failing.REFUSED:
            raise self.failure.error

    def after(self) -> None:
        """Raise if the answer is lost."""
        if self.failure and self.failure.failing is Failing.LOST_REPLY:
            raise self.failure.error
