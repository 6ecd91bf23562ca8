"""A consumer: a name, a handler, how messages are read, and how failures are met.

    @consumer("billing", id_from=FromHeader("message-id"))
    async def on_paid(message: Message, session: AsyncSession) -> None:
        session.add(Payment(...))

What the decorator returns can still be called like the function itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.codec import Codec, FromHeader, JsonCodec, Place, Reading, Unreadable
from semel.errors import Misuse
from semel.message import Coordinates, Message, Record, raw_of, value_of
from semel.messaging.failure import (
    Classification,
    FailureClass,
    Rule,
    listed_codes,
)
from semel.messaging.handle.cancel import called
from semel.messaging.handle.claims import (
    ClaimAnswer,
    Duplicate,
)
from semel.messaging.records import DeadLetter, StoredMessage, WaitingMessage
from semel.messaging.send.outbox import MESSAGE_ID_HEADER
from semel.messaging.settings import ConsumerSettings, ReplayRules
from semel.policy.vocabulary import Duplicates, GapPolicy, Mode, StalePolicy

if TYPE_CHECKING:
    from semel.policy import Policy


class Pace:
    """How many messages of a batch share a savepoint: the longer nothing fails, the more.

    A savepoint costs about as much as a message, and after a failure half of the messages that
    share one are handled again.  With one failure in *f* messages, √(2f) per savepoint is best.
    """

    __slots__ = ("_since_failure",)

    def __init__(self) -> None:
        self._since_failure = 0

    def size(self, least: int) -> int:
        """Say how many messages to handle behind one savepoint, *least* or more."""
        return max(least, isqrt(2 * self._since_failure))

    def went_well(self, count: int) -> None:
        """Note that so many messages were handled without a failure."""
        self._since_failure += count

    def failed(self) -> None:
        """Note that a message failed: its neighbours may be next."""
        self._since_failure = 0


Handler: TypeAlias = Callable[..., Awaitable[Any]]


Inspect: TypeAlias = Callable[[Message], Awaitable[bool | None]]
"""Says whether the effect of a message happened; None where it cannot tell."""


Repair: TypeAlias = Callable[..., Awaitable[None]]


@dataclass(frozen=True)
class Consumer:
    """What handles the messages of one purpose, by the name its claims carry."""

    name: str
    handler: Handler
    reading: Reading
    settings: ConsumerSettings = field(default_factory=ConsumerSettings)
    takes_batches: bool = False
    """The handler takes a list of messages instead of one."""

    rules: Mapping[type[BaseException], Rule] = field(default_factory=dict)
    codes: Mapping[str, FailureClass] = field(default_factory=dict)
    """What this consumer's own exceptions and codes mean, before everybody's."""

    inspect: Inspect | None = None
    """For `StalePolicy.INSPECT`."""

    fetch_missing: Repair | None = None
    """For `GapPolicy.FETCH`: bring the aggregate up to the version before the message's."""

    rebuild: Repair | None = None
    """For `GapPolicy.REBUILD`: make the aggregate as the message and all before it leave it."""

    mode: Mode | None = None
    """How its messages are claimed, where that is known; its runner must do the same."""

    replays: ReplayRules = field(default_factory=ReplayRules)
    """What its policy says about replays; nothing where it was made without one."""

    pace: Pace = field(default_factory=Pace, init=False, repr=False, compare=False)
    """What its batches have seen of late."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 200:
            raise Misuse("a consumer needs a name of at most 200 characters")
        if not inspect.iscoroutinefunction(inspect.unwrap(self.handler)) and not (
            inspect.iscoroutinefunction(getattr(self.handler, "__call__", None))  # noqa: B004
        ):
            raise Misuse(f"consumer {self.name}: its handler must be an async function")
        if self.takes_batches and self.settings.versioned:
            raise Misuse(f"consumer {self.name}: versions are checked one message at a time")
        if self.takes_batches and self.settings.keeps_results:
            raise Misuse(f"consumer {self.name}: a handler of batches has no result of one message")
        if self.settings.stale is StalePolicy.INSPECT and self.inspect is None:
            raise Misuse(f"consumer {self.name}: the stale policy 'inspect' needs inspect=")
        if self.settings.versioned:
            self._check_repairs()
        object.__setattr__(self, "_takes_session", _takes_two(self.name, self.handler))

    def _check_repairs(self) -> None:
        repairs = {GapPolicy.FETCH: "fetch_missing", GapPolicy.REBUILD: "rebuild"}
        needed = repairs.get(self.settings.gaps)
        if needed and getattr(self, needed) is None:
            raise Misuse(
                f"consumer {self.name}: the gap policy '{self.settings.gaps}' needs {needed}="
            )

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the handler as the function it is: for unit tests."""
        return await self.handler(*arguments, **named)

    async def invoke(self, message: Message | Sequence[Message], session: Any) -> Any:
        """Call the handler, with the session where it takes one.

        A cancellation that comes out of it and is not the caller's own is a failure.
        """
        if self.takes_batches and isinstance(message, Message):
            message = [message]
        if getattr(self, "_takes_session", False):
            return await called(self.handler(message, session))
        return await called(self.handler(message))

    def classification(self, known: Classification) -> Classification:
        """Return what failures are: by its own rules and codes, its policy, then all that is known.

        A code that its policy lists is named with that, whatever an exception says of itself.
        """
        listed = listed_codes(self.settings.retry, known.codes)
        return known.extended(self.rules, {**listed, **self.codes})

    def with_settings(self, settings: ConsumerSettings) -> Consumer:
        """Return the same consumer with another behaviour."""
        return replace(self, settings=settings)


def _takes_two(name: str, handler: Handler) -> bool:
    """Tell whether a handler gets the session, or the lease, behind the message.

    It does where it needs a second argument, or has one of that name.

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
        f"consumer {name}: its handler takes {signature}; it is called with the message, or with "
        f"the message and the session (or lease), and nothing by name"
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
    """Make a consumer of an ``async def handle(message, session)``.

    Without `id_from` or `reading`, the id is expected in the header ``message-id``; a message
    without one goes to the dead letters.  A `Policy` of a file says where the id is, how the
    consumer of this name behaves, in which *mode*, and whether its messages may be replayed;
    `semel.messaging.settings.settings_of` gives the runner's settings.  Without one, a
    handler that takes a lease says ``mode=Mode.LEASED``: replays and dry runs need to know.

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
        settings, declared, said = _of_policy(file, name)
        replays = ReplayRules.of_policy(file, name)
        if mode not in (None, said):
            raise Misuse(f"consumer {name}: its policy says mode {said}, the code {mode}")
        mode = said
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


def _of_policy(policy: Policy, name: str) -> tuple[ConsumerSettings, Place | None, Mode]:
    # It knows the runner, which knows this module.
    from semel.messaging.settings import id_place_of, settings_of

    settings, runner = settings_of(policy, name)
    return settings, id_place_of(policy, name), runner.mode


def unread(stored: StoredMessage) -> Message:
    """Return a stored message with the bytes of its payload, which nobody decodes here."""
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


def message_of(consumer: Consumer, stored: WaitingMessage | DeadLetter) -> Message | Unreadable:
    """Read a stored message again, as the broker's record was read."""
    record = Record(
        stored.source or Coordinates(stored.topic or "?", 0, 0),
        value_of(stored.payload, stored.payload_hash),
        None if stored.key is None else raw_of(stored.key),
        stored.headers,
        stored.timestamp,
    )
    found = consumer.reading.read(record)
    if isinstance(found, Unreadable):
        return found
    if isinstance(stored, DeadLetter) and stored.was_no_message:
        return found  # its own id is made up; now that it can be read, it has a real one
    # A person may have given it another id, and the key may come from elsewhere.
    return replace(found, id=stored.message_id, key=stored.key, source=stored.source)


def holds_key(consumer: Consumer, message: Message) -> bool:
    """Tell whether a message of this consumer that waits holds its key."""
    return consumer.settings.holds_waiting_keys and message.key is not None


def invokes(consumer: Consumer, answer: ClaimAnswer | None) -> bool:
    """Tell whether the handler is called for a duplicate, to send everything again."""
    is_wanted = consumer.settings.duplicates is Duplicates.INVOKE
    return is_wanted and isinstance(answer, Duplicate) and answer.had_effect
