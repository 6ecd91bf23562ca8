"""The count at the end: what was offered, and what readers of each sink see."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg
import pyarrow.dataset
from pyarrow.fs import FileSystem, S3FileSystem
from pyiceberg.catalog import load_catalog

from examples.demo.payments import UNREADABLE, Payment, read_source, read_topic
from examples.demo.place import Place, Variant
from examples.demo.progress import SINK_NAMES
from semel.testing import audit_sinks, services

LETTERS: Final = "SELECT payload FROM semel.dead_letter"
WAITING: Final = "SELECT count(*) FROM semel.waiting_message"

OVERTAKEN: Final = """
SELECT count(*) FROM (
    SELECT version, lag(version) OVER (PARTITION BY account ORDER BY place) AS before FROM entries
) AS neighbours WHERE version < before
"""


@dataclass(frozen=True, slots=True)
class Count:
    """One sink, compared with the source row by row."""

    sink: str
    expected: int
    rows: int
    expected_cents: int
    cents: int
    duplicates: int
    missing: int
    foreign: int
    """Rows that the source never had."""

    left_behind: int = 0
    """Transactions that are neither visible nor gone."""

    @property
    def is_clean(self) -> bool:
        """Whether every row exists once, and nothing else is."""
        found = self.duplicates + self.missing + self.foreign + self.left_behind
        return found == 0 and self.rows == self.expected and self.cents == self.expected_cents


@dataclass(frozen=True, slots=True)
class Counts:
    """The audit of one variant's run."""

    variant: Variant
    source_rows: int
    source_cents: int
    sinks: tuple[Count, ...]
    records: int = 0
    """In the topic, duplicates and what cannot be read included; 0 if payments come from files."""

    misspelled: int = 0
    letters_off: int = 0
    """Dead letters that are missing, or there beside those of the unreadable records."""

    waiting: int = 0
    overtaken: int = 0
    """Rows in Postgres behind a later payment of their account."""

    @property
    def is_clean(self) -> bool:
        """Whether every sink is; of messages, also what became of those that have no rows."""
        wrong = self.letters_off + self.waiting + self.overtaken
        has_messages = wrong == 0 or self.variant is Variant.PLAIN
        return has_messages and all(sink.is_clean for sink in self.sinks)


def count(variant: Variant, place: Place) -> Counts:
    """Read the source and every sink, and compare them."""
    records = read_topic(place.bootstrap, place.topic) if place.bootstrap else []
    sent = [Payment(**json.loads(record)) for record in records if record != UNREADABLE]
    source = list(dict.fromkeys(sent)) if records else read_source(place.input)
    misspelled = sum(payment != payment.fixed for payment in source)
    found = {"postgres": read_postgres(place.url), "files": read_parquet(place.large)}
    left: dict[str, int] = {}
    letters_off = waiting = 0
    if variant is Variant.SEMEL:
        source = [payment.fixed for payment in source]
        found |= {"iceberg": read_iceberg(place), "s3": read_s3(place)}
        left = left_behind(place)
        if records:
            found["outbox"] = read_outbox(place.url)
            letters = Counter(payload for (payload,) in ask(place.url, LETTERS))
            unreadable = Counter(record for record in records if record == UNREADABLE)
            letters_off = ((letters - unreadable) + (unreadable - letters)).total()
            waiting = ask(place.url, WAITING)[0][0]
    large = [payment for payment in source if payment.is_large]
    expected = {"postgres": source, "iceberg": source}
    expected |= dict.fromkeys(("s3", "files", "outbox"), large)
    return Counts(
        variant,
        len(source),
        _cents(source),
        tuple(
            _compare(SINK_NAMES[sink], rows, found[sink], left.get(sink, 0))
            for sink, rows in expected.items()
            if sink in found
        ),
        records=len(records),
        misspelled=misspelled,
        letters_off=letters_off,
        waiting=waiting,
        overtaken=ask(place.url, OVERTAKEN)[0][0] if records else 0,
    )


def ask(url: str, statement: LiteralString) -> list[tuple[Any, ...]]:
    """Ask the database."""
    with psycopg.connect(url) as connection:
        return connection.execute(statement).fetchall()


def read_postgres(url: str) -> list[Payment]:
    """Read what a client of the database sees."""
    found = ask(url, "SELECT id, account, kind, amount, version FROM entries")
    return [Payment(*row) for row in found]


def read_outbox(url: str) -> list[Payment]:
    """Read the receipts that are to be sent."""
    asked = "SELECT payload FROM semel.outbox_message"
    return [Payment(**json.loads(payload)) for (payload,) in ask(url, asked)]


def read_parquet(folder: Path) -> list[Payment]:
    """Read what a reader of the folder sees; like Spark, it passes over hidden names."""
    if not folder.is_dir():
        return []
    return _read_files(folder)


def read_iceberg(place: Place) -> list[Payment]:
    """Read what a reader of the table sees."""
    with closing(load_catalog("lake", **place.lake)) as catalog:
        rows = catalog.load_table(place.table).scan().to_arrow()
    return [Payment(**row) for row in rows.to_pylist()]


def read_s3(place: Place) -> list[Payment]:
    """Read every object that is visible, whether its cycle has a manifest or not."""
    return _read_files(place.objects.removeprefix("s3://"), open_store(place))


def open_store(place: Place) -> S3FileSystem:
    """Open the object store without semel."""
    return S3FileSystem(
        access_key=services.SeaweedServer.access_key,
        secret_key=services.SeaweedServer.secret_key,
        region=services.SeaweedServer.region,
        endpoint_override=place.s3,
    )


def _read_files(folder: Path | str, system: FileSystem | None = None) -> list[Payment]:
    files = pyarrow.dataset.dataset(folder, format="parquet", filesystem=system)
    if not files.files:
        return []
    table = files.to_table(columns=list(Payment._fields))
    return [Payment(**row) for row in table.to_pylist()]


def left_behind(place: Place) -> dict[str, int]:
    """By sink: transactions that are prepared and not finished."""
    from examples.demo.pipeline import pipeline

    payments = pipeline(place)
    try:
        return {sink.name: len(sink.recover(payments.scope)) for sink in payments.sinks}
    finally:
        for sink in payments.sinks:
            sink.close()


def _compare(sink: str, expected: Sequence[Payment], found: Sequence[Payment], left: int) -> Count:
    (compared,) = audit_sinks(expected, {sink: found}).sinks
    return Count(
        sink,
        len(expected),
        len(found),
        _cents(expected),
        _cents(found),
        len(compared.duplicated),
        len(compared.missing),
        len(compared.foreign),
        left,
    )


def _cents(payments: Sequence[Payment]) -> int:
    return sum(payment.amount for payment in payments)
