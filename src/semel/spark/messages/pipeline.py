"""`MessagePipeline`: a policy and a handler, one decision per batch."""

from __future__ import annotations

import json
import random
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from semel.arrow.changes import arrow_schema
from semel.clock import SYSTEM_CLOCK, Clock
from semel.codec import FromHeader, FromKey, FromPayload, Place, Reading, Unreadable
from semel.errors import Misuse, Permanent, Retryable
from semel.events import CircuitClosed, CircuitOpened, GapCrossed, Metric
from semel.message import (
    Coordinates,
    Message,
    Record,
    StoredRecord,
    headers_from_text,
    raw_of,
    value_of,
)
from semel.messaging.changes import ComeBack, MessageChange, MessagesReader, Op, SeenClaim
from semel.messaging.failed.deadletters import is_letter_record
from semel.messaging.failure import (
    CLASSIFICATION,
    FailureClass,
    Rule,
    listed_codes,
)
from semel.messaging.handler import Consumer
from semel.messaging.outcome import Outcome, told
from semel.messaging.send.outbox import MESSAGE_ID_HEADER, OutboxEntry, value_of_payload
from semel.messaging.settings import (
    ConsumerSettings,
    ReplayRules,
    id_place_of,
    settings_of,
)
from semel.messaging.tables import split_schema
from semel.operate.dryrun import DryRun
from semel.operate.stores import Change, RowChange, shown
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.sink import Receipt, TwoPhaseSink
from semel.pipeline.source import SourceKind
from semel.pipeline.txn import NAME, SinkTxnId
from semel.policy.model import Policy
from semel.policy.vocabulary import Engine, Intent, RetryMode, Strategy
from semel.spark.exactly_once import CycleGaveUp, ExactlyOnce
from semel.spark.messages.frames import (
    MADE,
    PassCounts,
    PassTee,
    RowCheck,
    arrow_fields,
    columns_of,
    first_raising,
    in_order,
    kafka_columns,
    rows_of_batch,
    with_rows,
)
from semel.spark.messages.handling import (
    Arrival,
    MessagePass,
    PassSettings,
)
from semel.spark.query import has_speculation, is_connect
from semel.spark.staging import arrow_schemas, run_tasks, task_attempts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0

# A service names its driver in the URL; here it is always psycopg.
_DRIVER: Final = re.compile(r"^postgres(?:ql)?\+\w+://")


class OutageMet(Retryable):
    """A share of a batch failed because a dependency is down; nothing of it was written."""

    def __init__(self, outages: int, tried: int) -> None:
        super().__init__(outages, tried)
        self.outages = outages
        self.tried = tried

    def __str__(self) -> str:
        return (
            f"{self.outages} of {self.tried} messages failed because a dependency is down; none "
            f"of the batch is written, and it is tried again"
        )


class MessagePipeline(ExactlyOnce):
    """A consumer that Spark runs: claims, retries, dead letters and effects in one decision.

    *handler* is called for each message, in a task, and yields pairs of a sink's name (or its
    table) and a row, and `Send` messages.  It may be an async function.  It may be called
    again for the same message until its batch is decided: what it does itself is not covered.

    Without a *handler*, the sinks' ``rows=`` take its place: Spark makes them from the message's
    columns (``key``, ``value``, ``headers``, ``topic``, …) and from *columns*, which are added by
    name.  *failure* is a column: a struct of code and reason where a message cannot be handled.

    *policy* is a file, a `Policy`, or `ConsumerSettings`; *database* is the PostgreSQL database
    of semel's messaging tables, or a list of them: each then has the keys whose hash is its
    number, and the first one has the ledger, unless another is given.  *app* is the pipeline's
    name in its ledger: the consumer's, made short and lower-case where it must be.  A handler's
    rows have no schema of their own: it is the sink's ``schema=``, or in *schemas* by the sink's
    name.

    *claims* is ``"all"``; or ``"lean"``, where a message that passes leaves 32 bytes in a table of
    its day, which no service reads; or ``"failed"``: then only messages that have failed once are
    remembered by their id, and repetitions must be kept out by something else.

    What fails waits in the retry table, for every ``retry.mode`` of the policy.  While a dependency
    is down (the policy's ``circuit``), a batch stands still and nothing of it is written.
    """

    def __init__(
        self,
        consumer: str,
        *,
        app: str | None = None,
        policy: str | Path | Policy | ConsumerSettings | None = None,
        database: str | Sequence[str],
        handler: Callable[..., Any] | None = None,
        columns: Mapping[str, Any] | None = None,
        failure: Any = None,
        sinks: Sequence[TwoPhaseSink],
        ledger: Any = None,
        reading: Reading | None = None,
        id_from: Place | None = None,
        key_from: Place | None = None,
        version_from: Place | None = None,
        rules: Mapping[type[BaseException], Rule] | None = None,
        codes: Mapping[str, FailureClass] | None = None,
        fetch_missing: Callable[..., Any] | None = None,
        rebuild: Callable[..., Any] | None = None,
        outbox: str = "outbox",
        concurrency: int | None = None,
        tasks: int | None = None,
        come_back_rows: int = 10_000,
        come_back_bytes: int = 32 * 2**20,
        schemas: Mapping[str, str] | None = None,
        claims: Literal["all", "lean", "failed"] = "all",
        messages: TwoPhaseSink | None = None,
        **options: Any,
    ) -> None:
        if not 1 <= len(consumer) <= 200:
            raise Misuse(f"a consumer needs a name of 1 to 200 characters, got {consumer!r}")
        if isinstance(policy, str | Path):
            policy = Policy.load(policy)
        settings, most_at_once, place = _settings_of(policy, consumer)
        self._calls = _calls_of(policy, consumer)
        by_version = settings.versioned or _upserts_by_version(policy, consumer)
        reading = reading or Reading(
            id_from=id_from or place or FromHeader(MESSAGE_ID_HEADER),
            key_from=key_from or FromKey(),
            version_from=version_from or (FromPayload("version") if by_version else None),
        )
        if place is not None and reading.id_from != place:
            raise Misuse(
                f"consumer {consumer}: its policy takes the id from the {place}, the code from the "
                f"{reading.id_from}"
            )
        urls = [database] if isinstance(database, str) else [*database]
        places = [split_schema(_DRIVER.sub("postgresql://", url)) for url in urls]
        if len({*places}) < len(places) or not places:
            raise Misuse(f"consumer {consumer}: each database= must be another one")
        if messages is not None:
            kept = [messages]
        else:
            from semel.sinks import MessagesSink

            # With their number in their names: another number of them would look for keys in
            # other databases, and is refused, because the places are known under these names.
            kept = [
                MessagesSink(
                    url,
                    consumer,
                    "messages" if len(urls) == 1 else f"messages-{number}-of-{len(urls)}",
                    schema=schema,
                )
                for number, (url, schema) in enumerate(places, 1)
            ]
        if handler is not None and (columns or failure is not None):
            raise Misuse(f"consumer {consumer}: columns= and failure= take the place of a handler")
        without = [sink.name for sink in sinks if handler is None and sink.rows is None]
        if without:
            raise Misuse(
                f"consumer {consumer}: without a handler, sink {without[0]!r} needs rows=: a "
                f"struct of the message's columns"
            )
        if claims not in ("all", "lean", "failed"):
            raise Misuse(f"consumer {consumer}: claims={claims!r}; write 'all', 'lean' or 'failed'")
        app, ledger = app or _app_of(consumer), ledger or places[0][0]
        super().__init__(app, ledger, [*sinks, *kept], **options)
        self.consumer = consumer
        self._replays = (
            ReplayRules.of_policy(policy, consumer) if isinstance(policy, Policy) else ReplayRules()
        )
        self._messages: list[Any] = [*kept]
        for sink in self._messages:
            sink.claims = claims
        self._user_sinks = tuple(sinks)
        self._ddl = {sink.name: getattr(sink, "schema", None) for sink in sinks}
        self._ddl |= schemas or {}
        self._columns, self._failure = columns or {}, failure
        self._tasks = tasks
        self._limits = come_back_rows // len(kept) or 1, come_back_bytes // len(kept) or 1
        self._tries: tuple[str, int] = ("", 0)
        self._counts = PassCounts()
        self._suspects: list[list[str]] = []
        """By database: messages that were noted when the attempt began."""

        self._clock: Clock = SYSTEM_CLOCK
        self._arrow: list[Any] = []
        self._outages = 0
        self._down_since: float | None = None
        self._is_down = False
        """The last attempt met an outage."""

        self._pause = FIRST_PAUSE_SECONDS
        known = CLASSIFICATION.codes
        classification = CLASSIFICATION.extended(
            rules, {**listed_codes(settings.retry, known), **(codes or {})}
        )
        self.pass_settings = PassSettings(
            consumer,
            handler,
            reading,
            settings,
            classification,
            _places(self._user_sinks),
            outbox=outbox,
            concurrency=concurrency or most_at_once,
            fetch_missing=fetch_missing,
            rebuild=rebuild,
            keeps_claims=claims != "failed",
            is_lean=claims == "lean",
        )

    def write(self, df: DataFrame) -> DataStreamWriter:
        """Return the writer of a query over *df*, the columns of Spark's Kafka source.

        The query wakes up for messages that are due, too.

        Raises:
            Misuse: the handler, or another part, cannot be sent to Spark's tasks.
        """
        from semel.spark.messages.wakeup import waiting_stream

        self._check_that_tasks_get_it()
        if self._calls and has_speculation(df):
            raise Misuse(
                f"consumer {self.consumer}: its policy has side effect {self._calls[0]!r}, which a "
                f"speculative copy of a task calls at the same time: set spark.speculation=false, "
                f"or write the intent (outbox: true)"
            )
        messages = self._messages
        idle = waiting_stream(
            df.sparkSession, self.app, lambda: any(sink.is_due() for sink in messages)
        )
        stream = kafka_columns(df, self.pass_settings.reading)
        return stream.unionByName(idle).writeStream.foreachBatch(self)

    def _check_that_tasks_get_it(self) -> None:
        from pyspark import cloudpickle

        for part in fields(self.pass_settings):
            given = getattr(self.pass_settings, part.name)
            try:
                cloudpickle.dumps(given)  # type: ignore[no-untyped-call]
            except Exception as error:
                named = getattr(given, "__qualname__", type(given).__name__)
                raise Misuse(
                    f"consumer {self.consumer}: its {part.name} {named!r} cannot be sent to "
                    f"Spark's tasks ({error}); make a client or a lock in the task, at the first "
                    f"call, and keep it in a global variable"
                ) from error

    def try_out(self, messages: Iterable[Any]) -> TriedOut:
        """Run the pass over a list, without Spark and without a database.

        A message is its value (bytes, text, or what JSON can represent) or a `Record`.  A value
        alone has no key and no headers: where the id is in one, as by default, give a `Record`.
        """
        if self.pass_settings.handler is None:
            raise Misuse("try_out calls a handler, and here Spark makes the rows: start a query")
        arrivals = [_arrival(offset, one, self.consumer) for offset, one in enumerate(messages)]
        tried = TriedOut()
        self._try(arrivals, tried, self.pass_settings.settings)
        return tried

    def _try(self, arrivals: list[Arrival], tried: TriedOut, settings: ConsumerSettings) -> None:
        checks = [
            RowCheck(sink.name, [*columns_of(text)], arrow_fields(text))
            if (text := self._ddl[sink.name])
            else RowCheck(sink.name, [])
            for sink in self._user_sinks
        ]
        of = replace(self.pass_settings, checks=checks, settings=settings)
        passed = MessagePass(of, _Nothing(), {}, tried.note)
        made = passed.run(arrivals)
        tried.changes = [*made.changes, *passed.finish()]
        for place, rows in made.rows.items():
            tried.rows[self._user_sinks[place].name] = rows

    def _rehearse(self, message: Message) -> DryRun:
        """Run the pass over one message of any version, as a dry run shows it."""
        if self.pass_settings.handler is None:
            return DryRun(message.id, not_possible="Spark makes its rows, in a query only")
        record = StoredRecord(
            message.source or Coordinates(self.consumer, 0, 0),
            value_of(message.raw, message.digest),
            None if message.key is None else raw_of(message.key),
            message.headers,
            message.timestamp,
            message=message,
        )
        tried = TriedOut()
        self._try([Arrival(record)], tried, replace(self.pass_settings.settings, versioned=False))
        [one] = tried.messages
        rows = [
            RowChange(Change.INSERT, name, after={key: shown(key, row[key]) for key in row})
            for name, some in tried.rows.items()
            for row in some
        ]
        sent = tuple(one for one in tried.entries if not is_letter_record(one))
        failure = getattr(one.result, "failure", None)
        return DryRun(message.id, None, one.result, failure, rows, sent)

    def as_consumer(self) -> Consumer:
        """Return what operators' commands know a consumer by; its handler runs on Spark only."""

        async def handle(message: Any, session: Any) -> None:
            raise Misuse(
                f"consumer {self.consumer}: a pipeline on Spark runs its handler; start it, or "
                f"see what it makes of a message with `semel replay dry-run`"
            )

        told = self.pass_settings
        return Consumer(
            told.consumer,
            handle,
            told.reading,
            told.settings,
            replays=self._replays,
            rehearse=self._rehearse,
        )

    # One batch

    def _batch(self, df: DataFrame, batch_id: int) -> None:
        self._tries = ("", 0)
        run = self._run_of(df, batch_id)
        while True:
            try:
                super()._batch(df, batch_id)
                break
            except CycleGaveUp:
                # Each attempt is aborted, so that none leaves staged rows; the batch stands still
                # here, because another start of the query would change nothing.
                if not (self._is_down and self._is_active()):
                    raise
                self._run = run
        if isinstance(self.outcome, CommitSucceeded):
            for key, expected, found in self._counts.gaps:
                name = self.consumer
                self.events.emit(GapCrossed(name, name, key, expected, found))
            for sink, noted in zip(self._messages, self._suspects, strict=False):
                # Also those that are no longer anywhere: any note makes every batch slow.
                with suppress(Retryable):  # the next batch clears them
                    if noted:
                        sink.reader().clear(noted)
            if self.events.is_measured:
                self._measure(batch_id)

    def _measure(self, batch_id: int) -> None:
        """Measure what the committed cycle has counted, and how far its partitions are behind."""
        measure, group = self.events.measure, self.consumer
        for (name, *labels), number in self._counts.metrics.items():
            measure(Metric(name), *labels, value=number)
        for (*labels, _), (number, seconds) in self._counts.durations.items():
            measure(Metric.DURATION, *labels, value=seconds / number, readings=number)
        if self._run is None:
            return
        read = self._run.checkpoint.range(batch_id)
        ends = {
            partition: span.end
            for source in read.sources
            if source.kind is SourceKind.OFFSETS
            for partition, span in source.spans.items()
        }
        for topic in sorted({partition.rpartition("/")[0] for partition in ends}):
            measure(Metric.OFFSET_COMMITS, topic, group, "ok")
        for partition, end in self._run.kafka.ends(read).items():
            topic, _, place = partition.rpartition("/")
            measure(Metric.LAG, topic, group, place, value=float(max(end - ends[partition], 0)))

    def _schemas(self, df: DataFrame) -> Mapping[str, Any]:
        if self.pass_settings.handler is None:
            rows = rows_of_batch(df, self.pass_settings.reading)
            made = self._with_rows(rows).select(
                *(f"{MADE}{place}" for place in range(len(self._user_sinks)))
            )
            found = arrow_schemas(made, self._user_sinks)
        else:
            found = {sink.name: _arrow_schema(sink.name, self._ddl) for sink in self._user_sinks}
        checks = [RowCheck(name, schema.names, schema) for name, schema in found.items()]
        self.pass_settings = replace(self.pass_settings, checks=checks)
        self._arrow = [*found.values()]
        return {**found, **{sink.name: arrow_schema() for sink in self._messages}}

    def _with_rows(self, rows: DataFrame) -> DataFrame:
        return with_rows(rows, self._columns, self._user_sinks, self._failure)

    def _stage(self, df: DataFrame, txn: SinkTxnId) -> Mapping[str, Sequence[Receipt]]:
        """Run the pass; while a dependency is down, wait and give the attempt up.

        Raises:
            OutageMet: too many messages met an outage; nothing of the attempt is kept.
        """
        cycle = txn.cycle.label
        number = self._tries[1] + 1 if self._tries[0] == cycle else 1
        self._tries, self._is_down = (cycle, number), False
        receipts = self._stage_once(df, txn, is_again=number > 1)
        self._counts = counts = PassCounts.of(receipts[self._messages[-1].name])
        settings = self.pass_settings.settings
        down = counts.outages + self._outages
        is_share = counts.outages >= settings.circuit_share * counts.tried
        if settings.circuit_failures and down >= settings.circuit_failures and is_share:
            # The next attempt is no less bold: this one failed for no reason of its own.
            self._tries, self._is_down = (cycle, number - 1), True
            self._stand_still()
            raise OutageMet(counts.outages, counts.tried)
        if counts.tried > counts.outages:
            self._outages = 0
            if self._down_since is not None:
                seconds = self._clock.monotonic() - self._down_since
                self.events.emit(CircuitClosed(self.consumer, self.consumer, seconds))
                self.events.measure(Metric.CIRCUIT, self.consumer, value=0.0)
                self._down_since, self._pause = None, FIRST_PAUSE_SECONDS
        else:  # batches of a few messages meet it one after another
            self._outages += counts.outages
        return receipts

    def _stand_still(self) -> None:
        """Wait before the next attempt, each time twice as long, as long as the query runs."""
        if self._down_since is None:
            self._down_since = self._clock.monotonic()
            self.events.emit(CircuitOpened(self.consumer, self.consumer, "DEPENDENCY_UNAVAILABLE"))
            self.events.measure(Metric.CIRCUIT, self.consumer, value=1.0)
        until = self._clock.monotonic() + random.uniform(self._pause / 2, self._pause)
        self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)
        while self._clock.monotonic() < until and self._is_active():
            self._clock.sleep(0.5)

    def _stage_once(
        self, df: DataFrame, txn: SinkTxnId, *, is_again: bool
    ) -> Mapping[str, Sequence[Receipt]]:
        session = df.sparkSession
        readers: list[MessagesReader] = [sink.reader() for sink in self._messages]
        self._suspects = [[*reader.suspects()] for reader in readers]
        back: list[ComeBack] = [sink.come_back(*self._limits) for sink in self._messages]
        rows = rows_of_batch(df, self.pass_settings.reading, back)
        tasks = self._tasks or (8 if is_connect(df) else session.sparkContext.defaultParallelism)
        tee = PassTee(
            [(sink.name, sink.stager(txn)) for sink in self.sinks],
            self.pass_settings,
            [(reader, one.held) for reader, one in zip(readers, back, strict=True)],
            self._arrow,
            attempts=task_attempts(session),
            is_careful=is_again or any(self._suspects),
            is_alone=is_again,
        )
        # The ids of one message may have come under two keys, which only one task can see.
        sorted_rows = in_order(rows, 1 if is_again else tasks)
        if self.pass_settings.handler is not None:
            return run_tasks(sorted_rows, tee)
        try:
            return run_tasks(self._with_rows(sorted_rows), tee)
        except Permanent as error:
            record = first_raising(rows, self._with_rows)
            if record is None:
                raise
            one = self.pass_settings.reading.read(record)
            raise Permanent(
                f"{error}; the first message at which an expression raises is {one.id!r}, "
                f"{record.at}: use try_cast and its like, or failure="
            ) from None


def _app_of(consumer: str) -> str:
    """Return the name of a consumer's app: its own, or as much of it as an app's name may have."""
    if NAME.fullmatch(consumer):
        return consumer
    known = re.sub(r"[^a-z0-9_-]+", "-", consumer.lower())[:31]
    return f"{known}-{sha256(consumer.encode()).hexdigest()[:8]}"


def _settings_of(
    policy: Policy | ConsumerSettings | None, consumer: str
) -> tuple[ConsumerSettings, int, Place | None]:
    """Return the settings as Spark keeps them: what fails waits in the retry table."""
    place, most_at_once = None, 8
    if isinstance(policy, Policy):
        settings, runner = settings_of(policy, consumer, engine=Engine.SPARK)
        place, most_at_once = id_place_of(policy, consumer), max(runner.concurrency, most_at_once)
    else:
        settings = policy or ConsumerSettings()
    if settings.keeps_results:
        raise Misuse(
            f"consumer {consumer}: keepResult keeps what a handler returns; on Spark a handler "
            f"yields rows, so keep the result in a row of a sink"
        )
    retry = replace(settings.retry, mode=RetryMode.RETRY_TABLE)
    return replace(settings, retry=retry, holds_keys=None), most_at_once, place


def _calls_of(policy: Policy | ConsumerSettings | None, consumer: str) -> list[str]:
    """Return the calls to other systems that the handler makes itself, as the policy says."""
    if not isinstance(policy, Policy):
        return []
    own = policy.consumer(consumer)
    if own.outbox and own.side_effects is None:
        return []
    found = [policy.effective(consumer, topic) for topic in policy.topics_of(consumer) or (None,)]
    effects = [effect for one in found for effect in one.side_effects]
    return [effect.name for effect in effects if effect.intent is not Intent.OUTBOX]


def _upserts_by_version(policy: Policy | ConsumerSettings | None, consumer: str) -> bool:
    if not isinstance(policy, Policy):
        return False
    return policy.consumer(consumer).idempotency.strategy is Strategy.AGGREGATE_VERSION_UPSERT


def _places(sinks: Sequence[TwoPhaseSink]) -> dict[str, int]:
    """Return the place of every sink, by its name, and by its table if only one writes to it."""
    tables = [getattr(sink, "table", None) for sink in sinks]
    found = {
        str(table): place
        for place, table in enumerate(tables)
        if table is not None and tables.count(table) == 1
    }
    return {**found, **{sink.name: place for place, sink in enumerate(sinks)}}


def _arrow_schema(sink: str, ddl: Mapping[str, str | None]) -> Any:
    """Return the Arrow schema of a sink's rows.

    Raises:
        Misuse: the sink has no schema, or Spark cannot read it.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    text = ddl[sink]
    if text is None:
        raise Misuse(
            f"sink {sink!r} needs schema=: a handler's rows have none of their own; for "
            f"example schema='id string, version long'"
        )
    try:
        parsed: Any = StructType.fromDDL(text)
        return to_arrow_schema(parsed, timezone="UTC")
    except PySparkException as error:
        raise Misuse(f"sink {sink!r}: schema={text!r} cannot be read: {error}") from error


# Without Spark


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of one message that was tried out."""

    message_id: str
    outcome: str
    reason: str = ""
    result: Outcome | None = field(default=None, repr=False, compare=False)


@dataclass
class TriedOut:
    """What a pass over a list of messages has made."""

    messages: list[Tried] = field(default_factory=list)
    """In the order in which they were handled: by key, then as they came."""

    rows: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    """By the sink's name."""

    changes: list[MessageChange] = field(default_factory=list)
    """What semel's own tables would get."""

    @property
    def outcomes(self) -> dict[str, str]:
        """By message id: what became of its last delivery."""
        return {one.message_id: one.outcome for one in self.messages}

    @property
    def outgoing(self) -> list[Mapping[str, Any]]:
        """The outgoing messages: topic, key, and payload as text."""
        return [{"topic": e.topic, "key": e.key, "payload": e.value} for e in self.entries]

    @property
    def entries(self) -> list[OutboxEntry]:
        """The outgoing messages as the outbox gets them."""
        found = []
        for change in self.changes:
            if change.op == Op.SEND and change.detail is not None:
                told = json.loads(change.detail)
                value = None if told["payload"] is None else b64decode(told["payload"])
                headers = headers_from_text(told["headers"])
                entry = OutboxEntry(change.message_id, told["topic"], value, change.key, headers)
                found.append(entry)
        return found

    def note(self, arrival: Arrival, one: Message | Unreadable, outcome: Outcome) -> None:
        """Keep one outcome."""
        failure = getattr(outcome, "failure", None)
        reason = failure.reason if failure else ""
        if isinstance(one, Unreadable) and "in the header" in reason and not arrival.record.headers:
            reason += "; this message has no headers: give try_out a Record with them"
        self.messages.append(Tried(one.id, told(outcome).value, reason, outcome))


class _Nothing:
    """The stores of a pass without a database: every message is new."""

    def claims(self, message_ids: Sequence[str]) -> Mapping[str, SeenClaim]:
        return {}

    def versions(self, keys: Iterable[str]) -> Mapping[str, int | None]:
        return {}

    def suspects(self) -> Mapping[str, int]:
        return {}

    def note(self, message_ids: Sequence[str]) -> None:
        """Nothing dies here."""

    def clear(self, message_ids: Sequence[str]) -> None:
        """Nothing was noted."""


def _arrival(offset: int, given: Any, topic: str) -> Arrival:
    if isinstance(given, Record):
        return Arrival(given)
    return Arrival(Record(Coordinates(topic, 0, offset), value_of_payload(given)))
