"""The staging job: one pass of the plan for all sinks.

    df ──▶ select(one column per sink) ──▶ mapInArrow: every batch to every stager ──▶ receipts

Only the receipts of winning task attempts come back, also with retries and
speculation; the rows of the other attempts are never committed.

Spark passes a task's exception on as text, and repeats the task first.  So an error
of staging comes back as a row, like a receipt, with its group: one that would come
again at once, any other in the last attempt that Spark allows.
"""

from __future__ import annotations

import contextlib
import re
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.crashpoints import CrashPoint, reach
from semel.errors import NEVER_PASSES, Misuse, Permanent, Retryable, SemelError, reason_of
from semel.pipeline.driver import Stage
from semel.pipeline.sink import Receipt, StageAnew, Stager, StagingWriter, Tally, TwoPhaseSink
from semel.pipeline.txn import SinkTxnId

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

RECEIPTS: Final = "sink int, receipt string, failure string"
"""A task's receipts; or one row with the group of its failure, and its reason as the receipt."""

# Larger Arrow batches halve the cost of the transfer to Python up to this size and not
# beyond; a task holds one batch at a time.
ROWS_PER_ARROW_BATCH: Final = 20_000


def rows_column(sink: TwoPhaseSink) -> Column:
    """Return the column that holds a sink's rows: its own, parsed from text, or all columns."""
    from pyspark.sql import functions as f

    if sink.rows is None:
        return f.struct("*")
    return f.expr(sink.rows) if isinstance(sink.rows, str) else sink.rows


def select_rows(df: DataFrame, sinks: Sequence[TwoPhaseSink]) -> DataFrame:
    """Return one column per sink, named by its place."""
    return df.select(*(rows_column(sink).alias(f"s{i}") for i, sink in enumerate(sinks)))


def shared_rows(sinks: Sequence[TwoPhaseSink]) -> tuple[list[TwoPhaseSink], list[int]]:
    """Return a sink for every different `rows`, and for each sink its place among them.

    The transfer to Python costs more than writing, so equal rows are sent once.
    """
    different: list[TwoPhaseSink] = []
    places = []
    for sink in sinks:
        alike = [i for i, other in enumerate(different) if _are_same(sink.rows, other.rows)]
        if not alike:
            different.append(sink)
        places.append(alike[0] if alike else len(different) - 1)
    return different, places


def _are_same(one: Any, other: Any) -> bool:
    # Spark columns cannot be compared: == builds a third column.
    return one is other or (isinstance(one, str) and isinstance(other, str) and one == other)


def arrow_schemas(selected: DataFrame, sinks: Sequence[TwoPhaseSink]) -> dict[str, pa.Schema]:
    """Return the Arrow schema of each sink's rows.

    Raises:
        Misuse: a sink's rows are neither a struct nor an array of structs, or have two columns
            of one name.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import ArrayType, StructType

    zone = selected.sparkSession.conf.get("spark.sql.session.timeZone")
    schemas = {}
    for sink, column in zip(sinks, selected.schema.fields, strict=True):
        kind = column.dataType
        if isinstance(kind, ArrayType):
            kind = kind.elementType
        if not isinstance(kind, StructType):
            raise Misuse(
                f"sink {sink.name!r}: rows= must be a struct (one row), null (no row) or an array "
                f"of structs (several rows), such as F.struct('id', 'amount'), got "
                f"{column.dataType.simpleString()}"
            )
        twice = sorted(name for name, times in Counter(kind.names).items() if times > 1)
        if twice:
            raise Misuse(
                f"sink {sink.name!r}: rows= has two columns called {twice[0]!r}; rename one with "
                f".alias('…')"
            )
        schemas[sink.name] = to_arrow_schema(kind, timezone=zone)
    return schemas


def stage(
    df: DataFrame, sinks: Sequence[TwoPhaseSink], txn: SinkTxnId
) -> Mapping[str, Sequence[Receipt]]:
    """Run the plan once, staging every sink's rows; return the winning tasks' receipts.

    Raises:
        StagingFailed: a task failed in every attempt that Spark allows; it may pass later.
        Permanent, Fenced, NeedsOperator, Misuse: it would fail again.
    """
    return run_tasks(*staging_job(df, sinks, [(sink.name, sink.stager(txn)) for sink in sinks]))


def staging_job(
    df: DataFrame, sinks: Sequence[TwoPhaseSink], stagers: Sequence[tuple[str, Stager]]
) -> tuple[DataFrame, Tee]:
    """Return the frame of one pass, and the function that its tasks run.

    A column of structs costs Spark a copy of every row, so if all sinks take all columns, the
    frame is passed as it is.
    """
    attempts, (different, places) = task_attempts(df.sparkSession), shared_rows(sinks)
    if len(different) == 1 and different[0].rows is None and _can_be_selected(df.columns):
        return df, WholeTee(stagers, attempts=attempts)
    return select_rows(df, different), Tee(stagers, places, attempts)


def _can_be_selected(names: Sequence[str]) -> bool:
    """Return whether `mapInArrow` finds each of the columns by its name."""
    return len({name.lower() for name in names}) == len(names) and all(
        name.isidentifier() for name in names
    )


def run_tasks(frame: DataFrame, tee: Tee) -> Mapping[str, Sequence[Receipt]]:
    """Run *tee* over every partition of *frame*; return the winning tasks' receipts, by sink.

    Raises:
        StagingFailed: a task failed in every attempt that Spark allows; it may pass later.
        Permanent, Fenced, NeedsOperator, Misuse: it would fail again.
    """
    from pyspark.errors import PySparkException

    conf = frame.sparkSession.conf
    conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(ROWS_PER_ARROW_BATCH))
    try:
        collected = frame.mapInArrow(_in_task(tee), RECEIPTS).collect()
    except Exception as error:
        # Py4J, which Spark Connect does not need, raises the JVM's exceptions.
        if isinstance(error, PySparkException) or hasattr(error, "java_exception"):
            # Without its cause: the text of Spark's errors may quote a row.
            raise _translated(error) from None
        raise
    failed = [row for row in collected if row["failure"]]
    # An error that would come again is raised before one that may pass.
    for row in sorted(failed, key=lambda row: row["failure"] == StagingFailed.__name__):
        raise _GROUPS[row["failure"]](row["receipt"])
    receipts: dict[str, list[Receipt]] = {name: [] for name in tee.names}
    for row in collected:
        receipts[tee.names[row["sink"]]].append(Receipt.from_json(row["receipt"]))
    return receipts


class StagingFailed(Retryable):
    """A staging task failed; its rows are never committed."""


_GROUPS: Final[Mapping[str, type[SemelError]]] = {
    group.__name__: group for group in (*NEVER_PASSES, StagingFailed)
}

# What a value or a missing package causes, wherever it is raised; Arrow's errors about values
# and types are such, too.
_COMES_AGAIN: Final = (ValueError, TypeError, NotImplementedError, ImportError)


def _group_of(error: Exception) -> str:
    """Return the group to raise on the driver."""
    found = next((group for group in NEVER_PASSES if isinstance(error, group)), None)
    if found is not None:
        return found.__name__
    return (Permanent if isinstance(error, _COMES_AGAIN) else StagingFailed).__name__


def _words(error: Exception) -> str:
    """Return the text of our own and the system's errors; of others, which may quote a row, not."""
    if isinstance(error, SemelError | OSError | ImportError):
        return reason_of(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = type(error).__name__
    return f"{kind} at {place.filename}:{place.lineno} (its text may quote a row and is not shown)"


def _in_task(tee: Tee) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that a worker without semel can load, and that says what is missing."""
    from pyspark import cloudpickle

    pickled = cloudpickle.dumps(tee)  # type: ignore[no-untyped-call]

    # A nested function is pickled by value: it must not use anything of this module.
    def run(batches):  # type: ignore[no-untyped-def]
        import pickle
        import sys

        import pyarrow as pa

        try:
            tee = pickle.loads(pickled)
        except ImportError as error:
            reason = (
                f"{error}: the executors' Python ({sys.executable}) lacks it; install it there, "
                f"or set PYSPARK_PYTHON to one that has it"
            )
            place = pa.array([-1], pa.int32())
            failed = {"sink": place, "receipt": [reason], "failure": ["Permanent"]}
            yield pa.RecordBatch.from_pydict(failed)
            return
        yield from tee(batches)

    return run


def task_attempts(session: Any) -> int:
    """Return how often Spark tries a task; a local master has a number of its own."""
    master = str(session.conf.get("spark.master", ""))
    if master.startswith("local") and not master.startswith("local-cluster"):
        found = re.search(r",\s*(\d+)\s*\]", master)
        return int(found[1]) if found else 1
    return int(session.conf.get("spark.task.maxFailures", "4"))


# Classes of SQLSTATE in Spark's errors: data, a key that comes twice in a map, a routine in
# another language (a Python UDF), and what the query itself raises.
_PERMANENT_CLASSES: Final = ("22", "23", "38", "P0")
_PERMANENT_CONDITIONS: Final = ("FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH",)

# A worker's traceback, up to the class of the first exception; the values come after it.
_TRACEBACK: Final = re.compile(
    r"Traceback \(most recent call last\):\n"
    r"(?P<frames>(?:[ \t].*\n)+)(?P<kind>[\w.]+)(?P<text>.*)"
)
_FRAME: Final = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)


def _translated(error: Exception) -> SemelError:
    """Translate a failure of the plan itself, after Spark's own retries of the task."""
    text = str(error)
    _, ours, words = text.partition(f"{Retryable.__module__}.{Retryable.__name__}:")
    if ours:
        return StagingFailed(words.strip().partition("\n")[0])
    causes = _causes(error)
    for cause in causes:
        state, condition = cause.getSqlState() or "", cause.getCondition() or ""
        if state.startswith("38"):
            return Permanent(_of_python(text))
        if state.startswith(_PERMANENT_CLASSES) or condition in _PERMANENT_CONDITIONS:
            return Permanent(_of_spark(cause, causes))
    told = next((cause for cause in causes if cause.getCondition()), None)
    if told is not None:
        return StagingFailed(_of_spark(told, causes))
    java = _java_causes(error)
    kind = java[-1].getClass().getName() if java else type(error).__name__
    return StagingFailed(f"the plan failed with {kind} (Spark's log has the text)")


def _java_causes(error: Exception) -> list[Any]:
    """Return the JVM's exception and its causes; none on Spark Connect."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    found = []
    while java is not None:
        found.append(java)
        java = java.getCause()
    return found


def _causes(error: Exception) -> list[Any]:
    """Return the failure and its causes, as far as they have a condition and a SQLSTATE."""
    found = [java for java in _java_causes(error) if "getSqlState" in dir(java)]
    return found or ([error] if hasattr(error, "getSqlState") else [])


def _of_spark(cause: Any, causes: Sequence[Any]) -> str:
    """Name a failure and its place; its text may quote a row."""
    paths = (dict(each.getMessageParameters() or {}).get("path") for each in causes)
    fragments = (repr(context.fragment()) for context in cause.getQueryContext() or ())
    place = next(filter(None, (*fragments, *paths)), "")
    where = f" in {place}" if place else ""
    state = cause.getSqlState()
    return f"{cause.getCondition()}{where} (SQLSTATE {state}; Spark's log has the text)"


def _of_python(text: str) -> str:
    """Name the exception of a Python worker and its place; its text may quote a row."""
    found = _TRACEBACK.search(text)
    if found is None:
        return "a Python function raised (Spark's log has the text)"
    if found["kind"].endswith(("ModuleNotFoundError", "ImportError")):
        return (
            f"{found['kind']}{found['text']}: the executors' Python lacks it; install it there, "
            f"or set PYSPARK_PYTHON to one that has it"
        )
    frames = _FRAME.findall(found["frames"])
    place = ":".join(frames[-1]) if frames else "an unknown place"
    return f"{found['kind']} at {place} (its text may quote a row and is not shown)"


SinkRows: TypeAlias = "tuple[int, pa.RecordBatch]"


class Tee:
    """The function that runs in a task: every Arrow batch goes to every sink's writer.

    *places* says which column of a batch holds each sink's rows; by default each has its own.
    *attempts* is how often Spark tries a task.
    """

    def __init__(
        self,
        stagers: Sequence[tuple[str, Stager]],
        places: Sequence[int] | None = None,
        attempts: int = 1,
    ) -> None:
        self._stagers = stagers
        self._places = range(len(stagers)) if places is None else places
        self._attempts = attempts

    @property
    def names(self) -> list[str]:
        """The sinks' names, in order."""
        return [name for name, _ in self._stagers]

    def parts(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Iterator[SinkRows]]:
        """Yield what each batch brings: rows, with the place of their sink."""
        for batch in batches:
            columns = [rows_of(column) for column in batch.columns]
            yield ((sink, columns[place]) for sink, place in enumerate(self._places))

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write all of the partition, then return one receipt per sink, or the failure."""
        import pyarrow as pa

        task, number = _task()
        failure: str | None = None
        try:
            told = [receipt.to_json() for receipt in self.write(batches, task)]
        except Exception as error:
            failure, told = _group_of(error), [_words(error)]
            may_pass = failure == StagingFailed.__name__ and not isinstance(error, StageAnew)
            if may_pass and number + 1 < self._attempts:
                raise  # Spark tries this task again, and no other
        yield pa.RecordBatch.from_pydict(
            {
                "sink": pa.array(range(len(told)), pa.int32()),
                "receipt": told,
                "failure": pa.array([failure] * len(told), pa.string()),
            }
        )

    def write(self, batches: Iterable[pa.RecordBatch], task: str) -> list[Receipt]:
        """Stage the rows of one task attempt; drop them again if anything fails."""
        writers: list[StagingWriter] = []
        try:
            for name, stager in self._stagers:
                reach(CrashPoint.STAGE_BEFORE, name)
                writers.append(stager.open(task))
            for part in self.parts(batches):
                for sink, rows in part:
                    if rows.num_rows:
                        writers[sink].write(rows)
                reach(CrashPoint.STAGE_WRITTEN)
            receipts = []
            for (name, _), writer in zip(self._stagers, writers, strict=True):
                receipts.append(writer.finish())
                reach(CrashPoint.STAGE_AFTER, name)
        except BaseException:
            # GeneratorExit, too: a speculative copy that lost is closed here.
            for writer in writers:
                with contextlib.suppress(Exception):  # one failed discard must not stop the others
                    writer.discard()
            raise
        return receipts


class WholeTee(Tee):
    """A tee whose batches are the rows of every sink."""

    def parts(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Iterator[SinkRows]]:
        """Yield what each batch brings."""
        for batch in batches:
            yield ((sink, batch) for sink in range(len(self._stagers)))


def rows_of(column: Any) -> pa.RecordBatch:
    """Turn a column of structs, or of arrays of structs, into rows; a null gives no row."""
    import pyarrow as pa

    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = column.flatten()
    if column.null_count:
        column = column.drop_null()
    return pa.RecordBatch.from_struct_array(column)


def _task() -> tuple[str, int]:
    """Return a unique name of this task attempt, and how many attempts were before it.

    Spark's own number restarts in each application.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    number = context.taskAttemptId() if context else 0
    before = context.attemptNumber() if context else 0
    return f"t{number}-{uuid.uuid4().hex[:12]}", before


def check_static(frame: DataFrame | Any, reader: str) -> None:
    """Check that *frame*, which the function *reader* returned, can be read as a whole.

    Raises:
        Misuse: it is not a static DataFrame.
    """
    if getattr(frame, "isStreaming", None) is not False:
        raise Misuse(
            f"{reader} returned {type(frame).__name__}, and must return a static DataFrame with "
            f"the stream's columns (spark.read…, not spark.readStream…)"
        )


def stage_of(frame: DataFrame | Any, sink: TwoPhaseSink, reader: str) -> Stage:
    """Return the staging of a static DataFrame for one sink, which is asked whether it can be.

    Raises:
        Misuse: *frame* is not a static DataFrame.
        Permanent: the sink cannot keep its rows.
    """
    check_static(frame, reader)
    sink.check(arrow_schemas(select_rows(frame, [sink]), [sink])[sink.name])
    return lambda txn: stage(frame, [sink], txn)


# The hash is an unsigned 64-bit number, which Spark's integers cannot hold.
TALLIES: Final = "sink int, rows bigint, hash string"


def tally_source(
    frame: DataFrame | Any, sinks: Sequence[TwoPhaseSink], reader: str = "the reader"
) -> dict[str, Tally]:
    """Return the count and hash of each sink's rows of *frame*, in one pass; write nothing.

    Uses the same columns and the same hash as staging, so that the two can be compared.

    *reader* is the name of the frame's source in errors.

    Raises:
        Misuse: it is not a static DataFrame.
    """
    check_static(frame, reader)
    found = dict.fromkeys((sink.name for sink in sinks), Tally())
    for row in select_rows(frame, sinks).mapInArrow(_Count(len(sinks)), TALLIES).collect():
        name = sinks[row["sink"]].name
        found[name] += Tally(row["rows"], int(row["hash"]))
    return found


class _Count:
    """The function that runs in a task."""

    def __init__(self, sinks: int) -> None:
        self._sinks = sinks

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        from semel.arrow.tally import tally

        totals = [Tally()] * self._sinks
        for batch in batches:
            for index in range(self._sinks):
                totals[index] += tally(rows_of(batch.column(index)))
        yield pa.RecordBatch.from_pydict(
            {
                "sink": pa.array(range(self._sinks), pa.int32()),
                "rows": pa.array([total.rows for total in totals], pa.int64()),
                "hash": [str(total.hash) for total in totals],
            }
        )
