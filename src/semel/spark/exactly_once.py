"""`ExactlyOnce`: the function that Spark calls for every batch."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from semel.crashpoints import CrashPoint, reach
from semel.errors import Misuse, NeedsOperator, Retryable
from semel.events import EVENTS, Events
from semel.ledgers import open_ledger
from semel.pipeline.cycle import CommitAborted, CommitFatal, CommitSucceeded, CycleRefused
from semel.pipeline.driver import CycleOutcome, CycleReplayed, Driver, Heartbeat, Settings
from semel.pipeline.generation import settle_generation
from semel.pipeline.ledger import Generation, Ledger
from semel.pipeline.recovery import RecoveryReport
from semel.pipeline.sink import MindsSpeculation, Receipt, TwoPhaseSink
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId, Scope, SinkTxnId, checked_name
from semel.spark.checkpoint import Checkpoint, open_checkpoint
from semel.spark.kafka import KafkaSources, starting_offsets
from semel.spark.query import has_speculation, is_connect, refuse_unsafe, running_query
from semel.spark.staging import arrow_schemas, select_rows, stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from semel.spark.supervise import Exit


class CycleGaveUp(Retryable):
    """A batch used up its attempts and was aborted; none of its rows is visible."""

    def __init__(self, cycle: str, reason: str) -> None:
        super().__init__(cycle, reason)
        self.cycle = cycle
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"cycle {self.cycle} was aborted: {self.reason}; none of its rows is visible, and the "
            f"batch runs again when the query is started again"
        )


class CycleFatal(NeedsOperator):
    """A batch ended in a way that only recovery or an operator can settle."""

    def __init__(self, cycle: str, reason: str) -> None:
        super().__init__(cycle, reason)
        self.cycle = cycle
        self.reason = reason

    def __str__(self) -> str:
        return f"cycle {self.cycle}: {self.reason}"


class ExactlyOnce:
    """One atomic decision per micro-batch over all *sinks*, for `foreachBatch`.

    *ledger* is a URL (``sqlite:///payments.ledger``, ``postgresql://…``) or a ledger.
    Recovery runs before the first batch; `run` supervises a query and recovers before
    it starts.  *checkpoint* is needed on Spark Connect only.  *consumer_group* is a Kafka
    group, without members, whose offsets follow the committed cycles, so that lag tools see
    the query.
    """

    def __init__(
        self,
        app: str,
        ledger: str | Ledger,
        sinks: Sequence[TwoPhaseSink],
        query: str = "main",
        *,
        checkpoint: str | None = None,
        stateful: bool | None = None,
        fails_on_data_loss: bool | None = None,
        consumer_group: str | None = None,
        settings: Settings | None = None,
        events: Events = EVENTS,
    ) -> None:
        self.app = checked_name("app", app)
        self.query = checked_name("query", query)
        self.sinks = tuple(sinks)
        self.settings = settings or Settings()
        self.outcome: CycleOutcome | None = None
        """How the last cycle ended; Spark passes an exception on only as text."""

        self.failure: BaseException | None = None
        """The exception of the last batch, or of recovery before it."""

        self._ledger = ledger
        self._checkpoint = checkpoint
        self._stateful = stateful
        self._fails_on_data_loss = fails_on_data_loss
        self._consumer_group = consumer_group
        self._events = events
        self._forget()

    def _forget(self) -> None:
        self._driver: Driver | None = None
        self._heartbeat: Heartbeat | None = None
        self._run: _Run | None = None
        self._started_ahead = False

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without connections, lease and history: another process starts new."""
        state = self.__dict__.copy()
        for name in ("_driver", "_heartbeat", "_run", "_started_ahead", "outcome", "failure"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.outcome = self.failure = None
        self._forget()

    def __repr__(self) -> str:
        names = ", ".join(sink.name for sink in self.sinks)
        return f"ExactlyOnce({self.app}/{self.query}, sinks: {names})"

    @property
    def driver(self) -> Driver:
        """The driver of this process; opens the ledger."""
        if self._driver is None:
            ledger = open_ledger(self._ledger)
            self._driver = Driver(
                self.app,
                ledger,
                self.sinks,
                self.query,
                settings=self.settings,
                events=self._events,
            )
        return self._driver

    @property
    def events(self) -> Events:
        """The events of this pipeline."""
        return self._events

    @property
    def given_ledger(self) -> str | Ledger:
        """The ledger as it was given, not opened: opening it would create it."""
        return self._ledger

    @property
    def ledger(self) -> Ledger:
        """The ledger, opened."""
        return self.driver.ledger

    @property
    def scope(self) -> Scope:
        """The scope of this pipeline."""
        return self.driver.scope

    def starting_offsets(self, options: Mapping[str, str], source: int = 0) -> str:
        """Return the ``startingOffsets`` with which a Kafka source goes on where the ledger ends.

        *options* are the source's own (``kafka.bootstrap.servers`` and ``subscribe``, for
        example), *source* its place in the query.  Spark uses the value for a new checkpoint
        only: with it, a lost checkpoint neither skips nor repeats a record.  ``earliest`` before
        the first cycle, and for partitions that the ledger does not know.

        Raises:
            NeedsOperator: a topic was deleted and created again.
            Retryable: the cluster does not answer.
        """
        from pyspark.sql import SparkSession

        session = SparkSession.getActiveSession()
        if session is None:
            raise Misuse("starting_offsets asks the cluster through Spark: start a session first")
        positions = self.ledger.positions(self.scope, BatchRange())
        return starting_offsets(session, options, positions, source)

    def recover(self) -> RecoveryReport:
        """Take the scope and settle everything that earlier owners left, before the query starts.

        Raises:
            LeaseHeld: another live process owns the scope.
            Retryable, NeedsOperator: recovery could not be completed.
        """
        try:
            report = self._start(lambda: True)
        except Exception as error:
            self.failure = error
            raise
        self._started_ahead = True
        return report

    def run(self, start_query: Callable[[], StreamingQuery], **options: Any) -> Exit:
        """Recover, start the query, and start it again after retryable failures.

        Returns when the query ends, with an exit code for `sys.exit`; see
        `semel.spark.supervise.supervise`.
        """
        from semel.spark.supervise import supervise

        return supervise(self, start_query, **options)

    def stop(self) -> None:
        """Release the scope, so that a successor need not wait for the lease to end."""
        heartbeat, driver = self._heartbeat, self._driver
        self._heartbeat = self._run = None
        self._started_ahead = False
        if heartbeat is not None:
            heartbeat.stop()
        if driver is not None:
            _LIVE.pop(driver.scope, None)
            driver.stop()

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Carry one batch through all sinks; Spark calls this.

        Raises only ordinary exceptions: a SystemExit or KeyboardInterrupt inside
        foreachBatch would hang the query.
        """
        self.outcome = self.failure = None
        try:
            reach(CrashPoint.SPARK_BATCH_BEFORE)
            self._batch(df, batch_id)
            reach(CrashPoint.SPARK_BATCH_AFTER)
        except Exception as error:
            self.failure = error
            raise
        except BaseException as error:
            self.failure = error
            raise RuntimeError(f"the batch was stopped by {type(error).__name__}") from error

    def _batch(self, df: DataFrame, batch_id: int) -> None:
        run = self._run_of(df, batch_id)
        cycle = CycleId(self.scope, run.generation.number, batch_id)
        self.outcome = self.driver.run_cycle(
            cycle,
            lambda: run.kafka.added_to(run.checkpoint.range(batch_id)),
            lambda txn: self._stage(df, txn),
        )
        self._publish(run, batch_id)
        match self.outcome:
            case CycleReplayed():
                if run.is_stateful or run.checkpoint.is_stateful:
                    # Otherwise Spark would mark the batch as done without its state,
                    # and the checkpoint would stay broken.
                    df.write.format("noop").mode("overwrite").save()
            case CommitAborted(reason):
                self._run = None
                raise CycleGaveUp(str(cycle), reason)
            case CommitFatal(reason):
                self._run = None
                if isinstance(self.outcome.cause, CycleRefused):
                    raise self.outcome.cause
                raise CycleFatal(str(cycle), reason) from self.outcome.cause

    def _publish(self, run: _Run, batch_id: int) -> None:
        if self._consumer_group and isinstance(self.outcome, CommitSucceeded | CycleReplayed):
            run.kafka.publish(self._consumer_group, run.checkpoint.range(batch_id))

    def _stage(self, df: DataFrame, txn: SinkTxnId) -> Mapping[str, Sequence[Receipt]]:
        """Write the rows of one attempt for every sink; return the winning tasks' receipts."""
        return stage(df, self.sinks, txn)

    def _schemas(self, df: DataFrame) -> Mapping[str, Any]:
        """Return the Arrow schema of every sink's rows."""
        return arrow_schemas(select_rows(df, self.sinks), self.sinks)

    def _run_of(self, df: DataFrame, batch_id: int) -> _Run:
        """Return the facts about this run of the query, read at its first batch."""
        run_id = _run_id(df)
        if self._run is not None and self._run.id == run_id and self.driver.is_started:
            return self._run
        if self._run is not None and self._run.id != run_id and self._is_active():
            raise Misuse(
                f"{self!r} is run by another query already; stop that one first, or give each "
                f"query its own ExactlyOnce with its own query="
            )
        self._run = None
        query = running_query(df, self._checkpoint)
        refuse_unsafe(df, query, self._fails_on_data_loss)
        spark = None if is_connect(df) else df.sparkSession
        checkpoint = open_checkpoint(query.checkpoint, spark)
        schemas = self._schemas(df)
        speculates = has_speculation(df)
        for sink in self.sinks:
            if speculates and isinstance(sink, MindsSpeculation):
                sink.expect_speculation()
            sink.check(schemas[sink.name])
        if self._started_ahead and self.driver.is_started:
            self._watch(query.is_active)
        else:
            self._start(query.is_active)
        self._started_ahead = False
        if query.interval_seconds and not self.driver.settings.interval_seconds:
            self.driver.settings = replace(
                self.driver.settings, interval_seconds=query.interval_seconds
            )
        stateful = self._stateful if self._stateful is not None else query.is_stateful
        kafka = KafkaSources(spark, query.source_options)
        if self._consumer_group and not kafka:
            raise Misuse(
                "consumer_group is for queries that read Kafka, and needs Spark's own JVM: none of "
                "the sources is a Kafka source here; leave it out"
            )
        view = checkpoint.view(batch_id)
        view = replace(
            view,
            range=kafka.added_to(view.range),
            is_stateful=view.is_stateful or stateful,
        )
        generation = settle_generation(self.ledger, self.driver.lease, view)
        self._run = _Run(run_id, checkpoint, generation, view.is_stateful, kafka)
        return self._run

    def _start(self, is_active: Callable[[], bool]) -> RecoveryReport:
        driver = self.driver
        other = _LIVE.get(driver.scope)
        if other is not None and other is not self:
            if other.is_running:
                raise Misuse(
                    f"scope {driver.scope} is run by another query of this process; stop it "
                    f"first, or give this one its own query="
                )
            other.stop()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        report = driver.start()
        if _LIVE.get(driver.scope) is not self:
            atexit.register(self.stop)
        _LIVE[driver.scope] = self
        self._watch(is_active)
        return report

    def _watch(self, is_active: Callable[[], bool]) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._is_active = is_active
        self._heartbeat = Heartbeat(self.ledger, self.driver.lease, self._events, is_active).start()

    @property
    def is_running(self) -> bool:
        """Whether a query of this process uses this object now."""
        return self._run is not None and self._is_active()


@dataclass(frozen=True, slots=True)
class _Run:
    """The facts about one run of the query."""

    id: str
    checkpoint: Checkpoint
    generation: Generation
    is_stateful: bool
    kafka: KafkaSources


def _run_id(df: DataFrame) -> str:
    """Return Spark's id of this run of the query; on Connect one process serves one run."""
    if is_connect(df):
        return "connect"
    return df.sparkSession.sparkContext.getLocalProperty("spark.jobGroup.id") or ""


_LIVE: dict[Scope, ExactlyOnce] = {}
"""The driver of each scope in this process, to refuse a second query of one scope."""
