"""What the lint says of a consumer that a pipeline on Spark runs.

A cycle is settled as a whole, in order per key: its messages are handled in tasks, and their
claims, rows and offsets become durable by one decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from semel.policy.rules import NOTE, PATH, REFUSED, WARN, Case, Nouns, Rule, once
from semel.policy.vocabulary import CommitTiming, Duplicates, Intent, Mode, RetryMode, Semantics

OF_SERVICES: Final = frozenset(
    {
        *("lease-repeats-work", "batch-repeats-calls", "commits-before-processing"),
        *("may-lose-messages", "retry-breaks-order", "batch-breaks-order", "order-across-a-pause"),
        *("retries-exceed-lag-slo", "not-carried-out"),
    }
)
"""Rules about what only services do."""


def _blocks(case: Case) -> Iterator[Nouns]:
    if case.own.retry.mode is not RetryMode.RETRY_TABLE:
        yield {"mode": case.own.retry.mode}


def _ignored(case: Case) -> Iterator[Nouns]:
    own = case.own
    idle: Mapping[str, bool] = {
        "mode": own.mode is Mode.LEASED,
        "lease": own.lease is not None,
        "batch": own.batch is not None,
        "offsetCommit.timing": own.offset_commit.timing is not CommitTiming.AFTER_DB_TRANSACTION,
    }
    for key, is_idle in idle.items():
        if is_idle:
            yield {"key": key, PATH: case.at(key)}


def _calls(case: Case) -> Iterator[tuple[str, bool]]:
    """Yield the calls that handlers make themselves, and whether a key protects each."""
    for effect in case.effective.side_effects:
        if effect.intent is not Intent.OUTBOX:
            yield effect.name, effect.is_protected


def _calls_with_key(case: Case) -> Iterator[Nouns]:
    return ({"effect": name} for name, is_protected in _calls(case) if is_protected)


def _calls_without_key(case: Case) -> Iterator[Nouns]:
    if case.effective.guarantee in (Semantics.EFFECTIVELY_ONCE, Semantics.EXACTLY_ONCE):
        for name, is_protected in _calls(case):
            if not is_protected:
                yield {"effect": name, "wanted": case.effective.guarantee}


# fmt: off
RULES_ON_SPARK: Final = (
    Rule("waits-in-retry-table", NOTE, "retry.mode", _blocks,
        "a batch cannot be settled in part: on Spark a failed message of {consumer} waits in the "
        "retry table and holds its key, whatever retry.mode says ({mode})",
        "use retry.mode: retry-table, which says so"),
    Rule("call-from-a-task", NOTE, "sideEffects", _calls_with_key,
        "handlers run in tasks: side effect '{effect}' is called again when a task, an attempt or "
        "a cycle runs again, and only its provider's key makes that one effect; a pipeline refuses "
        "to run with spark.speculation",
        "write the intent (intent: outbox), where the provider does not keep keys for so long"),
    Rule("call-repeats", REFUSED, "sideEffects", _calls_without_key,
        "{wanted} is wanted, and side effect '{effect}' is called in tasks, which run again, "
        "without a key: it is at-least-once",
        "set externalProviderIdempotency: true, if the provider takes a key, or write the intent "
        "(intent: outbox)"),
    Rule("rows-for-a-duplicate", WARN, "idempotency.duplicateHandling",
        once(lambda c: c.own.idempotency.duplicate_handling is Duplicates.INVOKE),
        "a handler of {consumer} that is called for a duplicate may send messages again, and its "
        "rows are left out: their effect is durable",
        "use duplicateHandling: skip and send through the outbox"),
    Rule("only-for-services", WARN, "", _ignored,
        "{key} has no effect on Spark: claims, rows and offsets of {consumer} are one decision",
        "take it out, or keep it for the time when a service runs {consumer}"),
)
# fmt: on
"""What the lint looks for beside its other rules: code, severity, key, finder, sentence, fix."""
