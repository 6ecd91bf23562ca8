"""The JSON documents of every command about a database, as they are promised to users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from semel.cli.app import app
from semel.lease import Owner
from semel.ledgers import open_ledger
from semel.message import Partition
from semel.messaging.outcome import OutcomeRange
from semel.messaging.settings import DAY_SECONDS
from semel.operate.replay import Cursor
from semel.operate.selection import Letters, to_json
from semel.operate.stores import ReplayRun
from semel.pipeline.txn import Scope
from semel.policy.vocabulary import GapPolicy
from tests.messaging.act_world import bury, park
from tests.messaging.cli.test_cli_outbox import two_parked
from tests.messaging.cli_shop import CONSUMER, MODULE, Shop
from tests.messaging.engines import take_over
from tests.messaging.replay_world import gapped
from tests.snapshots import compare, normal
from tests.stores.claims_world import CONSUMER as LEASED
from tests.stores.claims_world import LEASE_SECONDS, lease

ON = ("--consumer", "billing")
ACT = ("--actor", "ann", "--reason", "because", "--yes")


class Scene:
    """A database whose commands' documents are kept."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.shop = Shop(folder / "shop.db", monkeypatch)
        self.found: dict[str, Any] = {}

    def take(self, name: str, *arguments: object, stdin: bytes | None = None) -> Any:
        done = CliRunner().invoke(app, [*map(str, arguments), "--json"], input=stdin)
        document = json.loads(done.stdout)
        self.found[name] = normal(document, self.folder)
        return document


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("semel.cli.database.this_account", lambda: "ann@laptop")
    return Scene(tmp_path, monkeypatch)


def test_the_documents_about_dead_letters_keep_their_keys(scene, monkeypatch):
    take = scene.take
    for name in ("m1", "m2", "m3"):
        scene.shop.fill(lambda world, name=name: bury(world, name))
    scene.shop.fill(lambda world: bury(world, "m4", payload=b"\xff\x00", key=None))

    take("consumers", "consumers")
    take("inbox", "inbox", *ON)
    take("dlq list", "dlq", "list")
    take("dlq show", "dlq", "show", "m1", *ON, "--actor", "ann")
    take("dlq show: bytes", "dlq", "show", "m4", *ON, "--actor", "ann")
    take("dlq retry", "dlq", "retry", "m1", "nobody", *ON, *ACT)
    take("dlq park", "dlq", "park", "m2", *ON, *ACT)
    take("dlq skip", "dlq", "skip", "m3", *ON, *ACT)
    number = take("dlq delete", "dlq", "delete", "m4", *ON, *ACT)["request"]["number"]
    take("parking requests", "parking", "requests")
    take("parking approve: the same", "parking", "approve", number, *ACT)
    monkeypatch.setattr("semel.cli.database.this_account", lambda: "bob@laptop")
    bob = ("--actor", "bob", "--reason", "yes", "--yes")
    take("parking approve", "parking", "approve", number, *bob)
    take("audit list", "audit", "list")
    take("audit verify", "audit", "verify")
    take("dlq list: none", "dlq", "list")

    compare("dlq", scene.found)


def test_the_documents_about_parked_messages_keep_their_keys(scene):
    take = scene.take
    scene.shop.fill(lambda world: park(world, "m1", "m2", "m3", key="customer-7"))
    scene.shop.fill(lambda world: park(world, "n1"))
    scene.shop.fill(lambda world: bury(world, "dead"))

    take("parking list", "parking", "list", *ON)
    take("parking keys", "parking", "keys", *ON)
    take("parking classify", "parking", "classify", "m1", *ON, "--label", "data", *ACT)
    fix = ("parking", "fix", "m1", *ON, "--payload", "-", "--keep-id", *ACT)
    take("parking fix", *fix, stdin=b'{"id": "m1", "amount": 12}')
    take("parking delete", "parking", "delete", "n1", *ON, *ACT)
    take("parking show", "parking", "show", "m1", *ON, "--actor", "ann")
    take("parking show: asked to delete", "parking", "show", "n1", *ON, "--actor", "ann")
    take("parking skip", "parking", "skip", "n1", *ON, *ACT)
    take("parking release", "parking", "release", "--key", "customer-7", *ON, *ACT)
    take("erase", "erase", "--key", "customer-7", *ACT)
    scene.shop.fill(lambda world: world.age(15 * DAY_SECONDS))
    take("retention", "retention", *ON, *ACT)
    take("retention: too short", "retention", *ON, "--topic-days", "30", *ACT)

    compare("parking", scene.found)


def test_the_documents_about_an_outbox_keep_their_keys(scene):
    take = scene.take
    take("outbox status: empty", "outbox", "status")
    scene.shop.fill(two_parked)
    take("outbox status", "outbox", "status")
    take("outbox parked", "outbox", "parked")
    take("outbox retry", "outbox", "retry", "m1", "m2", *ACT)
    take("outbox drop", "outbox", "drop", "m3", *ACT)
    scene.shop.fill(lambda world: world.age(90))
    take("outbox status: silent", "outbox", "status")

    compare("outbox", scene.found)


def test_the_documents_about_replays_keep_their_keys(scene):
    take, shop = scene.take, scene.shop
    shop.bury("m1", "m2", "m3")
    run = ("replay", "run", *CONSUMER, *ACT)
    letters = ("--dead-letters",)

    take("replay dry-run", "replay", "dry-run", *CONSUMER, *letters)
    shop.broken = {"m2"}
    take("replay run: fails", *run, *letters, "--name", "again")
    take("replay status", "replay", "status", "again")
    take("replay abandon", "replay", "abandon", "again", *ACT)
    shop.broken = set()
    take("replay run", *run, *letters, "--name", "once more")
    take("replay list", "replay", "list")
    shop.fill(begin_replay)
    take("replay stop", "replay", "stop", "running", *ACT)
    take("replay stop: finished", "replay", "stop", "once more", *ACT)
    take("explain", "explain", "m1")
    take("explain: unknown", "explain", "m9")

    compare("replay", scene.found)


async def begin_replay(world: Any) -> None:
    run = ReplayRun("running", "billing", to_json(Letters()), "ann", cursor=Cursor().text())
    async with world.database.begin() as unit:
        await unit.replays.begin(run)


def test_the_documents_about_what_is_missing_keep_their_keys(scene):
    take, shop = scene.take, scene.shop

    async def fill(world: Any) -> None:
        await gapped(world, GapPolicy.ALERT)
        place = Partition("payments", 0)
        async with world.database.begin() as unit:
            await unit.outcomes.record(
                "audited",
                [OutcomeRange(place, 0, 4, "success"), OutcomeRange(place, 5, 5, "parked")],
            )
        await lease(world, "stuck")
        await lease(world, "running", seconds=LEASE_SECONDS * 10)
        await world.age(LEASE_SECONDS * 2)

    shop.fill(fill)

    take("gaps list", "gaps", "list")
    take("gaps close", "gaps", "close", *ON, "--key", "k", *ACT)
    complete = ("audit", "completeness", "--consumer", "audited")
    take("audit completeness", *complete, "--committed", "payments/0=8")
    for _ in range(9):
        shop.broker.put("payments", b"{}")
    reader = ("--reader", f"{MODULE}:reader")
    take("audit completeness --reader", *complete, "--committed", "payments/0=8", *reader)
    take("claims list", "claims", "list", "--consumer", LEASED)

    compare("missing", scene.found)


def test_the_documents_about_who_runs_a_consumer_keep_their_keys(scene, tmp_path):
    url = f"sqlite:///{tmp_path / 'pipeline.ledger'}"
    ledger = open_ledger(url)
    scope = Scope(ledger.ledger_id, "payments", "main")
    ledger.release(ledger.acquire(scope, Owner.here(), 60.0))
    ledger.close()
    scene.shop.fill(lambda world: take_over(world.database, scope=scope))
    hand_over = ("consumer", "hand-over", "billing", "--ledger", url, *ACT)

    scene.take("consumers", "consumers")
    scene.take("consumer hand-over", *hand_over)
    scene.take("consumer hand-over: of services", *hand_over)

    compare("engines", scene.found)


def test_the_documents_about_tables_keep_their_keys(scene, tmp_path, monkeypatch):
    monkeypatch.setenv("SEMEL_DATABASE", f"sqlite:///{tmp_path / 'new.db'}")
    take = scene.take

    take("db check: none", "db", "check")
    take("db create", "db", "create")
    take("db create: again", "db", "create")
    take("db upgrade", "db", "upgrade")
    take("db check", "db", "check")

    compare("db", scene.found)
