"""Each rule of the lint, with what it is for and what is near it."""

from __future__ import annotations

from semel.policy.vocabulary import Severity

REFUSED, WARN, NOTE = Severity.REFUSED, Severity.WARN, Severity.NOTE
MAIL = [{"name": "mail"}]
KEYED = [{"name": "mail", "idempotencyKey": True}]
INTENT = [{"name": "mail", "intent": "outbox"}]
PER_KEY = {"ordering": "per-key"}

# rule, severity; what triggers it (consumer, topic); what is near and does not
CASES = [
    (
        "weaker-than-wanted",
        REFUSED,
        ({"guarantee": "effectively-once", "sideEffects": MAIL}, {"replayAllowed": None}),
        ({"guarantee": "effectively-once", "sideEffects": KEYED}, {}),
    ),
    (
        "weaker-than-wanted",
        REFUSED,
        ({"offsetCommit": {"timing": "before-processing"}}, {}),
        ({"offsetCommit": {"timing": "before-processing"}}, {"defaultGuarantee": "at-most-once"}),
    ),
    (
        "exactly-once-without-scope",
        REFUSED,
        ({}, {"defaultGuarantee": "exactly-once"}),
        (
            {"offsetCommit": {"timing": "in-output-transaction"}},
            {"defaultGuarantee": "exactly-once"},
        ),
    ),
    (
        "exactly-once-without-scope",
        REFUSED,
        (
            {
                "guarantee": "exactly-once",
                "offsetCommit": {"timing": "in-output-transaction"},
                "sideEffects": KEYED,
            },
            {},
        ),
        ({"guarantee": "effectively-once", "sideEffects": KEYED}, {}),
    ),
    (
        "assumes-no-duplicates",
        WARN,
        ({"idempotency": {"strategy": "none"}}, {}),
        ({"idempotency": {"strategy": "overwrite-by-key"}}, {}),
    ),
    (
        "assumes-no-duplicates",
        REFUSED,
        ({"idempotency": {"strategy": "none"}, "critical": True}, {}),
        ({"critical": True}, {}),
    ),
    (
        "id-by-coordinates",
        NOTE,
        ({"messageId": {"from": "coordinates"}}, {}),
        ({"messageId": {"from": "payload:id"}}, {}),
    ),
    (
        "lease-repeats-work",
        WARN,
        ({"mode": "leased"}, {}),
        ({"mode": "leased", "lease": {"stale": "inspect"}}, {}),
    ),
    (
        "lease-repeats-work",
        WARN,
        ({"mode": "leased", "idempotency": {"strategy": "notification-id"}}, {}),
        ({"mode": "leased", "idempotency": {"strategy": "aggregate-version-upsert"}}, {}),
    ),
    (
        "claims-ttl-too-short",
        REFUSED,
        ({"claims": {"ttl": "7d"}}, {}),
        ({"claims": {"ttl": "14d"}}, {}),
    ),
    (
        "claims-ttl-too-short",
        REFUSED,
        ({"claims": {"ttl": "59d"}, "dlq": {"keep": "30d"}}, {}),
        ({"claims": {"ttl": "60d"}, "dlq": {"keep": "30d"}}, {}),
    ),
    (
        "claims-ttl-too-short",
        REFUSED,
        ({"claims": {"ttl": "59d"}, "parking": {"keep": "30d"}}, {}),
        ({"claims": {"ttl": "59d"}, "parking": {"keep": "29d"}}, {}),
    ),
    (
        "claims-ttl-too-short",
        REFUSED,
        ({"claims": {"ttl": "59d"}}, {"replayWindow": "30d"}),
        ({"claims": {"ttl": "59d"}}, {"replayWindow": "30d", "replayAllowed": False}),
    ),
    (
        "retention-unknown",
        NOTE,
        ({"claims": {"ttl": "14d"}}, {"retention": None}),
        ({}, {"retention": None}),
    ),
    (
        "claims-ttl-too-short",
        REFUSED,
        ({"claims": {"ttl": "13d"}}, {"retention": None}),
        ({"claims": {"ttl": "14d"}}, {"retention": None}),
    ),
    (
        "claims-ttl-too-short",
        REFUSED,
        ({"claims": {"ttl": "6d"}, "dlq": {"keep": "3d"}}, {"retention": None}),
        ({"claims": {"ttl": "2d"}}, {"retention": "1d"}),
    ),
    (
        # Records that cannot be read are dead letters, whatever dlq.enabled says.
        "claims-ttl-too-short",
        REFUSED,
        ({"claims": {"ttl": "59d"}, "dlq": {"enabled": False, "keep": "30d"}}, {}),
        ({"claims": {"ttl": "60d"}, "dlq": {"enabled": False, "keep": "30d"}}, {}),
    ),
    (
        "side-effect-unprotected",
        REFUSED,
        ({"sideEffects": MAIL}, {"replayAllowed": None}),
        ({"sideEffects": INTENT}, {}),
    ),
    (
        "side-effect-unprotected",
        REFUSED,
        ({"sideEffects": MAIL, "critical": True}, {"replayAllowed": None}),
        ({"sideEffects": KEYED, "critical": True}, {}),
    ),
    (
        "side-effect-unprotected",
        REFUSED,
        ({"sideEffects": None, "idempotency": {"strategy": "notification-id"}}, {}),
        (
            {
                "sideEffects": None,
                "idempotency": {"strategy": "notification-id", "externalProviderIdempotency": True},
            },
            {},
        ),
    ),
    (
        "batch-repeats-calls",
        NOTE,
        ({"sideEffects": KEYED, "batch": {"size": 10}}, {}),
        ({"sideEffects": INTENT, "batch": {"size": 10}}, {}),
    ),
    (
        "batch-repeats-calls",
        NOTE,
        ({"sideEffects": KEYED, "batch": {}}, {}),
        ({"sideEffects": KEYED, "batch": {"size": 1}}, {}),
    ),
    (
        "commits-before-processing",
        REFUSED,
        ({"offsetCommit": {"timing": "before-processing"}, "critical": True}, {}),
        ({"offsetCommit": {"timing": "after-processing"}, "critical": True}, {}),
    ),
    (
        "may-lose-messages",
        NOTE,
        ({"offsetCommit": {"timing": "before-processing"}}, {}),
        ({"offsetCommit": {"timing": "before-processing"}, "critical": True}, {}),
    ),
    (
        "replay-unsafe",
        REFUSED,
        ({"sideEffects": MAIL}, {"replayAllowed": True}),
        ({"sideEffects": MAIL}, {"replayAllowed": False}),
    ),
    (
        "replay-unsafe",
        REFUSED,
        ({"sideEffects": MAIL, "replay": {"allowed": True}}, {"replayAllowed": None}),
        ({"sideEffects": MAIL, "replay": {"allowed": "false-for-side-effect"}}, {}),
    ),
    (
        "duplicates-untested",
        WARN,
        ({"critical": True, "tests": {"duplicates": None}}, {}),
        ({"tests": {"duplicates": None}}, {}),
    ),
    (
        "crash-window-untested",
        WARN,
        ({"critical": True, "tests": {"crashWindow": None}}, {}),
        ({"critical": True}, {}),
    ),
    ("global-ordering", REFUSED, ({}, {"ordering": "global"}), ({}, PER_KEY)),
    ("global-ordering", REFUSED, ({"ordering": "global"}, {}), ({"ordering": "per-key"}, {})),
    ("ordering-without-key", WARN, ({}, {**PER_KEY, "key": None}), ({}, {"key": None})),
    (
        "retry-breaks-order",
        REFUSED,
        ({"retry": {"mode": "retry-topic"}}, PER_KEY),
        ({"retry": {"mode": "retry-topic"}, "parking": {"perKey": True}}, PER_KEY),
    ),
    (
        "retry-breaks-order",
        REFUSED,
        ({"retry": {"mode": "retry-table"}, "parking": {"perKey": False}}, PER_KEY),
        ({"retry": {"mode": "retry-table"}}, PER_KEY),
    ),
    (
        "retry-breaks-order",
        REFUSED,
        ({"retry": {"mode": "retry-topic"}, "ordering": "per-key"}, {}),
        ({"retry": {"mode": "retry-topic"}}, {}),
    ),
    (
        "batch-breaks-order",
        REFUSED,
        ({"batch": {"policy": "independent"}, "parking": {"perKey": False}}, PER_KEY),
        ({"batch": {"policy": "stop"}, "parking": {"perKey": False}}, PER_KEY),
    ),
    ("order-across-a-pause", NOTE, ({}, PER_KEY), ({"versioned": True}, PER_KEY)),
    (
        "order-across-a-pause",
        NOTE,
        ({"idempotency": {"strategy": "unique-event-id"}}, PER_KEY),
        ({"idempotency": {"strategy": "aggregate-version-upsert"}}, PER_KEY),
    ),
    ("dead-letter-leaves-hole", NOTE, ({}, PER_KEY), ({"onExhausted": "park"}, PER_KEY)),
    (
        "dead-letter-leaves-hole",
        NOTE,
        ({"onExhausted": "park", "batch": {"policy": "dead-letter"}}, PER_KEY),
        ({"onExhausted": "park", "batch": {"policy": "stop"}}, PER_KEY),
    ),
    (
        "retries-forever",
        REFUSED,
        ({"retry": {"maxAttempts": 0}}, {}),
        ({"retry": {"maxAttempts": 1}}, {}),
    ),
    (
        "retries-forever",
        REFUSED,
        ({"retry": {"maxAttempts": -1}}, {}),
        ({"retry": {"maxAttempts": 1000}, "lagSlo": {"maxLagSeconds": 1e9}}, {}),
    ),
    (
        "retries-exceed-lag-slo",
        WARN,
        ({"lagSlo": {"maxLagSeconds": 14}}, {}),
        ({"lagSlo": {"maxLagSeconds": 15}}, {}),
    ),
    (
        "retries-exceed-lag-slo",
        WARN,
        ({"retry": {"maxAttempts": 10**9}}, {}),
        ({"retry": {"maxAttempts": 10**9, "mode": "retry-table"}}, {}),
    ),
    (
        "outage-spends-attempts",
        NOTE,
        ({"retry": {"maxAttempts": 4}}, {}),
        ({"retry": {"maxAttempts": 4}, "circuit": {"failures": 3}}, {}),
    ),
    (
        "outage-spends-attempts",
        NOTE,
        ({"circuit": {"failures": 5}}, {}),
        ({"retry": {"maxAttempts": 4}, "circuit": {"enabled": False}}, {}),
    ),
    (
        "retries-too-long",
        WARN,
        ({"retry": {"maxAttempts": 1001, "initialDelayMs": 0}, "lagSlo": None}, {}),
        ({"retry": {"maxAttempts": 1000}, "lagSlo": None}, {}),
    ),
    (
        "retries-too-long",
        WARN,
        ({"retry": {"maxAttempts": 100, "maxDelayMs": 3_600_000}}, {}),
        ({"retry": {"maxAttempts": 100, "maxDelayMs": 3_600_000, "mode": "retry-table"}}, {}),
    ),
    (
        "retries-unreadable",
        WARN,
        ({"retry": {"retryable": ["SCHEMA_INVALID"]}}, {}),
        ({"retry": {"retryable": ["RATE_LIMITED"], "nonRetryable": ["SCHEMA_INVALID"]}}, {}),
    ),
    ("unreadable-unheard", WARN, ({"dlq": {"enabled": False}}, {}), ({}, {})),
    (
        "unreadable-unheard",
        REFUSED,
        ({"dlq": {"enabled": False}, "critical": True}, {}),
        ({"dlq": {"enabled": True}, "critical": True}, {}),
    ),
    ("dlq-without-owner", WARN, ({"dlq": {"owner": None}}, {}), ({}, {})),
    (
        "dlq-without-owner",
        WARN,
        ({"dlq": None}, {}),
        ({"dlq": {"enabled": False, "owner": None}}, {}),
    ),
    (
        "dlq-without-owner",
        REFUSED,
        ({"dlq": {"owner": None}, "critical": True}, {}),
        ({"critical": True}, {}),
    ),
    (
        "parking-without-owner",
        WARN,
        ({"onExhausted": "park", "dlq": {"owner": None}}, {}),
        ({"onExhausted": "park", "dlq": {"owner": None}, "parking": {"owner": "b-team"}}, {}),
    ),
    (
        "parking-without-owner",
        WARN,
        ({"versioned": True, "gaps": "park-key", "dlq": {"owner": None}}, {}),
        ({"versioned": True, "gaps": "alert", "dlq": {"owner": None}}, {}),
    ),
    (
        "parked-without-review",
        WARN,
        ({"dlq": {"manualReviewRequired": True}, "onExhausted": "park"}, {}),
        ({"dlq": {"manualReviewRequired": True}, "onExhausted": "dlq"}, {}),
    ),
    (
        "parked-without-review",
        WARN,
        ({"dlq": {"manualReviewRequired": True, "enabled": False}}, {}),
        ({"onExhausted": "park"}, {}),
    ),
    ("no-lag-alert", WARN, ({"lagSlo": None}, {}), ({}, {})),
    ("no-runbook", WARN, ({"critical": True, "runbook": None}, {}), ({"runbook": None}, {})),
    (
        "no-runbook",
        WARN,
        ({"dlq": {"manualReviewRequired": True}, "runbook": None}, {}),
        ({"dlq": {"manualReviewRequired": True}}, {}),
    ),
    (
        "without-effect",
        WARN,
        ({"lease": {"seconds": 5}}, {}),
        ({"lease": {"seconds": 5}, "mode": "leased"}, {}),
    ),
    ("without-effect", WARN, ({"gaps": "fetch"}, {}), ({"gaps": "fetch", "versioned": True}, {})),
    (
        "without-effect",
        WARN,
        ({"parking": {"perKey": True}}, {}),
        ({"parking": {"perKey": True}}, PER_KEY),
    ),
    (
        "without-effect",
        WARN,
        ({"claims": {"ttl": "30d"}, "idempotency": {"strategy": "none"}}, {}),
        ({"claims": {"ttl": "30d"}}, {}),
    ),
    (
        "without-effect",
        WARN,
        ({"dlq": {"enabled": False, "topic": "x"}}, {}),
        ({"dlq": {"topic": "x"}}, {}),
    ),
    (
        "without-effect",
        WARN,
        ({"poison": {"maxAttemptsBeforePark": 6}}, {}),
        ({"poison": {"maxAttemptsBeforePark": 5}}, {}),
    ),
    ("dlq-topic-is-read", REFUSED, ({"dlq": {"topic": "t"}}, {}), ({"dlq": {"topic": "t2"}}, {})),
    (
        "dlq-topic-is-read",
        REFUSED,
        ({"dlq": {"unreadableTopic": "t"}}, {}),
        ({"dlq": {"unreadableTopic": "t2"}}, {}),
    ),
    (
        "without-effect",
        WARN,
        ({"retry": {"topic": "later"}}, {}),
        ({"retry": {"mode": "retry-topic", "topic": "later"}}, {}),
    ),
    (
        "not-carried-out",
        REFUSED,
        ({"mode": "leased", "batch": {"size": 10}}, {}),
        ({"batch": {"size": 10}}, {}),
    ),
    (
        "not-carried-out",
        REFUSED,
        ({"idempotency": {"strategy": "none"}}, {}),
        ({"idempotency": {"strategy": "overwrite-by-key"}}, {}),
    ),
    (
        "code-unknown",
        WARN,
        ({"retry": {"retryable": ["DATABSE_TIMEOUT"]}}, {}),
        ({"retry": {"retryable": ["DATABASE_TIMEOUT"]}}, {}),
    ),
    (
        "code-unknown",
        WARN,
        ({"retry": {"nonRetryable": ["SHEMA_INVALID"]}}, {}),
        ({"retry": {"nonRetryable": ["SCHEMA_INVALID"]}}, {}),
    ),
    (
        "code-of-your-own",
        NOTE,
        ({"retry": {"retryable": ["WAREHOUSE_CLOSED"]}}, {}),
        ({"retry": {"retryable": ["RATE_LIMITED"]}}, {}),
    ),
]
