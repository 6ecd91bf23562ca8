"""The batch as the pass needs it: rows of a key together and in order, with those that come back.

batch ∪ waiting messages ──▶ route ──▶ repartition, sort ──▶ mapInArrow: the pass ──▶ stagers
"""

from __future__ import annotations

import gc
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from semel.arrow.changes import to_batch
from semel.codec import (
    FromCoordinates,
    FromHeader,
    FromKey,
    FromPayload,
    JsonCodec,
    Place,
    Reading,
    Unreadable,
)
from semel.errors import Misuse, Permanent, Retryable, reason_of
from semel.events import EVENTS, Measurement
from semel.message import Coordinates, Message, Record, headers_from, pairs_of
from semel.messaging.changes import (
    ComeBack,
    MessagesReader,
    Op,
    SeenWaiting,
)
from semel.messaging.failure import OUTAGES, UNKNOWN_CODE
from semel.messaging.outcome import Handled, Outcome, tell, tell_received
from semel.messaging.records import Waits
from semel.pipeline.sink import Receipt, Stager, TwoPhaseSink
from semel.spark.messages.columns import FAILURE, Columns, Ordinary, are_possible
from semel.spark.messages.handling import (
    Arrival,
    MessagePass,
    PassSettings,
    Results,
    route_of,
    stored_record,
)
from semel.spark.staging import SinkRows, Tee, rows_column, rows_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

KAFKA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key:string,value:binary>>"
)
"""The columns of a batch: those of Spark's Kafka source, with its headers."""

_ROW: Final = (
    "route string, place bigint, topic string, partition int, offset bigint, timestamp double, "
    "key binary, value binary, headers array<struct<key:string,value:binary>>, waiting string"
)
_ROW_NAMES: Final = tuple(one.split()[0] for one in _ROW.split(", "))

# A key with more rows in one batch is handled in several parts: memory is bounded, and only
# versions that overtake others are not looked for beyond a part.
_MOST_OF_A_ROUTE: Final = 50_000


def kafka_columns(df: DataFrame, reading: Reading) -> DataFrame:
    """Return the columns of *df* that a batch of messages needs.

    Raises:
        Misuse: one of them is missing, or the source does not read headers.
    """
    places = (reading.id_from, reading.key_from, reading.version_from)
    if "headers" not in df.columns and any(isinstance(one, FromHeader) for one in places):
        raise Misuse(
            "the stream has no headers, and this consumer reads one: add "
            ".option('includeHeaders', 'true') to the Kafka source"
        )
    if "key" not in df.columns and any(isinstance(one, FromKey) for one in places):
        raise Misuse("the stream has no column 'key', and this consumer reads it: give key_from=")
    missing = [name for name in ("topic", "partition", "offset", "value") if name not in df.columns]
    if missing:
        raise Misuse(
            f"the stream has no column {missing[0]!r}: a pipeline of messages reads the columns of "
            f"Spark's Kafka source (topic, partition, offset, key, value, timestamp, headers); "
            f"for another source, .select(…) its columns under these names"
        )
    from pyspark.sql import functions as f

    columns = []
    for column in KAFKA.split(", "):
        name, kind = column.split(" ", 1)
        found = f.col(name) if name in df.columns else f.lit(None)
        columns.append(found.cast(kind).alias(name))
    return df.select(*columns)


def rows_of_batch(df: DataFrame, reading: Reading, come_back: Sequence[ComeBack] = ()) -> DataFrame:
    """Return the rows of one attempt: those of the batch, and each database's waiting messages."""
    from pyspark.sql import functions as f

    route = _route(reading)
    new = df.select(
        (f.lit(None).cast("string") if route is None else route).alias("route"),
        f.lit(None).cast("bigint").alias("place"),
        "topic",
        "partition",
        "offset",
        (f.unix_micros("timestamp") / f.lit(1e6)).alias("timestamp"),
        "key",
        "value",
        "headers",
        f.lit(None).cast("string").alias("waiting"),
    )
    if route is None:
        new = new.mapInArrow(_Routes(reading), _ROW)
    listed = [_waiting_row(one, shard) for shard, of in enumerate(come_back) for one in of.rows]
    if not listed:
        return new
    return df.sparkSession.createDataFrame(listed, _ROW).unionByName(new)


MADE: Final = "semel_row_"
"""The columns of the rows that Spark makes, one for each sink, where there is no handler."""


def with_rows(
    rows: DataFrame,
    columns: Mapping[str, Any],
    sinks: Sequence[TwoPhaseSink],
    failure: Any = None,
) -> DataFrame:
    """Add what takes the place of a handler: each sink's row, and why a message cannot be handled.

    Nothing else of *columns* goes on to the tasks.
    """
    from pyspark.sql import functions as f

    def column(given: Any) -> Any:
        return f.expr(given) if isinstance(given, str) else given

    taken = [n for n in columns if n.lower() in _ROW_NAMES or n.startswith("semel_")]
    if taken:
        raise Misuse(f"columns= may not replace {taken[0]!r}: choose another name")
    wide = rows
    for name, given in columns.items():
        wide = wide.withColumn(name, column(given))
    made = [rows_column(sink).alias(f"{MADE}{place}") for place, sink in enumerate(sinks)]
    why = f.lit(None).cast(_WHY) if failure is None else column(failure).cast(_WHY)
    return wide.select(*_ROW_NAMES, *made, why.alias(FAILURE))


_WHY: Final = "struct<code:string,reason:string>"


def in_order(rows: DataFrame, tasks: int) -> DataFrame:
    """Bring the rows of a key into one task, waiting ones first, then as they came."""
    from pyspark.sql import functions as f

    order: list[Column | str | int] = [f.col("place").asc_nulls_last()]
    order += ["topic", "partition", "offset"]
    if tasks == 1:
        return rows.repartition(1).sortWithinPartitions(order)
    return rows.repartition(tasks, "route").sortWithinPartitions(["route", *order])


def first_raising(rows: DataFrame, wide: Callable[[DataFrame], DataFrame]) -> Record | None:
    """Return the first record at which the columns that *wide* adds raise; None if none does.

    The rows are halved until one is left: about fifteen small jobs for a batch of any size.
    """
    from pyspark.sql import functions as f

    def raises(some: DataFrame) -> bool:
        try:
            wide(some).write.format("noop").mode("overwrite").save()
        except Exception:  # noqa: BLE001  which half it is in is all that is asked
            return True
        return False

    rows = rows.withColumn("waits", f.col("waiting").isNotNull())
    if not raises(rows):
        return None
    groups = rows.select("waits", "topic", "partition").distinct().collect()
    for group in groups:
        here = [f.col(name).eqNullSafe(f.lit(group[name])) for name in group.asDict()]
        some = rows.where(here[0] & here[1] & here[2])
        if not raises(some):
            continue
        place = f.col("place" if group["waits"] else "offset")
        first, last = some.agg(f.min(place), f.max(place)).collect()[0]
        while first < last:
            middle = (first + last) // 2
            if raises(some.where(place.between(first, middle))):
                last = middle
            else:
                first = middle + 1
        row = some.where(place == first).collect()[0]
        pairs = headers_from((one["key"], one["value"]) for one in row["headers"] or ())
        at = Coordinates(row["topic"], row["partition"] or 0, row["offset"] or 0)
        return Record(at, row["value"], row["key"], pairs)
    return None


def _route(reading: Reading) -> Column | None:
    """Return the column by which rows are shared out; None if only Python can read it."""
    from pyspark.sql import functions as f

    parts = [_column_of(reading.key_from, reading), _column_of(reading.id_from, reading)]
    if parts[0] is None or parts[1] is None:
        return None
    # A message without a key has no order: its id brings its repetitions together.
    coordinates = f.concat_ws("/", "topic", "partition", "offset")
    return f.coalesce(*(part for part in parts if part is not None), coordinates)


def _column_of(place: Place, reading: Reading) -> Column | None:
    from pyspark.sql import functions as f

    match place:
        case FromKey():
            return _text(f.col("key"))
        case FromHeader(name):
            same = f.filter("headers", lambda one: one["key"] == name)
            return _text(f.get(same, f.size(same) - 1)["value"])
        case FromCoordinates():
            return f.concat_ws("/", "topic", "partition", "offset")
        case FromPayload(path) if isinstance(reading.codec, JsonCodec):
            steps = "".join(f"['{step}']" for step in path.split("."))
            return f.get_json_object(f.col("value").cast("string"), f"${steps}")
        case _:
            return None


def _text(column: Column) -> Column:
    """Return bytes as text, or in hexadecimal digits where they are none, as `route_of` does."""
    from pyspark.sql import functions as f

    return f.coalesce(f.try_validate_utf8(column.cast("string")), f.hex(column))


class _Routes:
    """The function that adds the route where only the codec can read the key or the id."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            try:
                read = [self._reading.read(arrival.record) for arrival in _arrivals(batch)]
            except Retryable as error:
                # By the name of this class the driver knows that it may pass.
                raise Retryable(reason_of(error)) from None
            routes = [
                route_of(one) if isinstance(one, Message) else str(one.record.at) for one in read
            ]
            yield batch.set_column(0, "route", pa.array(routes, pa.string()))


def _waiting_row(one: SeenWaiting, shard: int) -> tuple[Any, ...]:
    record = stored_record(one)
    told = {f.name: getattr(one, f.name) for f in fields(one) if f.name != "payload"}
    told["shard"] = shard
    return (
        route_of(record.message),
        one.place,
        one.topic,
        one.partition,
        one.offset,
        one.timestamp,
        record.key,
        one.payload,
        list(pairs_of(record.headers)),
        json.dumps(told),
    )


def _arrivals(batch: pa.RecordBatch | pa.Table) -> Iterator[Arrival]:
    columns = [batch.column(name).to_pylist() for name in _ROW_NAMES]
    has_failures = FAILURE in batch.schema.names
    failures = batch.column(FAILURE).to_pylist() if has_failures else [None] * batch.num_rows
    for why, (route, _, topic, partition, offset, at, key, value, headers, waiting) in zip(
        failures, zip(*columns, strict=True), strict=True
    ):
        failure = None if why is None else (why["code"] or UNKNOWN_CODE, why["reason"] or "")
        if waiting is not None:
            told = json.loads(waiting)
            told["waits"], shard = Waits(told["waits"]), told.pop("shard")
            seen = SeenWaiting(payload=value, **told)
            yield Arrival(stored_record(seen), route, seen, failure, shard)
            continue
        pairs = headers_from((one["key"], one["value"]) for one in headers) if headers else {}
        record = Record(Coordinates(topic, partition, offset), value, key, pairs, at or 0.0)
        yield Arrival(record, route or "", failure=failure)


@dataclass
class PassCounts:
    """What the passes of an attempt have counted: for metrics, and whether it met an outage."""

    tried: int = 0
    outages: int = 0
    metrics: Counter[tuple[str, ...]] = field(default_factory=Counter)
    durations: dict[tuple[str, str, str, int], tuple[int, float]] = field(default_factory=dict)
    """Of calls of the handler, by labels and power of two: their number, and their seconds."""

    gaps: list[tuple[str, int, int]] = field(default_factory=list)
    """Those that were passed over: the key, the expected version, and the one that came."""

    _told: dict[tuple[Any, ...], Counter[tuple[str, ...]]] = field(default_factory=dict, repr=False)
    """What outcomes without a failure add to the metrics: nearly all messages are alike."""

    def note(
        self,
        group: str,
        arrival: Arrival,
        one: Message | Unreadable,
        outcome: Outcome,
        times: int = 1,
    ) -> None:
        """Count one outcome; *times* only if it has no failure and no gap."""
        failure = getattr(outcome, "failure", None)
        self.tried += times * (isinstance(outcome, Handled) or failure is not None)
        self.outages += failure is not None and failure.failure_class in OUTAGES
        if isinstance(outcome, Handled) and (gap := outcome.gap) is not None:
            self.gaps.append((gap.key, gap.expected, gap.found))
        if failure is not None or not isinstance(one, Message):
            self._tell(group, arrival, one, outcome)
            return
        topic, why = one.source and one.source.topic, getattr(outcome, "why", None)
        alike = (group, topic, one.type, type(outcome), why, arrival.waiting is None)
        if (added := self._told.get(alike)) is None:
            before, self.metrics = self.metrics, Counter()
            self._tell(group, arrival, one, outcome)
            self._told[alike] = added = self.metrics
            self.metrics = before
        for name, number in added.items():
            self.metrics[name] += number * times

    def _tell(
        self, group: str, arrival: Arrival, one: Message | Unreadable, outcome: Outcome
    ) -> None:
        if arrival.waiting is None:
            tell_received(one, group)
        tell(one, outcome, group)

    def took(self, group: str, message: Message, seconds: float) -> None:
        """Add the duration of one call to those of about the same length."""
        topic = message.source.topic if message.source else ""
        about = math.frexp(max(seconds, 1e-6))[1]
        number, total = self.durations.get((topic, group, message.type, about), (0, 0.0))
        self.durations[topic, group, message.type, about] = number + 1, total + seconds

    def measured(self, found: Any) -> None:
        """Add one measurement."""
        self.metrics[found.metric.value, *found.labels.values()] += found.value

    def to_json(self) -> list[Any]:
        """Return the counts as plain values."""
        metrics = [[*key, number] for key, number in sorted(self.metrics.items())]
        durations = [[*key, *found] for key, found in self.durations.items()]
        return [self.tried, self.outages, metrics, self.gaps, durations]

    @classmethod
    def of(cls, receipts: Iterable[Receipt]) -> PassCounts:
        """Add up what the receipts of the messages sink say."""
        total = cls()
        for receipt in receipts:
            counts = receipt.detail.get(COUNTS, [0, 0, [], [], []])
            tried, outages, metrics, gaps, durations = counts
            total.tried += tried
            total.outages += outages
            for *key, number in metrics:
                total.metrics[tuple(key)] += number
            total.gaps += gaps
            for *key, number, seconds in durations:
                before = total.durations.get(tuple(key), (0, 0.0))
                total.durations[tuple(key)] = before[0] + number, before[1] + seconds
        return total


COUNTS: Final = "counts"
"""The key in the detail of the messages sink's receipts."""


class PassTee(Tee):
    """The function that runs in a task: the pass, and what it makes to every sink's writer.

    The messages sinks are the last ones, in the order of *stores*: the reader and the held keys
    of each database.  Each has a pass of its own, over the keys whose hash is its number.
    """

    def __init__(
        self,
        stagers: Sequence[tuple[str, Stager]],
        settings: PassSettings,
        stores: Sequence[tuple[MessagesReader, Mapping[str, int]]],
        schemas: Sequence[pa.Schema],
        *,
        attempts: int,
        is_careful: bool,
        is_alone: bool,
    ) -> None:
        super().__init__(stagers, attempts=attempts)
        self._settings = settings
        self._stores = stores
        self._schemas = schemas
        self._is_careful, self._is_alone = is_careful, is_alone
        self._has_columns = are_possible(settings) and not (is_careful or is_alone)
        self._counts = PassCounts()

    def parts(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Iterator[SinkRows]]:
        """Handle the messages, and yield the rows and changes of each Arrow batch."""
        import pyarrow as pa

        self._counts = counts = PassCounts()
        group = self._settings.consumer
        passes = [
            MessagePass(
                self._settings,
                *store,
                lambda *outcome: counts.note(group, *outcome),
                is_careful=self._is_careful,
                is_alone=self._is_alone,
            )
            for store in self._stores
        ]
        unsubscribe = EVENTS.subscribe(counts.measured, Measurement)
        try:
            for rows in _by_route(batches):
                if self._has_columns:
                    columns, left = Columns(self._settings, rows), list[int]()
                    for shard, passed in enumerate(passes):
                        ordinary = columns.of(passed, shard, len(passes))
                        for one in ordinary.counted:
                            counts.note(group, *one)
                        left += ordinary.left
                        yield self._ordinary(ordinary, rows, shard)
                    rows = rows.take(pa.array(sorted(left), pa.int64()))
                arrivals = [*_arrivals(rows)]
                for shard, (places, read) in self._by_shard(arrivals):
                    made = passes[shard].run([arrivals[place] for place in places], read)
                    made.picked = [places[place] for place in made.picked]
                    for message, seconds in made.seconds:
                        counts.took(group, message, seconds)
                    yield self._rows(made, rows, shard)
            told = [passed.finish() for passed in passes]
            # All counts in every database: an audit looks there for the offsets of whole cycles.
            counted = [one for some in told for one in some if one.op == Op.COUNT]
            for shard, some in enumerate(told):
                own = [one for one in some if one.op != Op.COUNT]
                yield self._rows(Results([*own, *counted]), None, shard)
        finally:
            unsubscribe()

    def _by_shard(
        self, arrivals: Sequence[Arrival]
    ) -> Iterator[tuple[int, tuple[list[int], list[Message | Unreadable]]]]:
        """Yield each database's number with the places of its rows, and what they hold."""
        if len(self._stores) == 1:
            read_all = [self._settings.reading.read(one.record) for one in arrivals]
            yield 0, ([*range(len(arrivals))], read_all)
            return
        shared: dict[int, tuple[list[int], list[Message | Unreadable]]] = {}
        for place, arrival in enumerate(arrivals):
            one = self._settings.reading.read(arrival.record)
            route = route_of(one) if isinstance(one, Message) else arrival.route
            number = crc32(route.encode("utf-8", "surrogatepass")) % len(self._stores)
            if arrival.waiting is not None:
                number = arrival.shard
            places, read = shared.setdefault(number, ([], []))
            places.append(place)
            read.append(one)
        yield from sorted(shared.items())

    def write(self, batches: Iterable[pa.RecordBatch], task: str) -> list[Receipt]:
        """Stage what the pass makes; the last receipt has its counts, too."""
        # A full collection walks over all of a batch's messages, which live to its end; it took
        # a third of the pass's time.  Young garbage, of a handler's calls, goes as always.
        young, middle, old = gc.get_threshold()
        gc.set_threshold(young, middle, old * 10)
        try:
            *receipts, messages = super().write(batches, task)
        finally:
            gc.set_threshold(young, middle, old)
        detail = {**messages.detail, COUNTS: self._counts.to_json()}
        return [*receipts, replace(messages, detail=detail)]

    def _rows(self, made: Results, rows: pa.Table | None, shard: int) -> Iterator[SinkRows]:
        import pyarrow as pa

        for place, some in made.rows.items():
            yield place, pa.RecordBatch.from_pylist(list(some), schema=self._schemas[place])
        if made.picked and rows is not None:
            yield from self._picked(rows, made.picked)
        if made.changes:
            yield len(self._schemas) + shard, to_batch(made.changes)

    def _ordinary(self, made: Ordinary, rows: pa.Table, shard: int) -> Iterator[SinkRows]:
        if made.picked:
            yield from self._picked(rows, made.picked)
        if made.claims is not None:
            yield len(self._schemas) + shard, made.claims

    def _picked(self, rows: pa.Table, places: Sequence[int]) -> Iterator[SinkRows]:
        """Yield what Spark has made for these rows."""
        import pyarrow as pa

        names = [f"{MADE}{place}" for place in range(len(self._schemas))]
        taken = rows.select(names).take(pa.array(places, pa.int64()))
        for batch in taken.combine_chunks().to_batches():
            for place, name in enumerate(names):
                yield place, rows_of(batch.column(name))


def _by_route(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows in groups that end where a route ends."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kept: pa.Table | None = None
    for batch in batches:
        new = pa.Table.from_batches([batch])
        rows = new if kept is None else pa.concat_tables([kept, new])
        routes = rows.column("route").fill_null("")
        last = routes[-1] if len(routes) else ""
        others = pc.indices_nonzero(pc.not_equal(routes, last))
        first = others[-1].as_py() + 1 if len(others) else 0
        if first == 0 and rows.num_rows >= _MOST_OF_A_ROUTE:
            first = rows.num_rows
        if first:
            yield rows.slice(0, first).combine_chunks()
        kept = rows.slice(first)
    if kept is not None and kept.num_rows:
        yield kept.combine_chunks()


@dataclass(frozen=True)
class RowCheck:
    """Checks that a handler's row fits its sink's schema, before its message counts as handled."""

    sink: str
    names: Sequence[str]
    schema: Any = None
    """The columns' Arrow types; without Spark, of those whose types are known."""

    def __call__(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row.

        Raises:
            Permanent: it has a column that the schema has not, or a value of another type.
        """
        unknown = row.keys() - self._known
        if unknown and self.names:
            raise Permanent(
                f"the row for sink {self.sink!r} has the column {min(unknown)!r}; its schema has "
                f"{', '.join(self.names)}"
            )
        for name, kind, nullable, usual in self._columns:
            value = row.get(name)
            if value is None:
                if not nullable:
                    raise Permanent(f"the row for sink {self.sink!r} has no {name!r}")
            elif not (type(value) is usual and _is_usual(value)) and not _fits(value, kind):
                raise Permanent(
                    f"the row for sink {self.sink!r} has a {type(value).__name__} in column "
                    f"{name!r}, which is {kind}"
                )
        return row

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names)

    @cached_property
    def _columns(self) -> list[tuple[str, Any, bool, type | None]]:
        """The columns' names, types, whether they take nulls, and which values need no look."""
        import pyarrow as pa

        usual = {pa.string(): str, pa.int64(): int}
        return [
            (one.name, one.type, one.nullable, usual.get(one.type)) for one in self.schema or ()
        ]


_COLUMN: Final = re.compile(r"\s*(?:`([^`]+)`|([^\s:`]+))(?:\s*:\s*|\s+)(\S.*?)\s*", re.DOTALL)


def columns_of(ddl: str) -> dict[str, str]:
    """Return the columns of a schema in SQL's words, each with its type.

    Raises:
        Misuse: it cannot be read.
    """
    found = [_COLUMN.fullmatch(part) for part in _split(ddl)]
    if not all(found):
        raise Misuse(f"schema={ddl!r} cannot be read: write 'id string, version long'")
    return {one[1] or one[2]: one[3] for one in found if one}


def _split(text: str) -> list[str]:
    depth, parts = 0, [""]
    for sign in text:
        depth += (sign in "<(") - (sign in ">)")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


_ARROW: Final = (
    ("bool_", ("boolean",)),
    ("int8", ("tinyint", "byte")),
    ("int16", ("smallint", "short")),
    ("int32", ("int", "integer")),
    ("int64", ("bigint", "long")),
    ("float32", ("float", "real")),
    ("float64", ("double",)),
    ("string", ("string",)),
    ("binary", ("binary",)),
    ("date32", ("date",)),
)
_ARROW_NAMES: Final = {name: kind for kind, names in _ARROW for name in names}
_TYPE: Final = re.compile(r"(\w+)\s*(?:[<(](.*)[>)])?", re.DOTALL)
_MORE: Final = re.compile(r"(\s+not\s+null)?(\s+(?:default|comment)\s.*)?$", re.I | re.DOTALL)


def arrow_fields(ddl: str) -> list[pa.Field]:
    """Return the columns of a schema as Spark gives them to Arrow, without Spark.

    A column of a type that is not known here is left out.
    """
    import pyarrow as pa

    found = []
    for name, text in columns_of(ddl).items():
        more = _MORE.search(text)
        kind = _arrow_type(text[: more.start()] if more else text)
        if kind is not None:
            found.append(pa.field(name, kind, nullable=not (more and more[1])))
    return found


def _arrow_type(text: str) -> Any:
    """Return the Arrow type of one of Spark's, None if it is not known."""
    import pyarrow as pa

    matched = _TYPE.fullmatch(text.strip())
    if matched is None:
        return None
    name, inner = matched[1].lower(), matched[2] or ""
    match name:
        case "decimal" | "dec" | "numeric":
            precision, scale = [*map(int, inner.split(",")), 0][:2] if inner else (10, 0)
            return pa.decimal128(precision, scale)
        case "timestamp" | "timestamp_ltz":
            return pa.timestamp("us", "UTC")
        case "timestamp_ntz":
            return pa.timestamp("us")
        case "array" | "map":
            parts = [_arrow_type(part) for part in _split(inner)]
            make = pa.list_ if name == "array" else pa.map_
            return None if None in parts else make(*parts)
        case "struct":
            fields = arrow_fields(inner)
            return pa.struct(fields) if len(fields) == len(columns_of(inner)) else None
        case _:
            return getattr(pa, _ARROW_NAMES[name])() if name in _ARROW_NAMES else None


def _is_usual(value: object) -> bool:
    """Return whether Arrow surely takes a text, or a whole number of 64 bits."""
    if isinstance(value, str):
        return value.isascii()
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _fits(value: Any, kind: Any) -> bool:
    """Return whether Arrow takes a value as it is."""
    import pyarrow as pa

    if type(value) is bool:
        return bool(pa.types.is_boolean(kind))
    try:
        pa.scalar(value, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True
