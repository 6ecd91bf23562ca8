"""URLs as people have them: with a client's settings, of other drivers, with mistakes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from semel.errors import Misuse
from semel.sql.database import SqlDatabase
from semel.sql.engine import connect_arguments, read_url

DB = "postgresql://user:secret@db/shop"


async def asked(url: str, question: str) -> Any:
    database = SqlDatabase(url)
    try:
        async with database.engine.connect() as connection:
            return (await connection.execute(text(question))).scalar_one()
    finally:
        await database.close()


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("settings", "question", "answer"),
    [
        ("sslmode=disable", "SHOW lock_timeout", "2s"),
        ("sslmode=prefer&target_session_attrs=any", "SHOW lock_timeout", "2s"),
        ("", "SHOW application_name", "semel"),
        ("application_name=billing", "SHOW application_name", "billing"),
        ("options=-c%20statement_timeout%3D7s", "SHOW statement_timeout", "7s"),
        ("connect_timeout=5&command_timeout=5", "SHOW lock_timeout", "2s"),
    ],
)
def test_a_url_may_have_the_settings_of_other_clients(postgres_url, settings, question, answer):
    assert asyncio.run(asked(f"{postgres_url}?{settings}", question)) == answer


@pytest.mark.postgres
def test_a_connection_that_must_be_encrypted_is_not_made_without_it(postgres_url):
    with pytest.raises(OSError, match="SSL"):
        asyncio.run(asked(f"{postgres_url}?sslmode=require", "SELECT 1"))


def test_the_settings_of_another_driver_are_its_own():
    url = read_url(f"{DB.replace('postgresql', 'postgresql+psycopg')}?channel_binding=require")

    assert connect_arguments(url) == (url, {})


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (f"{DB}?channel_binding=require", "asyncpg has no setting channel_binding"),
        (f"{DB}?sslmode=yes", "sslmode must be one of disable"),
        (f"{DB}?connect_timeout=soon", "connect_timeout must be a number of seconds"),
        (DB.replace("db", "db:port"), "is not the URL of a database"),
        (DB.replace("postgresql", "postgresql+none"), "is not an installed asynchronous driver"),
        ("sqlite+pysqlite:///shop.db", "is not an installed asynchronous driver"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_name_and_without_the_password(url, why):
    with pytest.raises(Misuse, match=why) as refused:
        SqlDatabase(url)

    assert "secret" not in str(refused.value)
