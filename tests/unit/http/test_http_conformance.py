"""The contract of receivers: the reference keeps it, and each broken receiver is convicted."""

from __future__ import annotations

import contextlib
import json

import pytest
from test_http_sink import SECRET, Served
from typer.testing import CliRunner

from semel.cli.app import app as cli
from semel.errors import Retryable
from semel.http.receiver import receiver
from semel.http.store import ReceiverStore, Refusal
from semel.testing import ReceiverContract
from tests.snapshots import compare, normal


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    app = receiver(f"sqlite:///{tmp_path_factory.mktemp('receiver') / 'received.db'}")
    with Served(app) as served:
        served.store = app.state.store
        yield served
    app.state.store.close()


def applied(store):
    with store.engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT row FROM semel_received").scalars()
        return [json.loads(row) for row in found]


class TestReference(ReceiverContract):
    @pytest.fixture(autouse=True)
    def _there(self, reference, monkeypatch):
        monkeypatch.setattr(type(self), "url", reference.url)
        rows = staticmethod(lambda: applied(reference.store))
        monkeypatch.setattr(type(self), "read_rows", rows)


class Forgets(ReceiverStore):
    """Says done of a commit that it has forgotten."""

    def commit(self, txn, token):
        with contextlib.suppress(Refusal):
            super().commit(txn, token)


class ShowsTwo(ReceiverStore):
    """Looks for a proof of the attempt and not of the cycle."""

    def _proof(self, connection, cycle):
        return None


class TakesAnyChunk(ReceiverStore):
    """Does not compare what is sent again, nor what is prepared."""

    def put_chunk(self, txn, task, number, body, encoding):
        with contextlib.suppress(Refusal):
            super().put_chunk(txn, task, number, body, encoding)

    def prepare(self, txn, epoch, token, chunks):
        super().prepare(txn, epoch, token, [])


class IgnoresEpochs(ReceiverStore):
    """Takes any owner for the newest."""

    def prepare(self, txn, epoch, token, chunks):
        super().prepare(txn, 10**6, token, chunks)


class DropsTheCommitted(ReceiverStore):
    """Aborts what is committed, too."""

    def abort(self, txn):
        with self.engine.begin() as connection:
            self._forget(connection, txn)
            connection.exec_driver_sql("DELETE FROM semel_receiver_proof WHERE txn = ?", (txn,))


class LowersTheMark(ReceiverStore):
    """Takes the last committed cycle for the highest."""

    def commit(self, txn, token):
        super().commit(txn, token)
        with self.engine.begin() as connection:
            connection.exec_driver_sql(
                "UPDATE semel_receiver_scope SET mark = ?", (txn.partition(".")[2],)
            )


class RenamesForAnybody(ReceiverStore):
    """Lets an owner that was fenced give its scope away."""

    def rename(self, old, new, epoch, about):
        super().rename(old, new, 10**6, about)


class AppliesTwice(ReceiverStore):
    """Applies the rows of a commit that is repeated once more."""

    def commit(self, txn, token):
        super().commit(txn, token)
        with self.engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO semel_received (cycle, row) SELECT cycle, row FROM semel_received "
                "WHERE substr(cycle, 1, 20) = ?",
                (txn[:20],),
            )


class ShowsEarly(ReceiverStore):
    """Shows what is prepared."""

    def prepare(self, txn, epoch, token, chunks):
        super().prepare(txn, epoch, token, chunks)
        with self.engine.begin() as connection:
            self._apply(connection, txn, self._rows(connection, txn, chunks))

    def commit(self, txn, token):
        self._apply = lambda *_: None
        super().commit(txn, token)


BROKEN = {
    Forgets: "what is not prepared cannot be committed",
    ShowsTwo: "only one attempt of a cycle is committed",
    TakesAnyChunk: "a chunk may be sent again but not with other rows",
    IgnoresEpochs: "an older epoch is refused",
    DropsTheCommitted: "what is committed cannot be aborted",
    RenamesForAnybody: "a renamed scope takes its mark along",
    AppliesTwice: "a commit makes visible and may be repeated",
    ShowsEarly: "what is prepared is held",
    LowersTheMark: "the mark is the highest committed cycle and nothing goes below it",
}


@contextlib.contextmanager
def broken(folder, monkeypatch, store):
    monkeypatch.setattr("semel.http.receiver.ReceiverStore", store)
    app = receiver(f"sqlite:///{folder / 'received.db'}")
    with Served(app) as served:
        served.store = app.state.store
        yield served
    app.state.store.close()


@pytest.mark.parametrize("store", BROKEN)
def test_a_broken_receiver_is_convicted_by_its_url(tmp_path, monkeypatch, store):
    with broken(tmp_path, monkeypatch, store) as served:
        read = staticmethod(lambda: applied(served.store))
        there = type("There", (ReceiverContract,), {"url": served.url, "read_rows": read})
        with pytest.raises((AssertionError, Retryable)):
            there().follow(f"test_{BROKEN[store].replace(' ', '_')}")


def test_the_report_says_of_each_rule_whether_a_receiver_keeps_it(tmp_path, monkeypatch):
    login = f"Authorization: Bearer {SECRET}"
    with broken(tmp_path, monkeypatch, DropsTheCommitted) as served:
        command = ["receiver", "check", served.url, "--header", login]
        said = CliRunner().invoke(cli, command)
        document = CliRunner().invoke(cli, [*command, "--json"]).stdout

    assert said.exit_code == 1, said.output
    assert f"{served.url}: 24 rules, 1 broken" in said.stdout
    assert "what is committed cannot be aborted" in said.stdout
    assert "was answered 200 and not 409" in said.stdout
    assert SECRET not in said.output + document
    known = normal(json.loads(document.replace(served.url, "<url>")), tmp_path)
    compare("receiver", {"receiver check": known})


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["http://127.0.0.1:9"], 75),
        (["ftp://host"], 2),
        (["http://host", "--header", "nonsense"], 2),
    ],
)
def test_a_receiver_that_cannot_be_asked_is_told_apart_from_a_broken_one(arguments, code):
    assert CliRunner().invoke(cli, ["receiver", "check", *arguments]).exit_code == code
