"""A slot: one transactional producer, which sends a part of a cycle with the proof that it did.

    init_transactions ─▶ read the slot's marker ─▶ begin ─▶ records + marker ─▶ commit
      ends what an         this cycle is there:
      earlier one left     nothing to send

The marker is a record in the slot's own partition of a compacted topic: in a shared one, another
slot's open transaction would hide it.  A producer whose answer did not come is never used again:
a delayed request of it could hit the next transaction.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from semel.clock import SYSTEM_CLOCK
from semel.crashpoints import CrashPoint, reach
from semel.errors import NeedsOperator, Permanent, Retryable, require
from semel.kafka.client import CALL_SECONDS, CONSUMER, PRODUCER, kafka, make, meaning
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

admin: Any = require("confluent_kafka.admin", "kafka")

_PREFIX: Final = "semel-markers-"

# The proofs of so many cycles stay in a marker; older ones are only known to be at or below it.
_REMEMBERED: Final = 16

MOST_BYTES: Final = 100_000_000
"""The largest record, unless the user says otherwise: brokers close the connection of a request
over `socket.request.max.bytes`, by default 100 MiB.  The client's own limit is below a topic's."""

BATCH_BYTES: Final = 1_000_000
"""How many records the client sends together; a topic that takes less refuses all of them."""

_FIRST_LOOK: Final = 32
"""How many offsets before its end a marker's partition is read first."""


class Proof(NamedTuple):
    """What a slot has sent in one cycle."""

    label: str
    attempt: str
    digest: str


class Marker(NamedTuple):
    """The last cycles that a slot has sent, oldest first."""

    proofs: tuple[Proof, ...] = ()
    about: tuple[str, ...] = ()
    """Who has sent them, and where: ledger, app, query, sink and topic."""

    @classmethod
    def parse(cls, value: bytes) -> Marker:
        """Read the value of a record."""
        content = json.loads(value)
        return cls(tuple(Proof(*fields) for fields in content["proofs"]), tuple(content["about"]))

    def to_bytes(self) -> bytes:
        """Write the value of a record."""
        return json.dumps({"about": self.about, "proofs": self.proofs}).encode()

    def of(self, cycle: CycleId) -> Proof | None:
        """Return the proof of a cycle."""
        return next((proof for proof in self.proofs if proof.label == cycle.label), None)

    def txns(self, scope: Scope) -> list[SinkTxnId]:
        """Return the cycles that were sent, in their order."""
        txns = [CycleId.parse(scope, p.label).attempt(p.attempt) for p in self.proofs]
        return sorted(txns, key=lambda txn: txn.cycle)

    def last(self, scope: Scope) -> SinkTxnId | None:
        """Return the highest cycle that was sent."""
        return next(reversed(self.txns(scope)), None)

    def with_one(self, proof: Proof) -> Marker:
        """Return the marker with one more proof."""
        return self._replace(proofs=(*self.proofs, proof)[-_REMEMBERED:])


class Slots:
    """The slots of one sink and scope, and their markers."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        sink: str,
        scope: Scope,
        count: int,
        seconds: float,
        target: str,
    ) -> None:
        self._settings, self._sink, self._scope = settings, sink, scope
        self._count, self._seconds = count, seconds
        self._about = (scope.ledger, scope.app, scope.query, sink, target)
        self.topic = f"{_PREFIX}{scope.slug}-{sink}"
        self._slots: dict[int, Slot] = {}
        self._lock = threading.Lock()
        self._consumer: Any = None

    def make_topic(self) -> None:
        """Create the topic of the markers, or give it the partitions that it lacks."""
        client = make("AdminClient", self._settings)
        with answered(f"sink {self._sink}: topic {self.topic}"):
            known = client.list_topics(timeout=CALL_SECONDS).topics.get(self.topic)
            have = 0 if known is None else len(known.partitions)
            if have == 0:
                config = {"cleanup.policy": "compact"}
                new = admin.NewTopic(self.topic, self._count, -1, config=config)
                asked = client.create_topics([new])
            elif have < self._count:
                asked = client.create_partitions([admin.NewPartitions(self.topic, self._count)])
            else:
                return
            try:
                asked[self.topic].result(CALL_SECONDS)
            except kafka.KafkaException as error:
                if error.args[0].code() != kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                    raise

    def slot(self, number: int) -> Slot:
        """Return a slot of this process."""
        with self._lock:
            if number not in self._slots:
                name = f"semel-{self._scope.slug}-{self._sink}-{number}"
                self._slots[number] = Slot(
                    self._settings,
                    name,
                    f"sink {self._sink}",
                    (self.topic, number),
                    self._seconds,
                    lambda number: self.read(number)._replace(about=self._about),
                )
            return self._slots[number]

    def seen(self) -> Marker:
        """Read the first slot's marker, which comes last; an empty one before the first start."""
        try:
            return self.read(0)
        except Permanent:
            return Marker()

    def read(self, number: int) -> Marker:
        """Read the marker of a slot, as far as it is committed.

        Raises:
            Permanent: the topic of the markers does not exist.
            Retryable: no broker answers.
        """
        with self._lock, answered(f"sink {self._sink}: topic {self.topic}"):
            if self._consumer is None:
                # The end is noticed by a fetch that finds nothing: do not let that one wait.
                own = {"group.id": "semel-markers", "fetch.wait.max.ms": 5}
                self._consumer = make("Consumer", {**CONSUMER, **self._settings, **own})
            until = SYSTEM_CLOCK.monotonic() + CALL_SECONDS
            while True:
                try:
                    return _last_marker(self._consumer, self.topic, number)
                except kafka.KafkaException as error:
                    is_new = error.args[0].code() in _NO_LEADER
                    if not is_new or SYSTEM_CLOCK.monotonic() > until:
                        self._consumer = None
                        raise
                    self._consumer.poll(0.05)

    def copy_to(self, other: Slots) -> None:
        """Give every marker to the slots of another name, and empty these; repeatable."""
        known = make("AdminClient", self._settings).list_topics(timeout=CALL_SECONDS).topics
        count = len(known[self.topic].partitions) if self.topic in known else 0
        markers = [self.read(number) for number in range(count)]
        if not any(marker.proofs for marker in markers):
            return
        other._count = max(count, other._count)
        other.make_topic()
        for number, marker in enumerate(markers):
            other.slot(number).settle(marker.proofs)
        for number in range(count):
            self.slot(number).settle(())

    def close(self) -> None:
        """Close the clients; an open transaction is ended by the next owner."""
        with self._lock:
            for slot in self._slots.values():
                slot.drop()
            self._slots.clear()
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None


# A topic that was made a moment ago.
_NO_LEADER: Final = frozenset(
    {kafka.KafkaError.NOT_LEADER_FOR_PARTITION, kafka.KafkaError.LEADER_NOT_AVAILABLE}
)


def _last_marker(consumer: Any, topic: str, number: int) -> Marker:
    place = kafka.TopicPartition(topic, number)
    first, end = consumer.get_watermark_offsets(place, timeout=CALL_SECONDS)
    back = _FIRST_LOOK
    while True:
        # Ends of transactions take offsets, too: the last record may lie before the last few.
        begin = max(first, end - back)
        value = _last_value(consumer, kafka.TopicPartition(topic, number, begin))
        if value is not None:
            return Marker.parse(value)
        if begin == first:
            return Marker()
        back *= _FIRST_LOOK


def markers_of(settings: Mapping[str, Any], what: str) -> Iterator[Marker]:
    """Read the first marker of every sink that has sent to this cluster, as far as is allowed."""
    with answered(what):
        own = {"group.id": "semel-markers", "fetch.wait.max.ms": 5}
        consumer = make("Consumer", {**CONSUMER, **settings, **own})
        try:
            for topic in sorted(consumer.list_topics(timeout=CALL_SECONDS).topics):
                if topic.startswith(_PREFIX):
                    # Every client that may create topics may give one any name and any records.
                    with contextlib.suppress(ValueError, KeyError, TypeError), _as_far_as_allowed():
                        yield _last_marker(consumer, topic, 0)
        finally:
            consumer.close()


@contextlib.contextmanager
def _as_far_as_allowed() -> Iterator[None]:
    try:
        yield
    except kafka.KafkaException as error:
        if error.args[0].code() != kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise


def _last_value(consumer: Any, begin: Any) -> bytes | None:
    consumer.assign([begin])
    try:
        last: bytes | None = None
        while (record := consumer.poll(CALL_SECONDS)) is not None:
            error = record.error()
            if error is None:
                last = record.value()
            elif error.code() == kafka.KafkaError._PARTITION_EOF:
                return last
            else:
                raise kafka.KafkaException(error)
        raise Retryable(f"topic {begin.topic}: no broker answers")
    finally:
        consumer.unassign()


class Slot:
    """One transactional id; used by one thread at a time."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        name: str,
        what: str,
        marker: tuple[str, int],
        seconds: float,
        read: Callable[[int], Marker],
    ) -> None:
        self._settings, self._name, self._what = settings, name, what
        self._topic, self._number = marker
        self._seconds, self._read = seconds, read
        self._producer: Any = None
        self._batch_bytes = 0
        self._known = Marker()
        self.lock = threading.Lock()

    def send(
        self,
        txn: SinkTxnId,
        digest: str,
        batch_bytes: int,
        records: Callable[[], Iterable[Any]],
    ) -> None:
        """Send the records and the proof in one transaction, unless the proof is there.

        The smallest topic takes *batch_bytes* at once.

        Raises:
            NeedsOperator: another attempt was sent, or one of a later cycle.
            Permanent: Kafka refuses a record, and will refuse it again.
            Retryable: it is not known to be sent; call again.
        """
        with self.lock:
            try:
                with answered(self._what):
                    self._open(batch_bytes)
                    if not self._is_sent(txn, digest):
                        self._transact(txn, digest, records)
            except BaseException:
                self.drop()
                raise

    def open(self, batch_bytes: int) -> None:
        """Take the transactional id over, if this process does not have it yet.

        Raises:
            Permanent: Kafka does not allow it.
            Retryable: no broker answers.
        """
        with self.lock, answered(self._what):
            self._open(batch_bytes)

    def _open(self, batch_bytes: int) -> None:
        if self._producer is not None and self._batch_bytes <= batch_bytes:
            return
        self.drop()
        producer = transactional(self._settings, self._name, self._seconds, batch_bytes)
        # Only now: before, a transaction that is being committed may still be invisible.
        self._known = self._read(self._number)
        self._producer, self._batch_bytes = producer, batch_bytes

    def _is_sent(self, txn: SinkTxnId, digest: str) -> bool:
        proof, last = self._known.of(txn.cycle), self._known.last(txn.scope)
        if proof == Proof(txn.cycle.label, txn.attempt, digest):
            return True
        if proof is not None:
            raise NeedsOperator(f"{txn.cycle} was committed by another attempt, {proof.attempt}")
        if last is not None and txn.cycle <= last.cycle:
            raise NeedsOperator(f"{txn} is below the mark {last}: another attempt was committed")
        return False

    def _transact(self, txn: SinkTxnId, digest: str, records: Callable[[], Iterable[Any]]) -> None:
        producer = self._producer
        producer.begin_transaction()
        for record in records():
            self._produce(*record)
        marker = self._known.with_one(Proof(txn.cycle.label, txn.attempt, digest))
        self._mark(marker)
        reach(CrashPoint.KAFKA_SLOT_COMMIT_BEFORE, self._what.removeprefix("sink "))
        producer.commit_transaction(self._seconds)
        reach(CrashPoint.KAFKA_SLOT_COMMIT_AFTER, self._what.removeprefix("sink "))
        self._known = marker

    def settle(self, proofs: tuple[Proof, ...]) -> None:
        """Replace the marker, in a transaction of its own."""
        with self.lock:
            try:
                with answered(self._what):
                    self._open(BATCH_BYTES)
                    self._known = self._known._replace(proofs=proofs)
                    self._producer.begin_transaction()
                    self._mark(self._known)
                    self._producer.commit_transaction(self._seconds)
            except BaseException:
                self.drop()
                raise

    def _mark(self, marker: Marker) -> None:
        self._produce(self._topic, self._number, self._name.encode(), marker.to_bytes(), None)

    def _produce(
        self, topic: str, partition: int | None, key: Any, value: Any, headers: Any
    ) -> None:
        where = -1 if partition is None else partition
        while True:
            try:
                self._producer.produce(topic, value, key, where, headers=headers)
            except BufferError:
                # Its queue is full.
                self._producer.poll(0.1)
            else:
                return

    def drop(self) -> None:
        """Forget the producer; it is not told to abort, because its commit may be under way."""
        self._producer = None


def transactional(
    settings: Mapping[str, Any], name: str, seconds: float, batch_bytes: int = BATCH_BYTES
) -> Any:
    """Return a producer that has taken the transactional id over."""
    own = {
        "message.max.bytes": MOST_BYTES,
        **PRODUCER,
        **settings,
        "batch.size": min(int(settings.get("batch.size", BATCH_BYTES)), batch_bytes),
        "transactional.id": name,
        "transaction.timeout.ms": round(seconds * 1_000),
        # Spark's own writer, and every other Java client, chooses partitions like this.
        "partitioner": "murmur2_random",
    }
    producer = make("Producer", own)
    # It knows the broker then; else the next call takes half a second longer.
    producer.list_topics(timeout=CALL_SECONDS)
    producer.init_transactions(seconds)
    return producer


@contextlib.contextmanager
def answered(what: str) -> Iterator[None]:
    """Translate the client's errors.  A slot that another process took over can be tried again."""
    try:
        yield
    except kafka.KafkaException as error:
        found = meaning(error, what)
        raise found if isinstance(found, Permanent) else Retryable(str(found)) from error
