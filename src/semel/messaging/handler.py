"""A handler, and what makes a consumer of it: a name, how records are read, what a failure does.

    @consumer("billing", id_from=FromHeader("message-id"))
    async def on_paid(message: Message, session: AsyncSession) -> None:
        session.add(Payment(...))

The decorator's result can still be called like the function itself.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.clock import SYSTEM_CLOCK, Clock
from semel.codec import Codec, FromHeader, JsonCodec, Place, Reading, Unreadable
from semel.errors import Misuse
from semel.events import EVENTS, CircuitClosed, CircuitOpened, Metric
from semel.message import Coordinates, Message, Record, StoredRecord, raw_of, value_of
from semel.messaging.failure import (
    OUTAGES,
    Classification,
    Classified,
    FailureClass,
    NonRetryableMessageError,
    Rule,
    listed_codes,
)
from semel.messaging.handle.cancel import called
from semel.messaging.handle.claims import ClaimAnswer, Duplicate
from semel.messaging.handle.thread import call_plain
from semel.messaging.outcome import Handled, Outcome, RetryLater
from semel.messaging.records import DeadLetter, StoredMessage
from semel.messaging.send.outbox import MESSAGE_ID_HEADER
from semel.messaging.settings import ConsumerSettings, ReplayRules, id_place_of, settings_of
from semel.policy.vocabulary import Duplicates, GapPolicy, Mode, RetryMode, StalePolicy

if TYPE_CHECKING:
    from semel.policy.model import Policy


class Pace:
    """How many messages of a batch share a savepoint: more while no message fails.

    A savepoint costs about as much as a message, and after a failure half of the messages
    that share one are handled again.  With one failure in *f* messages, √(2f) is best.
    """

    __slots__ = ("_since_failure",)

    def __init__(self) -> None:
        self._since_failure = 0

    def size(self, least: int) -> int:
        """Return how many messages to handle per savepoint, at least *least*."""
        return max(least, isqrt(2 * self._since_failure))

    def went_well(self, count: int) -> None:
        """Record that *count* messages were handled without a failure."""
        self._since_failure += count

    def failed(self) -> None:
        """Record a failure, which makes failures of the next messages more likely."""
        self._since_failure = 0


RECENT_ATTEMPTS: Final = 20
RECENT_SECONDS: Final = 300.0
FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 60.0


class Circuit:
    """The recent attempts of one consumer in this process, and whether it stands still.

        closed ──▶ open      the last 4 attempts, or half of the last 20, met an outage or a limit
        open   ──▶ closed    one message succeeds; one is tried at a time, at growing intervals

    While it is open, a failure of these two classes counts as no attempt.  When it closes, it
    forgets them: a message that always fails beside others that succeed is given up at last.
    """

    def __init__(self, consumer: str, failures: int, share: float) -> None:
        self.clock: Clock = SYSTEM_CLOCK
        self.since: float | None = None
        """When it was opened (UTC); None if it is closed."""

        self._consumer = consumer
        self._least = failures
        self._share = share
        self._recent: deque[tuple[float, bool]] = deque(maxlen=max(failures, RECENT_ATTEMPTS) - 1)
        """When attempts ended, and whether by an outage."""

        self._interval = 0.0
        self._next_try = 0.0

    @property
    def is_open(self) -> bool:
        """The consumer stands still, apart from one message at a time."""
        return self.since is not None

    @property
    def seconds_left(self) -> float:
        """The seconds until a message may be tried; 0 if it is closed."""
        return max(self._next_try - self.clock.monotonic(), 0.0) if self.is_open else 0.0

    def trying(self) -> None:
        """Note that a message is tried while it is open: the next one waits twice as long."""
        self._interval = min(2 * self._interval, LONGEST_SECONDS)
        self._next_try = self.clock.monotonic() + self._interval

    def not_tried(self) -> None:
        """Take back `trying`: its handler was not called, as for a duplicate."""
        if self.is_open:
            self._interval = max(self._interval / 2, FIRST_SECONDS)
            self._next_try = self.clock.monotonic()

    def spares(self, failure: Classified) -> bool:
        """Return whether *failure* counts as no attempt; open the circuit if it is one too many."""
        if failure.failure_class not in OUTAGES or not self._least:
            return False
        now = self.clock.monotonic()
        if not self.is_open:
            if not self._is_outage_with_one_more(now):
                return False
            self._open(now, failure)
        self._next_try = max(self._next_try, now + (failure.retry_after or self._interval))
        return True

    def failed(self, failure: Classified) -> None:
        """Record an attempt that failed and was not spared."""
        if not self.is_open:
            is_outage = failure.failure_class in OUTAGES
            self._recent.append((self.clock.monotonic(), is_outage))

    def succeeded(self) -> None:
        """Record an attempt that succeeded: the dependency is there, or there again."""
        if self.since is None:
            self._recent.append((self.clock.monotonic(), False))
            return
        seconds, self.since = self.clock.now() - self.since, None
        self._recent.clear()
        EVENTS.emit(CircuitClosed(self._consumer, self._consumer, seconds))
        EVENTS.measure(Metric.CIRCUIT, self._consumer, value=0.0)

    def _is_outage_with_one_more(self, now: float) -> bool:
        while self._recent and self._recent[0][0] < now - RECENT_SECONDS:
            self._recent.popleft()
        met = [*(is_outage for _, is_outage in self._recent), True]
        in_a_row = len(met) >= self._least and all(met[-self._least :])
        return in_a_row or sum(met) >= self._share * max(self._least, RECENT_ATTEMPTS)

    def _open(self, now: float, failure: Classified) -> None:
        self.since = self.clock.now()
        self._interval, self._next_try = FIRST_SECONDS, now
        EVENTS.emit(CircuitOpened(self._consumer, self._consumer, failure.code))
        EVENTS.measure(Metric.CIRCUIT, self._consumer, value=1.0)


Handler: TypeAlias = Callable[..., Any]
"""An async function, or a plain one, which runs in a thread."""


Inspect: TypeAlias = Callable[[Message], Awaitable[bool | None]]
"""Returns whether the effect of a message happened; None if it cannot be known."""


Repair: TypeAlias = Callable[..., Awaitable[None]]


@dataclass(frozen=True)
class Consumer:
    """A handler with its settings, by the name that its claims carry."""

    name: str
    handler: Handler
    reading: Reading
    settings: ConsumerSettings = field(default_factory=ConsumerSettings)
    takes_batches: bool = False
    """The handler takes a list of messages instead of one."""

    rules: Mapping[type[BaseException], Rule] = field(default_factory=dict)
    codes: Mapping[str, FailureClass] = field(default_factory=dict)
    """The classes of this consumer's own exceptions; they come before the built-in rules."""

    inspect: Inspect | None = None
    """For `StalePolicy.INSPECT`."""

    fetch_missing: Repair | None = None
    """For `GapPolicy.FETCH`: brings the aggregate to the version before the message's."""

    rebuild: Repair | None = None
    """For `GapPolicy.REBUILD`: rebuilds the aggregate up to and including the message."""

    mode: Mode | None = None
    """How its messages are claimed, if known; its runner must use the same mode."""

    replays: ReplayRules = field(default_factory=ReplayRules)
    """The replay rules of its policy; empty without a policy."""

    rehearse: Callable[[Message], Any] | None = None
    """What a dry run calls instead of the handler, where that does not run beside a session."""

    pace: Pace = field(default_factory=Pace, init=False, repr=False, compare=False)
    """The size of its savepoints, by recent failures."""

    circuit: Circuit = field(init=False, repr=False, compare=False)
    """Whether it stands still in an outage."""

    def __post_init__(self) -> None:
        settings = self.settings
        circuit = Circuit(self.name, settings.circuit_failures, settings.circuit_share)
        object.__setattr__(self, "circuit", circuit)
        if not self.name or len(self.name) > 200:
            raise Misuse(f"a consumer needs a name of 1 to 200 characters, got {self.name!r}")
        is_async = inspect.iscoroutinefunction(inspect.unwrap(self.handler)) or (
            inspect.iscoroutinefunction(getattr(self.handler, "__call__", None))  # noqa: B004
        )
        if self.takes_batches and self.settings.versioned:
            raise Misuse(f"consumer {self.name}: a handler of batches cannot check versions")
        if self.takes_batches and self.settings.keeps_results:
            raise Misuse(
                f"consumer {self.name}: a handler of batches cannot keep results per message"
            )
        if self.settings.stale is StalePolicy.INSPECT and self.inspect is None:
            raise Misuse(f"consumer {self.name}: the stale policy 'inspect' needs inspect=")
        if self.settings.versioned:
            self._check_repairs()
        object.__setattr__(self, "_takes_session", _takes_two(self.name, self.handler))
        object.__setattr__(self, "_is_plain", not is_async)

    def _check_repairs(self) -> None:
        repairs = {GapPolicy.FETCH: "fetch_missing", GapPolicy.REBUILD: "rebuild"}
        needed = repairs.get(self.settings.gaps)
        if needed and getattr(self, needed) is None:
            raise Misuse(
                f"consumer {self.name}: the gap policy '{self.settings.gaps}' needs {needed}="
            )

    def on(self, *types: str) -> Callable[[Handler], Handler]:
        """Register the handler of some message types, on a `dispatcher`.

        Raises:
            Misuse: the consumer has one handler for all, or a type has one already.
        """
        if not isinstance(self.handler, _Dispatch):
            raise Misuse(f"consumer {self.name} handles every type; make it with dispatcher(…)")
        by_type = self.handler.by_type

        def register(handler: Handler) -> Handler:
            if known := by_type.keys() & set(types):
                raise Misuse(f"consumer {self.name}: {min(known)!r} has a handler already")
            one = replace(self, handler=handler)
            by_type.update(dict.fromkeys(types, one))
            return handler

        return register

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the handler directly, for unit tests; a plain function runs here, and blocks."""
        result = self.handler(*arguments, **named)
        return await result if inspect.isawaitable(result) else result

    async def invoke(self, message: Message | Sequence[Message], session: Any) -> Any:
        """Call the handler, with the session if it takes one.

        A CancelledError that the caller did not cause is turned into a failure.
        """
        if self.takes_batches and isinstance(message, Message):
            message = [message]
        given = (message, session) if getattr(self, "_takes_session", False) else (message,)
        if getattr(self, "_is_plain", False):
            return await called(call_plain(self.handler, *given))
        return await called(self.handler(*given))

    def note(self, outcome: Outcome) -> None:
        """Tell the circuit what became of an attempt."""
        failure = getattr(outcome, "failure", None)
        if isinstance(outcome, Handled):
            self.circuit.succeeded()
        elif failure is not None:
            self.circuit.failed(failure)
        elif not isinstance(outcome, RetryLater):
            self.circuit.not_tried()

    def classification(self, known: Classification) -> Classification:
        """Return the rules for failures: its own, then its policy's codes, then *known*.

        A code that its policy lists counts as named: the exception's class does not decide.
        """
        listed = listed_codes(self.settings.retry, known.codes)
        return known.extended(self.rules, {**listed, **self.codes})

    def retry_topic(self, topic: str) -> str:
        """Return the topic in which its messages of *topic* wait for their next attempt."""
        return self.settings.retry_topic or f"{topic}.{self.name}.retry"

    def topics(self, *topics: str) -> tuple[str, ...]:
        """Return what to subscribe to: these topics, and their retry topics if it uses them."""
        if self.settings.retry.mode is not RetryMode.RETRY_TOPIC:
            return topics
        return tuple(dict.fromkeys([*topics, *map(self.retry_topic, topics)]))

    def with_settings(self, settings: ConsumerSettings) -> Consumer:
        """Return a copy of the consumer with other settings."""
        return replace(self, settings=settings)


def _takes_two(name: str, handler: Handler) -> bool:
    """Return whether a handler takes the session, or the lease, after the message.

    True if it needs a second argument, or has one of that name.

    Raises:
        Misuse: it can be called neither way.
    """
    signature = inspect.signature(handler)
    takes = list(signature.parameters.values())
    if not any(p.name in SECOND and p.kind is p.KEYWORD_ONLY for p in takes):
        if _can_be_called(signature, "message"):
            return any(p.kind is p.VAR_POSITIONAL for p in takes) or (
                len(takes) > 1 and takes[1].name in SECOND
            )
        if _can_be_called(signature, "message", "session"):
            return True
    raise Misuse(
        f"consumer {name}: its handler takes {signature}; it must take the message, or the "
        f"message and the session (or lease), as positional arguments"
    )


SECOND: Final = ("session", "lease")


def _can_be_called(signature: inspect.Signature, *arguments: str) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def consumer(
    name: str,
    *,
    policy: ConsumerSettings | Policy | None = None,
    id_from: Place | None = None,
    codec: Codec | None = None,
    reading: Reading | None = None,
    batches: bool = False,
    rules: Mapping[type[BaseException], Rule] | None = None,
    codes: Mapping[str, FailureClass] | None = None,
    inspect: Inspect | None = None,
    fetch_missing: Repair | None = None,
    rebuild: Repair | None = None,
    mode: Mode | None = None,
) -> Callable[[Handler], Consumer]:
    """Turn an ``async def handle(message, session)`` into a consumer.

    A plain ``def handle(message, session)`` works, too: it runs in a thread, and its session is
    a `Session` of SQLAlchemy in the same transaction.

    Without `id_from` or `reading`, the id is expected in the header ``message-id``; a message
    without one becomes a dead letter.  A `Policy` from a file sets where the id is, the
    settings of the consumer of this name, its *mode*, and whether its messages may be replayed;
    `semel.messaging.settings.settings_of` returns the runner's settings.  Without a policy, a
    handler that takes a lease needs ``mode=Mode.LEASED``, for replays and dry runs.

    Raises:
        Misuse: `reading` and one of its parts were both given; or the policy is refused, or
            contradicts what is given here.
    """
    if reading is not None and (id_from is not None or codec is not None):
        raise Misuse(f"consumer {name}: give id_from and codec inside reading=, or without it")
    settings = policy if isinstance(policy, ConsumerSettings) else ConsumerSettings()
    declared: Place | None = None
    replays = ReplayRules()
    file = None if isinstance(policy, ConsumerSettings) else policy
    if file is not None:
        settings, runner = settings_of(file, name)
        declared = id_place_of(file, name)
        replays = ReplayRules.of_policy(file, name)
        if mode not in (None, runner.mode):
            raise Misuse(f"consumer {name}: its policy has mode {runner.mode}, the code {mode}")
        mode = runner.mode
    found = reading or Reading(
        id_from=id_from or declared or FromHeader(MESSAGE_ID_HEADER), codec=codec or JsonCodec()
    )
    if declared is not None and found.id_from != declared:
        raise Misuse(
            f"consumer {name}: its policy takes the id from the {declared}, the code from the "
            f"{found.id_from}"
        )
    if file is not None and settings.versioned and found.version_from is None:
        raise Misuse(f"consumer {name}: its policy checks versions; reading= must say where one is")

    def decorate(handler: Handler) -> Consumer:
        return Consumer(
            name,
            handler,
            found,
            settings,
            batches,
            rules or {},
            codes or {},
            inspect,
            fetch_missing,
            rebuild,
            mode,
            replays,
        )

    return decorate


class _Dispatch:
    """The handler of a consumer that chooses by the message's type."""

    def __init__(self) -> None:
        self.by_type: dict[str, Consumer] = {}

    async def __call__(self, message: Message, session: Any) -> Any:
        chosen = self.by_type.get(message.type)
        if chosen is None:
            known = ", ".join(sorted(self.by_type)) or "none"
            why = f"no handler for the type {message.type!r}; there are: {known}"
            raise NonRetryableMessageError(why, "UNKNOWN_EVENT_TYPE")
        return await chosen.invoke(message, session)


def dispatcher(name: str, **options: Any) -> Consumer:
    """Make a consumer with a handler for each message type, registered by `Consumer.on`.

    A message of another type is a dead letter with the code UNKNOWN_EVENT_TYPE.  *options* are
    those of `consumer`; ``reading=Reading(type_from=…)`` says where the type is.

    Raises:
        Misuse: as `consumer`, or for ``batches=True``: a batch has messages of several types.
    """
    if options.get("batches"):
        raise Misuse(f"consumer {name}: a handler of batches cannot be chosen by type")
    return consumer(name, **options)(_Dispatch())


def unread(stored: StoredMessage) -> Message:
    """Rebuild a Message from a stored row, with the bytes of its payload and nothing decoded."""
    return Message(
        stored.message_id,
        None,
        stored.payload or b"",
        stored.key,
        stored.message_type,
        stored.headers,
        stored.source,
        stored.timestamp,
        schema_version=stored.schema_version,
        correlation_id=stored.correlation_id,
        digest=stored.payload_hash,
    )


def message_of(consumer: Consumer, stored: StoredMessage) -> Message | Unreadable:
    """Rebuild a Message from a stored row, read as the broker's record was."""
    record: Record = record_of(stored)
    if isinstance(stored, DeadLetter) and stored.was_no_message:
        # Its own id is made up; if it can be read now, it has a real one.
        record = Record(record.at, record.value, record.key, record.headers, record.timestamp)
    return consumer.reading.read(record)


def record_of(stored: StoredMessage, at: Coordinates | None = None) -> StoredRecord:
    """Return a stored row as a record: the one that came, or one that a runner fetches *at*."""
    return StoredRecord(
        at or stored.source or Coordinates(stored.topic or "?", 0, 0),
        value_of(stored.payload, stored.payload_hash),
        None if stored.key is None else raw_of(stored.key),
        stored.headers,
        stored.timestamp,
        message=replace(unread(stored), fetched_from=at),
    )


def holds_key(consumer: Consumer, message: Message) -> bool:
    """Return whether a waiting message of this consumer holds its key."""
    return consumer.settings.holds_waiting_keys and message.key is not None


def invokes(consumer: Consumer, answer: ClaimAnswer | None) -> bool:
    """Return whether the handler is called for a duplicate, to send its messages again."""
    is_wanted = consumer.settings.duplicates is Duplicates.INVOKE
    return is_wanted and isinstance(answer, Duplicate) and answer.had_effect
