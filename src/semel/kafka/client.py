"""The settings of Kafka's client, and what its errors mean for the caller."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.errors import Fenced, Misuse, NeedsOperator, Permanent, Retryable, SemelError, require
from semel.messaging.receive.broker import MemberEnded

log = logging.getLogger("semel.kafka")

# Confluent's client is native code: it is imported when a name of this part is used.
kafka: Any = require("confluent_kafka", "kafka")

CALL_SECONDS: Final = 10.0
"""How long the broker may take to answer a question."""

SCHEME: Final = "kafka://"

Word = TypeVar("Word", bound=StrEnum)


class Start(StrEnum):
    """Where a group begins to read a topic for which it has committed nothing.

    A partition that is added later always begins at its first record.
    """

    BEGINNING = "beginning"
    """At the first record there is: nothing is missed."""

    END = "end"
    """At the next record.  What was sent before is never read, and that is committed."""


class GroupProtocol(StrEnum):
    """How the members of a group share partitions."""

    CONSUMER = "consumer"
    """The broker assigns them (KIP-848; Kafka 4.0 or newer): a rebalance stops no other member."""

    CLASSIC = "classic"
    """The members assign them, cooperatively: for older brokers."""


def member_of(kind: type[Word], given: str, name: str) -> Word:
    """Return the member of an enum that a user named.

    Raises:
        Misuse: there is none.
    """
    if given not in {word.value for word in kind}:
        raise Misuse(f"{name} must be one of {', '.join(kind)}, got {given!r}")
    return kind(given)


OURS: Final[Mapping[str, str]] = {
    "enable.auto.commit": "offsets are committed after the database, never by a timer",
    "enable.auto.offset.store": "offsets are committed explicitly",
    "auto.offset.reset": "use start=Start.BEGINNING or Start.END",
    "isolation.level": "records of open and aborted transactions must not be handled",
    "enable.partition.eof": "it says that a partition has no more records",
    "group.id": "it is the argument of subscribe",
    "group.instance.id": "use instance_id",
    "group.protocol": "use protocol",
    "partition.assignment.strategy": "members share partitions cooperatively",
    "enable.idempotence": "a producer that is not idempotent breaks the order of a key",
    "transactional.id": "messages are sent without a Kafka transaction",
    "acks": "a message counts as sent when it is durable",
    "delivery.report.only.error": "what is not reported counts as sent",
    "bootstrap.servers": "it is the first argument",
}
"""Settings that a user may not give, and why."""

COMMON: Final[Mapping[str, Any]] = {
    "client.id": "semel",
    # Errors reach the callbacks; the client's own log repeats each refused connection.
    "log_level": 2,
    # A broker that restarts is found again within a second, not ten.
    "reconnect.backoff.max.ms": 1_000,
    "topic.metadata.propagation.max.ms": 5_000,
}
CONSUMER: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # A position that no longer exists is an error, and never a silent jump.
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    # The broker answers in order: a question about the lag waits behind a fetch without records.
    "fetch.wait.max.ms": 100,
    # An empty partition answers, too.
    "enable.partition.eof": True,
    # What is prefetched is dropped when a partition is paused: a little is enough.
    "queued.min.messages": 10_000,
    "queued.max.messages.kbytes": 16_384,
}
PRODUCER: Final[Mapping[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    # A flush that has ended has delivered what was not reported: a third of the client's time.
    "delivery.report.only.error": True,
    "linger.ms": 5,
    "compression.type": "lz4",
    # Longer than a broker needs to restart, shorter than a person waits, and than a relay does.
    "message.timeout.ms": 60_000,
}


def settings_for(bootstrap: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that every client of this cluster shares.

    Raises:
        Misuse: *given* has a setting that only semel may choose.
    """
    for name in given:
        if name in OURS:
            raise Misuse(f"Kafka setting {name!r} cannot be given: {OURS[name]}")
    return {**COMMON, **given, "bootstrap.servers": bootstrap}


def bootstrap_of(url: str) -> tuple[str, dict[str, str]]:
    """Split ``kafka://host:port,host:port?setting=value`` into the servers and the settings.

    A user and a password mean SASL/PLAIN over TLS, unless settings say otherwise.

    Raises:
        Misuse: *url* does not have this form.
    """
    if not url.startswith(SCHEME):
        return url, {}
    form = "a broker's URL has the form kafka://host:port,host:port?setting=value"
    try:
        parts = urlsplit(url)
        settings = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise Misuse(form) from error
    login, _, servers = parts.netloc.rpartition("@")
    if not servers:
        raise Misuse(form)
    if login:
        user, _, password = login.partition(":")
        settings = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": unquote(user),
            "sasl.password": unquote(password),
            **settings,
        }
    return servers, settings


def make(kind: str, settings: Mapping[str, Any]) -> Any:
    """Make a client: ``Consumer``, ``Producer`` or ``admin.AdminClient``.

    Raises:
        Misuse: the client refuses a setting.
    """
    module = require("confluent_kafka.admin", "kafka") if kind == "AdminClient" else kafka
    try:
        return getattr(module, kind)({**settings, "logger": log})
    except (kafka.KafkaException, ValueError, TypeError) as error:
        raise Misuse(f"Kafka's client refuses its settings: {error}") from error


_CODES: Any = kafka.KafkaError

GONE: Final = frozenset({_CODES._AUTO_OFFSET_RESET, _CODES.OFFSET_OUT_OF_RANGE})
# Not ILLEGAL_GENERATION and STALE_MEMBER_EPOCH: between two generations of a rebalance, the broker
# refuses commits even of partitions that stay this member's.  If they are lost, a poll says so.
FENCED: Final = frozenset(
    {
        _CODES.UNKNOWN_MEMBER_ID,
        _CODES.FENCED_INSTANCE_ID,
        _CODES.FENCED_MEMBER_EPOCH,
        _CODES._FENCED,
    }
)
REFUSED: Final = frozenset(
    {
        _CODES.TOPIC_AUTHORIZATION_FAILED,
        _CODES.GROUP_AUTHORIZATION_FAILED,
        _CODES.CLUSTER_AUTHORIZATION_FAILED,
        _CODES.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        _CODES._AUTHENTICATION,
        _CODES.SASL_AUTHENTICATION_FAILED,
        _CODES.MSG_SIZE_TOO_LARGE,
        _CODES.RECORD_LIST_TOO_LARGE,
        _CODES.INVALID_RECORD,
        _CODES.POLICY_VIOLATION,
        _CODES.INVALID_TRANSACTION_TIMEOUT,
        _CODES.TOPIC_EXCEPTION,
        _CODES._UNKNOWN_TOPIC,
        _CODES._UNKNOWN_PARTITION,
        _CODES.UNKNOWN_TOPIC_OR_PART,
        _CODES._INVALID_ARG,
    }
)
"""The same call fails until a person changes something."""


def meaning(error: Any, what: str) -> SemelError:
    """Translate an error of the client, which happened during *what*."""
    found = error.args[0] if isinstance(error, kafka.KafkaException) else error
    code, text = found.code(), f"{what}: {found.str()}"
    if code in GONE:
        return NeedsOperator(
            f"{text}; records that were not handled are gone, or the topic was made again: "
            f"find out what is missing, then set the group's offset (kafka-consumer-groups.sh "
            f"--reset-offsets)"
        )
    if code in FENCED:
        return Fenced(text)
    if code == _CODES._FATAL:
        return MemberEnded(f"{text}; this client can do nothing more: start the process again")
    if code in REFUSED:
        return Permanent(text)
    return Retryable(text)
