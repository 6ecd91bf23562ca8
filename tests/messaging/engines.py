"""Consumers that a pipeline on Spark runs, and the records of its cycles."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, insert

from semel.pipeline.txn import CycleId, Scope
from semel.sql.tables import consumer_engine
from semel.sql.types import now_us

SCOPE = Scope("ledger1", "payments", "main")


async def take_over(database: Any, consumer: str = "billing", books: str = "semel") -> None:
    """Write that a pipeline runs the consumer, as its start does."""
    async with database.begin() as unit:
        row = {"scope": SCOPE.slug, "app": SCOPE.app, "query": SCOPE.query, "ledger": SCOPE.ledger}
        more = {"engine": "spark", "epoch": 1, "books": books, "since": now_us()}
        await unit.session.execute(insert(consumer_engine).values(consumer=consumer, **row, **more))


async def give_back(database: Any, consumer: str = "billing") -> None:
    """Remove that row, as a hand-over does."""
    async with database.begin() as unit:
        mine = consumer_engine.c.consumer == consumer
        await unit.session.execute(delete(consumer_engine).where(mine))


def cycle(batch: int) -> CycleId:
    """Return a cycle of the pipeline."""
    return CycleId(SCOPE, 1, batch)
