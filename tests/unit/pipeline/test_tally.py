"""The tally of Arrow batches: equal for equal multisets of rows, and for no others."""

from __future__ import annotations

import datetime as dt
import math
import random
import weakref
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.arrow import tally as tallies
from semel.arrow.tally import schema_from_text, schema_to_text, tally, tally_all
from semel.pipeline.sink import Tally

naive = dt.datetime.fromisoformat
INT64 = st.integers(-(2**63), 2**63 - 1)
NAIVE = st.datetimes(naive("1900-01-01"), naive("2200-01-01"))
TEXT = st.text(max_size=40) | st.text("ab", max_size=9)
BYTES = st.binary(max_size=40) | st.binary(min_size=1000, max_size=1050)

COLUMNS = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int64": (pa.int64(), INT64),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "float32": (pa.float32(), st.floats(width=32)),
    "float64": (pa.float64(), st.floats()),
    "bool": (pa.bool_(), st.booleans()),
    "decimal": (pa.decimal128(18, 2), st.decimals(-(10**15), 10**15, places=2)),
    "wide": (pa.decimal128(38, 3), st.decimals(-(10**34), 10**34, places=3)),
    "wider": (pa.decimal256(60, 3), st.decimals(-(10**56), 10**56, places=3)),
    "date": (pa.date32(), st.dates()),
    "time": (pa.time64("us"), st.times()),
    "naive": (pa.timestamp("us"), NAIVE),
    "aware": (pa.timestamp("us", "UTC"), NAIVE.map(lambda at: at.replace(tzinfo=dt.UTC))),
    "duration": (pa.duration("us"), st.timedeltas(dt.timedelta(-9000), dt.timedelta(9000))),
    "text": (pa.string(), TEXT),
    "large": (pa.large_string(), TEXT),
    "bytes": (pa.binary(), BYTES),
    "fixed": (pa.binary(5), st.binary(min_size=5, max_size=5)),
    "list": (pa.list_(pa.int32()), st.lists(st.integers(0, 9) | st.none(), max_size=3)),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.integers(0, 9), "b": TEXT | st.none()}),
    ),
    "map": (
        pa.map_(pa.string(), pa.int32()),
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)).map(lambda d: [*d.items()]),
    ),
    "nothing": (pa.null(), st.none()),
}
SCHEMA = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
ROWS = st.lists(
    st.fixed_dictionaries({name: st.none() | values for name, (_, values) in COLUMNS.items()}),
    max_size=12,
)


def batch_of(rows, schema=SCHEMA):
    return pa.RecordBatch.from_pylist(rows, schema=schema)


def one(value, kind, name="x"):
    return tally(pa.RecordBatch.from_arrays([pa.array([value], kind)], names=[name]))


@settings(max_examples=40, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_order_and_batching_make_no_difference(rows, chance):
    shuffled = random.Random(chance.random()).sample(rows, len(rows))
    cut = chance.randint(0, len(rows))

    parts = [batch_of(shuffled[:cut]), batch_of(shuffled[cut:])]

    assert tally_all(parts) == tally(batch_of(rows))
    assert tally(batch_of(rows)).rows == len(rows)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(0, 12), st.integers(0, 12))
def test_slices_are_hashed_by_their_own_rows_alone(rows, start, stop):
    slice_ = batch_of(rows).slice(start, max(0, stop - start))

    assert tally(slice_) == tally(batch_of(rows[start : max(start, stop)]))


@settings(max_examples=40, deadline=None)
@given(ROWS, st.permutations(SCHEMA.names))
def test_the_order_of_columns_makes_no_difference(rows, names):
    batch = batch_of(rows)

    assert tally(batch.select(names)) == tally(batch)


@settings(max_examples=100, deadline=None)
@given(ROWS.filter(bool), st.data())
def test_another_value_anywhere_is_another_hash(rows, data):
    place = data.draw(st.integers(0, len(rows) - 1))
    name = data.draw(st.sampled_from([name for name in SCHEMA.names if name != "nothing"]))
    before = batch_of(rows)
    changed = [dict(row) for row in rows]
    changed[place][name] = data.draw(COLUMNS[name][1])
    after = batch_of(changed)
    same = canonical(before[name][place].as_py()) == canonical(after[name][place].as_py())

    assert (tally(after) == tally(before)) is same


def canonical(value):
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return (
        sorted(value)
        if isinstance(value, list) and value and value[0].__class__ is tuple
        else value
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXT | st.none(), max_size=20))
def test_every_encoding_of_text_hashes_equal(texts):
    plain = pa.array(texts, pa.string())
    encodings = [
        plain,
        plain.cast(pa.large_string()),
        plain.cast(pa.string_view()),
        plain.dictionary_encode(),
        pa.array(["before", None, *texts], pa.string()).slice(2),
    ]

    hashes = {tally(pa.RecordBatch.from_arrays([array], names=["x"])).hash for array in encodings}

    assert len(hashes) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abcdefghij"), max_size=25).map("".join), max_size=30))
def test_texts_of_all_lengths_are_told_apart(texts):
    texts = sorted(set(texts))

    hashes = {one(text, pa.string()).hash for text in texts}

    assert len(hashes) == len(texts)


def test_every_length_around_every_word_is_told_apart_at_every_alignment():
    texts = ["x" * length for length in range(60)] + ["y" * 1023, "y" * 1024, "y" * 1025]
    alone = [one(text, pa.string()).hash for text in texts]

    for shift in range(9):
        array = pa.array(["z" * shift, *texts], pa.string()).slice(1)
        together = tally(pa.RecordBatch.from_arrays([array], names=["x"]))
        assert together.hash == sum(alone) % 2**64
    assert len(set(alone)) == len(texts)


def test_values_swapped_between_rows_are_other_rows():
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])

    straight = batch_of([{"a": 1, "b": "x"}, {"a": 2, "b": "y"}], schema)
    swapped = batch_of([{"a": 1, "b": "y"}, {"a": 2, "b": "x"}], schema)

    assert tally(straight) != tally(swapped)


def test_values_swapped_between_columns_are_other_rows():
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])

    assert tally(batch_of([{"a": 1, "b": 2}], schema)) != tally(
        batch_of([{"a": 2, "b": 1}], schema)
    )


def test_a_batch_that_several_sinks_get_is_hashed_once_and_not_kept(monkeypatch):
    hashed = []
    hash_rows = tallies._counted
    monkeypatch.setattr(tallies, "_counted", lambda batch: hashed.append(1) or hash_rows(batch))
    first, second = batch_of([{"int64": 1}]), batch_of([{"int64": 2}])

    found = [tally(batch) for batch in (first, first, second, second, first)]

    assert (found[0], found[2]) == (found[4], found[3])
    assert found[0] != found[2]
    assert len(hashed) == 3
    gone = weakref.ref(first)
    del first
    assert gone() is None


def test_a_row_that_comes_twice_counts_twice():
    once = one(1, pa.int64())

    twice = tally(pa.RecordBatch.from_arrays([pa.array([1, 1])], names=["x"]))

    assert twice == once + once


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5, pa.int8()), (5, pa.int64())),
        ((-5, pa.int16()), (-5, pa.int32())),
        ((200, pa.uint8()), (200, pa.int64())),
        ((1.5, pa.float32()), (1.5, pa.float64())),
        ((0.0, pa.float64()), (-0.0, pa.float64())),
        ((math.nan, pa.float64()), (-math.nan, pa.float32())),
        ((Decimal("-1.50"), pa.decimal128(5, 2)), (Decimal("-1.50"), pa.decimal256(60, 2))),
        ((Decimal(10**20), pa.decimal128(38, 0)), (Decimal(10**20), pa.decimal256(60, 0))),
        ((dt.date(2026, 1, 2), pa.date32()), (dt.date(2026, 1, 2), pa.date64())),
        ((1_000, pa.timestamp("ms")), (1, pa.timestamp("s"))),
        ((1_000_000, pa.timestamp("ns", "UTC")), (1_000, pa.timestamp("us", "Europe/Berlin"))),
        ((None, pa.int64()), (None, pa.string())),
        ((None, pa.null()), (None, pa.decimal128(9, 1))),
    ],
)
def test_the_width_of_a_type_makes_no_difference(left, right):
    assert one(*left) == one(*right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((None, pa.string()), ("", pa.string())),
        ((None, pa.int64()), (0, pa.int64())),
        (("1", pa.string()), (1, pa.int64())),
        (("a", pa.string()), (b"a", pa.binary())),
        ((1, pa.timestamp("ns")), (0, pa.timestamp("ns"))),
        (("a\x00", pa.string()), ("a", pa.string())),
        (([], pa.list_(pa.int8())), (None, pa.list_(pa.int8()))),
        (([None], pa.list_(pa.int8())), ([], pa.list_(pa.int8()))),
    ],
)
def test_what_is_not_equal_is_told_apart(left, right):
    assert one(*left) != one(*right)


def test_the_names_of_columns_count():
    assert one(1, pa.int64(), "x") != one(1, pa.int64(), "y")


def test_whatever_lies_under_a_null_makes_no_difference():
    valid = pa.py_buffer(bytes([0b101]))
    numbers = pa.Array.from_buffers(
        pa.int64(), 3, [valid, pa.array([1, 99, 3]).buffers()[1]], null_count=1
    )
    source = pa.array(["one", "garbage", "three"])
    texts = pa.Array.from_buffers(pa.string(), 3, [valid, *source.buffers()[1:]], null_count=1)

    dirty = pa.RecordBatch.from_arrays([numbers, texts], names=["n", "t"])
    clean = pa.RecordBatch.from_arrays(
        [pa.array([1, None, 3]), pa.array(["one", None, "three"])], names=["n", "t"]
    )

    assert tally(dirty) == tally(clean)


def test_nothing_tallies_to_nothing():
    assert tally(batch_of([])) == Tally()
    assert tally(batch_of([]).slice(0, 0)) == Tally()
    assert tally_all([]) == Tally()


def test_many_rows_are_hashed_as_if_they_were_hashed_one_by_one():
    numbers = list(range(20_001))
    schema = pa.schema([("n", pa.int64()), ("t", pa.string())])
    batch = batch_of([{"n": n, "t": f"row {n}"} for n in numbers], schema)

    parts = [batch.slice(start, 7) for start in range(0, len(numbers), 7)]

    assert tally_all(parts) == tally(batch)


def test_run_ends_and_extensions_are_hashed_by_their_values():
    plain = pa.array([1, 1, 2], pa.int64())
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([1, 2]))

    assert tally(pa.RecordBatch.from_arrays([runs], names=["x"])) == tally(
        pa.RecordBatch.from_arrays([plain], names=["x"])
    )


def test_the_hash_never_changes_between_versions():
    rows = [
        {"id": "pay-1", "n": 1, "amount": Decimal("1.50"), "at": naive("2026-01-01")},
        {"id": None, "n": -2, "amount": None, "at": naive("1969-12-31")},
    ]
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("n", pa.int32()),
            ("amount", pa.decimal128(18, 2)),
            ("at", pa.timestamp("us")),
        ]
    )

    assert tally(batch_of(rows, schema)) == Tally(2, 11722147762088508918)


def test_a_schema_survives_its_way_through_a_token():
    assert schema_from_text(schema_to_text(SCHEMA)) == SCHEMA
    assert schema_to_text(SCHEMA.with_metadata({"a": "b"})) == schema_to_text(SCHEMA)
