"""The keys of a policy file: the settings of a topic and of a consumer.

A key's name is the field's in camel case; the docstring below a field is the
key's description.  The JSON Schema, the error messages and the reference are
made of these classes.  A field that is None says nothing: what holds then is
decided by `semel.policy.model.Effective`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    Strict,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from semel.codec import FromCoordinates, FromHeader, FromPayload
from semel.policy.reader import PARTS, nearest
from semel.policy.vocabulary import (
    BackoffShape,
    BatchPolicy,
    CommitTiming,
    Duplicates,
    GapPolicy,
    GiveUp,
    Intent,
    Mode,
    Ordering,
    ReplayAllowed,
    RetryMode,
    Semantics,
    StalePolicy,
    Strategy,
)

# Seven digits: the longest, of weeks, is still a duration that Python can hold.
DURATION: Final = r"^[1-9][0-9]{0,6}(ms|s|m|h|d|w)$"

_UNITS: Final[Mapping[str, timedelta]] = {
    "w": timedelta(weeks=1),
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}


def parse_duration(text: str) -> timedelta | None:
    """Read a duration such as ``7d``, ``36h`` or ``90s``; None where *text* is none."""
    found = re.fullmatch(DURATION, text)
    if found is None:
        return None
    unit = found[1]
    return int(text.removesuffix(unit)) * _UNITS[unit]


def duration_words(duration: timedelta) -> str:
    """Write a duration with the largest unit that needs no fraction, weeks left out."""
    for unit, length in _UNITS.items():
        if unit != "w" and duration >= length and not duration % length:
            return f"{duration // length}{unit}"
    return f"{duration / timedelta(milliseconds=1):g}ms"


def _wrong(meant: str = "") -> PydanticCustomError:
    """Make the error about a value; the reader writes the sentence."""
    return PydanticCustomError("wrong_value", "this is not a value of the key", {"meant": meant})


def _number(value: Any) -> Any:
    """Refuse what pydantic would turn into a number: true, and the text of one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong()
    return value


def _duration(value: Any) -> timedelta:
    found = parse_duration(value) if isinstance(value, str) else value
    if not isinstance(found, timedelta):
        raise _wrong(f"{value}s or {value}d" if type(value) is int else "")
    return found


def _replay_allowed(value: Any) -> ReplayAllowed:
    for member, written in _REPLAY_WRITTEN.items():
        # By type, too: to Python 1 is True.
        if value is member or (type(value) is type(written) and value == written):
            return member
    raise _wrong()


_REPLAY_WRITTEN: Final[Mapping[ReplayAllowed, bool | str]] = {
    ReplayAllowed.YES: True,
    ReplayAllowed.NO: False,
    ReplayAllowed.NOT_FOR_SIDE_EFFECT: "false-for-side-effect",
}

_PLACE: Final = r"^((header|payload):\S+|coordinates)$"


def _place(value: Any) -> FromHeader | FromPayload | FromCoordinates:
    if isinstance(value, FromHeader | FromPayload | FromCoordinates):
        return value
    if not isinstance(value, str) or not re.fullmatch(_PLACE, value):
        kind = value.partition(":")[0] if isinstance(value, str) else ""
        raise _wrong(nearest(kind, ("header:", "payload:", "coordinates")))
    kind, _, name = value.partition(":")
    if kind == "coordinates":
        return FromCoordinates()
    return FromHeader(name) if kind == "header" else FromPayload(name)


def place_words(place: FromHeader | FromPayload | FromCoordinates) -> str:
    """Write where an id comes from as the file has it."""
    match place:
        case FromHeader(name):
            return f"header:{name}"
        case FromPayload(path):
            return f"payload:{path}"
        case _:
            return "coordinates"


# More than any useful number of messages, attempts, seconds or milliseconds, and small enough
# to be multiplied safely.
MOST: Final = 10**9

UNBOUNDED: Final = 0
"""The number of attempts that means: no limit."""

# The largest number that is not infinite; JSON has no word for those that are.
_LARGEST: Final = 1.7976931348623157e308


def _text(title: str, example: str, pattern: str = r"^[\s\S]*\S[\s\S]*$") -> Any:
    """Make the schema of a text; its title says what is expected, in messages and docs, too."""
    return Field(pattern=pattern, title=title, examples=[example])


def _written(title: str, example: str, pattern: str) -> WithJsonSchema:
    """Make the schema of a text that becomes something else."""
    schema = {"type": "string", "pattern": pattern, "title": title, "examples": [example]}
    return WithJsonSchema(schema)


_CODE: Final = r"^[A-Z][A-Z0-9]*(_[A-Z0-9]+)*$"

Flag: TypeAlias = Annotated[bool, Strict()]
Text: TypeAlias = Annotated[str, _text("text", "search-team")]
TopicName: TypeAlias = Annotated[str, _text("the name of a topic", "case-events")]
Link: TypeAlias = Annotated[str, _text("a link or a path", "docs/runbook.md")]
Code: TypeAlias = Annotated[
    str, _text("a code such as DATABASE_TIMEOUT", "DATABASE_TIMEOUT", _CODE)
]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MOST, examples=[4]), BeforeValidator(_number)]
Milliseconds: TypeAlias = Annotated[
    int, Field(ge=0, le=MOST, examples=[1000]), BeforeValidator(_number)
]
Seconds: TypeAlias = Annotated[
    float,
    Field(gt=0, le=MOST, allow_inf_nan=False, title="a number of seconds above 0", examples=[60]),
    BeforeValidator(_number),
]
Share: TypeAlias = Annotated[
    float,
    Field(gt=0, le=1, allow_inf_nan=False, title="a share above 0, up to 1", examples=[0.5]),
    BeforeValidator(_number),
]
Attempts: TypeAlias = Annotated[
    int,
    Field(ge=-1, le=MOST),
    AfterValidator(lambda number: max(number, UNBOUNDED)),
    BeforeValidator(lambda value: UNBOUNDED if _number(value) == math.inf else value),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": -1, "maximum": MOST},
                {"type": "number", "exclusiveMinimum": _LARGEST},
            ],
            "title": "a whole number of attempts of 1 or more",
            "examples": [5],
        }
    ),
]
"""A number of attempts; 0, -1 and .inf all mean `UNBOUNDED`, which the lint refuses."""

Duration: TypeAlias = Annotated[
    timedelta,
    BeforeValidator(_duration),
    PlainSerializer(duration_words),
    _written("a duration such as 7d, 36h or 90s", "14d", DURATION),
]
IdPlace: TypeAlias = Annotated[
    FromHeader | FromPayload | FromCoordinates,
    PlainValidator(_place),
    PlainSerializer(place_words),
    _written("header:NAME, payload:PATH or coordinates", "header:message-id", _PLACE),
]
Replayable: TypeAlias = Annotated[
    ReplayAllowed,
    PlainValidator(_replay_allowed),
    PlainSerializer(lambda member: _REPLAY_WRITTEN[member]),
    WithJsonSchema({"enum": [*_REPLAY_WRITTEN.values()], "title": ReplayAllowed.__name__}),
]


def unsaid(default: str) -> Any:
    """Make a key that may be left out; *default* says in words what holds then."""
    return Field(default=None, json_schema_extra={"x-default": default})


class Section(BaseModel):
    """Keys and values that belong together.  In Python, fields have their own names."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    @field_validator("*")
    @classmethod
    def _no_item_twice(cls, value: Any) -> Any:
        items = value if isinstance(value, tuple) else ()
        _refuse((n, _TWICE) for n, item in enumerate(items) if item in items[:n])
        return value


_TWICE: Final = "the item stands in the list already"


def _refuse(found: Iterable[tuple[str | int, str]]) -> None:
    """Raise one error for all keys or items that are wrong together, if any are."""
    if all_found := list(found):
        said = "; ".join(f"{step}: {what}" for step, what in all_found)
        raise PydanticCustomError(PARTS, "{said}", {"said": said, "found": all_found})


class Idempotency(Section):
    """How repetitions are recognised, and what is done with them."""

    strategy: Strategy = Strategy.PROCESSED_MESSAGE
    """How the consumer recognises that a message had its effect already."""
    duplicate_handling: Duplicates = Duplicates.SKIP
    """What is done with a message that was handled before."""
    external_provider_idempotency: Flag | None = None
    """Whether providers of side effects get, and recognise, an idempotency key."""


class OffsetCommit(Section):
    """When a message is acknowledged."""

    timing: CommitTiming = CommitTiming.AFTER_DB_TRANSACTION
    """When a message is acknowledged to the broker."""


class Retry(Section):
    """How often, how soon, and where a failed message is tried again."""

    max_attempts: Attempts = 5
    """How often a message is tried, the first time included.
    0, -1 and .inf mean no limit, which the lint refuses.
    """
    backoff: BackoffShape = BackoffShape.EXPONENTIAL_JITTER
    """How the waits between attempts grow."""
    initial_delay_ms: Milliseconds = 1000
    """The first wait, in milliseconds."""
    max_delay_ms: Milliseconds = 60000
    """The longest wait, in milliseconds."""
    jitter: Flag | None = unsaid("as `backoff` says")
    """Whether waits are shortened at random."""
    retryable: tuple[Code, ...] = ()
    """Codes that are retried, regardless of class and exception."""
    non_retryable: tuple[Code, ...] = ()
    """Codes that are not retried, regardless of class and exception."""
    mode: RetryMode = RetryMode.BLOCKING
    """Where a message waits for its next attempt."""
    topic: Text | None = unsaid("`<topic>.<consumer>.retry`")
    """The retry topic, in mode `retry-topic`."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Retry:
        found: list[tuple[str | int, str]] = [
            ("nonRetryable", f"{code} is in retryable, too")
            for code in sorted({*self.retryable} & {*self.non_retryable})
        ]
        if self.initial_delay_ms > self.max_delay_ms:
            first, longest = self.initial_delay_ms, self.max_delay_ms
            what = f"the first wait, {first} ms, is longer than the longest, {longest} ms"
            found.append(("initialDelayMs", what))
        if self.jitter is False and self.backoff is BackoffShape.EXPONENTIAL_JITTER:
            what = "backoff exponential-jitter has jitter; use backoff exponential"
            found.append(("jitter", what))
        _refuse(found)
        return self


class Dlq(Section):
    """The dead letters."""

    enabled: Flag = True
    """Whether messages that cannot be handled become dead letters."""
    topic: Text | None = None
    """The topic that dead letters are published to, besides being kept. They go through the
    outbox named `outbox`, whose relay must run.
    """
    unreadable_topic: Text | None = unsaid("`topic`")
    """The topic for records that cannot be decoded, or whose schema is missing or incompatible."""
    owner: Text | None = None
    """The team that looks after them."""
    manual_review_required: Flag = False
    """Whether a person must have looked at a dead letter (`semel dlq show`) before it is sent
    back, parked or replayed.
    """
    keep: Duration | None = None
    """How long a dead letter may wait for its replay."""
    expire: Flag = False
    """Whether `semel retention` deletes dead letters that have waited longer than `keep`,
    which must be given then.
    """


class Poison(Section):
    """Messages that fail every time."""

    max_attempts_before_park: Count | None = unsaid("`retry.maxAttempts`")
    """After how many attempts a poison message is parked; unless said, it goes where `onExhausted`
    says, after its last attempt.
    """


class CircuitTerms(Section):
    """Standing still in an outage."""

    enabled: Flag = True
    """Whether the consumer stands still, and spends no attempts, in an outage."""
    failures: Count = 4
    """How many failures of the class `dependency_outage` or `rate_limit` in a row it takes. Fewer
    than `retry.maxAttempts` protect the first message, too.
    """
    share: Share = 0.5
    """Or which share of the last 20 attempts (`circuit.failures`, if that is more)."""


class LagSlo(Section):
    """How far behind the consumer may be."""

    max_lag_seconds: Seconds
    """How many seconds behind raise an alert: compare the metric `consumer.lag.seconds` with it."""


class ReplaySection(Section):
    """Sending messages to the consumer again, on purpose."""

    allowed: Replayable | None = unsaid(
        "`true`; `false-for-side-effect` where one has neither key nor intent"
    )
    """Whether an operator may do it."""
    window: Duration | None = unsaid("the topic's `replayWindow`")
    """How far back a replay may reach."""


class MessageId(Section):
    """What makes two deliveries the same message."""

    place: IdPlace = Field(alias="from")
    """Where the id comes from."""


class LeaseTerms(Section):
    """The lease of a claim in mode ``leased``."""

    seconds: Seconds = 60.0
    """How long a lease lasts unless it is renewed."""
    stale: StalePolicy = StalePolicy.RECLAIM
    """What becomes of a lease that ran out."""


class Parking(Section):
    """The parking lot."""

    per_key: Flag | None = unsaid("`true` with order per key; with `retry-topic` it must be said")
    """Whether the later messages of a key wait behind one that waits."""
    owner: Text | None = unsaid("`dlq.owner`")
    """The team that looks after it."""
    keep: Duration | None = None
    """How long a message may be parked."""


class SideEffect(Section):
    """One effect outside the handler's database."""

    name: Text
    """What it is."""
    idempotency_key: Flag | None = unsaid("`idempotency.externalProviderIdempotency`")
    """Whether its provider gets, and recognises, an idempotency key."""
    intent: Intent | None = None
    """Where its intent becomes durable, to be carried out later."""

    @property
    def is_protected(self) -> bool:
        """A repetition is recognised by its provider, or its intent is durable."""
        return bool(self.idempotency_key) or self.intent is not None


class Claims(Section):
    """The records by which repetitions are recognised."""

    ttl: Duration | None = unsaid("twice the longest window in which a message can come again")
    """How long a finished claim is kept."""


class Batch(Section):
    """Handling several messages in one transaction."""

    size: Count = 100
    """How many at most."""
    policy: BatchPolicy = BatchPolicy.INDEPENDENT
    """What one failed message does to its batch."""


class Proofs(Section):
    """The tests that prove the policy."""

    duplicates: Text | None = None
    """The test that delivers twice."""
    crash_window: Text | None = None
    """The test that crashes between effect and ack."""


class TopicPolicy(Section):
    """What holds for all consumers of a topic."""

    default_guarantee: Semantics | None = None
    """The weakest semantics that its consumers may have."""
    key: Text | None = None
    """The field that the messages are partitioned by."""
    ordering: Ordering | None = unsaid("none")
    """Which order consumers keep."""
    retention: Duration | None = None
    """How long the broker keeps the messages, and can deliver them again."""
    replay_allowed: Flag | None = None
    """Whether messages may be sent to consumers again, on purpose."""
    replay_window: Duration | None = unsaid("`retention`")
    """How far back a replay may reach, archives included."""


class ConsumerPolicy(Section):
    """How one consumer handles its messages."""

    topics: tuple[TopicName, ...] | None = unsaid("all topics of the file")
    """The topics it reads."""
    critical: Flag = False
    """Whether losing or repeating an effect costs more than standing still."""
    guarantee: Semantics | None = None
    """The weakest semantics that its effects may have."""
    ordering: Ordering | None = unsaid("the topic's `ordering`")
    """Which order it needs."""
    message_id: MessageId | None = None
    """What makes two deliveries the same message."""
    mode: Literal[Mode.TRANSACTIONAL, Mode.LEASED] = Field(Mode.TRANSACTIONAL, title="Mode")
    """How a claim and the handler's work belong together."""
    lease: LeaseTerms | None = None
    """The lease of a claim, in mode `leased`."""
    idempotency: Idempotency = Idempotency()
    """How repetitions are recognised, and what is done with them."""
    offset_commit: OffsetCommit = OffsetCommit()
    """When a message is acknowledged."""
    retry: Retry = Retry()
    """How often, how soon, and where a failure is tried again."""
    on_exhausted: GiveUp | None = unsaid("`dlq` where it is enabled, else `park`")
    """Where a message goes that is not tried again."""
    dlq: Dlq = Dlq()
    """The dead letters."""
    poison: Poison = Poison()
    """Messages that fail every time."""
    circuit: CircuitTerms = CircuitTerms()
    """Standing still in an outage."""
    handler_seconds: Seconds = 300.0
    """How long a handler may run; then it is cancelled, and the attempt has failed. In mode
    `leased` only if it is given.
    """
    parking: Parking = Parking()
    """The parking lot."""
    lag_slo: LagSlo | None = None
    """How far behind it may be."""
    replay: ReplaySection = ReplaySection()
    """Sending messages to it again, on purpose."""
    versioned: Flag = False
    """Whether messages carry their aggregate's version, and the sequence is checked."""
    gaps: GapPolicy | None = unsaid("`retry`")
    """What happens when versions are missing."""
    outbox: Flag = False
    """Whether outgoing messages are written to the outbox, with the handler's rows."""
    side_effects: tuple[SideEffect, ...] | None = unsaid(
        "one, where `idempotency` or `replay` speaks of it"
    )
    """Effects outside the handler's database; `[]` where there are none."""
    claims: Claims = Claims()
    """The records by which repetitions are recognised."""
    keep_result: Flag = False
    """Whether the handler's result is kept, for duplicates to be answered with."""
    batch: Batch | None = unsaid("one by one")
    """Handling several messages in one transaction."""
    concurrency: Count = 1
    """How many messages are handled at once."""
    tests: Proofs = Proofs()
    """The tests that prove it."""
    runbook: Link | None = None
    """What to do when it stands still."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> ConsumerPolicy:
        if self.on_exhausted is GiveUp.DEAD_LETTER and not self.dlq.enabled:
            what = "exhausted messages go to the dead letters, which are not enabled"
            _refuse([("onExhausted", what)])
        return self
