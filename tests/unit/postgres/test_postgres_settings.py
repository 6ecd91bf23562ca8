"""How the PostgreSQL sink is set up: settings, secrets, poolers and connections."""

from __future__ import annotations

import logging
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pytest

from semel.errors import Misuse, Permanent, Retryable
from semel.pipeline.sink import SinkOK
from semel.postgres.connect import pool
from semel.postgres.ledger import PostgresLedger
from semel.postgres.sink import PostgresSink
from tests.unit.postgres.pooler import Pooler
from tests.unit.postgres.postgres_place import (
    SCHEMA,
    SCOPE,
    TABLE,
    committed,
    create_role,
    prepared,
    row,
    rows_of,
    txn,
)

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize("mode", ["transaction", "rotating"])
def test_a_pooler_that_lends_sessions_by_transaction_is_refused(
    postgres_server, url, database, mode
):
    with Pooler(url, mode) as pooler:
        sink = PostgresSink(url.replace(str(postgres_server.port), str(pooler.port)), "entries")

        with pytest.raises(Permanent, match=r"pooler.*session mode"):
            sink.check(None)

        sink.close()


def test_a_pooler_that_lends_sessions_for_good_is_welcome(postgres_server, url, database):
    with Pooler(url, "session") as pooler:
        sink = PostgresSink(url.replace(str(postgres_server.port), str(pooler.port)), "entries")

        sink.check(SCHEMA)

        sink.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "prepared", "key": "id"},
        {"write": "upsert"},
        {"version_column": "amount"},
        {"mode": "magic"},
        {"create_table": "always"},
        {"table": "a.b.c"},
        {"url": "host=localhost password=s3cret"},
        {"name": "Not a name"},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_at_once(settings):
    place = {"url": "postgresql://u:s3cret@localhost/x", "table": "t"}

    with pytest.raises(Misuse) as refusal:
        PostgresSink(**{**place, **settings})

    assert "s3cret" not in str(refusal.value)


def test_no_password_is_told_anywhere(url, database, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "pa55:w/rd"
    teller = create_role(url, "teller", attributes="SUPERUSER LOGIN")
    database.execute(f"ALTER ROLE teller PASSWORD '{secret}'")
    given = teller.replace(urlsplit(url).password, "pa55%3Aw%2Frd")
    sink = PostgresSink(given, "entries", mode="auto")
    asked = PostgresSink(teller, "entries", password=lambda: secret, name="asked")
    of = txn()
    token = prepared(sink, of, [row(1)])
    told = [repr(sink), str(sink), repr(sink.stager(of)), repr(asked.stager(of)), repr(token)]
    told += [repr(sink.__dict__), repr(sink.look_up(of, token)), repr(sink.commit(of, token))]
    for broken in (
        PostgresSink("postgresql://u:pa55%3Aw%2Frd@127.0.0.1:1/x", "t"),
        PostgresSink("postgresql://127.0.0.1:1/x?sslmode=odd", "t", password=secret),
        PostgresSink(f"{url}?nonsense=1", "t", password=lambda: secret),
    ):
        for call in (lambda b=broken: b.check(None), lambda b=broken: b.recover(SCOPE)):
            with pytest.raises((Retryable, Misuse)) as failure:
                call()
            told += [repr(failure.value), "".join(traceback.format_exception(failure.value))]
        told.append(repr(broken.look_up(of, None)))

    for text in [*told, caplog.text]:
        assert secret not in text
        assert "pa55%3Aw%2Frd" not in text


@pytest.mark.parametrize("password", ["x@s3cret", "12@s3cret:1", "x/s3cret", "x@y/s3cret"])
def test_a_password_that_the_driver_would_take_for_the_host_is_refused_and_not_shown(password):
    for made in (partial(PostgresSink, table="t"), PostgresLedger):
        with pytest.raises(Misuse, match="write @ as %40") as refusal:
            made(f"postgresql://u:{password}@127.0.0.1:1/db")
        assert "s3cret" not in str(refusal.value)


def test_a_process_uses_few_connections_however_many_cycles_it_runs(url, database):
    sink = PostgresSink(url, "entries")
    for number in range(12):
        committed(sink, [row(2 * number)], [row(2 * number + 1)])

    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'semel%'"
    assert database.execute(query).fetchone()[0] <= 3
    sink.close()
    deadline = time.monotonic() + 10  # the server needs a moment to see that they are closed
    while database.execute(query).fetchone()[0] > 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_threads_that_start_at_once_wait_for_each_others_connections(url, database, monkeypatch):
    monkeypatch.setattr("semel.postgres.connect.MOST_CONNECTIONS", 3)
    sink = PostgresSink(url, "entries")
    of = txn()
    stager = sink.stager(of)
    open_at_once = []

    def staged(number):
        writer = stager.open(f"thread-{number}")
        writer.write(pa.RecordBatch.from_pylist([row(number)], schema=SCHEMA))
        open_at_once.append(len(pool()._lent))
        time.sleep(0.01)
        return writer.finish()

    with ThreadPoolExecutor(12) as threads:
        receipts = [*threads.map(staged, range(24))]

    assert max(open_at_once) <= 3
    assert isinstance(sink.prepare(of, receipts), SinkOK)


def test_two_sinks_whose_options_name_two_databases_write_to_two(postgres_server):
    rows = {}
    for name in ("left", "right"):
        url = postgres_server.create_database(f"options_{name}")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(TABLE)
    for name in ("left", "right"):
        database = {"dbname": f"options_{name}"}
        sink = PostgresSink(postgres_server.url, "entries", name=name, connect=database)
        committed(sink, [row(1, note=name)])

    for name in ("left", "right"):
        url = postgres_server.url_of(f"options_{name}")
        with psycopg.connect(url) as connection:
            rows[name] = rows_of(connection, "SELECT note FROM entries")

    assert rows == {"left": [("left",)], "right": [("right",)]}
    pool().close_all()
    for name in ("left", "right"):
        postgres_server.drop_database(f"options_{name}")
