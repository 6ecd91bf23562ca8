"""The real guarantee: what happens once, where, and under which failures, computed.

    when the message is acknowledged  ×  how a repetition is met  ──▶  semantics

Every effect of a consumer has a promise of its own, because the weakest one
says nothing about the others: rows may be effectively-once while an e-mail of
the same handler is at-least-once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from semel.codec import FromCoordinates
from semel.policy.model import Effective
from semel.policy.sections import OffsetCommit, SideEffect, duration_words
from semel.policy.vocabulary import (
    CommitTiming,
    Duplicates,
    Engine,
    Mode,
    Semantics,
    StalePolicy,
    Strategy,
)


class AckTime(StrEnum):
    """When a message is acknowledged, as far as it matters for the semantics."""

    BEFORE = "before the work"
    AFTER = "after the work"
    WITHIN = "in the transaction of the output"


ACK: Final[Mapping[CommitTiming, AckTime]] = {
    CommitTiming.BEFORE_PROCESSING: AckTime.BEFORE,
    CommitTiming.AFTER_PROCESSING: AckTime.AFTER,
    CommitTiming.AFTER_DB_TRANSACTION: AckTime.AFTER,
    CommitTiming.IN_OUTPUT_TRANSACTION: AckTime.WITHIN,
    CommitTiming.AFTER_SIDE_EFFECT: AckTime.AFTER,
}


class Repetition(StrEnum):
    """How an effect meets a message that comes again."""

    APPLIED = "applied again"
    RECOGNISED = "recognised"
    ONE_TRANSACTION = "met by nothing: the broker undid the first attempt"


SEMANTICS: Final[Mapping[tuple[AckTime, Repetition], Semantics]] = {
    # A crash loses all work after the ack, however well it is protected.
    (AckTime.BEFORE, Repetition.APPLIED): Semantics.AT_MOST_ONCE,
    (AckTime.BEFORE, Repetition.RECOGNISED): Semantics.AT_MOST_ONCE,
    (AckTime.BEFORE, Repetition.ONE_TRANSACTION): Semantics.AT_MOST_ONCE,
    (AckTime.AFTER, Repetition.APPLIED): Semantics.AT_LEAST_ONCE,
    (AckTime.AFTER, Repetition.RECOGNISED): Semantics.EFFECTIVELY_ONCE,
    # A broker transaction that leaves the offset out is repeated with it.
    (AckTime.AFTER, Repetition.ONE_TRANSACTION): Semantics.AT_LEAST_ONCE,
    (AckTime.WITHIN, Repetition.APPLIED): Semantics.AT_LEAST_ONCE,
    (AckTime.WITHIN, Repetition.RECOGNISED): Semantics.EFFECTIVELY_ONCE,
    (AckTime.WITHIN, Repetition.ONE_TRANSACTION): Semantics.EXACTLY_ONCE,
}
"""The one table from which the lint's guarantee and the delivery matrix are computed."""


@dataclass(frozen=True, slots=True)
class StrategyFacts:
    """What a strategy does for the handler's rows."""

    claims: bool
    """A claim is taken before the handler runs."""

    at_target: bool
    """The rows themselves refuse a repetition, without any claim."""

    outlives_claims: bool
    """They do so however old the message is."""


STRATEGIES: Final[Mapping[Strategy, StrategyFacts]] = {
    Strategy.PROCESSED_MESSAGE: StrategyFacts(True, at_target=False, outlives_claims=False),
    Strategy.AGGREGATE_VERSION_UPSERT: StrategyFacts(True, at_target=True, outlives_claims=True),
    Strategy.UNIQUE_EVENT_ID: StrategyFacts(True, at_target=True, outlives_claims=True),
    Strategy.STATE_VERSION_CHECK: StrategyFacts(True, at_target=True, outlives_claims=True),
    # An old message that comes again after newer ones would overwrite them.
    Strategy.DETERMINISTIC_DOCUMENT_ID: StrategyFacts(True, at_target=True, outlives_claims=False),
    Strategy.OVERWRITE_BY_KEY: StrategyFacts(True, at_target=True, outlives_claims=False),
    # These two protect the call, not the rows.
    Strategy.NOTIFICATION_ID: StrategyFacts(True, at_target=False, outlives_claims=False),
    Strategy.PROVIDER_IDEMPOTENCY_KEY: StrategyFacts(True, at_target=False, outlives_claims=False),
    Strategy.NONE: StrategyFacts(False, at_target=False, outlives_claims=False),
}


@dataclass(frozen=True, slots=True)
class Promise:
    """The semantics of one effect, with its scope."""

    semantics: Semantics
    what: str
    """The effect, and where it is."""

    under: tuple[str, ...]
    """The failures that it withstands; empty where it is no better than its ack."""

    caveat: str
    """Why it is not more, or on what it rests."""

    @property
    def sentence(self) -> str:
        """The promise with its scope; the semantics never stands alone."""
        if self.under:
            scope = f"{self.semantics} for {self.what}, under {listing(self.under)}"
            return f"{scope}, {self.caveat}" if self.caveat else scope
        return f"{self.semantics} for {self.what}: {self.caveat}"


@dataclass(frozen=True, slots=True)
class ConsumerGuarantee:
    """The promises of one consumer on one topic."""

    promises: tuple[Promise, ...]

    @property
    def sentence(self) -> str:
        """All promises in one sentence."""
        return "; ".join(promise.sentence for promise in self.promises)


def guarantee_of(effective: Effective, engine: Engine = Engine.SERVICE) -> ConsumerGuarantee:
    """Compute what a consumer really guarantees on a topic, as *engine* runs it."""
    what = "rows in the handler's database"
    if engine is Engine.SPARK:
        what = "rows of the pipeline's sinks, decided together with its claims and offsets"
        only_for_services = {"offset_commit": OffsetCommit(), "mode": Mode.TRANSACTIONAL}
        own = effective.consumer.model_copy(update=only_for_services)
        effective = replace(effective, consumer=own)
    own = effective.consumer
    within = ACK[own.offset_commit.timing] is AckTime.WITHIN
    promises = [_records(effective) if within else _rows(effective, what)]
    promises += [_call(effective, effect) for effect in effective.side_effects]
    if own.outbox:
        again = "and their receivers may get one again, with the same id"
        promises.append(_written(effective, "messages in the outbox", again))
    return ConsumerGuarantee(tuple(promises))


def rows_repetition(effective: Effective) -> tuple[Repetition, str]:
    """Say how the handler's rows meet a repetition, and why they apply it where they do."""
    own = effective.consumer
    facts = STRATEGIES[own.idempotency.strategy]
    if not facts.claims:
        return Repetition.APPLIED, "no claim is taken, and a repetition is handled again"
    stale = own.lease.stale if own.lease else StalePolicy.RECLAIM
    if own.mode is Mode.TRANSACTIONAL or facts.at_target or stale is StalePolicy.INSPECT:
        return Repetition.RECOGNISED, ""
    return Repetition.APPLIED, _LEASE_LOST[stale]


_LEASE_LOST: Final[Mapping[StalePolicy, str]] = {
    StalePolicy.RECLAIM: "when a lease runs out, work that may be done already is done again",
    StalePolicy.WAIT: "a handler that died is parked, and its work may or may not be done",
    StalePolicy.ABANDON: "a handler that died is parked, and its work may or may not be done",
    StalePolicy.INSPECT: "",
}

_LOST = "the offset is committed before the work, and a crash loses it"
_FAILURES = ("process crash", "broker redelivery")


def _rows(effective: Effective, what: str) -> Promise:
    repetition, why = rows_repetition(effective)
    if repetition is Repetition.APPLIED:
        return _promise(effective, repetition, what, (), why)
    under = (*_FAILURES, _replay_words(effective))
    return _promise(effective, repetition, what, under, _rests_on(effective))


def _records(effective: Effective) -> Promise:
    what = "records in Kafka, within the broker's transaction"
    seen = "as readers with read_committed see them"
    return _promise(effective, Repetition.ONE_TRANSACTION, what, _FAILURES, seen)


def _call(effective: Effective, effect: SideEffect) -> Promise:
    what = f"side effect {effect.name!r}"
    if effect.intent is not None:
        later = "and its receiver may get it again, with the same id"
        return _written(effective, f"the intent of {what}", later)
    if effect.idempotency_key:
        kept = "as long as the handler passes the key and its provider keeps it"
        return _promise(effective, Repetition.RECOGNISED, what, (*_FAILURES, "replay"), kept)
    return _promise(effective, Repetition.APPLIED, what, (), "no idempotency key")


def _written(effective: Effective, what: str, again: str) -> Promise:
    """Promise a message that is written as a row; another process sends it."""
    repetition, why = rows_repetition(effective)
    if repetition is Repetition.APPLIED:
        return _promise(effective, repetition, what, (), why)
    under = (*_FAILURES, _replay_words(effective))
    return _promise(effective, repetition, what, under, again)


def _promise(
    effective: Effective, repetition: Repetition, what: str, under: Sequence[str], caveat: str
) -> Promise:
    ack = ACK[effective.consumer.offset_commit.timing]
    if ack is AckTime.BEFORE:
        under, caveat = (), _LOST
    return Promise(SEMANTICS[ack, repetition], what, tuple(under), caveat)


def _replay_words(effective: Effective) -> str:
    """Say until when a replay is recognised: by its claim, or at any time by its version."""
    if effective.consumer.versioned:
        return "replay at any time"
    return f"replay within {duration_words(effective.claims_ttl)}"


def unchecked(effective: Effective) -> str:
    """Say what the promise rests on that the handler must do and nothing checks; or nothing.

    A strategy at the target is only declared: it protects the rows if the handler's statements
    really refuse a repetition.
    """
    own = effective.consumer
    facts = STRATEGIES[own.idempotency.strategy]
    met = f"as long as the handler's rows refuse a repetition ({own.idempotency.strategy})"
    if own.versioned or not facts.at_target:
        return ""
    if own.mode is Mode.LEASED:
        return met
    return f"later {met}" if facts.outlives_claims else ""


def _rests_on(effective: Effective) -> str:
    own = effective.consumer
    parts = [condition] if (condition := unchecked(effective)) else []
    if own.idempotency.duplicate_handling is Duplicates.INVOKE:
        parts.append("as long as the handler writes nothing for a duplicate")
    if own.mode is Mode.LEASED and not STRATEGIES[own.idempotency.strategy].at_target:
        parts.append("as far as the consumer's own inspection is right")
    if own.message_id and isinstance(own.message_id.place, FromCoordinates):
        parts.append("but a message that is published again counts as a new one")
    return ", ".join(parts)


def listing(words: Sequence[str]) -> str:
    """Write a list as a sentence has it: ``a, b and c``."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
