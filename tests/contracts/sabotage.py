"""Statements that broken stores write past the right ones."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text


async def say(store: Any, statement: str, **values: Any) -> Any:
    """Execute a statement in the transaction of a store."""
    return await store._session.execute(text(statement), values)


async def say_of(store: Any, table: str, change: str, consumer: str, message_id: str) -> None:
    """Change the row of one message."""
    column = "consumer_name" if table == "processed_message" else "consumer"
    mine = f"{column} = :consumer AND message_id = :id"
    await say(store, f"UPDATE {table} SET {change} WHERE {mine}", consumer=consumer, id=message_id)
