"""What the HTTP sink does after each answer, and after none."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import json
import pickle
import re
from email.utils import format_datetime
from itertools import count

import httpx
import pyarrow as pa
import pytest
import sqlalchemy
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from test_http_sink import Served, Service

from semel.errors import Misuse, Permanent, Retryable
from semel.http.client import ANSWERS, ReceiverClient, Response, meaning
from semel.http.receiver import receiver
from semel.http.store import keep_rows
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable
from semel.pipeline.txn import CycleId, Scope
from semel.sinks import HttpSink
from semel.testing.services import CutProxy

SCOPE = Scope("ledger", "payments", "main")
ROWS = pa.RecordBatch.from_pydict({"id": [1, 2], "text": ["a", None]})


@pytest.fixture
def service(tmp_path):
    with Service(tmp_path) as service:
        yield service


def prepared(sink, number=0):
    txn = CycleId(SCOPE, 1, number).attempt()
    writer = sink.stager(txn).open("task")
    writer.write(ROWS)
    outcome = sink.prepare(txn, [writer.finish()])
    assert isinstance(outcome, SinkOK), outcome
    return txn, outcome.token


@pytest.fixture
def answers():
    """A receiver that answers with the statuses of a list, and then with 200."""
    left, seen = [], []

    async def answer(request):
        seen.append(request)
        status, headers = left.pop(0) if left else (200, {})
        return JSONResponse({"reason": "so it is"}, status, headers)

    methods = ["GET", "PUT", "POST", "DELETE"]
    with Served(Starlette(routes=[Route("/{path:path}", answer, methods=methods)])) as served:
        yield served, left, seen


@pytest.mark.parametrize("status", [*ANSWERS, 418, 500, 502, 503, 504])
def test_every_status_has_its_consequence(answers, status):
    served, left, seen = answers
    client = ReceiverClient(served.url, tries=2)
    left += [(status, {})]

    match meaning(status)[0]:
        case Response.DONE:
            client.request("POST", "/commit/x", epoch=3)
            assert len(seen) == 1
        case Response.REFUSED:
            with pytest.raises(Permanent, match=str(status)):
                client.request("POST", "/commit/x", epoch=3)
            assert len(seen) == 1
        case Response.LATER:
            client.request("POST", "/commit/x", epoch=3)
            assert len(seen) == 2
    client.close()
    assert {request.headers["Semel-Epoch"] for request in seen} == {"3"}
    assert len({request.headers["Idempotency-Key"] for request in seen}) == 1


def test_only_the_repetitions_of_one_request_share_a_key(answers):
    served, left, seen = answers
    client = ReceiverClient(served.url)
    left += [(503, {})]

    for epoch in (1, 2):
        client.request("POST", "/fence/x", epoch=epoch)
    for _ in range(2):
        client.request("POST", "/abort/x", epoch=2)
        client.request("GET", "/txn/x", epoch=2)

    client.close()
    keys = [request.headers.get("Idempotency-Key") for request in seen if request.method == "POST"]
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1 == 4
    assert not [one for one in seen if one.method == "GET" and "Idempotency-Key" in one.headers]


@pytest.mark.parametrize(("seconds", "waited"), [(5, 4), (3600, 10), (-3600, 0), (None, 0)])
def test_a_receiver_may_ask_for_time_until_a_date_by_its_own_clock(
    answers, monkeypatch, seconds, waited
):
    served, left, _ = answers
    waits = []
    monkeypatch.setattr("semel.http.client.time.sleep", waits.append)
    until = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds or 0)
    asked = format_datetime(until, usegmt=True) if seconds else "soon"
    left += [(429, {"Retry-After": asked})]
    client = ReceiverClient(served.url)

    client.request("POST", "/commit/x")

    client.close()
    assert waited - 1 <= waits[0] <= waited + 1


def test_a_receiver_that_asks_for_time_gets_it_and_then_it_is_unknown(answers, monkeypatch):
    served, left, seen = answers
    waits = []
    monkeypatch.setattr("semel.http.client.time.sleep", waits.append)
    client = ReceiverClient(served.url, tries=3)
    left += [(429, {"Retry-After": "4"}), (503, {"Retry-After": "9000"}), (425, {})]

    with pytest.raises(Retryable, match="425, too early: so it is; what happened is unknown"):
        client.request("POST", "/commit/x")

    client.close()
    assert waits == [4.0, 10.0]
    assert len(seen) == 3


def test_a_lost_reply_to_the_commit_is_answered_by_asking_again(service):
    with CutProxy(service.port) as proxy:
        sink = HttpSink(f"http://127.0.0.1:{proxy.port}", tries=1)
        sink.fence(SCOPE, 1)
        txn, token = prepared(sink)
        proxy.swallow_reply_to(b"POST /commit/")

        outcome = sink.commit(txn, token)

        assert isinstance(outcome, SinkRetryable), outcome
        assert proxy.wait_until_swallowed()
        assert sink.look_up(txn, token).found is Found.VISIBLE
        assert sink.commit(txn, token) == SinkOK()
        sink.close()
    assert service.query("SELECT count(*) FROM semel_received") == [(2,)]


def test_without_a_receiver_the_answer_is_unknown(service):
    sink = HttpSink("http://127.0.0.1:9", tries=2)
    txn = CycleId(SCOPE, 1, 0).attempt()

    assert isinstance(sink.commit(txn, {"place": sink.place}), SinkRetryable)
    assert sink.look_up(txn, None).found is Found.UNREACHABLE
    with pytest.raises(Retryable):
        sink.recover(SCOPE)
    sink.close()


def test_a_service_mounts_the_receiver_and_applies_rows_in_the_transaction_of_the_commit(tmp_path):
    total = []

    def apply(connection, cycle, rows):
        for row in rows:
            if len(total) == 1:
                total.append("failed")
                raise RuntimeError("the service fails in the middle")
            connection.exec_driver_sql("INSERT INTO entry VALUES (?)", (row["id"],))
            total.append(row)

    with Service(tmp_path, apply, mounted=True) as service:
        service.query("CREATE TABLE entry (id integer)")
        sink = HttpSink(f"{service.url}/semel", tries=1, compression="none")
        sink.fence(SCOPE, 1)
        sink.check(ROWS.schema)
        txn, token = prepared(sink)

        assert isinstance(sink.commit(txn, token), SinkRetryable)
        assert service.query("SELECT id FROM entry") == []
        sink.close()
        assert sink.look_up(txn, token).found is Found.HELD
        assert sink.commit(txn, token) == SinkOK()

        assert service.query("SELECT id FROM entry ORDER BY id") == [(1,), (2,)]
        sink.close()


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError])
def test_a_fault_of_the_services_own_code_is_tried_again_and_no_refusal(tmp_path, error):
    failures = [error("the service's own")]

    def apply(connection, cycle, rows):
        if failures:
            raise failures.pop()

    with Service(tmp_path, apply) as service:
        sink = HttpSink(service.url, tries=1)
        sink.fence(SCOPE, 1)
        txn, token = prepared(sink)

        outcome = sink.commit(txn, token)

        assert isinstance(outcome, SinkRetryable), outcome
        sink.close()
        assert sink.commit(txn, token) == SinkOK()
        sink.close()


def test_a_body_without_a_length_is_refused_before_it_fills_the_memory(service, monkeypatch):
    monkeypatch.setattr("semel.http.receiver.LARGEST_BODY_BYTES", 1_000)
    read, answers = count(), []
    path = f"/chunks/{SCOPE.slug}.g1.b0.attempt/task/0"

    async def receive():
        return {"type": "http.request", "body": b"x" * 400, "more_body": next(read) < 1_000}

    async def send(message):
        answers.append(message.get("status"))

    asked = {"type": "http", "method": "PUT", "path": path, "headers": [], "query_string": b""}
    asyncio.run(service.app(asked, receive, send))

    assert answers[0] == 413
    assert next(read) == 3


def test_a_cycle_of_any_size_is_kept_in_slices(service):
    store = service.app.state.store
    widest = []
    with store.engine.begin() as connection:
        listen = sqlalchemy.event.listen
        listen(connection, "before_cursor_execute", lambda *c: widest.append(len(c[3])))
        keep_rows(connection, "cycle", ({"id": n} for n in range(2_500)))

    assert widest == [1_000, 1_000, 500]
    assert service.query("SELECT count(*) FROM semel_received") == [(2_500,)]


def test_old_proofs_go_and_nothing_below_them_is_committed_again(service):
    sink = HttpSink(service.url)
    sink.fence(SCOPE, 1)
    late = prepared(sink, 0)
    for number in range(40):
        assert sink.commit(*prepared(sink, number)) == SinkOK()

    assert isinstance(sink.commit(*late), SinkFatal)

    assert service.query("SELECT count(*) FROM semel_receiver_proof") == [(16,)]
    assert sink.mark(SCOPE).cycle.batch == 39
    sink.close()


def test_a_scope_that_no_sink_can_have_is_refused_and_one_that_is_there_stops_no_start(service):
    client = ReceiverClient(service.url)
    about = {"ledger": "l", "app": "An App", "query": "main", "sink": "http"}
    with pytest.raises(Permanent, match="400"):
        client.request("POST", "/fence/" + "0" * 20, json={"epoch": 1, **about})
    client.close()
    service.query(
        "INSERT INTO semel_receiver_scope VALUES "
        "('00000000000000000000', 'l', 'An App', 'main', 'http', 1, 'g1.b0.x')"
    )
    sink = HttpSink(service.url)
    sink.fence(SCOPE, 1)
    sink.commit(*prepared(sink))

    assert [tenant.scope for tenant in sink.tenants()] == [SCOPE]
    sink.close()


def test_a_receiver_asks_for_a_login_itself_where_its_framework_does_not(tmp_path):
    def allow(headers):
        return headers.get("authorization") == "Bearer right"

    app = receiver(f"sqlite:///{tmp_path / 'received.db'}", allow=allow)
    with Served(Starlette(routes=[Mount("/semel", app)])) as served:
        answers = [
            httpx.get(f"{served.url}/semel{path}", headers={"Authorization": f"Bearer {token}"})
            for path in ("/scopes", "/openapi.json")
            for token in ("wrong", "right")
        ]
    app.state.store.close()

    assert [answer.status_code for answer in answers] == [401, 200, 401, 200]


def insert(connection, cycle, rows):
    connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS entry (id INTEGER PRIMARY KEY)")
    for row in rows:
        connection.exec_driver_sql(f"INSERT INTO entry VALUES ({row['id']})")


def entries(app):
    with app.state.store.engine.connect() as connection:
        return connection.exec_driver_sql("SELECT id FROM entry ORDER BY id").scalars().all()


def check_rows_are_tried_before_the_decision(url):
    app = receiver(url, insert, validate=insert)
    with Served(app) as served:
        sink = HttpSink(served.url, tries=1)
        sink.fence(SCOPE, 1)
        txn, token = prepared(sink)
        with pytest.raises(sqlalchemy.exc.DatabaseError):
            entries(app)  # what the trial wrote, the table among it, is not there
        assert sink.commit(txn, token) == SinkOK()

        again = CycleId(SCOPE, 1, 1).attempt()
        writer = sink.stager(again).open("task")
        writer.write(ROWS)
        outcome = sink.prepare(again, [writer.finish()])

        assert isinstance(outcome, SinkFatal)
        assert re.search("422.*refuses the rows.*IntegrityError|unique constraint", str(outcome))
        assert "DETAIL" not in str(outcome)
        assert sink.look_up(again, None).found is Found.GONE
        assert sink.abort(again, None) == SinkOK()
        assert entries(app) == [1, 2]
        sink.close()
    app.state.store.close()


def test_rows_are_tried_and_refused_before_the_decision(tmp_path):
    check_rows_are_tried_before_the_decision(f"sqlite:///{tmp_path / 'received.db'}")


@pytest.mark.postgres
def test_rows_are_tried_and_refused_before_the_decision_in_postgresql(postgres_url):
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    check_rows_are_tried_before_the_decision(url)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("row 3 has no currency"), SinkFatal),
        (KeyError("currency"), SinkFatal),
        (ConnectionError("the rates do not answer"), SinkRetryable),
        (sqlalchemy.exc.OperationalError("SELECT", {}, Exception("locked")), SinkRetryable),
    ],
)
def test_what_validation_raises_refuses_the_rows_unless_something_does_not_answer(
    tmp_path, error, kind
):
    def validate(connection, cycle, rows):
        assert [row["id"] for row in rows] == [1, 2]
        raise error

    app = receiver(f"sqlite:///{tmp_path / 'received.db'}", validate=validate)
    with Served(app) as served:
        sink = HttpSink(served.url, tries=1)
        sink.fence(SCOPE, 1)
        txn = CycleId(SCOPE, 1, 0).attempt()
        writer = sink.stager(txn).open("task")
        writer.write(ROWS)

        outcome = sink.prepare(txn, [writer.finish()])

        assert isinstance(outcome, kind)
        assert "currency" in outcome.reason or kind is SinkRetryable
        sink.close()
    app.state.store.close()


@pytest.mark.postgres
def test_a_receiver_in_postgresql_commits_once_whoever_asks(postgres_url):
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    app = receiver(url)
    with Served(app) as served:
        sink = HttpSink(served.url)
        sink.fence(SCOPE, 1)
        txn, token = prepared(sink)
        rival, rival_token = prepared(sink)

        assert sink.commit(txn, token) == SinkOK()
        assert sink.commit(txn, token) == SinkOK()
        assert isinstance(sink.commit(rival, rival_token), SinkFatal)

        with app.state.store.engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT row FROM semel_received").scalars().all()
        assert [json.loads(row)["id"] for row in rows] == [1, 2]
        sink.close()
    app.state.store.close()


@pytest.mark.parametrize(
    "path", ["/txn/x", "/txn/" + "a" * 20 + ".g1.b1..", "/pending/x", "/prepare/" + "a" * 20]
)
def test_names_that_no_sink_sends_are_refused(service, path):
    client = ReceiverClient(service.url)

    with pytest.raises(Permanent, match=r"40[045]"):
        client.request("GET" if "prepare" not in path else "POST", path)

    client.close()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("ftp://host", {}),
        ("http://user:secret@host", {}),
        ("http://host?key=secret", {}),
        ("http://host", {"compression": "rar"}),
        ("http://host", {"tries": 0}),
    ],
)
def test_wrong_settings_of_an_http_sink_are_refused_at_once(url, options):
    with pytest.raises(Misuse) as refused:
        HttpSink(url, **options)

    assert "secret" not in str(refused.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for this machine that nobody but its file vouches for, and its key."""
    found = [tmp_path_factory.mktemp("tls") / name for name in ("key.pem", "certificate.pem")]
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "receiver")])
    now = dt.datetime.now(dt.UTC)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + dt.timedelta(1))
    signed = made.add_extension(here, critical=False).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    found[0].write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    )
    found[1].write_bytes(signed.public_bytes(pem))
    return found


def test_a_receiver_by_tls_is_trusted_by_its_certificate_and_not_without(tmp_path, certificate):
    key, trusted = map(str, certificate)
    app = receiver(f"sqlite:///{tmp_path / 'received.db'}")
    with Served(app, ssl_keyfile=key, ssl_certfile=trusted) as served:
        stranger = HttpSink(served.url, tries=1)
        with pytest.raises(Retryable, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.check(None)

        sink = HttpSink(served.url, ca_file=trusted)
        sink.fence(SCOPE, 1)
        txn, token = prepared(sink)
        assert sink.commit(txn, token) == SinkOK()
        sink.close()
        stranger.close()
    app.state.store.close()


TOKENS = count(1)


def next_token():
    return {"Authorization": f"Bearer {next(TOKENS)}"}


def test_a_service_checks_logins_before_the_receiver_and_every_request_has_a_fresh_one(tmp_path):
    seen = []

    class Login(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            token = request.headers.get("Authorization")
            seen.append(token)
            return await call_next(request) if token else JSONResponse({}, 401)

    app = receiver(f"sqlite:///{tmp_path / 'received.db'}")
    with Served(Starlette(routes=[Mount("/semel", app)], middleware=[Middleware(Login)])) as served:
        with pytest.raises(Permanent, match="401, the receiver wants other credentials"):
            HttpSink(f"{served.url}/semel").check(None)
        seen.clear()
        sink = HttpSink(f"{served.url}/semel", headers=next_token)
        sink.fence(SCOPE, 1)
        txn, token = prepared(pickle.loads(pickle.dumps(sink)))
        assert sink.commit(txn, token) == SinkOK()
        sink.close()
    app.state.store.close()

    assert len(seen) == len(set(seen)) == 4


def test_the_document_of_the_protocol_names_every_request_that_the_receiver_answers(service):
    client = ReceiverClient(service.url)

    found = client.request("GET", "/openapi.json")

    client.close()
    named = {(path, method.upper()) for path, calls in found["paths"].items() for method in calls}
    answered = {
        (route.path.replace(":int", ""), method)
        for route in service.app.routes
        for method in route.methods - {"HEAD"}
    }
    assert answered - named == {("/openapi.json", "GET")}
    assert named <= answered
    schemas = found["components"]["schemas"]
    used = set(re.findall("schemas/([A-Za-z]+)", json.dumps(found["paths"])))
    assert used == set(schemas)
    put = found["paths"]["/chunks/{txn}/{task}/{number}"]["put"]
    assert {"200", "409", "413", "425", "429"} <= put["responses"].keys()
