"""The Kafka sink: the records of a cycle, once each for readers with `read_committed`.

    tasks: shards in a shared place ──prepare: checked, promised──▶ commit: one transaction a slot

Spark's own Kafka writer sends at least once.  `semel.kafka.slots` has the transaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from semel.arrow.area import Area
from semel.arrow.attempts import PREPARED, sync
from semel.arrow.tally import tally
from semel.crashpoints import CrashPoint, reach
from semel.errors import (
    Fenced,
    Misuse,
    NeedsOperator,
    Permanent,
    Retryable,
    SemelError,
    reason_of,
)
from semel.kafka.client import CALL_SECONDS, bootstrap_of, kafka, make, settings_for
from semel.kafka.slots import (
    BATCH_BYTES,
    MOST_BYTES,
    Marker,
    Proof,
    Slots,
    admin,
    answered,
    markers_of,
    transactional,
)
from semel.kafka.staging import Demand, ShardStager, check_columns
from semel.pipeline.sink import (
    Found,
    Guarantee,
    Leftover,
    Receipt,
    Schema,
    SinkFatal,
    SinkFinding,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Tally,
    Tenant,
    Token,
    digest_of,
    tally_of,
)
from semel.pipeline.txn import Scope, SinkTxnId, checked_name

# A record's own fields beside its key, value and headers, with room to spare.
_OVERHEAD_BYTES: Final = 128


class KafkaSink:
    """Records for Kafka topics; rows have the columns of Spark's own writer.

    Those are ``value``, and optionally ``key``, ``headers``, ``topic`` and ``partition``.
    *staging* is a folder that the driver and all executors mount, or the URI of a bucket
    (``s3://bucket/prefix?region=…``, as pyarrow reads it): what a batch sends is kept there until
    the decision.  *slots* is how many producers send at once; each has a transaction of its own,
    so readers may see a part of a batch for a moment.  *config* has further settings of the
    client, under librdkafka's names.
    """

    uncounted = (
        "a record in a topic does not say which cycle sent it; compare the source with what was "
        "staged (--reread)"
    )

    def __init__(
        self,
        bootstrap: str,
        topic: str = "",
        rows: Any = None,
        *,
        staging: str,
        name: str = "kafka",
        slots: int = 2,
        transaction_seconds: float = 300.0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        self.topic = topic
        if slots < 1:
            raise Misuse(f"sink {name}: slots must be at least 1, got {slots}")
        self._servers, given = bootstrap_of(bootstrap)
        self._settings = settings_for(self._servers, {**given, **(config or {})})
        self._area = Area(str(staging), name)
        self._count, self._seconds = slots, transaction_seconds
        self._epochs: dict[Scope, int] = {}
        self._slots: dict[Scope, Slots] = {}

    def __repr__(self) -> str:
        return f"KafkaSink({self._servers!r}, {self.topic!r}, name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_slots": {}}

    def check(self, schema: Schema | None) -> None:
        """Check the columns, the topic, the shared place, and that transactions are allowed."""
        if schema is not None:
            check_columns(self.name, schema, bool(self.topic))
        if self.topic:
            has_keys = schema is None or "key" in schema.names
            self._ask({self.topic: Demand(keyless=0 if has_keys else 1)})
        self._area.check()
        with answered(f"sink {self.name}"):
            transactional(self._settings, f"semel-probe-{self.name}", self._seconds)

    def fence(self, scope: Scope, epoch: int) -> None:
        with self._area.faults():
            newest = self._area.attempts(scope).epoch()
            if epoch < newest:
                raise Fenced(self._fenced(scope, epoch, newest))
            self._area.attempts(scope).raise_epoch(epoch)
        self._of(scope).make_topic()
        self._epochs[scope] = epoch

    def stager(self, txn: SinkTxnId) -> ShardStager:
        return ShardStager(self._area, txn, self.topic)

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Check the shards and the topics, and write down which shards will be sent."""
        return self._outcome(lambda: self._prepare(txn, receipts))

    def _token(self, txn: SinkTxnId, digest: str) -> dict[str, str]:
        return {"attempt": txn.attempt, "digest": digest, "place": self._target}

    def _prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        attempts = self._area.attempts(txn.scope)
        mine, newest = self._epochs.get(txn.scope, 0), attempts.epoch()
        if mine < newest:
            return SinkFatal(self._fenced(txn.scope, mine, newest))
        digest = digest_of(receipts)
        token = self._token(txn, digest)
        marker = self._of(txn.scope).seen()
        proof = marker.of(txn.cycle)
        if proof == Proof(txn.cycle.label, txn.attempt, digest):
            return SinkOK(token)
        if wrong := _below(txn, marker):
            return SinkFatal(wrong)
        known = attempts.read(PREPARED, txn)
        if known is not None:
            if known["digest"] != digest:
                return SinkFatal(f"{txn} was prepared before, with other rows")
            return SinkOK(token)
        shards = [_shard(receipt) for receipt in receipts if receipt.detail["file"]]
        if lost := self._area.missing(txn, shards):
            return SinkFatal(f"{txn}: {lost}")
        slots = self._of(txn.scope)
        batch_bytes = self._ask({slots.topic: Demand(), **_demands(receipts)})
        # Kafka shows the rights to a transactional id only to who takes it over.
        for number in range(min(self._count, max(len(shards), 1))):
            slots.slot(number).open(batch_bytes)
        if shards:
            sync(self._area.opened()[0], self._area.folder(txn))
        rows = tally_of(receipts).rows
        how = {"slots": self._count, "batch_bytes": batch_bytes}
        attempts.write(PREPARED, txn, {**token, "rows": rows, **how, "shards": shards})
        reach(CrashPoint.KAFKA_PREPARE_SEALED, self.name)
        return SinkOK(token)

    def _ask(self, demands: Mapping[str, Demand]) -> int:
        """Ask Kafka whether the topics take such records; return how many bytes each takes at once.

        Raises:
            Permanent: a topic refuses a record, and would after the decision, too.
        """
        client = make("AdminClient", self._settings)
        with answered(f"sink {self.name}"):
            known = client.list_topics(timeout=CALL_SECONDS).topics
            for topic, demand in demands.items():
                if topic not in known or known[topic].error is not None:
                    raise self._refused(
                        topic, "does not exist; create it, or give this login the right WRITE"
                    )
                if demand.partition >= len(known[topic].partitions):
                    raise self._refused(
                        topic,
                        f"has no partition {demand.partition}, which column partition of "
                        f"{demand.highest} names",
                    )
            names = kafka.TopicCollection(list(demands))
            asked = client.describe_topics(names, include_authorized_operations=True)
            for topic, answer in asked.items():
                rights = answer.result(CALL_SECONDS).authorized_operations
                # Brokers without access control do not say.
                if rights and admin.AclOperation.WRITE not in rights:
                    raise self._refused(
                        topic,
                        "may not be written by this login; give it the right WRITE "
                        "(kafka-acls.sh --add --producer)",
                    )
            kind = admin.RESOURCE_TOPIC
            configs = client.describe_configs([admin.ConfigResource(kind, t) for t in demands])
            sizes = [BATCH_BYTES]
            for resource, answer in configs.items():
                topic = resource.name
                with answered(f"sink {self.name}: settings of topic {topic} (DESCRIBE_CONFIGS)"):
                    config = answer.result(CALL_SECONDS)
                sizes.append(self._fits(topic, demands[topic], config))
        return min(sizes)

    def _fits(self, topic: str, demand: Demand, config: Mapping[str, Any]) -> int:
        """Compare the largest record and the missing keys with a topic's settings."""
        if demand.keyless and "compact" in config["cleanup.policy"].value:
            raise self._refused(
                topic,
                f"is compacted and takes no record without a key; {demand.keyless} have a null in "
                f"column key, or no such column",
            )
        takes = int(config["max.message.bytes"].value)
        own = int(self._settings.get("message.max.bytes", MOST_BYTES))
        size = demand.size + _OVERHEAD_BYTES
        if demand.size and size > min(takes, own):
            whose = "max.message.bytes" if takes <= own else "the client's message.max.bytes"
            raise self._refused(
                topic,
                f"does not take a record of {size} bytes, because of {demand.largest}: {whose} is "
                f"{min(takes, own)}",
            )
        return takes

    def _refused(self, topic: str, why: str) -> Permanent:
        return Permanent(f"sink {self.name}: topic {topic} {why}")

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Send what was prepared, one transaction a slot; the first slot's proof comes last."""
        return self._outcome(lambda: self._commit(txn, token))

    def _commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        slots = self._of(txn.scope)
        promise = self._area.attempts(txn.scope).read(PREPARED, txn)
        if promise is None:
            proof = slots.seen().of(txn.cycle)
            if proof is None or proof.attempt != txn.attempt:
                return SinkFatal(
                    f"{txn} cannot be committed: its promise is not in {self._area.label}, and "
                    f"Kafka has no proof of it: never prepared, aborted, or lost"
                )
            is_right = token == self._token(txn, proof.digest)
            return SinkOK() if is_right else SinkFatal(_forged(txn))
        if token != self._token(txn, promise["digest"]):
            return SinkFatal(_forged(txn))
        lost = self._area.missing(txn, promise["shards"])
        if lost and not _is_done(slots.seen(), txn):
            return SinkFatal(f"{txn} cannot be committed: {lost}")
        digest, count = promise["digest"], promise["slots"]
        batch_bytes = promise.get("batch_bytes", BATCH_BYTES)
        shares = [promise["shards"][number::count] for number in range(count)]

        def send(number: int) -> None:
            slots.slot(number).send(
                txn, digest, batch_bytes, lambda: self._records(txn, shares[number])
            )

        others = [number for number in range(1, count) if shares[number]]
        if others:
            with ThreadPoolExecutor(len(others)) as pool:
                for _ in pool.map(send, others):
                    pass
        send(0)
        self._area.remove(txn)
        return SinkOK()

    def _records(self, txn: SinkTxnId, shards: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        """Read shards, and raise if they are not what their tasks wrote."""
        for shard in shards:
            found = Tally()
            for batch in self._area.batches(txn, shard["file"]):
                found += tally(batch)
                columns = [column.to_pylist() for column in batch.columns]
                for topic, partition, key, value, headers in zip(*columns, strict=True):
                    pairs = [(h["key"], h["value"]) for h in headers] if headers else None
                    yield topic, partition, key, value, pairs
            if [found.rows, found.hash] != shard["tally"]:
                raise NeedsOperator(f"{txn}: {shard['file']} has other rows than its task wrote")

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        return self._outcome(lambda: self._abort(txn))

    def _abort(self, txn: SinkTxnId) -> SinkOutcome:
        if _is_done(self._of(txn.scope).seen(), txn):
            return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
        self._area.remove(txn)
        return SinkOK()

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        """Look for the marker in Kafka, then for the promise in the shared place."""
        try:
            slots = self._of(txn.scope)
            if _is_done(slots.seen(), txn):
                return SinkFinding(Found.VISIBLE, f"topic {slots.topic} has its proof")
            attempts = self._area.attempts(txn.scope)
            promise = attempts.read(PREPARED, txn)
            if promise is None:
                staged = len(attempts.files(txn))
                return SinkFinding(Found.GONE, f"not prepared; {staged} tasks have staged for it")
            if lost := self._area.missing(txn, promise["shards"]):
                return SinkFinding(Found.GONE, f"prepared, but {lost}")
            text = f"{promise['rows']} records are prepared in {self._area.label}"
            return SinkFinding(Found.HELD, text)
        except (SemelError, OSError) as error:
            return SinkFinding(Found.UNREACHABLE, reason_of(error))

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        marker = self._of(scope).seen()
        with self._area.faults():
            held = self._area.attempts(scope).records(PREPARED)
        return [txn for txn in held if not _is_done(marker, txn)]

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        marker, attempts = self._of(scope).seen(), self._area.attempts(scope)
        swept = []
        with self._area.faults():
            left = {*attempts.records(PREPARED), *attempts.with_files(marker.last(scope))}
            for txn in sorted(left, key=lambda txn: (txn.cycle, txn.attempt)):
                if _is_done(marker, txn) or is_loser(txn):
                    self._area.remove(txn)
                    swept.append(txn)
        return swept

    def leftovers(self, scope: Scope) -> list[Leftover]:
        marker = self._of(scope).seen()
        with self._area.faults():
            attempts = self._area.attempts(scope)
            return attempts.leftovers(marker.last(scope), lambda txn: _is_done(marker, txn))

    def mark(self, scope: Scope) -> SinkTxnId | None:
        return self._of(scope).seen().last(scope)

    def find_place(self) -> str:
        client = make("AdminClient", self._settings)
        with answered(f"sink {self.name}"):
            cluster = client.list_topics(timeout=CALL_SECONDS).cluster_id
        return f"{self._target} of Kafka cluster {cluster}"

    @property
    def _target(self) -> str:
        return f"topic {self.topic}" if self.topic else "topics by row"

    def tenants(self) -> list[Tenant]:
        found = []
        for marker in markers_of(self._settings, f"sink {self.name}"):
            *names, sink, target = marker.about or ("", "")
            if not marker.proofs or target != self._target:
                continue
            with contextlib.suppress(TypeError, ValueError):  # semel did not write it
                scope = Scope(*names)
                last = marker.last(scope)
                found.append(Tenant(scope, sink, last.label if last else ""))
        return found

    def rename(self, old: Tenant, new: Tenant) -> None:
        """Give the markers and the epoch to the new name; the old markers stay, empty."""
        before, after = (Area(self._area.uri, sink) for sink in (old.sink, new.sink))
        with self._area.faults():
            epoch = before.attempts(old.scope).epoch()
            after.attempts(new.scope).raise_epoch(max(epoch, after.attempts(new.scope).epoch()))
        self.close()  # their producers have the same transactional ids
        was, will = (self._slots_of(tenant.sink, tenant.scope) for tenant in (old, new))
        try:
            was.copy_to(will)
        finally:
            was.close()
            will.close()

    def guarantee(self) -> Guarantee:
        return Guarantee(
            effect=f"the records of a cycle in topic {self.topic or '(by row)'}, once each",
            readers_see=(
                "with isolation.level=read_committed every record once; a batch appears slot by "
                "slot, so a part of it may be seen first; other readers also see records that "
                "were given up"
            ),
            not_covered=(
                f"a place {self._area.label} that loses what it has confirmed",
                "a topic that is deleted, or loses the right to be written, after the decision",
                "a deleted topic of markers: then a new ledger is not noticed, and a cycle that "
                "was being recovered is sent again",
            ),
            weakened_by=()
            if self._count == 1
            else ("several slots: a batch appears in parts; slots=1 shows it whole",),
        )

    def close(self) -> None:
        """Close the producers; the sink can be used again afterwards."""
        for slots in self._slots.values():
            slots.close()
        self._slots.clear()

    def _of(self, scope: Scope) -> Slots:
        found = self._slots.get(scope)
        if found is None:
            found = self._slots.setdefault(scope, self._slots_of(self.name, scope))
        return found

    def _slots_of(self, sink: str, scope: Scope) -> Slots:
        return Slots(self._settings, sink, scope, self._count, self._seconds, self._target)

    def _fenced(self, scope: Scope, mine: int, newest: int) -> str:
        return (
            f"sink {self.name}: scope {scope} belongs to epoch {newest}, this process holds "
            f"{mine}; it was fenced and must stop"
        )

    def _outcome(self, call: Callable[[], SinkOutcome]) -> SinkOutcome:
        try:
            return call()
        except Retryable as error:
            return SinkRetryable(reason_of(error))
        except SemelError as error:
            return SinkFatal(reason_of(error))
        except OSError as error:
            return SinkRetryable(f"sink {self.name}: {reason_of(error)}")


def _forged(txn: SinkTxnId) -> str:
    return f"{txn}: its token is not the one that prepare returned for this topic"


def _is_done(marker: Marker, txn: SinkTxnId) -> bool:
    proof = marker.of(txn.cycle)
    return proof is not None and proof.attempt == txn.attempt


def _below(txn: SinkTxnId, marker: Marker) -> str | None:
    last = marker.last(txn.scope)
    if last is None or last.cycle < txn.cycle:
        return None
    return f"{txn} is at or below the mark {last}: another attempt was committed"


def _shard(receipt: Receipt) -> dict[str, Any]:
    tally = [receipt.tally.rows, receipt.tally.hash]
    return {"file": receipt.detail["file"], "size": receipt.detail["size"], "tally": tally}


def _demands(receipts: Sequence[Receipt]) -> dict[str, Demand]:
    """Return what all tasks demand of each topic."""
    found: dict[str, Demand] = {}
    for receipt in receipts:
        for topic, fields in receipt.detail["topics"].items():
            found[topic] = found.get(topic, Demand()) | Demand(*fields)
    return found
