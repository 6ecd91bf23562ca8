"""The Kafka sink: the records of a cycle, once each for readers with `read_committed`.

    tasks: shards in a shared place ──prepare: checked, promised──▶ commit: one transaction a slot

Spark's own Kafka writer sends at least once.  `semel.kafka.slots` has the transaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from semel.arrow.area import Area
from semel.arrow.attempts import sync
from semel.arrow.held import HeldSink
from semel.arrow.tally import tally
from semel.errors import Misuse, NeedsOperator, Permanent
from semel.kafka.client import CALL_SECONDS, bootstrap_of, kafka, make, settings_for
from semel.kafka.slots import (
    BATCH_BYTES,
    MOST_BYTES,
    Slots,
    admin,
    answered,
    markers_of,
    transactional,
)
from semel.kafka.staging import Demand, ShardStager, check_columns
from semel.pipeline.sink import Guarantee, Receipt, Schema, Tally, Tenant
from semel.pipeline.txn import Scope, SinkTxnId

# A record's own fields beside its key, value and headers, with room to spare.
_OVERHEAD_BYTES: Final = 128


class KafkaSink(HeldSink):
    """Records for Kafka topics; rows have the columns of Spark's own writer.

    Those are ``value``, and optionally ``key``, ``headers``, ``topic`` and ``partition``.
    *staging* is a folder that the driver and all executors mount, or the URI of a bucket
    (``s3://bucket/prefix?region=…``, as pyarrow reads it): what a batch sends is kept there until
    the decision.  *slots* is how many producers send at once; each has a transaction of its own,
    so readers may see a part of a batch for a moment.  *config* has further settings of the
    client, under librdkafka's names.
    """

    kind = "kafka"
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
        super().__init__(rows, name, staging)
        self.topic = topic
        if slots < 1:
            raise Misuse(f"sink {name}: slots must be at least 1, got {slots}")
        self._servers, given = bootstrap_of(bootstrap)
        self._settings = settings_for(self._servers, {**given, **(config or {})})
        self._count, self._seconds = slots, transaction_seconds
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
        super().check(schema)
        with answered(f"sink {self.name}"):
            transactional(self._settings, f"semel-probe-{self.name}", self._seconds)

    def fence(self, scope: Scope, epoch: int) -> None:
        super().fence(scope, epoch)
        self._of(scope).make_topic()

    def stager(self, txn: SinkTxnId) -> ShardStager:
        return ShardStager(self._area, txn, self.topic)

    def _promised(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> Mapping[str, Any]:
        slots, shards = self._of(txn.scope), sum(len(one.detail["chunks"]) for one in receipts)
        batch_bytes = self._ask({slots.topic: Demand(), **_demands(receipts)})
        # Kafka shows the rights to a transactional id only to who takes it over.
        for number in range(min(self._count, max(shards, 1))):
            slots.slot(number).open(batch_bytes)
        if shards:
            sync(self._area.opened()[0], self._area.folder(txn))
        return {"slots": self._count, "batch_bytes": batch_bytes}

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

    def _done(self, scope: Scope) -> list[SinkTxnId]:
        return self._of(scope).seen().txns(scope)

    def _proof(self, txn: SinkTxnId) -> str | None:
        proof = self._of(txn.scope).seen().of(txn.cycle)
        return proof.digest if proof is not None and proof.attempt == txn.attempt else None

    def _carry_out(
        self, txn: SinkTxnId, promise: Mapping[str, Any], lost: str | None
    ) -> str | None:
        """Send, one transaction a slot, each with its proof; the first slot's comes last."""
        if lost:
            return None if txn in self._done(txn.scope) else lost
        slots, count = self._of(txn.scope), promise["slots"]
        shares = [promise["chunks"][number::count] for number in range(count)]

        def send(number: int) -> None:
            digest, batch_bytes = promise["token"]["digest"], promise["batch_bytes"]
            slots.slot(number).send(
                txn, digest, batch_bytes, lambda: self._records(txn, shares[number])
            )

        others = [number for number in range(1, count) if shares[number]]
        if others:
            with ThreadPoolExecutor(len(others)) as pool:
                for _ in pool.map(send, others):
                    pass
        send(0)
        return None

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

    def find_place(self) -> str:
        client = make("AdminClient", self._settings)
        with answered(f"sink {self.name}"):
            cluster = client.list_topics(timeout=CALL_SECONDS).cluster_id
        return f"{self.target} of Kafka cluster {cluster}"

    @property
    def target(self) -> str:
        """The topic, if all rows go to one."""
        return f"topic {self.topic}" if self.topic else "topics by row"

    def tenants(self) -> list[Tenant]:
        found = []
        for marker in markers_of(self._settings, f"sink {self.name}"):
            *names, sink, target = marker.about or ("", "")
            if not marker.proofs or target != self.target:
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
        return Slots(self._settings, sink, scope, self._count, self._seconds, self.target)


def _demands(receipts: Sequence[Receipt]) -> dict[str, Demand]:
    """Return what all tasks demand of each topic."""
    found: dict[str, Demand] = {}
    for receipt in receipts:
        for topic, fields in receipt.detail["topics"].items():
            found[topic] = found.get(topic, Demand()) | Demand(*fields)
    return found
