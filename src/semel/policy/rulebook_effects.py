"""The rules about duplicates, side effects, acknowledgement and replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from semel.codec import FromCoordinates
from semel.policy.durations import duration_words
from semel.policy.guarantee import ACK, STRATEGIES, Ack, Repetition, rows_repetition
from semel.policy.rules import PATH, AntiPattern, Case, Nouns, Rule, Severity, once
from semel.policy.vocabulary import Intent, Mode, ReplayAllowed, Semantics, Strategy

_ORDER: Final = [*Semantics]


def _weaker_than_wanted(case: Case) -> Iterator[Nouns]:
    wanted = case.effective.guarantee
    if wanted is None or wanted is Semantics.EXACTLY_ONCE:
        return
    for promise in case.guarantee.promises:
        if _ORDER.index(promise.semantics) < _ORDER.index(wanted):
            path = case.effective.decided_by["guarantee"]
            yield {"wanted": wanted, "promise": promise.sentence, PATH: path}


def _exactly_once_claimed(case: Case) -> Iterator[Nouns]:
    if case.effective.guarantee is not Semantics.EXACTLY_ONCE:
        return
    if any(p.semantics is not Semantics.EXACTLY_ONCE for p in case.guarantee.promises):
        path = case.effective.decided_by["guarantee"]
        yield {"real": case.guarantee.sentence, PATH: path}


def _unprotected(case: Case) -> Iterator[Nouns]:
    for number, effect in enumerate(case.effective.side_effects):
        if effect in case.unprotected:
            listed = case.own.side_effects is not None
            path = (*case.at("sideEffects"), number) if listed else case.at("idempotency")
            yield {"effect": effect.name, PATH: path}


def _replay_unsafe(case: Case) -> Iterator[Nouns]:
    if case.effective.replay is ReplayAllowed.YES:
        path = case.effective.decided_by.get("replay") or case.at("replay.allowed")
        for effect in case.unprotected:
            yield {"effect": effect.name, PATH: path}


def _ttl_too_short(case: Case) -> Iterator[Nouns]:
    e = case.effective
    claims = STRATEGIES[case.own.idempotency.strategy].claims
    if not claims or e.claims_ttl >= e.needed_ttl:
        return
    longest = max(e.windows, key=lambda window: window.length)
    yield {
        "ttl": duration_words(e.claims_ttl),
        "window": longest.what,
        "length": duration_words(longest.length),
        "needed": duration_words(e.needed_ttl),
    }


def _calls_in_batches(case: Case) -> Iterator[Nouns]:
    if case.own.batch is None or case.own.batch.size < 2:
        return
    for effect in case.effective.side_effects:
        if effect.intent is not Intent.OUTBOX:
            yield {"effect": effect.name}


EFFECT_RULES: Final = (
    Rule(
        "weaker-than-wanted",
        Severity.REFUSED,
        "guarantee",
        _weaker_than_wanted,
        "{wanted} is wanted, and what {consumer} has is {promise}",
        "strengthen it as the other findings say, or want less",
    ),
    Rule(
        "exactly-once-without-scope",
        Severity.REFUSED,
        "guarantee",
        _exactly_once_claimed,
        "'exactly-once' is wanted without a scope, and no broker can give it: the real guarantee "
        "of {consumer} is {real}",
        "want effectively-once, or commit offsets in the output's transaction and have no other "
        "effects",
        AntiPattern.EXACTLY_ONCE_CHECKBOX,
    ),
    Rule(
        "assumes-no-duplicates",
        Severity.WARN,
        "idempotency.strategy",
        once(lambda case: case.own.idempotency.strategy is Strategy.NONE),
        "{consumer} does not recognise duplicates, and they are normal: redelivery, rebalances "
        "and replays make them",
        "choose a strategy; processed-message needs nothing of the handler",
        AntiPattern.ASSUMING_NO_DUPLICATES,
        Severity.REFUSED,
    ),
    Rule(
        "id-by-coordinates",
        Severity.NOTE,
        "messageId.from",
        once(
            lambda case: (
                case.own.message_id and isinstance(case.own.message_id.place, FromCoordinates)
            )
        ),
        "the id is the record's place in {topic}: a message that is published again, or copied to "
        "another topic, counts as a new one",
        "let the producer give an id, and name its header or field",
    ),
    Rule(
        "lease-repeats-work",
        Severity.WARN,
        "lease.stale",
        once(
            lambda case: (
                case.own.mode is Mode.LEASED
                and case.own.idempotency.strategy is not Strategy.NONE
                and rows_repetition(case.effective)[0] is Repetition.APPLIED
            )
        ),
        "in mode leased the claim and the rows of {consumer} are two transactions: after a crash "
        "between them nobody knows whether the work is done",
        "use mode transactional, a strategy that the rows themselves enforce, or stale: inspect",
    ),
    Rule(
        "claims-ttl-too-short",
        Severity.REFUSED,
        "claims.ttl",
        _ttl_too_short,
        "claims are kept for {ttl}, and {window} is {length}: a message that comes again at the "
        "edge of it is handled twice",
        "keep them for {needed} or longer, or leave claims.ttl out",
    ),
    Rule(
        "retention-unknown",
        Severity.NOTE,
        "claims.ttl",
        once(
            lambda case: case.effective.topic.retention is None and case.own.claims.ttl is not None
        ),
        "the retention of {topic} is not stated, so claims.ttl is compared with the usual week",
        "state the topic's retention",
    ),
    Rule(
        "side-effect-unprotected",
        Severity.REFUSED,
        "sideEffects",
        _unprotected,
        "side effect '{effect}' has neither an idempotency key nor a durable intent: it is "
        "at-least-once, and a crash, a retry or a redelivery repeats it",
        "give its provider a key (idempotencyKey: true), or write the wish (intent: outbox)",
        AntiPattern.SIDE_EFFECTS_WITHOUT_IDEMPOTENCY,
    ),
    Rule(
        "batch-repeats-calls",
        Severity.NOTE,
        "batch",
        _calls_in_batches,
        "the handler is called again after a part of its batch failed, and side effect '{effect}' "
        "with it, without any crash",
        "write the wish (intent: outbox), which is undone with the part",
    ),
    Rule(
        "commits-before-processing",
        Severity.REFUSED,
        "offsetCommit.timing",
        once(lambda case: case.own.critical and _ack(case) is Ack.BEFORE),
        "{consumer} is critical and commits the offset before the work: a crash loses the message",
        "use timing: after-db-transaction",
        AntiPattern.COMMITTING_BEFORE_PROCESSING,
    ),
    Rule(
        "may-lose-messages",
        Severity.NOTE,
        "offsetCommit.timing",
        once(lambda case: not case.own.critical and _ack(case) is Ack.BEFORE),
        "{consumer} commits the offset before the work: at-most-once, for what may be lost",
        "use timing: after-db-transaction where it may not",
    ),
    Rule(
        "replay-unsafe",
        Severity.REFUSED,
        "replay.allowed",
        _replay_unsafe,
        "replay is allowed, and would repeat side effect '{effect}'",
        "protect it, or set replay.allowed: false-for-side-effect",
        AntiPattern.REPLAY_UNSAFE,
    ),
    Rule(
        "duplicates-untested",
        Severity.WARN,
        "tests.duplicates",
        once(lambda case: case.own.critical and not case.own.tests.duplicates),
        "{consumer} is critical, and no test is named that delivers a message twice",
        "write one and name it in tests.duplicates",
    ),
    Rule(
        "crash-window-untested",
        Severity.WARN,
        "tests.crashWindow",
        once(lambda case: case.own.critical and not case.own.tests.crash_window),
        "{consumer} is critical, and no test is named that crashes between effect and ack",
        "write one and name it in tests.crashWindow",
    ),
)


def _ack(case: Case) -> Ack:
    return ACK[case.own.offset_commit.timing]
