"""What a checkpoint's files say, as Spark writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semel.errors import Misuse, NeedsOperator
from semel.pipeline.source import SourceKind, Span
from semel.spark.checkpoint import Checkpoint, open_checkpoint


class Written:
    """A checkpoint in the making."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("metadata", json.dumps({"id": "c1"}))

    def write(self, name: str, *lines: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text("\n".join(lines))

    def offsets(self, batch: int, *sources: object) -> None:
        lines = [s if s == "-" else json.dumps(s) for s in sources]
        self.write(f"offsets/{batch}", "v1", "{}", *[str(line) for line in lines])

    def files(self, name: str, *entries: tuple[str, int]) -> None:
        lines = [json.dumps({"path": path, "batchId": batch}) for path, batch in entries]
        self.write(f"sources/0/{name}", "v1", *lines)

    @property
    def read(self) -> Checkpoint:
        return open_checkpoint(str(self.root))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "c")


@pytest.mark.parametrize("name", ["plain", "a b", "a%20b", "a#b?c", "ü"])
@pytest.mark.parametrize("prefix", ["", "file:", "file://"])
def test_a_local_path_is_taken_as_it_is(tmp_path, name, prefix):
    Written(tmp_path / name)

    assert open_checkpoint(f"{prefix}{tmp_path / name}").id == "c1"


@pytest.mark.parametrize("root", ["hdfs://host/c", "hdfs:/c", "dbfs:/c", "s3a://b/c", "gs://b/c"])
def test_another_file_system_needs_spark_to_read_it(root):
    with pytest.raises(Misuse, match="read through Spark's JVM"):
        open_checkpoint(root)


def test_kafka_starts_where_the_batch_before_ended_and_new_partitions_at_their_beginning(written):
    written.offsets(0, {"t": {"0": 7}})
    written.offsets(1, {"t": {"0": 9, "1": 3}})

    assert written.read.range(1).sources[0].spans == {"t/0": Span(7, 9), "t/1": Span(0, 3)}


def test_kafkas_first_batch_starts_where_the_source_says(written):
    written.write("sources/0/0", "\x00v1", '{"t": {"0": 5}}')
    written.offsets(0, {"t": {"0": 7}})

    assert written.read.range(0).sources[0].spans == {"t/0": Span(5, 7)}


def test_a_source_that_had_no_data_before_starts_where_it_began(written):
    written.write("sources/1/0", "\x00v1", '{"t": {"0": 5}}')
    written.offsets(0, 3, "-")
    written.offsets(1, 4, {"t": {"0": 6}})

    rate, kafka = written.read.range(1).sources
    assert (rate.kind, rate.spans) == (SourceKind.EPHEMERAL, {"": Span(3, 4)})
    assert (kafka.source, kafka.spans) == ("1", {"t/0": Span(5, 6)})
    assert [source.source for source in written.read.range(0).sources] == ["0"]


def test_the_files_of_a_batch_are_found_after_spark_compacted_its_log(written):
    written.files("1", ("b", 1))
    written.files("2.compact", ("a", 0), ("b", 1), ("c", 2), ("d", 2))
    written.files("3", ("e", 3))
    for batch, log_offset in enumerate([0, 1, 3]):
        written.offsets(batch, {"logOffset": log_offset})

    found = [written.read.range(batch).sources[0].paths for batch in range(3)]

    assert found == [("a",), ("b",), ("c", "d", "e")]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda w: (w.root / "offsets/1").unlink(), "offsets/1 is missing"),
        (lambda w: w.write("offsets/1", "v1"), "offsets/1 is torn"),
        (lambda w: w.write("offsets/1", "v9", "{}", "1"), "in format v9"),
        (lambda w: w.offsets(1, {"logOffset": 1}, 5), "the query was changed"),
        (lambda w: (w.root / "sources/0/1").unlink(), "sources/0/1 is missing"),
    ],
    ids=["missing", "torn", "newer", "changed", "no files"],
)
def test_a_range_that_the_files_do_not_tell_is_refused(written, spoil, problem):
    written.files("0", ("a", 0))
    written.files("1", ("b", 1))
    written.offsets(0, {"logOffset": 0})
    written.offsets(1, {"logOffset": 1})
    assert written.read.range(1).sources[0].paths == ("b",)

    spoil(written)

    with pytest.raises(NeedsOperator, match=problem):
        written.read.range(1)


def test_a_checkpoint_that_was_never_there_is_refused(tmp_path):
    with pytest.raises(NeedsOperator, match="there is no metadata"):
        assert open_checkpoint(str(tmp_path)).id
