"""Replies that are lost, and a server that falls over: in doubt is not done, and not undone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_scene import KINDS, Scene

from semel.testing.services import CutProxy, PostgresServer
from tests.crash.local_driver import DONE, STOPPED

pytestmark = [pytest.mark.postgres, pytest.mark.kill, pytest.mark.timeout(600)]


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[CutProxy]:
    with CutProxy(postgres_server.port) as proxy:
        yield proxy


def through(proxy: CutProxy, url: str) -> str:
    return url.replace(f":{proxy.target_port}/", f":{proxy.port}/")


def lose_the_reply(scene: Scene, proxy: CutProxy, where: str, request: bytes, *options: str) -> str:
    """Run to the window, lose the reply to the next such request, and run to the end."""
    driver = scene.program.start(*options, stop_at=where)
    try:
        proxy.swallow_reply_to(request)
        driver.wake()
        ended = driver.wait()
    finally:
        driver.kill()
    assert proxy.wait_until_swallowed(0), f"{request!r} was never sent:\n{ended.output}"
    assert ended.code in (DONE, STOPPED)
    return ended.output


@pytest.mark.parametrize(
    ("kind", "where", "request_bytes"),
    [
        ("postgres-staging", "commit_2pc:postgres-staging:before#2", b"COMMIT"),
        ("postgres-prepared", "commit_2pc:postgres-prepared:before#2", b"COMMIT PREPARED"),
        ("postgres-prepared", "commit_2pc:postgres-prepared:before#2", b"COMMIT"),
        ("postgres-prepared", "stage:postgres-prepared:written#2", b"PREPARE TRANSACTION"),
        ("postgres-staging", "stage:postgres-staging:written#2", b"COMMIT"),
        ("postgres-staging", "abort_2pc:postgres-staging:before", b"COMMIT"),
    ],
)
def test_a_lost_reply_of_a_sink_neither_loses_nor_repeats_a_row(
    zygote, tmp_path, postgres_url, proxy, kind, where, request_bytes
):
    url = through(proxy, postgres_url)
    scene = Scene(zygote, tmp_path / "scene", [kind, "files"], 4, postgres_url, through=url)
    options = ["--fail-first"] if where.startswith("abort") else []

    lose_the_reply(scene, proxy, where, request_bytes, *options)
    scene.program.run_until_done()

    scene.assert_clean()


def test_a_lost_reply_to_the_commit_is_not_even_an_aborted_cycle(
    zygote, tmp_path, postgres_url, proxy
):
    url = through(proxy, postgres_url)
    scene = Scene(zygote, tmp_path / "s", ["postgres-staging"], 4, postgres_url, through=url)

    output = lose_the_reply(scene, proxy, "commit_2pc:postgres-staging:before#2", b"COMMIT")

    assert "CommitAborted" not in output
    assert output.rstrip().endswith("done: 24 rows")
    scene.assert_clean()


@pytest.mark.parametrize(
    "where",
    ["begin_txn:before#2", "tokens:before#2", "commit_txn:before#2", "store_commit:before#2"],
)
def test_a_lost_reply_of_the_ledger_neither_loses_nor_repeats_a_row(
    zygote, tmp_path, postgres_server, proxy, where
):
    name = f"ledger_{where.partition(':')[0]}"
    url = postgres_server.create_database(name)
    scene = Scene(zygote, tmp_path / "scene", ["files"], 4, ledger=through(proxy, url))

    output = lose_the_reply(scene, proxy, where, b"COMMIT")
    scene.program.run_until_done()

    if where.startswith("commit_txn"):
        assert "CommitAborted" not in output, "the COMMIT stands: it was only not heard"
    scene.assert_clean()
    postgres_server.drop_database(name)


@pytest.mark.parametrize(
    "where",
    [
        "stage:postgres-staging:written#2",
        "stage:postgres-prepared:after#2",
        "pre_commit_2pc:postgres-staging:after#2",
        "commit_txn:before#2",
        "commit_txn:after#2",
    ],
)
def test_a_server_that_falls_over_in_mid_cycle_loses_and_repeats_nothing(
    zygote, tmp_path, crashing_server, where
):
    name = "crash_" + where.replace(":", "_").replace("-", "_").replace("#", "_")
    url = crashing_server.create_database(name)
    scene = Scene(zygote, tmp_path / "scene", KINDS[:4], 4, url)
    driver = scene.program.start(stop_at=where)

    try:
        crashing_server.stop("immediate")
        driver.wake()
        ended = driver.wait()
    finally:
        driver.kill()
        crashing_server.start()
    assert ended.code == STOPPED, ended.output
    scene.program.run_until_done()

    scene.assert_clean()


@pytest.fixture(scope="module")
def crashing_server() -> Iterator[PostgresServer]:
    """A server of these tests' own: nobody else is on it when it falls over."""
    with PostgresServer(18) as server:
        yield server
