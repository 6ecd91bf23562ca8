"""Failures of a broker, on demand.

    broker.fail(Failure(Call.COMMIT, Failing.LOST_REPLY, after=2))

A failure strikes so many calls of one kind, and then no more; until the broker
is healed, where no number is said.
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
    """The request behind a batch; the publisher, being idempotent, repeats it by itself."""

    READ = "read"


class Failing(StrEnum):
    """What becomes of the call, and of its answer."""

    REFUSED = "refused"
    """Nothing happens, and the answer says so."""

    LOST_REPLY = "lost_reply"
    """It happens, and the answer is lost."""


@dataclass(slots=True)
class Failure:
    """Some calls that fail."""

    call: Call
    failing: Failing = Failing.REFUSED
    error: Exception = field(default_factory=lambda: Retryable("the broker does not answer"))
    """What is raised: `Retryable` for a broker that is away, `Permanent` for one that refuses."""

    times: int | None = 1
    """How many calls are struck; None: all of them, until the broker is healed."""

    after: int = 0
    """How many calls are spared first."""

    topic: str | None = None
    """Only messages of this topic; for `Call.MESSAGE`."""

    key: bytes | None = None
    """Only messages with this key; for `Call.MESSAGE`."""

    def strikes(self, call: Call, topic: str | None, key: bytes | None) -> bool:
        """Count a call, and tell whether it is struck."""
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
    """The failures that are still to come; may be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[Failure] = []

    def plan(self, *failures: Failure) -> None:
        """Let calls fail from now on."""
        with self._lock:
            self._planned.extend(failures)

    def clear(self) -> None:
        """Let no call fail any more."""
        with self._lock:
            self._planned.clear()

    def take(self, call: Call, topic: str | None = None, key: bytes | None = None) -> Lot:
        """Count a call, and say what becomes of it."""
        with self._lock:
            for failure in self._planned:
                if failure.strikes(call, topic, key):
                    return Lot(failure)
        return Lot(None)


@dataclass(frozen=True, slots=True)
class Lot:
    """What becomes of one call."""

    failure: Failure | None

    def read(self) -> None:
        """Raise: a question that is not answered changes nothing either way."""
        if self.failure:
            raise self.failure.error

    def before(self) -> None:
        """Raise, where the call is refused."""
        if self.failure and self.failure.failing is Failing.REFUSED:
            raise self.failure.error

    def after(self) -> None:
        """Raise, where the answer is lost."""
        if self.failure and self.failure.failing is Failing.LOST_REPLY:
            raise self.failure.error
