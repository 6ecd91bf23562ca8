"""What databases' errors say in reasons: what happened, and nothing of what was written."""

from __future__ import annotations

import enum
import sqlite3

import pytest
from sqlalchemy import Column, Enum, MetaData, Table, insert, text
from sqlalchemy.exc import IntegrityError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel import errors
from semel.messaging.failure import Classified, FailureClass, NonRetryableMessageError
from semel.messaging.redact import place_of, reason_of
from semel.sql.faults import SQL_CLASSIFICATION
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world

SECRET = "ann@secret.example"
TABLE = "CREATE TABLE person (mail text, age integer, CONSTRAINT person_mail UNIQUE (mail))"
ADD = text("INSERT INTO person (mail) VALUES (:mail)")


class Colour(enum.Enum):
    RED = "red"


class Base(DeclarativeBase):
    pass


class Person(Base):
    __tablename__ = "person"

    mail: Mapped[str] = mapped_column(primary_key=True)


@pytest.mark.parametrize("said", ["x" * 8193, "ü" * 5000, "a" + "🐟" * 3000, "\ud800" * 9000])
def test_a_reason_is_cut_in_its_middle(said):
    message = f"begins {said} ends"
    failures = [
        reason_of(ValueError(message)),
        errors.reason_of(ValueError(message)),
        SQL_CLASSIFICATION.classify(NonRetryableMessageError(message)).reason,
        Classified(FailureClass.SCHEMA, "X", message, "").reason,
    ]

    for reason in failures:
        assert len(reason.encode("utf-8", "surrogatepass")) <= 8 * 1024
        assert "begins " in reason[:20]
        assert reason.endswith(" ends")
        assert " bytes cut) … " in reason
    assert reason_of(ValueError("x" * 8100)) == f"ValueError: {'x' * 8100}"


def test_a_cut_reason_does_not_quote_a_row():
    inner = sqlite3.IntegrityError("UNIQUE constraint failed: person.mail")
    error = IntegrityError("INSERT " + "x" * 20_000, (SECRET,) * 2000, inner)

    assert SECRET not in reason_of(RuntimeError(f"it failed: {error}"))


class Asked:
    """Databases that are asked for something that they refuse."""

    async def refused(self, world, *statements, **values):
        """Return the error of the last statement, the values being in the table already."""
        async with world.database.engine.begin() as connection:
            await connection.execute(text("DROP TABLE IF EXISTS person"))
            await connection.execute(text(TABLE))
            await connection.execute(ADD, {"mail": SECRET})
        try:
            async with world.database.engine.begin() as connection:
                for statement in statements:
                    await connection.execute(statement, values)
        except Exception as error:  # noqa: BLE001  it is what the tests look at
            return error
        raise AssertionError("nothing was refused")

    @in_world
    async def test_what_sqlalchemy_is_given_that_no_column_takes_is_not_quoted(self, world):
        colour = Enum(Colour, native_enum=False, validate_strings=True)
        table = Table("person", MetaData(), Column("mail", colour))

        error = await self.refused(world, insert(table), mail=SECRET)

        assert SECRET in str(error)
        assert reason_of(error) == "StatementError: LookupError"

    @in_world
    async def test_an_error_that_quotes_the_databases_error_quotes_its_reason(self, world):
        error = await self.refused(world, ADD, mail=SECRET)
        for text_of in (str(error), f"no: {error}; sorry", str(error.orig), f"no: {error.orig}"):
            wrapped = NonRetryableMessageError(text_of)
            wrapped.__cause__ = error

            assert SECRET not in reason_of(wrapped)
            assert "constraint" in reason_of(wrapped)

        # Nobody says where it comes from: the sentence stays, and what it quotes goes.
        assert SECRET not in reason_of(ValueError(str(error)))

    @in_world
    async def test_a_session_that_was_not_rolled_back_does_not_quote_its_first_error(self, world):
        await self.refused(world, ADD, mail=SECRET)
        async with AsyncSession(world.database.engine) as session:
            session.add(Person(mail=SECRET))
            with pytest.raises(IntegrityError):
                await session.flush()
            with pytest.raises(PendingRollbackError, match=SECRET) as caught:
                await session.execute(text("SELECT 1"))

        assert SECRET not in reason_of(caught.value)
        assert reason_of(caught.value).startswith("PendingRollbackError: This Session's")

    @in_world
    async def test_a_failure_is_classified_with_the_same_reason(self, world):
        error = await self.refused(world, ADD, mail=SECRET)

        found = SQL_CLASSIFICATION.classify(error)

        assert (found.code, found.reason) == ("CONSTRAINT_VIOLATED", reason_of(error))
        assert found.exception == "sqlalchemy.exc.IntegrityError"


class TestInSqlite(InSqlite, Asked):
    @in_world
    async def test_a_constraint_is_named_and_the_value_is_not(self, world):
        error = await self.refused(world, ADD, mail=SECRET)

        assert SECRET in str(error)
        assert reason_of(error) == "IntegrityError: UNIQUE constraint failed: person.mail"
        assert reason_of(error.orig) == reason_of(error)

    @in_world
    async def test_names_are_said_and_values_are_not(self, world):
        gone = await self.refused(world, text("SELECT * FROM gone"))
        syntax = await self.refused(world, text(f"SELECT '{SECRET}' FRM 'x'"))
        no_path = await self.refused(world, text("SELECT json_extract('{}', :path)"), path=SECRET)

        assert reason_of(gone) == "OperationalError: no such table: gone"
        assert reason_of(syntax) == "OperationalError: near"
        assert reason_of(no_path).startswith("OperationalError: ")
        assert SECRET not in reason_of(no_path)

    def test_text_that_is_none_is_not_quoted(self):
        connection = sqlite3.connect(":memory:")
        with pytest.raises(sqlite3.OperationalError) as caught:
            connection.execute("SELECT CAST(x'ff414e4e' AS TEXT) AS mail").fetchall()
        connection.close()

        assert "ANN" in str(caught.value)
        assert reason_of(caught.value) == "OperationalError: Could not decode to UTF-8 column"


class TestInPostgres(InPostgres, Asked):
    @in_world
    async def test_a_constraint_is_named_and_the_row_is_not(self, world):
        error = await self.refused(world, ADD, mail=SECRET)

        assert SECRET in str(error)
        said = '23505 duplicate key value violates unique constraint "person_mail"'
        assert reason_of(error) == f"IntegrityError: {said}"
        assert reason_of(error.orig.__cause__) == f"UniqueViolationError: {said}"

    @in_world
    async def test_a_constraint_that_the_sentence_does_not_name_is_named_behind_it(self, world):
        raises = text(
            "DO $$ BEGIN RAISE EXCEPTION 'taken' USING ERRCODE = '23505', CONSTRAINT = 'mine', "
            f"DETAIL = '{SECRET}', HINT = '{SECRET}'; END $$"
        )

        error = await self.refused(world, raises)

        assert SECRET in str(error)
        assert reason_of(error) == "IntegrityError: 23505 taken (constraint mine)"

    @in_world
    async def test_a_value_that_does_not_fit_is_not_quoted(self, world):
        by_the_server = "22P02 invalid input syntax for type uuid"
        by_the_driver = "22000 invalid input for query argument $1"
        cases = {
            "SELECT CAST(CAST(:mail AS text) AS uuid)": f"DBAPIError: {by_the_server}",
            "UPDATE person SET age = :mail": f"DBAPIError: {by_the_driver}",
        }
        for statement, said in cases.items():
            error = await self.refused(world, text(statement), mail=SECRET)

            assert SECRET in str(error.orig)
            assert reason_of(error) == said
            wrapped = RuntimeError(f"no: {error}")
            wrapped.__context__ = error
            assert reason_of(wrapped) == f"RuntimeError: no: {said}"

    @in_world
    async def test_names_are_said_and_literals_are_not(self, world):
        gone = await self.refused(world, text("SELECT * FROM gone"))
        syntax = await self.refused(world, text(f"SELECT 1 FROM person person '{SECRET}'"))

        assert reason_of(gone) == 'ProgrammingError: 42P01 relation "gone" does not exist'
        assert reason_of(syntax) == "ProgrammingError: 42601 syntax error at or near"


def test_an_exception_that_cannot_be_told_has_its_name():
    class Silent(sqlite3.Error):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert reason_of(Silent()) == "Silent"
    assert reason_of(KeyError("mail")) == "KeyError: 'mail'"


def test_causes_that_go_round_end():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    assert reason_of(first) == "ValueError: a"


def test_a_place_is_that_of_the_line_that_raised():
    with pytest.raises(KeyError) as caught:
        {}["mail"]

    assert place_of(caught.value).rpartition(":")[0] == __file__
    assert place_of(ValueError()) == ""
