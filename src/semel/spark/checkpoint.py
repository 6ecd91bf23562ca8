"""A query's checkpoint, from which the source range of a batch is read.

    metadata            the checkpoint's own id
    offsets/N           the end of batch N, written before our function is called
    commits/N           batch N is done, written after our function returned
    sources/<i>/…       the start of a source; for file sources, the files of each entry
    state/              exists if the query keeps state

Ranges come from these files: never from the greatest offset seen (transaction
markers use offsets, too), never from listeners or progress (they are late).

A checkpoint may be wherever Spark can keep one, because it decides nothing: the
decisions and positions are the ledger's.  If an object store lets two drivers write
one batch, or loses a file, the next batch overlaps what is committed or leaves a gap,
and is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from semel.errors import Misuse, NeedsOperator, Retryable, reason_of
from semel.pipeline.generation import Adoptable, CheckpointView
from semel.pipeline.source import BatchRange, Position, SourceKind, SourceRange, Span

NO_DATA: Final = "-"
"""Spark's entry for a source without data so far."""

FILE_AGE_MS: Final = 7 * 24 * 3600 * 1000
"""Spark's default of ``maxFileAge``: a file that is older beside the newest one is never read."""

SIGNAL: Final = "semel_waiting"
"""The only key in the positions of the source that wakes a pipeline of messages."""


class CheckpointFiles(Protocol):
    """Where a checkpoint's files are read from; paths are relative to its root."""

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes; None if there is no such file."""

    def names(self, path: str) -> list[str]:
        """List a folder; empty if there is no such folder."""

    def write(self, path: str, text: str) -> None:
        """Replace a file."""


class LocalFiles:
    """A checkpoint on a file system that this process can read."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> bytes | None:
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def names(self, path: str) -> list[str]:
        try:
            return [entry.name for entry in (self._root / path).iterdir()]
        except FileNotFoundError:
            return []

    def write(self, path: str, text: str) -> None:
        """Replace a file at once, and remove the checksum that Hadoop keeps beside it."""
        file = self._root / path
        (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
        new = file.parent / f".{file.name}.semel"
        new.write_text(text, encoding="utf-8")
        new.replace(file)


class CheckpointUnreadable(Retryable):
    """The file system of a checkpoint did not answer, or refused."""


class HadoopFiles:
    """A checkpoint on any file system that Spark can use, with Spark's own settings for it."""

    def __init__(self, spark: Any, root: str) -> None:
        self._jvm = spark._jvm
        self._root = root
        configuration = spark._jsparkSession.sessionState().newHadoopConf()
        try:
            self._fs = self._path("").getFileSystem(configuration)
        except Exception as error:
            # Hadoop has one exception for schemes without a class and for wrong settings.
            raise Misuse(
                f"checkpoint {root}: Spark cannot open its file system: {_java_words(error)}; "
                f"check the URL, the file system's jars and its spark.hadoop.fs.… settings"
            ) from error

    @property
    def is_local(self) -> bool:
        """Whether the path is on this host, because Spark's default file system is."""
        return str(self._fs.getUri().getScheme()) == "file"

    def _path(self, path: str) -> Any:
        text = f"{self._root}/{path}" if path else self._root
        return self._jvm.org.apache.hadoop.fs.Path(text)

    def read(self, path: str) -> bytes | None:
        try:
            stream = self._fs.open(self._path(path))
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()
        except Exception as error:  # noqa: BLE001  Py4J's and PySpark's errors have no common class
            self._raise_unless_absent(path, error)
            return None

    def names(self, path: str) -> list[str]:
        try:
            found = self._fs.listStatus(self._path(path))
        except Exception as error:  # noqa: BLE001  Py4J's and PySpark's errors have no common class
            self._raise_unless_absent(path, error)
            return []
        return [str(status.getPath().getName()) for status in found]

    def write(self, path: str, text: str) -> None:
        """Replace a file: at once on an object store, but not on HDFS."""
        try:
            stream = self._fs.create(self._path(path), True)
            try:
                stream.write(bytearray(text, "utf-8"))
            finally:
                stream.close()
        except Exception as error:
            words = _java_words(error)
            raise CheckpointUnreadable(
                f"checkpoint {self._root}: {path} was not written: {words}; remove this new "
                f"checkpoint, start the query once more, and repeat the command"
            ) from error

    def _raise_unless_absent(self, path: str, error: Exception) -> None:
        java = getattr(error, "java_exception", None)
        if java is None or java.getClass().getSimpleName() != "FileNotFoundException":
            words = _java_words(error)
            raise CheckpointUnreadable(f"checkpoint {self._root}: {path}: {words}") from error


def _java_words(error: Exception) -> str:
    """Return the exception's own sentence; Py4J's text has the stack, too."""
    java = getattr(error, "java_exception", None)
    return reason_of(error) if java is None else str(java.toString())


_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def is_remote(root: str) -> bool:
    """Return whether *root* names another file system: ``hdfs:/x``, ``s3a://bucket/x``."""
    found = _SCHEME.match(root)
    return found is not None and found[1].lower() != "file"


def open_checkpoint(root: str, spark: Any = None) -> Checkpoint:
    """Open the checkpoint at *root*, a path or a URL, as Spark would.

    *spark* is a session; without one, only this host's files can be read.

    Raises:
        Misuse: the file system needs a session, or Spark cannot use it.
    """
    if is_remote(root) and spark is None:
        raise Misuse(
            f"checkpoint {root}: its file system is read through Spark's JVM, which cannot be "
            f"reached from this process (on Spark Connect it never can be)"
        )
    if spark is not None and not root.startswith("file:"):
        files = HadoopFiles(spark, root)
        if not files.is_local:
            return Checkpoint(root, files)
    return Checkpoint(root, LocalFiles(Path(_local_path(root))))


def spark_for(root: str) -> Any:
    """Start a session that can read *root*, with the settings of spark-defaults.conf.

    None if this process can read it without one.
    """
    if not is_remote(root):
        return None
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    return builder.config("spark.log.level", "ERROR").getOrCreate()


def _local_path(root: str) -> str:
    """Read ``file:/path`` and ``file:///path`` as Hadoop does, without URL decoding."""
    if not root.startswith("file:"):
        return root
    path = root.removeprefix("file:")
    return "/" + path[2:].partition("/")[2] if path.startswith("//") else path


class Checkpoint:
    """The content of one checkpoint."""

    def __init__(self, root: str, files: CheckpointFiles) -> None:
        self.root = root
        self._files = files

    @property
    def id(self) -> str:
        """Spark's own id of the checkpoint; a new checkpoint has another.

        Raises:
            NeedsOperator: there is no checkpoint, or it is torn.
        """
        try:
            return str(json.loads(self._require("metadata"))["id"])
        except (ValueError, KeyError) as error:
            raise NeedsOperator(f"checkpoint {self.root}: its metadata is torn") from error

    @property
    def last_finished(self) -> int | None:
        """The highest batch that Spark has marked as done."""
        return self._newest("commits")

    @property
    def last_planned(self) -> int | None:
        """The highest batch that Spark has begun."""
        return self._newest("offsets")

    @property
    def is_stateful(self) -> bool:
        """Whether a batch of this query has written state."""
        return bool(self._files.names("state"))

    def view(self, batch: int) -> CheckpointView:
        """Return the state of the checkpoint when *batch* is about to run."""
        return CheckpointView(
            self.id, batch, self.range(batch), self.last_finished, self.is_stateful
        )

    def range(self, batch: int) -> BatchRange:
        """Return the source range of *batch*.

        Raises:
            NeedsOperator: a file of the checkpoint is missing or damaged.
        """
        ends = self._offsets(batch)
        if ends is None:
            raise NeedsOperator(
                f"checkpoint {self.root}: offsets/{batch} is missing, so it is unknown what "
                f"batch {batch} reads"
            )
        starts = self._offsets(batch - 1) if batch > 0 else None
        if starts is None:
            starts = [None] * len(ends)
        elif len(starts) != len(ends):
            raise NeedsOperator(
                f"checkpoint {self.root}: batch {batch - 1} has {len(starts)} sources and batch "
                f"{batch} has {len(ends)}: the query was changed; change it back, or see the "
                f"runbook about lost checkpoints before you start it with another one"
            )
        return BatchRange(
            tuple(
                self._source_range(index, start, end)
                for index, (start, end) in enumerate(zip(starts, ends, strict=True))
                if end is not None
            )
        )

    def adoptable(self) -> Adoptable:
        """Return where this checkpoint would continue, for an operator's `adopt`."""
        last = self.last_finished
        planned = self.last_planned
        next_batch = 0 if last is None else last + 1
        if planned is not None and planned >= next_batch:
            spans, at_start = self.range(next_batch), True
        elif last is not None:
            spans, at_start = self.range(last), False
        else:
            raise NeedsOperator(
                f"checkpoint {self.root} has not begun a batch: start the query once without "
                f"`run`, by calling the function that starts it, so that Spark writes its start"
            )
        positions = {
            (source.source, partition): Position(span.start if at_start else span.end)
            for source in spans.sources
            if source.kind is SourceKind.OFFSETS
            for partition, span in source.spans.items()
        }
        read = {} if last is None else self._paths_through(last)
        return Adoptable(self.id, next_batch, positions, self.is_stateful, read)

    def leave_out(self, committed: Mapping[str, Collection[str]]) -> int:
        """Make a new checkpoint of file sources go on behind the *committed* files, by source.

        Its first batch becomes that of the committed files, and is marked as done: Spark then
        reads every other file, and none of these.  Repeatable after a crash.  Returns the
        number of files.

        Raises:
            NeedsOperator: the checkpoint is not new, or has state or other sources; or a file would
                never be read.
        """
        ends = self._offsets(0) or []
        if (
            self.last_planned != 0
            or self.last_finished is not None
            or self.is_stateful
            or not all(is_file_log(end) for end in ends)
        ):
            raise NeedsOperator(
                f"checkpoint {self.root}: files can be left out only of a new checkpoint that has "
                f"planned its first batch and not finished it, of a query without state whose "
                f"sources are all of files"
            )
        texts = {
            f"sources/{index}/0": self._left_out(index, committed.get(str(index), ()))
            for index in range(len(ends))
        }
        for entry, text in texts.items():
            self._files.write(entry, text)
        # Last: until then Spark would plan the batch again, and the ledger would refuse it.
        self._files.write("commits/0", 'v1\n{"nextBatchWatermarkMs":0}')
        return sum(len(committed.get(str(index), ())) for index in range(len(ends)))

    def _left_out(self, index: int, committed: Collection[str]) -> str:
        """Return the first entry of a source's log, with the *committed* files instead of its own.

        Spark forgets files that are older than ``maxFileAge`` beside the newest one in its log,
        and takes no file for new that is as old.
        """
        version, *lines = self._require(f"sources/{index}/0").splitlines()
        planned = [json.loads(line) for line in lines]
        written_at = {fields["path"]: int(fields["timestamp"]) for fields in planned}
        new = {path: at for path, at in written_at.items() if path not in committed}
        # A file that this batch does not list is remembered long, and makes no other one old.
        otherwise = min([max(written_at.values(), default=0), *new.values()])
        kept = {path: written_at.get(path, otherwise) for path in sorted(committed)}
        newest = max(kept.values(), default=0)
        if lost := sorted(path for path, at in new.items() if at < newest - FILE_AGE_MS):
            raise NeedsOperator(
                f"checkpoint {self.root}: Spark would never read {len(lost)} files that are not "
                f"committed, because they are more than 7 days (maxFileAge) older than committed "
                f"ones: {', '.join(lost[:5])}; give them a new time (touch), and begin again with "
                f"a new checkpoint"
            )
        entries = [{"path": path, "timestamp": at, "batchId": 0} for path, at in kept.items()]
        texts = [json.dumps(fields, separators=(",", ":")) for fields in entries]
        return "\n".join([version, *texts])

    def _paths_through(self, batch: int) -> dict[str, tuple[str, ...]]:
        """Return every file that batches up to *batch* have read, by source."""
        return {
            str(index): self._paths(index, -1, int(end["logOffset"]))
            for index, end in enumerate(self._offsets(batch) or [])
            if is_file_log(end)
        }

    def _source_range(self, index: int, start: Any, end: Any) -> SourceRange:
        source = str(index)
        if is_file_log(end):
            first = -1 if start is None else int(start["logOffset"])
            paths = self._paths(index, first, int(end["logOffset"]))
            return SourceRange(source, SourceKind.FILES, paths=paths)
        if is_kafka(end):
            begun = start if start is not None else self._first_offsets(index)
            return SourceRange(source, SourceKind.OFFSETS, kafka_spans(begun, end))
        if isinstance(end, Mapping) and set(end) == {SIGNAL}:
            return SourceRange(source, SourceKind.SIGNAL, raw=json.dumps([start, end]))
        if isinstance(end, int):
            return SourceRange(source, SourceKind.EPHEMERAL, {"": Span(start or 0, end)})
        return SourceRange(source, SourceKind.EPHEMERAL, raw=json.dumps([start, end]))

    def _first_offsets(self, index: int) -> Any:
        """Return the start of a Kafka source; only this file has the start of its first batch."""
        found = self._files.read(f"sources/{index}/0")
        if found is None:
            return {}
        text = found.lstrip(b"\x00").decode()
        return json.loads(text[text.index("{") :]) if "{" in text else {}

    def _paths(self, index: int, after: int, through: int) -> tuple[str, ...]:
        """Return the files of a file source's entries in ``(after, through]``."""
        folder = f"sources/{index}"
        paths: dict[str, None] = {}
        compacted: list[int] | None = None
        entry = after + 1
        while entry <= through:
            read, found = entry, self._entries(f"{folder}/{entry}", entry - 1, through)
            if found is None:
                # Only now: to list a folder costs a call into the JVM for every file in it.
                compacted = self._compacted(folder) if compacted is None else compacted
                later = [number for number in compacted if number >= entry]
                # Each has all entries before it: one file instead of many.
                read = max([n for n in later if n <= through], default=min(later, default=-1))
                found = self._entries(f"{folder}/{read}.compact", entry - 1, through)
            if found is None:
                raise NeedsOperator(
                    f"checkpoint {self.root}: {folder}/{entry} is missing, so it is unknown "
                    f"which files the batch reads"
                )
            paths.update(found)
            entry = read + 1
        return tuple(paths)

    def _compacted(self, folder: str) -> list[int]:
        return [
            int(name.removesuffix(".compact"))
            for name in self._files.names(folder)
            if re.fullmatch(r"\d+\.compact", name)
        ]

    def _entries(self, path: str, after: int, through: int) -> dict[str, None] | None:
        """Return the files of one log file's entries in ``(after, through]``."""
        found = self._files.read(path)
        if found is None:
            return None
        lines = [json.loads(line) for line in found.decode().splitlines()[1:]]
        return {f["path"]: None for f in lines if after < f["batchId"] <= through}

    def _offsets(self, batch: int) -> list[Any] | None:
        found = self._files.read(f"offsets/{batch}")
        if found is None:
            return None
        lines = found.decode().splitlines()
        if len(lines) < 2 or not lines[0].startswith("v"):
            raise NeedsOperator(f"checkpoint {self.root}: offsets/{batch} is torn")
        if lines[0] != "v1":
            raise NeedsOperator(
                f"checkpoint {self.root}: offsets/{batch} is in format {lines[0]}, and this "
                f"version of semel supports v1"
            )
        return [None if line == NO_DATA else json.loads(line) for line in lines[2:]]

    def _newest(self, folder: str) -> int | None:
        return max((int(n) for n in self._files.names(folder) if n.isdigit()), default=None)

    def _require(self, path: str) -> str:
        found = self._files.read(path)
        if found is None:
            raise NeedsOperator(
                f"checkpoint {self.root}: there is no {path}; give the checkpoint's own folder"
            )
        return found.decode()


def is_file_log(offsets: Any) -> bool:
    """Return whether *offsets* is a file source's position: the newest entry of its log."""
    return isinstance(offsets, Mapping) and set(offsets) == {"logOffset"}


def is_kafka(offsets: Any) -> bool:
    """Return whether *offsets* are Kafka's: by topic, by partition, a number."""
    return isinstance(offsets, Mapping) and all(
        isinstance(partitions, Mapping) and all(isinstance(o, int) for o in partitions.values())
        for partitions in offsets.values()
    )


def kafka_spans(
    start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
) -> dict[str, Span]:
    """Pair a start with an end; a partition that the start does not have begins at 0."""
    return {
        f"{topic}/{partition}": Span(start.get(topic, {}).get(partition, 0), offset)
        for topic, partitions in end.items()
        for partition, offset in partitions.items()
    }
