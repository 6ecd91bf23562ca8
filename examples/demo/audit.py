"""The count at the end: what was offered, and what readers of each sink see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pyarrow.dataset

from examples.demo.payments import Payment, read_source, read_topic
from examples.demo.place import Place, Variant
from semel.testing import audit_sinks


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

    @property
    def is_clean(self) -> bool:
        """Whether every sink is."""
        return all(sink.is_clean for sink in self.sinks)


def count(variant: Variant, place: Place) -> Counts:
    """Read the source and both sinks, and compare them."""
    source = read_source(place.input)
    if place.bootstrap:
        source = read_topic(place.bootstrap, place.topic)
    large = [payment for payment in source if payment.is_large]
    left = left_behind(place) if variant is Variant.SEMEL else {}
    return Counts(
        variant,
        len(source),
        _cents(source),
        (
            _compare("Postgres", source, read_postgres(place.url), left.get("postgres", 0)),
            _compare("Parquet", large, read_parquet(place.large), left.get("files", 0)),
        ),
    )


def read_postgres(url: str) -> list[Payment]:
    """Read what a client of the database sees."""
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT id, account, kind, amount FROM entries")
        return [Payment(*row) for row in found]


def read_parquet(folder: Path) -> list[Payment]:
    """Read what a reader of the folder sees; like Spark, it passes over hidden names."""
    if not folder.is_dir():
        return []
    files = pyarrow.dataset.dataset(folder, format="parquet")
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
