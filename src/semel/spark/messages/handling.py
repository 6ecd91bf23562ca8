"""The pass over a batch of messages: decode, deduplicate, order, handle, route.

    rows of a key, waiting ones first ──▶ read ──▶ claim known?  ──▶ duplicate, conflict
                                                   key held?     ──▶ waits behind
                                                   version old?  ──▶ passed over
                                                   handler       ──▶ rows, outgoing messages
                                                     └ failed    ──▶ retry, parked, dead letter

It writes nothing itself.  What it returns are rows for the user's sinks and changes of semel's
tables, all of one decision; what it has read without a lock, the sink of the changes compares.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from semel.codec import Reading, Unreadable
from semel.errors import Misuse, Retryable
from semel.message import (
    Coordinates,
    Message,
    Record,
    StoredRecord,
    digest_of,
    headers_from_text,
    raw_of,
    text_of,
    value_of,
)
from semel.messaging.changes import (
    MessageChange,
    MessagesReader,
    Op,
    SeenClaim,
    SeenWaiting,
    detail_of,
    micros,
    names_of,
)
from semel.messaging.failed.attempt_failed import conflict_with, unread_message, why_unread
from semel.messaging.failed.deadletters import record_of, topic_of
from semel.messaging.failed.waiting import InSequence, due_version, in_sequence
from semel.messaging.failure import (
    CODES,
    RETRYABLE_CLASSES,
    Classification,
    Classified,
    Exhausted,
    FailureClass,
    NonRetryableMessageError,
    RetryableMessageError,
    RetryIn,
    SequenceGap,
    verdict,
)
from semel.messaging.handle.cancel import called
from semel.messaging.handle.claims import OLD_VERSION, ClaimState
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Handled,
    Outcome,
    ParkedAway,
    Refused,
    RetryStored,
    Skipped,
    Told,
    told,
)
from semel.messaging.records import (
    BEHIND,
    DeadLetter,
    Gap,
    Waits,
    conflict_id,
    fields_of_message,
    original_id,
    stored_id,
)
from semel.messaging.send.outbox import (
    OutboxEntry,
    check_outgoing,
    key_to_text,
    outgoing_headers,
    outgoing_id,
    parent_of,
    value_of_payload,
)
from semel.messaging.settings import ConsumerSettings
from semel.policy.vocabulary import Duplicates, GapPolicy, GiveUp

NOTED_AT_ONCE: Final = 200
"""After the process has died, this many keys share a note; each of those then gets its own."""

_ENDED: Final = (ClaimState.COMPLETED, ClaimState.FAILED_TERMINAL)
"""States after which no pass tries a message: a note of it says nothing any more."""

HELD: Final = "held"
"""The state of a WAIT change whose row holds its key."""


@dataclass(frozen=True, slots=True)
class Send:
    """A message that a handler sends: a row of the outbox, in the same decision as its rows."""

    topic: str
    payload: Any
    """Bytes, text, or a value that JSON can represent; None is a tombstone."""

    key: str | bytes | None = None
    headers: Mapping[str, str | bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class PassSettings:
    """Everything that a task needs, apart from the stores; pickled into it."""

    consumer: str
    handler: Callable[..., Any] | None
    """None: Spark has made the rows, as columns beside each message."""

    reading: Reading
    settings: ConsumerSettings
    classification: Classification
    sinks: Mapping[str, int] = field(default_factory=dict)
    """By the names that a handler may use: the place of the sink."""

    checks: Sequence[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = ()
    """By place: checks that a row fits its sink, and raises Permanent if it does not."""

    outbox: str = "outbox"
    concurrency: int = 1
    """For async handlers: how many messages of different keys are handled at once, per task."""

    fetch_missing: Callable[..., Any] | None = None
    rebuild: Callable[..., Any] | None = None
    keeps_claims: bool = True
    """Messages that pass at their first attempt have a claim, too."""

    is_lean: bool = False
    """That claim is a lean one."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One row of the batch: a record of the topic, or a message that comes back."""

    record: Record
    route: str = ""
    waiting: SeenWaiting | None = None
    failure: tuple[str, str] | None = None
    """Code and reason, where Spark has found that the message cannot be handled."""

    shard: int = 0
    """Of a message that comes back: the number of the database where it waits."""


@dataclass(slots=True)
class Results:
    """What a pass over some rows has made."""

    changes: list[MessageChange] = field(default_factory=list)
    rows: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Of the user's sinks, by place."""

    picked: list[int] = field(default_factory=list)
    """Without a handler: the places of the arrivals that were handled, in order."""

    seconds: list[tuple[Message, float]] = field(default_factory=list)
    """How long the handler took, for each of its calls."""


_Seen: TypeAlias = SeenWaiting | SeenClaim | None
_Lane: TypeAlias = list[tuple[int, Message | Unreadable, SeenClaim | None]]
"""Messages of a key, each with its place among the arrivals."""

_InQueue: TypeAlias = tuple[int, Message | Unreadable, SeenWaiting, SeenClaim | None]
"""A waiting message, with the claim that its row does not know of."""

_Step: TypeAlias = Generator["_Call", Any, None]


@dataclass(slots=True)
class _Call:
    """A call of the user's code that a lane asks for."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(slots=True)
class _KeyVersion:
    """A key's applied version: as it was read, and after this pass."""

    seen: int | None
    now: int | None
    is_repaired: bool = False


class MessagePass:
    """Handles the rows of one task; keeps what it knows of keys and ids between Arrow batches.

    *held* are the keys whose new messages wait.  A careful pass notes what it tries: the
    process died in an attempt before.  A pass is *alone* if it is the only task of its attempt.
    """

    def __init__(
        self,
        settings: PassSettings,
        reader: MessagesReader,
        held: Mapping[str, int],
        on_outcome: Callable[[Arrival, Message | Unreadable, Outcome], None],
        *,
        is_careful: bool = False,
        is_alone: bool = False,
    ) -> None:
        self._of = settings
        self.reader = reader
        self._on_outcome = on_outcome
        self.stuck: dict[str, int | None] = dict(held)
        """Keys, as they are stored, whose new messages wait: the highest place that was seen."""

        self._queues: dict[str, int] = {}
        """The highest place of the keys whose waiting rows are in this pass."""

        self._seen: dict[str, tuple[int, str]] = {}
        """By id: the number of its first arrival in this pass, and the digest of the payload."""

        self._versions: dict[str, _KeyVersion] = {}
        self._counts: dict[tuple[str, int, str], tuple[int, int, int]] = {}
        self._is_careful, self._is_alone = is_careful, is_alone
        self._suspects: Mapping[str, int] = reader.suspects() if is_careful else {}
        self._is_async = _is_async(settings.handler)
        self._made = Results()
        self._arrivals: Sequence[Arrival] = ()
        self._before = 0
        """How many arrivals earlier calls have had."""

        self._noted = 0
        self._ended_early: set[str] = set()
        """Keys, as they are stored, of which a waiting message failed in this pass."""

    # The flow

    def run(
        self, arrivals: Sequence[Arrival], read: Sequence[Message | Unreadable] | None = None
    ) -> Results:
        """Handle rows in their order; all rows of a route must be in one call.

        *read* is what they hold, where that was read before.
        """
        self._made = made = Results()
        if read is None:
            read = [self._of.reading.read(one.record) for one in arrivals]
        self._before += len(self._arrivals)
        self._arrivals = arrivals
        if not self._is_alone:
            # One id under two keys is found by the claim's key, and then by a pass that is alone.
            self._seen.clear()
        known = self._claims(arrivals, read)
        if self._of.settings.versioned:
            self._read_versions(read)
        lanes: dict[str, _Lane] = {}
        for place, (arrival, one) in enumerate(zip(arrivals, read, strict=True)):
            claim = None
            if arrival.waiting is None:
                claim = known.get(one.id)
                digest = _digest(one)
                # The first by source order: lanes are handled in another.
                if claim is None or digest.startswith(claim.payload_hash):
                    self._seen.setdefault(one.id, (self._before + place, digest))
            elif isinstance(one, Message) and not arrival.waiting.claim_state:
                claim = known.get(one.id)
                # A replay put it there, and its topic may deliver it again, here and now.
                self._seen.setdefault(one.id, (self._before + place, _digest(one)))
            lanes.setdefault(self._route(arrival, one), []).append((place, one, claim))
        self._noted = 0
        for some, ids in self._groups([*lanes.values()]):
            if ids:
                self.reader.note(ids)
            try:
                self._drive([self._lane(rows) for rows in some])
            finally:
                # An exception is no death: only a process that died leaves its notes.
                if ids:
                    self.reader.clear(ids)
        new = sum(arrival.waiting is None for arrival in arrivals)
        if self._noted != new:
            raise Retryable(f"{new - self._noted} of {new} messages have got no outcome")
        return made

    def finish(self) -> list[MessageChange]:
        """Return what is known only at the end: versions, and the count of every outcome."""
        changes = []
        for key, version in self._versions.items():
            if version.now == version.seen:
                continue
            stored = stored_id(key)
            seen, now = version.seen, version.now
            changes.append(MessageChange(Op.VERSION, key=stored, version=now, seen_version=seen))
            if version.is_repaired and now is not None:
                gaps = MessageChange(Op.CLOSE, key=stored, state="arrived", version=now + 1)
                gaps.seen_version = 0 if seen is None else seen + 1
                changes.append(gaps)
        for (topic, partition, outcome), (first, last, total) in self._counts.items():
            count = MessageChange(Op.COUNT, topic=topic, partition=partition, state=outcome)
            count.seen_version, count.version, count.total = first, last, total
            changes.append(count)
        return changes

    def _claims(
        self, arrivals: Sequence[Arrival], read: Sequence[Message | Unreadable]
    ) -> Mapping[str, SeenClaim]:
        asked = {
            one.id
            for arrival, one in zip(arrivals, read, strict=True)
            if not (arrival.waiting and arrival.waiting.claim_state) and one.id not in self._seen
        }
        return self.reader.claims(sorted(asked)) if asked else {}

    def _read_versions(self, read: Sequence[Message | Unreadable]) -> None:
        keys = {one.key for one in read if isinstance(one, Message) and one.key is not None}
        missing = sorted(keys - self._versions.keys())
        found = self.reader.versions(missing) if missing else {}
        for key in missing:
            self._versions[key] = _KeyVersion(found.get(key), found.get(key))

    def _route(self, arrival: Arrival, one: Message | Unreadable) -> str:
        """Return the lane of a message: its key, or its id if it has none.

        Raises:
            Retryable: Spark reads another key, so messages of this one may be in other tasks; the
                next attempt is a single task.
        """
        if not isinstance(one, Message):
            return arrival.route
        route = route_of(one)
        if not self._is_alone and arrival.route not in ("", route):
            raise Retryable(f"Spark and Python read the key of message {one.id!r} in two ways")
        return route

    def _groups(self, lanes: list[_Lane]) -> Iterator[tuple[list[_Lane], list[str]]]:
        """Yield the lanes with what to note: all at once, or those without suspects in groups.

        Suspects are noted one by one when their turn comes, and nothing else runs meanwhile: what
        is under way when a process dies is suspected of it.
        """
        if not self._is_careful:
            yield lanes, []
            return
        suspected = [lane for lane in lanes if self._ids(lane) & self._suspects.keys()]
        others = [lane for lane in lanes if not self._ids(lane) & self._suspects.keys()]
        yield from (([lane], []) for lane in suspected)
        for at in range(0, len(others), NOTED_AT_ONCE):
            group = others[at : at + NOTED_AT_ONCE]
            yield group, sorted(set().union(*map(self._ids, group)))

    def _ids(self, lane: _Lane) -> set[str]:
        return {stored_id(one.id) for _, one, _ in lane if isinstance(one, Message)}

    def _drive(self, steps: Sequence[_Step]) -> None:
        if self._is_async:
            _run_async(self._at_once(steps))
            return
        for step in steps:
            _drive(step)

    async def _at_once(self, steps: Sequence[_Step]) -> None:
        limit = asyncio.Semaphore(self._of.concurrency)

        async def drive(step: _Step) -> None:
            async with limit:
                await _drive_async(step, self._of.settings.handler_seconds)

        try:
            async with asyncio.TaskGroup() as tasks:
                for step in steps:
                    tasks.create_task(drive(step))
        except BaseExceptionGroup as group:
            # Without the group, which hides the class of what it holds.
            raise min(group.exceptions, key=lambda one: not isinstance(one, Misuse)) from None

    # One key

    def _lane(self, rows: _Lane) -> _Step:
        queue: list[_InQueue] = []
        for place, one, claim in rows:
            arrival = self._arrivals[place]
            if arrival.waiting is not None:
                queue.append((place, one, arrival.waiting, claim))
                key = one.key if isinstance(one, Message) else arrival.waiting.key
                if key is not None:
                    self._queues[stored_id(key)] = arrival.waiting.place
        if queue:
            yield from self._drain(queue)
        for place, one, claim in rows:
            if self._arrivals[place].waiting is None:
                outcome = yield from self._arrived(place, one, claim)
                self._note(place, one, outcome)

    def _drain(self, queue: list[_InQueue]) -> _Step:
        """Handle a key's waiting messages in order, until one has to wait on."""
        while queue:
            at = self._next_of([one for _, one, _, _ in queue])
            place, one, waiting, claim = queue[at]
            key = one.key if isinstance(one, Message) else waiting.key
            has_failed = key is not None and stored_id(key) in self._ended_early
            if waiting.waits is Waits.PARKED or not waiting.is_due or has_failed:
                self._hold(key)
                return
            del queue[at]
            if isinstance(one, Unreadable):
                outcome: Outcome = self._unread(one, waiting)
            elif ClaimState.COMPLETED in (waiting.claim_state, claim and claim.state):
                # Its topic has delivered it since it was put here, or it has a lean claim.
                outcome = Skipped()
                self._end(one.tried(waiting.attempts), waiting, ClaimState.COMPLETED)
            else:
                outcome = yield from self._tried(place, one.tried(waiting.attempts + 1), waiting)
            self._note(place, one, outcome)
            if isinstance(outcome, RetryStored | ParkedAway) and self._holds(key):
                self._hold(key)
                self._ended_early.add(stored_id(key or ""))
                return

    def _next_of(self, queue: Sequence[Message | Unreadable]) -> int:
        """Return the place of the message to handle: the next version, if it waits behind."""
        if self._of.settings.versioned:
            for at, one in enumerate(queue):
                if isinstance(one, Message) and self._sequence(one) is InSequence.NEXT:
                    return at
        return 0

    def _holds(self, key: str | None) -> bool:
        return self._of.settings.holds_waiting_keys and key is not None

    def _hold(self, key: str | None) -> None:
        if key is not None and self._holds(key):
            stored = stored_id(key)
            self.stuck.setdefault(stored, self._queues.get(stored))

    def _arrived(
        self, place: int, one: Message | Unreadable, claim: SeenClaim | None
    ) -> Generator[_Call, Any, Outcome]:
        outcome = self._known(place, one, claim)
        if outcome is not None:
            if isinstance(one, Message) and outcome == Skipped() and claim is not None:
                yield from self._invoke_again(one, claim)
            if claim is not None and claim.state in _ENDED and stored_id(one.id) in self._suspects:
                self.reader.clear([stored_id(one.id)])
            return outcome
        if isinstance(one, Unreadable):
            return self._unread(one, claim)
        message = one.tried(1 if claim is None else claim.attempts + 1)
        # In most batches no key is held, and no message is suspected: then no id is looked up.
        is_held = bool(self.stuck) and self._holds(one.key)
        is_held = is_held and stored_id(one.key or "") in self.stuck
        is_next = self._of.settings.versioned and self._sequence(one) is InSequence.NEXT
        if is_held and not is_next:
            self._end(message, claim, ClaimState.PARKED, marker=BEHIND, attempts=0)
            self._wait(message, Waits.BEHIND, attempts=0)
            return RetryStored()
        return (yield from self._tried(place, message, claim))

    def _known(
        self, place: int, one: Message | Unreadable, claim: SeenClaim | None
    ) -> Outcome | None:
        """Return what becomes of a message that is known; None if it may be handled.

        Raises:
            BeingHandled: a service holds it; the attempt must be repeated.
        """
        digest = _digest(one)
        # Of a claim's hash, all may be known, or the first half, or nothing.
        if claim is not None and not digest.startswith(claim.payload_hash):
            return self._conflict(one, claim.payload_hash)
        number, earlier = self._seen[one.id]
        if number != self._before + place:
            return Skipped() if earlier == digest else self._conflict(one, earlier)
        if claim is None:
            return None
        match claim.state:
            case ClaimState.COMPLETED:
                return Skipped()
            case ClaimState.FAILED_TERMINAL:
                return Refused("dead letter")
            case ClaimState.IN_PROGRESS:
                if not claim.is_due:
                    raise BeingHandled(one.id)
                return None
            case _ if claim.waits:
                return Skipped("stored before")
            case ClaimState.PARKED:
                return Refused("parked")
            case ClaimState.FAILED_RETRYABLE:
                return None

    def _tried(self, place: int, message: Message, seen: _Seen) -> Generator[_Call, Any, Outcome]:
        """Handle a message whose turn it is."""
        stored = stored_id(message.id) if self._suspects else ""
        tries = self._suspects.get(stored, 0)
        # The first note is shared: it does not tell which message the process died of.
        if tries >= max(self._of.settings.poison_attempts, 2):
            self.reader.clear([stored])
            return self._failed(message, _crashed(tries), seen, parks=True)
        effects = _Effects(place)
        if tries:
            self.reader.note([stored])
        try:
            outcome = yield from self._apply(message, effects)
        except UnusableOutput:
            raise
        except Exception as error:  # noqa: BLE001  handlers raise what they like
            failure = self._of.classification.classify(error)
            return self._failed(message, failure, seen, self._open_gap(error))
        finally:
            if tries:
                self.reader.clear([stored])
        self._made.changes += effects.changes
        self._made.picked += effects.picked
        for place, row in effects.rows:
            self._made.rows.setdefault(place, []).append(row)
        marker = OLD_VERSION if isinstance(outcome, Skipped) else ""
        self._end(message, seen, ClaimState.COMPLETED, marker=marker)
        return outcome

    # Versions and the handler

    def _sequence(self, message: Message) -> InSequence | None:
        if message.version is None or message.key is None:
            return None
        known = self._versions.get(message.key)
        current = None if known is None else known.now
        return in_sequence(message.version, current, self._of.settings.first_version)

    def _apply(self, message: Message, effects: _Effects) -> Generator[_Call, Any, Outcome]:
        """Handle a message whose turn it is; first compare its version."""
        settings = self._of.settings
        if not settings.versioned:
            yield from self._handle(message, effects)
            return Handled()
        if message.version is None or message.key is None:
            raise NonRetryableMessageError("it has no version, or no key", "SCHEMA_INVALID")
        version = self._versions[message.key]
        gap: Gap | None = None
        match self._sequence(message):
            case InSequence.OLD:
                return Skipped("old version")
            case InSequence.GAP:
                due = due_version(version.now, settings.first_version)
                gap = Gap(self._of.consumer, message.key, due, message.version)
                if settings.gaps is GapPolicy.FETCH and self._of.fetch_missing is not None:
                    yield from self._call(effects, self._of.fetch_missing, message, gap)
                    version.is_repaired = True
                elif settings.gaps is GapPolicy.REBUILD and self._of.rebuild is not None:
                    yield from self._call(effects, self._of.rebuild, message, gap)
                    version.now, version.is_repaired = message.version, True
                    return Handled()
                elif settings.gaps is GapPolicy.ALERT:
                    effects.changes.append(_gap_change(gap))
                else:
                    raise SequenceGap(gap.key, gap.expected, gap.found)
            case _:
                stored = stored_id(message.key)
                version.is_repaired |= stored in self.stuck or stored in self._queues
        yield from self._handle(message, effects)
        version.now = message.version
        return Handled(gap=gap if settings.gaps is GapPolicy.ALERT else None)

    def _handle(self, message: Message, effects: _Effects) -> Generator[_Call, Any, None]:
        if self._of.handler is not None:
            began = time.perf_counter()
            try:
                yield from self._call(effects, self._of.handler, message)
            finally:
                self._made.seconds.append((message, time.perf_counter() - began))
            return
        failure = self._arrivals[effects.place].failure
        if failure is not None:
            code, reason = failure
            known = CODES.get(code)
            may_pass = known in RETRYABLE_CLASSES
            raise (RetryableMessageError if may_pass else NonRetryableMessageError)(reason, code)
        effects.picked.append(effects.place)

    def _call(
        self, effects: _Effects, function: Callable[..., Any], message: Message, *more: Any
    ) -> Generator[_Call, Any, None]:
        """Call the user's code, and keep what it yields if all of it can be used."""
        outputs = yield _Call(function, (message, *more))
        for output in _outputs(outputs):
            if isinstance(output, Send):
                effects.changes.append(self._sent(message, effects.next_ordinal(output), output))
                continue
            name, row = _row_of(output)
            place = self._of.sinks.get(name)
            if place is None:
                raise NoSuchSink(name, [*self._of.sinks])
            effects.rows.append((place, self._of.checks[place](row)))

    def _invoke_again(self, message: Message, claim: SeenClaim) -> _Step:
        """Call the handler for a duplicate; of what it yields, only outgoing messages are used."""
        handler = self._of.handler
        invokes = self._of.settings.duplicates is Duplicates.INVOKE and claim.had_effect
        if handler is None or not invokes or claim.state is not ClaimState.COMPLETED:
            return
        try:
            outputs = yield _Call(handler, (message.repeated(),))
            effects = _Effects()
            changes = [
                self._sent(message, effects.next_ordinal(one), one)
                for one in _outputs(outputs)
                if isinstance(one, Send)
            ]
        except UnusableOutput:
            raise
        except Exception as error:  # noqa: BLE001  its effect is durable: only the sending failed
            self._attempt(message, self._of.classification.classify(error))
        else:
            self._made.changes += changes

    # Changes

    def _end(
        self,
        message: Message,
        seen: _Seen,
        state: ClaimState,
        *,
        code: str = "",
        marker: str = "",
        seconds: float = 0.0,
        attempts: int | None = None,
    ) -> None:
        """Change the claim; a waiting message leaves the waiting table."""
        if seen is None and state is ClaimState.COMPLETED and not self._of.keeps_claims:
            return
        change = MessageChange(
            Op.CLAIM,
            **names_of(message.id, message.key),
            payload_hash=message.digest,
            source="" if message.source is None else str(message.source),
            state=state,
            attempts=message.attempt if attempts is None else attempts,
            error_code=code,
            marker=marker,
            delay_us=round(seconds * 1e6),
        )
        if isinstance(seen, SeenWaiting):
            change.op = Op.TAKE
            _compare(change, seen)
        elif seen is not None:
            change.op = Op.RETAKE
            change.seen_state, change.seen_attempts = seen.state, seen.attempts
        elif self._of.is_lean and state is ClaimState.COMPLETED and not marker:
            change.op = Op.LEAN
        self._made.changes.append(change)

    def _wait(
        self,
        message: Message,
        waits: Waits,
        *,
        attempts: int,
        failure: Classified | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Let a delivered message wait, behind those of its key."""
        names, source = names_of(message.id, message.key), message.source
        change = MessageChange(
            Op.WAIT,
            **names,
            payload_hash=message.digest,
            attempts=attempts,
            delay_us=round(seconds * 1e6),
            topic=source.topic if source else "",
            partition=source.partition if source else None,
            offset=source.offset if source else None,
        )
        # Others of its key wait for the next version: it must not wait behind them.
        overtakes = (
            self._of.settings.versioned
            and names["key"] in self.stuck
            and self._sequence(message) is InSequence.NEXT
        )
        if self._holds(message.key) and not overtakes:
            self._hold(message.key)
            change.state, change.place = HELD, self.stuck[names["key"]]
        columns = _stored(message, names) | {"waits": waits.value} | _why(failure)
        change.detail = detail_of(held=change.state == HELD, **columns)
        self._made.changes.append(change)

    def _failed(
        self,
        message: Message,
        failure: Classified,
        seen: _Seen,
        gap: Gap | None = None,
        *,
        parks: bool = False,
    ) -> Outcome:
        """Let a failed message be tried again, wait for a person, or become a dead letter."""
        settings = self._of.settings
        self._attempt(message, failure)
        parks |= gap is not None and settings.gaps is GapPolicy.PARK_KEY
        found = verdict(settings.retry, failure, message.attempt)
        if isinstance(found, RetryIn) and not parks:
            self._again(message, failure, seen, Waits.RETRY, found.seconds)
            return RetryStored(failure, message.attempt)
        given_up = settings.on_hopeless
        if isinstance(found, Exhausted):
            is_poison = failure.failure_class is FailureClass.POISON
            given_up = (settings.on_poison if is_poison else None) or settings.on_exhausted
        if parks or given_up is GiveUp.PARK:
            self._again(message, failure, seen, Waits.PARKED)
            return ParkedAway(failure.reason, failure)
        is_schema = failure.failure_class is FailureClass.SCHEMA
        return self._give_up(
            message, failure, Told.SCHEMA_INCOMPATIBLE if is_schema else Told.DLQ, seen
        )

    def _give_up(
        self, message: Message, failure: Classified, name: Told, seen: _Seen
    ) -> DeadLettered:
        self._end(message, seen, ClaimState.FAILED_TERMINAL, code=failure.code)
        first = seen.first_failed_at if isinstance(seen, SeenWaiting) else 0.0
        self._letter(message, failure, name, first_failed_at=first)
        return DeadLettered(failure, name)

    def _again(
        self,
        message: Message,
        failure: Classified,
        seen: _Seen,
        waits: Waits,
        seconds: float = 0.0,
    ) -> None:
        state = ClaimState.PARKED if waits is Waits.PARKED else ClaimState.FAILED_RETRYABLE
        self._end(message, seen, state, code=failure.code, seconds=seconds)
        if isinstance(seen, SeenWaiting):
            change = self._made.changes[-1]
            change.op, change.detail = Op.AGAIN, detail_of(waits=waits.value, **_why(failure))
            return
        self._wait(message, waits, attempts=message.attempt, failure=failure, seconds=seconds)

    def _attempt(self, message: Message, failure: Classified) -> None:
        names = names_of(message.id, message.key)
        change = MessageChange(Op.ATTEMPT, **names, error_code=failure.code)
        change.detail = detail_of(
            number=message.attempt,
            failure_class=failure.failure_class.value,
            exception=failure.exception,
            reason=failure.reason,
            originals=_originals(message.id, message.key, names),
        )
        self._made.changes.append(change)

    def _open_gap(self, error: Exception) -> Gap | None:
        """Note the missing versions that made a message fail."""
        if not isinstance(error, SequenceGap) or not self._of.settings.versioned:
            return None
        gap = Gap(self._of.consumer, error.key, error.expected, error.found)
        self._made.changes.append(_gap_change(gap))
        return gap

    def _letter(
        self,
        message: Message,
        failure: Classified,
        name: Told,
        *,
        as_id: str | None = None,
        expected: str = "",
        first_failed_at: float = 0.0,
    ) -> None:
        settings, now = self._of.settings, time.time()
        letter = DeadLetter(
            **fields_of_message(self._of.consumer, message) | {"message_id": as_id or message.id},
            attempts=message.attempt,
            reason=failure.reason,
            exception=failure.exception,
            error_code=failure.code,
            first_failed_at=first_failed_at or now,
            last_failed_at=now,
            owner=settings.dead_letter_owner,
            outcome=name.value,
            needs_review=settings.review_dead_letters,
            expected_hash=expected,
        )
        names = names_of(letter.message_id, letter.key)
        change = MessageChange(
            Op.LETTER,
            **names,
            payload_hash=letter.payload_hash,
            attempts=letter.attempts,
            error_code=letter.error_code,
        )
        change.detail = detail_of(
            **_stored(message, names),
            reason=letter.reason,
            exception=letter.exception,
            owner=letter.owner,
            outcome=letter.outcome,
            needs_review=letter.needs_review,
            expected_hash=expected,
            first_failed_at=micros(first_failed_at) if first_failed_at else None,
        )
        self._made.changes.append(change)
        if topic := topic_of(settings, letter):
            entry = record_of(letter, topic, settings.dead_letter_outbox)
            self._made.changes.append(_entry_change(message, 0, entry))

    def _conflict(self, one: Message | Unreadable, expected: str) -> Outcome:
        message = one if isinstance(one, Message) else unread_message(one)
        failure, its_own = conflict_with(expected, message), conflict_id(message.id, message.digest)
        self._letter(message, failure, Told.CONFLICT, as_id=its_own, expected=expected)
        return Conflicted(expected, message.digest)

    def _unread(self, one: Unreadable, seen: _Seen) -> Outcome:
        message, (failure, name) = unread_message(one), why_unread(one)
        message = message.tried(1 if seen is None else seen.attempts + 1)
        self._attempt(message, failure)
        return self._give_up(message, failure, name, seen)

    def _sent(self, message: Message, ordinal: int, one: Send) -> MessageChange:
        entry_id = outgoing_id(self._of.consumer, message.id, one.topic, ordinal)
        value = value_of_payload(one.payload)
        key = text_of(one.key) if isinstance(one.key, bytes) else one.key
        check_outgoing(one.topic, None if isinstance(one.key, bytes) else key, entry_id)
        entry = OutboxEntry(
            entry_id,
            one.topic,
            value,
            key,
            outgoing_headers(one.headers, message),
            outbox=self._of.outbox,
            parent=parent_of(self._of.consumer, message.id),
            parent_key=message.key,
        )
        return _entry_change(message, ordinal, entry)

    def _note(self, place: int, one: Message | Unreadable, outcome: Outcome) -> None:
        arrival = self._arrivals[place]
        self._on_outcome(arrival, one, outcome)
        if arrival.waiting is None:
            self._noted += 1
            at = arrival.record.at
            self.count(at.topic, at.partition, outcome, (at.offset,))

    def count(self, topic: str, partition: int, outcome: Outcome, offsets: Sequence[int]) -> None:
        """Count new messages of a partition that have the same outcome."""
        of = (topic, partition, told(outcome).value)
        first, last, total = self._counts.get(of, (offsets[0], offsets[0], 0))
        first, last = min(first, *offsets), max(last, *offsets)
        self._counts[of] = first, last, total + len(offsets)


@dataclass(slots=True)
class _Effects:
    """What the calls for one message have made; kept only if none of them fails."""

    place: int = 0
    """Of the message, among the arrivals."""

    changes: list[MessageChange] = field(default_factory=list)
    rows: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    picked: list[int] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)

    def next_ordinal(self, one: Send) -> int:
        """Return the number of a message to its topic: the ids of outgoing messages contain it."""
        number = self.sent.get(one.topic, 0)
        self.sent[one.topic] = number + 1
        return number


class UnusableOutput(Misuse):
    """What a handler yields has another form than it must have: no message can pass."""


class NoSuchSink(UnusableOutput):
    """A handler yields a row for a sink that the pipeline does not have."""

    def __init__(self, name: str, sinks: list[str]) -> None:
        super().__init__(name, sinks)
        self.name = name
        self.sinks = sinks

    def __str__(self) -> str:
        known = ", ".join(map(repr, self.sinks)) or "none"
        return f"the handler yields a row for {self.name!r}; there are sinks: {known}"


class BeingHandled(Retryable):
    """A service is handling a message of the batch; nothing was changed, the batch comes back."""

    def __init__(self, message_id: str) -> None:
        super().__init__(message_id)
        self.message_id = message_id

    def __str__(self) -> str:
        return f"message {self.message_id!r} is being handled by a service; the batch comes back"


# Calling the user's code


def _is_async(handler: Callable[..., Any] | None) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler)


_RUNNER: asyncio.Runner | None = None


def _run_async(work: Coroutine[Any, Any, None]) -> None:
    """Run in this process's one loop: what a handler keeps, such as a client, belongs to it."""
    global _RUNNER
    if _RUNNER is None:
        _RUNNER = asyncio.Runner()
    _RUNNER.run(work)


def _drive(step: _Step) -> None:
    """Carry out the calls of a lane, one after another."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            call = step.send(answer) if error is None else step.throw(error)
        except StopIteration:
            return
        answer, error = None, None
        try:
            answer = _listed(call.function(*call.arguments))
        except Exception as raised:  # noqa: BLE001  the lane decides what it means
            error = raised


async def _drive_async(step: _Step, seconds: float) -> None:
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            call = step.send(answer) if error is None else step.throw(error)
        except StopIteration:
            return
        answer, error = None, None
        try:
            async with asyncio.timeout(seconds):
                answer = await called(_listed_async(call.function(*call.arguments)))
        except Exception as raised:  # noqa: BLE001  the lane decides what it means
            error = raised


def _listed(result: Any) -> Any:
    """Run a generator to its end, so that what it raises is raised here."""
    return list(result) if inspect.isgenerator(result) else result


async def _listed_async(result: Any) -> Any:
    if isinstance(result, AsyncIterable):
        return [output async for output in result]
    if isinstance(result, Awaitable):
        return _listed(await result)
    return _listed(result)


def _outputs(result: Any) -> Iterable[Any]:
    if result is None:
        return ()
    if isinstance(result, Send) or (
        isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str)
    ):
        return (result,)
    if isinstance(result, Iterable) and not isinstance(result, str | bytes | Mapping):
        return result
    raise UnusableOutput(
        f"the handler returned {type(result).__name__}: it must yield pairs of a sink's name and "
        f"a row, or Send messages"
    )


def _row_of(output: Any) -> tuple[str, Mapping[str, Any]]:
    match output:
        case (str(name), Mapping() as row):
            return name, row
        case _:
            raise UnusableOutput(
                f"the handler yields {type(output).__name__}: it must yield pairs of a sink's "
                f"name and a row (a mapping), or Send messages"
            )


# Parts of changes


def _digest(one: Message | Unreadable) -> str:
    return one.digest if isinstance(one, Message) else digest_of(one.record.value)


def _gap_change(gap: Gap) -> MessageChange:
    change = MessageChange(Op.GAP, key=stored_id(gap.key))
    change.version, change.seen_version = gap.expected, gap.found
    change.detail = detail_of(original_key=original_id(gap.key))
    return change


def _crashed(tries: int) -> Classified:
    why = f"the process died {tries} times while it was handled"
    return Classified(FailureClass.TRANSIENT, "CRASHED", why, "")


def _compare(change: MessageChange, waiting: SeenWaiting) -> None:
    """Let a change of a waiting message compare what was read of it."""
    change.place, change.payload_hash = waiting.place, waiting.payload_hash
    change.seen_state, change.seen_attempts = waiting.claim_state, waiting.attempts
    change.seen_waits = waiting.waits.value


def _why(failure: Classified | None) -> dict[str, str]:
    if failure is None:
        return {"reason": "", "error_code": "", "exception": ""}
    return {
        "reason": failure.reason,
        "error_code": failure.code,
        "exception": failure.exception,
    }


def _stored(message: Message, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a stored message, without those that a change has itself."""
    fields = fields_of_message("", message)
    for name in ("consumer", "message_id", "key", "payload_hash"):
        del fields[name]
    fields["timestamp"] = micros(message.timestamp)
    fields["payload"] = value_of(message.raw, message.digest)
    fields["originals"] = _originals(message.id, message.key, names)
    return fields


def _originals(message_id: str, key: str | None, names: Mapping[str, Any]) -> str | None:
    given = {"message_id": message_id, "key": key}
    hashed = {name: value for name, value in given.items() if value != names[name]}
    return json.dumps(hashed) if hashed else None


def _entry_change(cause: Message, ordinal: int, entry: OutboxEntry) -> MessageChange:
    source = cause.source
    return MessageChange(
        Op.SEND,
        message_id=stored_id(entry.message_id),
        original_id=original_id(entry.message_id),
        key=key_to_text(entry.key),
        topic=source.topic if source else "",
        partition=source.partition if source else None,
        offset=source.offset if source else None,
        ordinal=ordinal,
        detail=detail_of(
            outbox=entry.outbox,
            topic=entry.topic,
            payload=entry.value,
            headers=entry.headers,
            parent=entry.parent,
            parent_key=None if entry.parent_key is None else stored_id(entry.parent_key),
        ),
    )


def route_of(message: Message) -> str:
    """Return the key, or the id of a message without one, as Spark compares it."""
    text = message.id if message.key is None else message.key
    if text.isascii():
        return text
    raw = raw_of(text)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.hex().upper()


def stored_record(waiting: SeenWaiting) -> StoredRecord:
    """Return a waiting message as the record that came."""
    originals = json.loads(waiting.originals) if waiting.originals else {}
    message_id = originals.get("message_id", waiting.message_id)
    key = originals.get("key", waiting.key)
    at = None
    if waiting.partition is not None and waiting.offset is not None:
        at = Coordinates(waiting.topic, waiting.partition, waiting.offset)
    headers = headers_from_text(waiting.headers)
    message = Message(
        message_id,
        None,
        waiting.payload or b"",
        key,
        waiting.message_type,
        headers,
        at,
        waiting.timestamp,
        schema_version=waiting.schema_version,
        correlation_id=waiting.correlation_id,
        digest=waiting.payload_hash,
    )
    return StoredRecord(
        at or Coordinates(waiting.topic or "?", 0, 0),
        value_of(waiting.payload, waiting.payload_hash),
        None if key is None else raw_of(key),
        headers,
        waiting.timestamp,
        message=message,
    )
