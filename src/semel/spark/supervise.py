"""Supervision: keep a query running, and stop where a restart cannot help."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol, Self

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import (
    Fenced,
    LeaseHeld,
    Misuse,
    Permanent,
    Retryable,
    SemelError,
    reason_of,
)
from semel.events import CycleEnded, Event, Events, QueryRestarted, log
from semel.pipeline.cycle import CommitFatal
from semel.pipeline.driver import CycleOutcome
from semel.pipeline.twophase import Backoff

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


class Exit(IntEnum):
    """The result of `run`, for `sys.exit`."""

    DONE = 0
    """The query ended by itself, or was stopped."""

    GAVE_UP = 75
    """More retryable failures than allowed; starting again later may help."""

    FENCED = 3
    """Another process owns the scope; do not restart this one automatically."""

    OPERATOR = 4
    """Records contradict each other, or a promise cannot be kept; see `semel doctor`."""

    STRANDED = 5
    """Committed, but not yet visible in every sink; starting again finishes it."""

    REFUSED = 65
    """The batch or the set-up can never pass as it is; a restart would fail in the same way."""

    FAILED = 1
    """The query failed for a reason outside semel."""

    INTERRUPTED = 130
    """Ctrl-C."""

    TERMINATED = 143
    """SIGTERM."""


NEXT: Final = {
    Exit.DONE: "nothing to do",
    Exit.GAVE_UP: "look at the reason above; start the job again when its cause is gone",
    Exit.FENCED: "find the other process with `semel status`; start this one after stopping that",
    Exit.OPERATOR: "run `semel doctor` and follow the runbook it names before starting again",
    Exit.STRANDED: "start the job again: recovery finishes what `semel doctor` lists",
    Exit.REFUSED: "change what the reason above names: a row, the table, the settings, a UDF",
    Exit.FAILED: "look at Spark's error above",
    Exit.INTERRUPTED: "start the job again whenever you like",
    Exit.TERMINATED: "start the job again whenever you like",
}
"""What an operator does next, by exit code."""

# A query that is stopped during a batch ends with an exception.
_ENDED_BY_STOPPING: Final = (Exit.DONE, Exit.GAVE_UP, Exit.FAILED)

RESTART_BACKOFF: Final = Backoff(tries=10, first_seconds=1.0, factor=2.0, most_seconds=60.0)


class Supervised(Protocol):
    """The supervised pipeline: an `ExactlyOnce`."""

    app: str
    query: str
    failure: BaseException | None
    outcome: CycleOutcome | None

    @property
    def events(self) -> Events:
        """Its events."""

    def recover(self) -> object:
        """Settle what earlier runs left."""

    def stop(self) -> None:
        """Release the scope."""


def supervise(
    pipeline: Supervised,
    start_query: Callable[[], StreamingQuery],
    *,
    backoff: Backoff = RESTART_BACKOFF,
    clock: Clock = SYSTEM_CLOCK,
) -> Exit:
    """Recover, run the query to its end, and start it again after retryable failures.

    The count of restarts returns to 0 whenever a cycle of this pipeline succeeds.  SIGTERM ends
    the query and releases the lease, unless the program has its own handler.
    """
    events, scope = pipeline.events, f"{pipeline.app}/{pipeline.query}"
    failures = 0

    def progressed(event: Event) -> None:
        nonlocal failures
        if not isinstance(event, CycleEnded) or event.scope != scope:
            return
        if event.outcome in ("succeeded", "replayed"):
            failures = 0

    unsubscribe = events.subscribe(progressed)
    try:
        with _Sigterm() as sigterm:
            while True:
                code, reason = _once(pipeline, start_query, sigterm)
                if sigterm.has_come and code in _ENDED_BY_STOPPING:
                    code, reason = Exit.TERMINATED, "terminated"
                if code is not Exit.GAVE_UP:
                    break
                failures += 1
                if failures >= backoff.tries:
                    break
                wait = backoff.wait_seconds(failures)
                events.emit(QueryRestarted(scope, failures, wait, reason))
                clock.sleep(wait)
    except _Terminated:
        code, reason = Exit.TERMINATED, "terminated"
    except KeyboardInterrupt:
        code, reason = Exit.INTERRUPTED, "interrupted"
    finally:
        unsubscribe()
    _release_scope(pipeline)
    say = log.info if code is Exit.DONE else log.error
    # In the text, too: without a special formatter, logs show no extra fields.
    words = f"query ended: {scope}: {reason or code.name.lower()}; next: {NEXT[code]}"
    say(words, extra={"scope": scope, "reason": reason, "next": NEXT[code]})
    return code


def _once(
    pipeline: Supervised, start_query: Callable[[], StreamingQuery], sigterm: _Sigterm
) -> tuple[Exit, str]:
    pipeline.failure = pipeline.outcome = None
    try:
        pipeline.recover()
        sigterm.query = start_query()
        sigterm.query.awaitTermination()
    except KeyboardInterrupt:
        if sigterm.query is not None:
            _stop(sigterm.query)
        raise
    except Exception as error:  # noqa: BLE001  Spark's errors have no common class with ours
        why = _known_failure(pipeline) or error
        return exit_for(why, pipeline.outcome), reason_of(why)
    finally:
        sigterm.query = None
    return Exit.DONE, ""


class _Terminated(BaseException):
    """SIGTERM arrived while no query ran."""


class _Sigterm:
    """Ends the query on SIGTERM; a second SIGTERM ends the process, as usual.

    The program's own handler, if there is one, stays in place.
    """

    def __init__(self) -> None:
        self.query: StreamingQuery | None = None
        self.has_come = False
        self._is_ours = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._is_ours = True
            signal.signal(signal.SIGTERM, self._end)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.has_come = True
        if self.query is None:
            raise _Terminated
        # The handler interrupts a call into the JVM, which must be able to return.
        threading.Thread(target=_stop, args=[self.query], name="semel-sigterm").start()


def _stop(query: StreamingQuery) -> None:
    try:
        query.stop()
    except Exception as error:  # noqa: BLE001  the JVM may be going down, too
        log.warning("query not stopped", extra={"reason": reason_of(error)})


def _known_failure(pipeline: Supervised) -> BaseException | None:
    """Return the exception of our function; Spark's own exception has it only as text."""
    return pipeline.failure


def exit_for(error: BaseException, outcome: object) -> Exit:
    """Return the exit code for a failure."""
    if isinstance(outcome, CommitFatal):
        if isinstance(outcome.cause, Fenced):
            return Exit.FENCED
        return Exit.STRANDED if outcome.stranded else _exit_of(outcome.cause or error)
    return _exit_of(error)


def _exit_of(error: BaseException) -> Exit:
    if isinstance(error, Fenced | LeaseHeld):
        return Exit.FENCED
    if isinstance(error, Retryable):
        return Exit.GAVE_UP
    if isinstance(error, Permanent | Misuse):
        return Exit.REFUSED
    if isinstance(error, SemelError):
        return Exit.OPERATOR
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    return Exit.FAILED


def _release_scope(pipeline: Supervised) -> None:
    try:
        pipeline.stop()
    except Exception as error:  # noqa: BLE001  the lease ends by itself
        log.warning("release failed", extra={"reason": reason_of(error)})
