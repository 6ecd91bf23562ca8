"""The pipeline with semel: Postgres and Parquet under one decision."""

from __future__ import annotations

from examples.demo.payments import LARGE_CENTS
from examples.demo.place import Place
from semel import ExactlyOnce
from semel.sinks import FilesSink, PostgresSink

# No primary key, in either variant: nothing but the protocol keeps duplicates out.
TABLE = "CREATE TABLE entries (id text, account text, kind text, amount bigint, cycle text)"


def pipeline(place: Place) -> ExactlyOnce:
    """Every payment to Postgres, the large ones to Parquet files, too."""
    return ExactlyOnce(
        app="payments",
        ledger=place.ledger,
        sinks=[
            PostgresSink(
                place.url,
                table="entries",
                rows="struct(id, account, kind, amount)",
                cycle_column="cycle",
            ),
            FilesSink(
                place.large,
                rows=f"if(abs(amount) > {LARGE_CENTS}, struct(id, account, kind, amount), null)",
            ),
        ],
    )
