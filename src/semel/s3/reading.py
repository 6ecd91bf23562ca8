"""Reading committed cycles: the objects that the manifests name, and no others."""

from __future__ import annotations

import datetime as dt
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Final

from semel.arrow.formats import Format, read_rows
from semel.arrow.tally import schema_from_text
from semel.errors import require
from semel.pipeline.sink import Batch, Schema
from semel.s3.store import ObjectStore, store_of, together

pa: Any = require("pyarrow", "s3")

COMMITS: Final = "_commits/"
"""The folder of the manifests."""


def committed_objects(
    url: str, *, scheme: str = "s3", endpoint: str | None = None, region: str | None = None
) -> list[str]:
    """Return the URLs of all objects of committed cycles, for Spark, DuckDB, Polars and others.

    *scheme* is what the reader calls S3: ``s3a`` for Spark.
    """
    store = store_of(url, endpoint, region)
    return [
        f"{scheme}://{store.bucket}/{store.key(one['name'])}"
        for manifest in _manifests(store)
        for one in manifest["objects"]
    ]


def read_committed(url: str, *, endpoint: str | None = None, region: str | None = None) -> Any:
    """Return a `pyarrow.RecordBatchReader` of the rows of all cycles that are committed now.

    A cycle is read whole or not at all.  Columns that only later cycles have are null before.
    """
    store = store_of(url, endpoint, region)
    manifests = [one for one in _manifests(store) if one["token"]["schema"] is not None]
    schemas = [schema_from_text(one["token"]["schema"]) for one in manifests]
    whole = pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])

    def batches() -> Iterator[Batch]:
        for manifest, schema in zip(manifests, schemas, strict=True):
            for batch in rows_of(store, manifest, schema):
                yield _widened(batch, whole)

    return pa.RecordBatchReader.from_batches(whole, batches())


def rows_of(store: ObjectStore, manifest: Mapping[str, Any], schema: Schema) -> Iterator[Batch]:
    """Read the rows of one cycle as they were staged.

    Raises:
        Missing: an object was removed.
    """
    token = manifest["token"]
    names = token["partition_by"]
    stored = pa.schema([column for column in schema if column.name not in names])
    for one in manifest["objects"]:
        values = dict(zip(names, one["values"], strict=True))
        with tempfile.NamedTemporaryFile() as copy:
            copy.writelines(store.read(one["name"]))
            copy.flush()
            rows = read_rows(copy.name, Format(token["format"]), stored, token["compression"])
            for batch in rows:
                yield _with_columns(batch, schema, values)


def _manifests(store: ObjectStore) -> list[Mapping[str, Any]]:
    names = [f"{COMMITS}{name}" for name, _ in store.names(COMMITS)]
    return [found for found in together(store.get, names) if found and "objects" in found]


def _with_columns(batch: Batch, schema: Schema, values: Mapping[str, Any]) -> Batch:
    """Put the partition columns back into a batch."""
    if not values:
        return batch
    columns = [
        pa.repeat(_scalar(values[column.name], column.type), batch.num_rows)
        if column.name in values
        else batch.column(column.name)
        for column in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _scalar(value: Any, kind: Any) -> Any:
    if value is not None and pa.types.is_date(kind):
        value = dt.date.fromisoformat(value)
    return pa.scalar(value, kind)


def _widened(batch: Batch, schema: Schema) -> Batch:
    if batch.schema.equals(schema):
        return batch
    columns = [
        batch.column(column.name).cast(column.type)
        if column.name in batch.schema.names
        else pa.nulls(batch.num_rows, column.type)
        for column in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
