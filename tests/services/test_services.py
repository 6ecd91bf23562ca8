"""The starters start real services, survive restarts, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from semel.testing.services import (
    CutProxy,
    KafkaServer,
    PostgresServer,
    SeaweedServer,
    ServiceUnavailable,
    connector_jars,
    free_port,
    jars,
    processes,
)
from tests.conftest import require

postgres = pytest.mark.postgres


def eventually(holds: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answer(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query).fetchone()
        assert row is not None
        return row[0]


@postgres
@pytest.mark.parametrize("version", [18, 16])
def test_postgres_keeps_its_promises_of_durability(version, request):
    server = request.getfixturevalue("postgres_server" if version == 18 else "postgres16_server")

    settings = ["server_version_num", "fsync", "synchronous_commit", "max_prepared_transactions"]
    shown = [answer(server.url, f"SHOW {name}") for name in settings]

    assert shown[0].startswith(str(version))
    assert shown[1:] == ["on", "on", "64"]


@postgres
@pytest.mark.parametrize("given", ["", ":postgres"])
def test_postgres_lets_nobody_in_without_its_password(postgres_server, given):
    url = postgres_server.url.replace(f":{postgres_server.password}", given)

    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(url)

    assert answer(
        postgres_server.url, "SELECT bool_and(auth_method = 'scram-sha-256') FROM pg_hba_file_rules"
    )
    kept = postgres_server.folder / "password"
    assert kept.stat().st_mode & 0o777 == 0o600


@postgres
def test_the_password_of_a_kept_folder_stays_the_same():
    with tempfile.TemporaryDirectory(prefix="semel-") as folder:
        first, again = PostgresServer(directory=folder), PostgresServer(directory=folder)
        with require(first.start):
            assert answer(first.url, "SELECT 1") == 1
        with again:
            assert answer(again.url, "SELECT 1") == 1

        assert first.password == again.password


@postgres
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_postgres_comes_back_on_the_same_port_with_what_was_committed(mode):
    with require(PostgresServer(settings={"max_connections": "20"}).start) as server:
        url = server.create_database("kept")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE paid (amount int)")
            connection.execute("INSERT INTO paid VALUES (7)")
            server.stop(mode)
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")

        server.start()

        assert answer(url, "SELECT amount FROM paid") == 7
        assert answer(url, "SHOW max_connections") == "20"


@postgres
def test_two_servers_start_at_the_same_time_from_two_threads():
    servers = [PostgresServer(18), PostgresServer(16)]

    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda server: require(server.start), servers))

    # The threads that started them are gone, the servers are not.
    assert [answer(server.url, "SELECT 1") for server in servers] == [1, 1]
    for server in servers:
        server.stop()


@postgres
def test_a_dropped_database_takes_its_prepared_transactions_along(postgres_server):
    url = postgres_server.create_database("doomed")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE held (row int)")
        connection.execute("PREPARE TRANSACTION 'it''s held'")

        postgres_server.drop_database("doomed")

    assert answer(postgres_server.url, "SELECT count(*) FROM pg_prepared_xacts") == 0


@postgres
def test_after_the_block_no_process_and_no_file_is_left():
    with require(PostgresServer().start) as server:
        pids, folder = server.pids, server.folder

    assert not any(exists(pid) for pid in pids)
    assert not folder.exists()
    assert server.pids == []


@postgres
@pytest.mark.kill
def test_a_service_and_its_files_go_with_a_process_that_is_killed(postgres_server):
    program = """if True:
        from semel.testing.services import PostgresServer
        server = PostgresServer().start()
        print(server.pids[0], server.port, server.folder, flush=True)
        input()
    """
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pid, port, folder = owner.stdout.readline().split()
        assert processes.listens(int(port))

        owner.send_signal(signal.SIGKILL)

    assert eventually(lambda: not exists(int(pid)))
    assert eventually(lambda: not processes.listens(int(port)))
    assert eventually(lambda: not os.path.exists(folder))


@postgres
def test_a_server_that_cannot_start_says_why_and_leaves_no_process():
    server = PostgresServer(settings={"max_connections": "none"})
    require(PostgresServer)

    with pytest.raises(ServiceUnavailable, match="max_connections"):
        server.start()

    assert server.pids == []


@pytest.mark.seaweedfs
def test_an_object_store_comes_back_after_a_crash_with_its_objects_and_its_catalog():
    boto3 = pytest.importorskip("boto3")
    with require(SeaweedServer().start) as server:
        client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            region_name=server.region,
        )
        client.put_object(Bucket=server.bucket, Key="kept", Body=b"7", IfNoneMatch="*")
        server.stop("immediate")

        server.start()

        assert client.get_object(Bucket=server.bucket, Key="kept")["Body"].read() == b"7"
        with urllib.request.urlopen(f"{server.catalog_uri}/v1/config") as answered:
            assert answered.status == 200
        client.close()
        pids = server.pids
    assert not any(exists(pid) for pid in pids)


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(ServiceUnavailable, match=r"pip install 'semel\[demo\]'"):
        processes.package_folder("no_such_package", extra="demo")


def test_a_missing_java_is_named(monkeypatch, tmp_path):
    processes.java.cache_clear()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(ServiceUnavailable, match="Java 17 or newer"):
        processes.java()


def test_a_download_tells_how_much_has_come(monkeypatch, tmp_path):
    seen, told = tmp_path / "seen", []
    # A Java that fetches 3 MB, and goes on when that was told.
    java = tmp_path / "java"
    java.write_text(
        f'#!/bin/sh\nhead -c 3000000 /dev/zero > "$4/jar"\nuntil [ -e {seen} ]; do :; done\n'
        f"mkdir -p {tmp_path}/cache/fetching/jars/broker\n"
    )
    java.chmod(0o755)
    monkeypatch.setattr(jars, "java", lambda: str(java))
    monkeypatch.setattr(jars, "TELL_SECONDS", 0.1)
    monkeypatch.setenv("SEMEL_SERVICES_DIR", str(tmp_path / "cache"))

    def tell(far):
        told.append(far)
        if far == "3 of 55 MB":
            seen.touch()

    folder = jars.fetch_jars(tell)

    assert (folder / "broker").is_dir()
    assert "3 of 55 MB" in told
    assert jars.first_download() is None


def test_free_ports_lie_outside_the_range_that_clients_are_given():
    assert all(free_port() < 32_768 for _ in range(50))


@pytest.mark.kafka
def test_kafka_keeps_a_topic_and_its_messages_over_a_crash():
    from confluent_kafka import Consumer, Producer

    with require(KafkaServer().start) as broker:
        broker.create_topic("orders", partitions=3)
        producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all"})
        producer.produce("orders", b"one", partition=2)
        assert producer.flush(30) == 0

        broker.stop("immediate")
        broker.start()

        consumer = Consumer(
            {
                "bootstrap.servers": broker.bootstrap,
                "group.id": "g",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe(["orders"])
        message = consumer.poll(60)
        assert message is not None
        assert message.error() is None
        assert (message.partition(), message.value()) == (2, b"one")
        consumer.close()


@pytest.mark.kafka
def test_the_connector_leaves_scala_to_spark():
    names = [os.path.basename(jar) for jar in require(connector_jars)]

    assert any(name.startswith("spark-sql-kafka-0-10") for name in names)
    assert not any(name.startswith("scala-library") for name in names)


@pytest.mark.kafka
@pytest.mark.spark
def test_the_session_of_the_tests_reads_from_kafka(spark, kafka_server):
    from confluent_kafka import Producer

    kafka_server.create_topic("read-by-spark", partitions=2)
    producer = Producer({"bootstrap.servers": kafka_server.bootstrap})
    for number in range(10):
        producer.produce("read-by-spark", str(number))
    assert producer.flush(30) == 0

    frame = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", kafka_server.bootstrap)
        .option("subscribe", "read-by-spark")
        .load()
    )

    assert sorted(int(row.value) for row in frame.collect()) == list(range(10))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.kill
def test_a_cluster_survives_the_loss_of_an_executor():
    # In another process: this one may have a local session, and there is only one per process.
    program = """if True:
        import os, signal, sys
        from pyspark.sql import SparkSession
        from semel.testing.services import SparkCluster
        with SparkCluster(workers=2) as cluster:
            builder = SparkSession.builder.config("spark.ui.enabled", "false")
            for key, value in cluster.session_settings.items():
                builder = builder.config(key, value)
            spark = builder.getOrCreate()
            context = spark.sparkContext
            count = lambda: context.parallelize(range(100), 4).sum()
            assert count() == 4950
            first = cluster.executor_pids()
            assert first, "no executors"
            os.kill(first[0], signal.SIGKILL)
            assert count() == 4950
            spark.stop()
            print(*cluster.pids, *first)
    """
    require(processes.java)

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )

    assert done.returncode == 0, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 4
    assert eventually(lambda: not any(exists(pid) for pid in pids))


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[CutProxy]:
    with CutProxy(postgres_server.port) as started:
        yield started


@postgres
def test_the_proxy_loses_the_reply_to_a_commit_that_happened(proxy, postgres_server):
    url = proxy.through(postgres_server.url)
    with psycopg.connect(url) as other, psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE lost_reply (row int)")
        proxy.swallow_reply_to(b"COMMIT")

        with pytest.raises(psycopg.OperationalError):
            connection.commit()

        assert proxy.wait_until_swallowed()
        assert answer(postgres_server.url, "SELECT count(*) FROM lost_reply") == 0
        other.execute("DROP TABLE lost_reply")


@postgres
def test_only_one_reply_is_lost(proxy, postgres_server):
    url = proxy.through(postgres_server.url)
    proxy.swallow_reply_to(b"SELECT 41")
    with psycopg.connect(url) as connection, pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 41")

    assert answer(url, "SELECT 41") == 41


@postgres
def test_a_lost_request_never_reaches_the_server(proxy, postgres_server):
    url = proxy.through(postgres_server.url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE lost_request (row int)")
        proxy.lose_request(re.compile(rb"INSERT INTO lost_\w+"))

        with pytest.raises(psycopg.OperationalError):
            connection.execute("INSERT INTO lost_request VALUES (1)")

    assert proxy.wait_until_swallowed()
    assert answer(url, "SELECT count(*) FROM lost_request") == 0


@postgres
def test_a_held_reply_arrives_when_it_is_released_and_what_it_reports_has_happened(
    proxy, postgres_server
):
    url = proxy.through(postgres_server.url)
    with psycopg.connect(url, autocommit=True) as connection, ThreadPoolExecutor(1) as pool:
        connection.execute("CREATE TABLE held_reply (row int)")
        proxy.hold_reply_to(b"INSERT INTO held_reply")

        asked = pool.submit(connection.execute, "INSERT INTO held_reply VALUES (1)")

        assert proxy.wait_until_swallowed()
        assert answer(url, "SELECT count(*) FROM held_reply") == 1
        assert not asked.done()
        proxy.release()
        assert asked.result(30).rowcount == 1
        assert connection.execute("SELECT 2").fetchone() == (2,)


@postgres
def test_a_cut_ends_connections_and_a_refusal_keeps_new_ones_out(proxy, postgres_server):
    url = proxy.through(postgres_server.url)
    with psycopg.connect(url) as connection:
        proxy.refuse()
        connection.execute("SELECT 1")
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))

    proxy.accept()

    assert answer(url, "SELECT 1") == 1
