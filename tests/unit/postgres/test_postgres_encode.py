"""Every Arrow type reaches PostgreSQL as it was, checked by the server's own reading of it."""

from __future__ import annotations

import datetime as dt
import json
import math
import uuid
from collections.abc import Iterator
from decimal import Decimal

import hypothesis.strategies as st
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from semel.errors import Permanent
from semel.postgres.encode import TRAILER
from semel.postgres.schema import TargetTable, created_type, find_target
from semel.postgres.statements import TableName
from semel.postgres.writer import RowEncoder

pytestmark = pytest.mark.postgres

UTC = dt.UTC


@pytest.fixture(scope="module")
def database(postgres_server) -> Iterator[psycopg.Connection]:
    with psycopg.connect(
        postgres_server.url, autocommit=True, prepare_threshold=None
    ) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
        connection.execute("CREATE DOMAIN cents AS numeric(12, 2) CHECK (VALUE > -1000)")
        yield connection
        connection.execute("DROP TYPE mood")
        connection.execute("DROP DOMAIN cents")


def written(database: psycopg.Connection, column: pa.Array, type_sql: str, shown="v") -> list:
    """Copy a column between two others into a table, and read it back."""
    database.execute(f"CREATE TEMP TABLE t (before int, v {type_sql}, after text)")
    try:
        target = find_target(database, TableName(None, "t"))
        assert isinstance(target, TargetTable)
        numbers = pa.array(range(len(column)), pa.int32())
        batch = pa.RecordBatch.from_arrays(
            [numbers, column, numbers.cast(pa.string())], ["before", "v", "after"]
        )
        rows = RowEncoder(target, batch.schema)
        with database.cursor().copy("COPY t FROM STDIN (FORMAT binary)") as copy:
            for chunk in rows.chunks(batch):
                copy.write(chunk)
            copy.write(TRAILER)
        found = database.execute(f"SELECT before, {shown}, after FROM t ORDER BY before").fetchall()
    finally:
        database.execute("DROP TABLE t")
    assert [(number, after) for number, _, after in found] == [
        (number, str(number)) for number in range(len(column))
    ]
    return [value for _, value, _ in found]


HUGE = Decimal("99999999999999999999999999999999999999")
D = Decimal
LONG = D("9" * 28 + "." + "9" * 10)

SAME = [
    # Arrow type, PostgreSQL type, values that come back equal
    (pa.bool_(), "boolean", [True, False]),
    (pa.int8(), "smallint", [-128, 0, 127]),
    (pa.int16(), "smallint", [-(2**15), 2**15 - 1]),
    (pa.int32(), "integer", [-(2**31), -1, 0, 2**31 - 1]),
    (pa.int64(), "bigint", [-(2**63), -1, 0, 2**63 - 1]),
    (pa.uint8(), "smallint", [0, 255]),
    (pa.uint16(), "integer", [0, 65535]),
    (pa.uint32(), "bigint", [0, 2**32 - 1]),
    (pa.uint64(), "bigint", [0, 2**63 - 1]),
    (pa.int64(), "integer", [-(2**31), 2**31 - 1]),
    (pa.int64(), "smallint", [-5, 5]),
    (pa.int32(), "bigint", [-5, 5]),
    (pa.int64(), "numeric", [-(2**63), -10000, -9999, -1, 0, 1, 9999, 10000, 2**63 - 1]),
    (pa.uint64(), "numeric(20)", [0, 1, 2**63, 2**64 - 1]),
    (pa.decimal128(20, 0), "bigint", [D(2**63 - 1), D(-(2**63))]),
    (pa.float32(), "real", [0.0, -1.5, 16777216.0, math.inf, -math.inf]),
    (pa.float32(), "double precision", [0.0, -1.5]),
    (pa.float16(), "real", [0.5, -2.0]),
    (pa.float64(), "double precision", [0.0, -0.1, 1e-300, 1.7976931348623157e308, -math.inf]),
    (pa.int32(), "double precision", [-7, 7]),
    (pa.decimal128(18, 2), "numeric(18,2)", [D("-0.01"), D("0.00"), D("9999999999999999.99")]),
    (pa.decimal128(18, 2), "numeric", [D("-1.10"), D("100.00"), D("10000.00"), D("99990000.99")]),
    (pa.decimal128(18, 18), "numeric", [D("0.000000000000000001"), D("-0.999999999999999999")]),
    (pa.decimal128(5, 4), "numeric(20,6)", [D("1.2345"), D("-9.9999")]),
    (pa.decimal128(38, 0), "numeric", [HUGE, HUGE.copy_negate(), D(0), D(1)]),
    (pa.decimal128(38, 10), "numeric", [LONG, LONG.copy_negate(), D("1E-10"), D("-7.5")]),
    (pa.decimal128(38, 37), "numeric", [D("-9." + "9" * 37), D("0." + "0" * 36 + "1")]),
    (pa.decimal128(9, -3), "numeric", [D("123456789000"), D("-1000")]),
    (pa.decimal256(76, 38), "numeric", [D("9" * 38 + "." + "9" * 38), D("-1E-38"), D(0)]),
    (pa.decimal32(7, 2), "numeric", [D("-12345.67"), D("0.01")]),
    (pa.decimal64(16, 3), "numeric", [D("-1234567890123.456"), D("0.001")]),
    (pa.string(), "text", ["", "a", "über 漢字 🦉", "x" * 70_000, "tab\tnew\nline\\"]),
    (pa.large_string(), "varchar(5)", ["", "abcde"]),
    (pa.string_view(), "text", ["", "short", "longer than twelve bytes"]),
    (pa.dictionary(pa.int8(), pa.string()), "text", ["a", "b", "a"]),
    (pa.string(), "mood", ["sad", "happy", "sad"]),
    (pa.string(), "char(3)", ["abc", "xyz"]),
    (pa.binary(), "bytea", [b"", b"\x00\xff", b"x" * 5000]),
    (pa.large_binary(), "bytea", [b"", b"\x00"]),
    (pa.binary(3), "bytea", [b"abc", b"\x00\x01\x02"]),
    (pa.date32(), "date", [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(9999, 12, 31)]),
    (pa.date64(), "date", [dt.date(1970, 1, 1), dt.date(2000, 1, 1)]),
    (pa.time32("s"), "time", [dt.time(0), dt.time(23, 59, 59)]),
    (pa.time64("us"), "time", [dt.time(0), dt.time(23, 59, 59, 999999)]),
    (pa.duration("us"), "interval", [dt.timedelta(0), dt.timedelta(days=-3, microseconds=7)]),
    (pa.list_(pa.int64()), "bigint[]", [[], [1], [1, None, -3], [None]]),
    (pa.list_(pa.string()), "text[]", [["a", "", None, "漢"], [], ["b"]]),
    (pa.large_list(pa.float64()), "double precision[]", [[1.5, -2.5], []]),
    (pa.list_(pa.decimal128(12, 3)), "numeric[]", [[D("1.500"), None], [D("-0.001")]]),
    (pa.list_(pa.bool_(), 2), "boolean[]", [[True, False], [None, True]]),
    (pa.null(), "integer", [None, None]),
    (pa.timestamp("us"), "timestamp(3)", [dt.datetime.fromisoformat("1960-01-01 00:00:00.007")]),
    (pa.list_(pa.decimal128(12, 2)), "numeric(12,2)[]", [[D("1.25")], []]),
    (pa.decimal128(12, 2), "cents", [D("1.25"), D("-999.99")]),
]


@pytest.mark.parametrize(("arrow", "type_sql", "values"), SAME, ids=lambda case: str(case)[:40])
def test_values_come_back_as_they_were(database, arrow, type_sql, values):
    assert written(database, pa.array(values, arrow), type_sql) == values


@pytest.mark.parametrize(("arrow", "type_sql", "values"), SAME, ids=lambda case: str(case)[:40])
def test_nulls_among_them_and_slices_of_them_come_back_too(database, arrow, type_sql, values):
    mixed = [None, *(v for value in values for v in (value, None))]

    assert written(database, pa.array(mixed, arrow), type_sql) == mixed
    assert written(database, pa.array(mixed, arrow)[1:-1], type_sql) == mixed[1:-1]
    assert written(database, pa.array([None] * 3, arrow), type_sql) == [None] * 3


MOMENTS = [
    dt.datetime.fromisoformat(text)
    for text in (
        "0001-01-01 00:00:00",
        "1969-12-31 23:59:59.999999",
        "2000-01-01 00:00:00",
        "9999-12-31 23:59:59.999999",
    )
]


@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
@pytest.mark.parametrize("type_sql", ["timestamp", "timestamptz"])
def test_instants_are_kept_in_utc_whatever_zone_they_are_shown_in(database, zone, type_sql):
    column = pa.array(MOMENTS, pa.timestamp("us")).cast(pa.timestamp("us", zone), safe=False)
    if zone is not None:
        column = pa.array([m.replace(tzinfo=UTC) for m in MOMENTS], pa.timestamp("us", zone))

    found = written(database, column, type_sql, "v::timestamptz AT TIME ZONE 'UTC'")

    assert found == MOMENTS


@pytest.mark.parametrize("unit", ["s", "ms", "ns"])
def test_instants_of_every_unit_arrive(database, unit):
    moments = [MOMENTS[2], None, dt.datetime.fromisoformat("1969-07-20 20:17:40")]

    assert written(database, pa.array(moments, pa.timestamp(unit)), "timestamp") == moments


def test_not_a_number_arrives(database):
    found = written(database, pa.array([math.nan, None], pa.float64()), "double precision")

    assert math.isnan(found[0])
    assert found[1] is None


def test_uuids_arrive_from_text_of_any_spelling_and_from_bytes(database):
    ids = [uuid.UUID(int=2**128 - 1), uuid.UUID(int=0), uuid.uuid5(uuid.NAMESPACE_URL, "x")]
    texts = pa.array([str(ids[0]).upper(), None, ids[1].hex, str(ids[2])])
    raw = pa.array([ids[0].bytes, None, ids[2].bytes], pa.binary(16))

    assert written(database, texts, "uuid") == [ids[0], None, ids[1], ids[2]]
    assert written(database, raw, "uuid") == [ids[0], None, ids[2]]


@pytest.mark.parametrize("type_sql", ["jsonb", "json"])
def test_nested_values_become_json_with_every_digit(database, type_sql):
    kind = pa.struct(
        [
            ("name", pa.string()),
            ("price", pa.decimal128(38, 10)),
            ("tags", pa.list_(pa.string())),
            ("counts", pa.map_(pa.string(), pa.int64())),
            ("at", pa.timestamp("us", "UTC")),
            ("raw", pa.binary()),
            ("ratio", pa.float64()),
        ]
    )
    value = {
        "name": 'quote " and \\ and 漢',
        "price": Decimal("1234567890123456789012345678.0123456789"),
        "tags": ["a", None],
        "counts": [("x", 1)],
        "at": dt.datetime(2024, 1, 2, tzinfo=UTC),
        "raw": b"\x00\xff",
        "ratio": math.nan,
    }

    text, none = written(database, pa.array([value, None], kind), type_sql, "v::text")

    assert none is None
    assert json.loads(text, parse_float=Decimal) == {
        "name": value["name"],
        "price": value["price"],
        "tags": ["a", None],
        "counts": {"x": 1},
        "at": "2024-01-02T00:00:00+00:00",
        "raw": "AP8=",
        "ratio": "nan",
    }


def test_text_goes_into_jsonb_as_it_is(database):
    column = pa.array(['{"a": [1, 2.50]}', None, "7"])

    assert written(database, column, "jsonb") == [{"a": [1, 2.5]}, None, 7]


REFUSED = [
    (pa.int64(), "integer", 2**31, "out of range"),
    (pa.uint64(), "bigint", 2**63, "out of range"),
    (pa.string(), "text", "a\0b", "NUL"),
    (pa.list_(pa.string()), "text[]", ["a\0b"], "NUL"),
    (pa.string(), "uuid", "not-a-uuid", "32 hex digits"),
    (pa.string(), "uuid", "g" * 32, "32 hex digits"),
    (pa.timestamp("ns"), "timestamp", 1, "cannot be converted"),
    (pa.timestamp("us"), "timestamp(3)", 1_500, "more than 3 fractional digits"),
    (pa.timestamp("us", "UTC"), "timestamptz(0)", 1, "more than 0 fractional digits"),
    (pa.time64("us"), "time(0)", 999_999, "more than 0 fractional digits"),
    (pa.list_(pa.timestamp("us")), "timestamp(0)[]", [1], "more than 0 fractional digits"),
    (pa.timestamp("us"), "timestamp", -(2**63) + 5, "range"),
    (pa.date32(), "date", -(2**31) + 5, "range"),
]


@pytest.mark.parametrize(("arrow", "type_sql", "value", "said"), REFUSED)
def test_a_value_that_does_not_fit_is_refused_by_the_name_of_its_column(
    database, arrow, type_sql, value, said
):
    with pytest.raises(Permanent, match=rf'column "v".*{said}'):
        written(database, pa.array([value], arrow), type_sql)


def test_what_lies_under_a_null_does_not_matter(database):
    valid = pa.py_buffer(b"\x01")
    words = pa.py_buffer((5).to_bytes(8, "little") + (2**40).to_bytes(8, "little"))
    column = pa.Array.from_buffers(pa.int64(), 2, [valid, words])

    assert written(database, column, "integer") == [5, None]


def test_only_the_lists_of_a_slice_are_looked_at(database):
    column = pa.array([["a\0b"], ["x", None], [], ["y"], ["c\0d"]])

    assert written(database, column[1:4], "text[]") == [["x", None], [], ["y"]]


WRONG = [
    (pa.float64(), "numeric"),
    (pa.float64(), "real"),
    (pa.float64(), "bigint"),
    (pa.int64(), "double precision"),
    (pa.int64(), "text"),
    (pa.decimal128(10, 4), "numeric(10,2)"),
    (pa.list_(pa.decimal128(10, 4)), "numeric(10,2)[]"),
    (pa.bool_(), "integer"),
    (pa.list_(pa.list_(pa.int64())), "bigint[]"),
    (pa.struct([("a", pa.int64())]), "text"),
]


@pytest.mark.parametrize(("arrow", "type_sql"), WRONG)
def test_a_type_that_would_lose_something_is_refused_with_the_way_out(database, arrow, type_sql):
    with pytest.raises(Permanent, match="ALTER COLUMN"):
        written(database, pa.array([], arrow), type_sql)


MADE = [
    *(arrow for arrow, _, _ in SAME),
    pa.list_(pa.struct([("a", pa.int64())])),
    pa.list_(pa.list_(pa.int64())),
    pa.map_(pa.string(), pa.int64()),
]


@pytest.mark.parametrize("arrow", MADE, ids=str)
def test_a_column_made_for_a_type_can_hold_it(database, arrow):
    assert written(database, pa.array([None], arrow), created_type(arrow)) == [None]


decimals = st.tuples(st.integers(1, 38), st.integers(0, 38)).flatmap(
    lambda shape: st.tuples(
        st.just(pa.decimal128(max(shape), shape[1])),
        st.lists(
            st.none()
            | st.integers(-(10 ** max(shape)) + 1, 10 ** max(shape) - 1).map(
                lambda digits: Decimal(f"{digits}E-{shape[1]}")
            ),
            max_size=20,
        ),
    )
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(decimals)
def test_decimals_of_every_shape_come_back_as_they_were(database, case):
    kind, values = case
    digits = pa.array([None if v is None else v for v in values], kind)

    assert written(database, digits, "numeric") == digits.to_pylist()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"))))
def test_texts_of_every_kind_come_back_as_they_were(database, values):
    assert written(database, pa.array(values, pa.string()), "text") == values
