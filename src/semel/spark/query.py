"""The running query of a batch: its checkpoint, its sources, its unsafe settings.

Spark's public API has none of this inside foreachBatch, so this module uses its
internal API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from semel.errors import Misuse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The folders that Spark makes for a query without a checkpointLocation: with the setting of this
# name, below it, and for a query without a name as new at every start.
_TEMPORARY: Final = re.compile(r"/(temporary-)?[0-9a-f]{8}(?:-[0-9a-f]{4,12}){4}$")
_ROOT: Final = "spark.sql.streaming.checkpointLocation"

REAL_TIME_BYPASS = "spark.sql.streaming.realTimeMode.allowlistCheck"

SILENT_LOSSES: Final[Mapping[str, tuple[str, str]]] = {
    # A source's option: the value that silently loses rows, and which rows.
    "failOnDataLoss": ("false", "lost records"),
    "ignoreMissingFiles": ("true", "files that are gone"),
    "ignoreCorruptFiles": ("true", "files that cannot be read"),
}
FILE_SETTINGS: Final = {
    f"spark.sql.files.{name}": SILENT_LOSSES[name]
    for name in ("ignoreMissingFiles", "ignoreCorruptFiles")
}
"""The same, for every file of a session."""


@dataclass(frozen=True, slots=True)
class RunningQuery:
    """The query that called us."""

    checkpoint: str
    source_options: Sequence[Mapping[str, str]]
    """By the source's place; empty if Spark does not expose them."""

    is_active: Callable[[], bool]
    is_stateful: bool = False
    interval_seconds: float | None = None
    """The processing-time trigger's interval, if it has one."""


def is_connect(df: DataFrame) -> bool:
    """Return whether the frame belongs to a Spark Connect session, which has no JVM here."""
    return type(df).__module__.startswith("pyspark.sql.connect")


def running_query(df: DataFrame, checkpoint: str | None) -> RunningQuery:
    """Find the query that is running *df* now.

    Raises:
        Misuse: it cannot be found; on Spark Connect `checkpoint=` must be given.
    """
    if is_connect(df):
        if checkpoint is None:
            raise Misuse(
                "on Spark Connect the checkpoint cannot be read from the query: give its path "
                "on the server: ExactlyOnce(..., checkpoint='/path')"
            )
        return RunningQuery(checkpoint, (), lambda: True)
    session: Any = df.sparkSession
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query_id is None:
        raise Misuse(
            "ExactlyOnce was called outside a streaming query; pass it to "
            "writeStream.foreachBatch(...)"
        )
    queries = session._jsparkSession.sharedState().activeStreamingQueries()
    key = session._jvm.java.util.UUID.fromString(query_id)
    execution = queries.get(key)
    own = str(execution.resolvedCheckpointRoot())
    if _is_new_at_every_start(own, session.conf.get(_ROOT, None), execution.name()):
        raise Misuse(
            "the query has no checkpointLocation of its own, so Spark makes a new one at every "
            'start, which begins anew: give it .option("checkpointLocation", "…")'
        )
    root = checkpoint or own
    return RunningQuery(
        root,
        _source_options(execution),
        _is_active(queries, key, str(execution.runId())),
        _is_stateful(execution),
        _interval_seconds(execution),
    )


def _is_new_at_every_start(checkpoint: str, root: str | None, name: str | None) -> bool:
    found = _TEMPORARY.search(checkpoint)
    if found is None or found[1]:
        return found is not None
    folder = checkpoint[: found.start()].rpartition("/")[2]
    return name is None and root is not None and root.rstrip("/").rpartition("/")[2] == folder


def has_speculation(df: DataFrame) -> bool:
    """Return whether a task may run twice at the same time; Spark accepts `True` for true."""
    return str(df.sparkSession.conf.get("spark.speculation", "false")).strip().lower() == "true"


def refuse_unsafe(df: DataFrame, query: RunningQuery, fails_on_data_loss: bool | None) -> None:
    """Refuse settings under which the guarantee cannot hold.

    Raises:
        Misuse: names the setting, the reason and the solution.
    """
    conf = df.sparkSession.conf
    if str(conf.get(REAL_TIME_BYPASS, "true")).lower() == "false":
        raise Misuse(
            f"{REAL_TIME_BYPASS}=false forces Real-Time Mode past its allow-list, where a batch "
            f"has no end at which to decide; remove the setting"
        )
    for setting, (value, rows) in FILE_SETTINGS.items():
        if str(conf.get(setting, "false")).lower() == value:
            raise Misuse(f"{setting}={value}: Spark would silently skip {rows}; remove the setting")
    for options in query.source_options:
        declared = {name.lower(): value.lower() for name, value in options.items()}
        for name, (value, rows) in SILENT_LOSSES.items():
            if declared.get(name.lower()) == value:
                raise Misuse(
                    f"a source has {name}={value}: it would silently skip {rows}; remove the option"
                )
    if is_connect(df) and fails_on_data_loss is None:
        raise Misuse(
            "on Spark Connect the sources' options cannot be read: declare that none of them "
            "has failOnDataLoss=false, ignoreMissingFiles=true or ignoreCorruptFiles=true with "
            "ExactlyOnce(..., fails_on_data_loss=True)"
        )
    if fails_on_data_loss is False:
        raise Misuse(
            "fails_on_data_loss=False: a source that silently skips lost records cannot be part "
            "of the guarantee; set its failOnDataLoss option to true"
        )


def _source_options(execution: Any) -> list[dict[str, str]]:
    """Return the options of the streams, without the static tables that they are joined with."""
    found = execution.analyzedPlan().collectLeaves()
    leaves = [found.apply(index) for index in range(found.size())]
    return [_options_of(leaf) for leaf in leaves if leaf.isStreaming()]


def _options_of(leaf: Any) -> dict[str, str]:
    """Return the options of a leaf: a V2 source, a V1 source, or none for a table."""
    try:
        options = leaf.extraOptions().asCaseSensitiveMap()
        return {str(name): str(options[name]) for name in options}
    except Exception:  # noqa: BLE001  Py4J has one error for all that a class does not have
        pass
    try:
        pairs = leaf.dataSource().options().iterator()
        found = {}
        while pairs.hasNext():
            pair = pairs.next()
            found[str(pair._1())] = str(pair._2())
        return found
    except Exception:  # noqa: BLE001  not a source at all
        return {}


def _is_active(queries: Any, key: Any, run_id: str) -> Callable[[], bool]:
    """Return a check for this run: a query that is started again has the same id."""

    def ask() -> bool:
        running = queries.get(key)
        return running is not None and str(running.runId()) == run_id

    return ask


def _is_stateful(execution: Any) -> bool:
    """Return whether an operator prints "state info", as every one that keeps state does."""
    last = execution.lastExecution()
    return last is not None and "state info" in last.executedPlan().toString()


def _interval_seconds(execution: Any) -> float | None:
    trigger = execution.trigger()
    if "ProcessingTime" not in trigger.getClass().getSimpleName():
        return None
    return float(trigger.intervalMs()) / 1000 or None
