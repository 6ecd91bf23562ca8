"""The guarantee is computed, effect by effect, and never stands without its scope."""

from __future__ import annotations

import re
from itertools import product

import pytest

from docs.policy_tables import MATRIX, PRODUCER_REPEATS, Publishing, SetUp
from semel.policy.guarantee import (
    ACK,
    SEMANTICS,
    STRATEGIES,
    AckTime,
    ConsumerGuarantee,
    Repetition,
    guarantee_of,
    listing,
)
from semel.policy.lint import lint_policy
from semel.policy.model import Policy
from semel.policy.vocabulary import (
    CommitTiming,
    Duplicates,
    Mode,
    Semantics,
    StalePolicy,
    Strategy,
)
from tests.unit.policy.policy_texts import TEMPLATE, policy_with


def guarantee(consumer=None, topic=None) -> ConsumerGuarantee:
    return guarantee_of(policy_with(consumer, topic).effective("c", "t"))


def sentences(consumer=None, topic=None) -> list[str]:
    return [promise.sentence for promise in guarantee(consumer, topic).promises]


ROWS = "effectively-once for rows in the handler's database, under process crash, broker redelivery"


def test_rows_and_an_unprotected_side_effect_have_promises_of_their_own():
    assert guarantee({"sideEffects": [{"name": "email"}]}).sentence == (
        "effectively-once for rows in the handler's database, under process crash, broker "
        "redelivery and replay within 14d; at-least-once for side effect 'email': no idempotency "
        "key"
    )


def test_the_templates_consumers_have_the_guarantees_that_follow_from_it():
    policy = Policy.parse(TEMPLATE)

    assert [
        guarantee_of(policy.effective(name, "case-events")).sentence for name in policy.consumers
    ] == [
        f"{ROWS} and replay within 14d, later as long as the handler's rows refuse a repetition "
        "(aggregate-version-upsert)",
        f"{ROWS} and replay within 14d; effectively-once for side effect 'notification', under "
        "process crash, broker redelivery and replay, as long as the handler passes the key and "
        "its provider keeps it",
    ]


@pytest.mark.parametrize(
    ("consumer", "first"),
    [
        ({}, f"{ROWS} and replay within 14d"),
        ({"claims": {"ttl": "90d"}}, f"{ROWS} and replay within 90d"),
        ({"versioned": True}, f"{ROWS} and replay at any time"),
        (
            {"idempotency": {"strategy": "unique-event-id"}},
            f"{ROWS} and replay within 14d, later as long as the handler's rows refuse a "
            "repetition (unique-event-id)",
        ),
        (
            {"idempotency": {"strategy": "aggregate-version-upsert"}, "versioned": True},
            f"{ROWS} and replay at any time",
        ),
        ({"idempotency": {"strategy": "overwrite-by-key"}}, f"{ROWS} and replay within 14d"),
        (
            {"idempotency": {"duplicateHandling": "invoke"}},
            f"{ROWS} and replay within 14d, as long as the handler writes nothing for a duplicate",
        ),
        (
            {"messageId": {"from": "coordinates"}},
            f"{ROWS} and replay within 14d, but a message that is published again counts as a new "
            "one",
        ),
        (
            {"idempotency": {"strategy": "none"}},
            "at-least-once for rows in the handler's database: no claim is taken, and a "
            "repetition is handled again",
        ),
        (
            {"mode": "leased"},
            "at-least-once for rows in the handler's database: when a lease runs out, work that "
            "may be done already is done again",
        ),
        (
            {"mode": "leased", "lease": {"stale": "abandon"}},
            "at-least-once for rows in the handler's database: a handler that died is parked, and "
            "its work may or may not be done",
        ),
        (
            {"mode": "leased", "lease": {"stale": "inspect"}},
            f"{ROWS} and replay within 14d, as far as the consumer's own inspection is right",
        ),
        (
            {"mode": "leased", "idempotency": {"strategy": "state-version-check"}},
            f"{ROWS} and replay within 14d, as long as the handler's rows refuse a repetition "
            "(state-version-check)",
        ),
        (
            {"offsetCommit": {"timing": "before-processing"}},
            "at-most-once for rows in the handler's database: the offset is committed before the "
            "work, and a crash loses it",
        ),
        (
            {"offsetCommit": {"timing": "in-output-transaction"}},
            "exactly-once for records in Kafka, within the broker's transaction, under process "
            "crash and broker redelivery, as readers with read_committed see them",
        ),
    ],
)
def test_what_happens_to_the_work_follows_from_the_policy(consumer, first):
    assert sentences(consumer)[0] == first


@pytest.mark.parametrize(
    ("consumer", "last"),
    [
        (
            {"sideEffects": [{"name": "push", "idempotencyKey": True}]},
            "effectively-once for side effect 'push', under process crash, broker redelivery and "
            "replay, as long as the handler passes the key and its provider keeps it",
        ),
        (
            {"sideEffects": [{"name": "letter", "intent": "outbox"}]},
            "effectively-once for the intent of side effect 'letter', under process crash, broker "
            "redelivery and replay within 14d, and its receiver may get it again, with "
            "the same id",
        ),
        (
            {
                "sideEffects": [{"name": "letter", "intent": "outbox"}],
                "idempotency": {"strategy": "none"},
            },
            "at-least-once for the intent of side effect 'letter': no claim is taken, and a "
            "repetition is handled again",
        ),
        (
            {"outbox": True},
            "effectively-once for messages in the outbox, under process crash, broker redelivery "
            "and replay within 14d, and their receivers may get one again, with the same id",
        ),
        (
            {"outbox": True, "idempotency": {"strategy": "unique-event-id"}},
            "effectively-once for messages in the outbox, under process crash, broker redelivery "
            "and replay within 14d, and their receivers may get one again, with the same id",
        ),
        (
            {"outbox": True, "mode": "leased"},
            "at-least-once for messages in the outbox: when a lease runs out, work that may be "
            "done already is done again",
        ),
    ],
)
def test_every_effect_beside_the_rows_is_promised_for_itself(consumer, last):
    assert sentences(consumer)[-1] == last


@pytest.mark.parametrize(("ack", "repetition"), [*product(AckTime, Repetition)])
def test_the_table_answers_every_combination(ack, repetition):
    assert (ack, repetition) in SEMANTICS


def test_no_table_leaves_a_word_out():
    assert ACK.keys() == {*CommitTiming}
    assert STRATEGIES.keys() == {*Strategy}
    assert PRODUCER_REPEATS.keys() == {*product(Publishing, Repetition)}


EVERY_SET_UP = [
    {
        "mode": str(mode),
        "lease": {"stale": str(stale)},
        "idempotency": {"strategy": str(strategy), "duplicateHandling": str(handling)},
        "offsetCommit": {"timing": str(timing)},
        "outbox": True,
        "sideEffects": [{"name": "a"}, {"name": "b", "idempotencyKey": True}],
    }
    for strategy, mode, stale, timing, handling in product(
        Strategy, [Mode.TRANSACTIONAL, Mode.LEASED], StalePolicy, CommitTiming, Duplicates
    )
]


def test_a_semantics_never_stands_without_its_scope_whatever_is_configured():
    named = "|".join(Semantics)
    for set_up in EVERY_SET_UP[::7]:
        found = guarantee(set_up)
        for promise in found.promises:
            assert re.fullmatch(rf"({named}) for .+(, under .+|: .+)", promise.sentence)
        assert len(re.findall("exactly-once(?! for )", found.sentence)) == 0


def test_only_the_brokers_own_records_are_ever_exactly_once():
    for set_up in EVERY_SET_UP[::7]:
        for promise in guarantee(set_up).promises:
            if promise.semantics is Semantics.EXACTLY_ONCE:
                assert promise.what == "records in Kafka, within the broker's transaction"


def test_the_lint_says_exactly_once_only_with_a_scope_or_to_name_what_was_written():
    text = TEMPLATE.replace("at-least-once", "exactly-once")
    for review in lint_policy(Policy.parse(text)).reviews:
        said = [a.text for a in review.answers] + [f.sentence for f in review.findings]
        for sentence in said:
            assert not re.search("(?<!')exactly-once(?! for )", sentence)


# Section 26 of the document, in our words.
EXPECTED = [
    "at-least-once for every effect: duplicates by the producer and the consumer",
    "at-least-once for every effect: duplicates by the consumer",
    "effectively-once for rows in the handler's database",
    "exactly-once for records in Kafka, within the broker's transaction",
    "at-least-once for the e-mail: duplicates by the producer and the consumer",
    "effectively-once for the notification",
]


def test_the_delivery_matrix_comes_out_as_documented():
    assert [row.final_effect for row in MATRIX] == EXPECTED


def test_a_producer_whose_repetitions_nobody_can_recognise_weakens_every_consumer():
    row = SetUp("", "", "", Publishing.NEW_MESSAGE, AckTime.AFTER, Repetition.RECOGNISED, "rows")

    assert row.final_effect == "at-least-once for rows: duplicates by the producer"


def test_whatever_is_acknowledged_first_is_at_most_once():
    row = SetUp("", "", "", Publishing.NEW_MESSAGE, AckTime.BEFORE, Repetition.APPLIED, "rows")

    assert row.semantics is Semantics.AT_MOST_ONCE


@pytest.mark.parametrize(
    ("words", "written"), [((), ""), (("a",), "a"), (("a", "b"), "a and b"), ("abc", "a, b and c")]
)
def test_lists_are_written_as_sentences_have_them(words, written):
    assert listing(words) == written
