"""`semel adopt`: what it means in words, and what it writes down."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from semel.lease import Owner
from semel.ledger.sqlite import SqliteLedger
from semel.pipeline.driver import Driver
from semel.pipeline.source import BatchRange, Position, SourceKind, SourceRange, Span
from semel.pipeline.txn import CycleId
from semel.testing.local import local_stage
from tests.unit.cli.cli_world import Shell, World

WHY = ("--why", "disk lost", "--who", "ann")


def write_checkpoint(root: Path, offsets: list[int], finished: int | None, name: str = "new"):
    """Write a Kafka query's checkpoint: batch n ends at offsets[n + 1]; it begins at offsets[0]."""
    for folder in ("offsets", "commits", "sources/0"):
        (root / folder).mkdir(parents=True)
    (root / "metadata").write_text(json.dumps({"id": name}))
    begun = json.dumps({"orders": {"0": offsets[0]}})
    (root / "sources/0/0").write_bytes(b"\x00v1\n" + begun.encode())
    for batch, end in enumerate(offsets[1:]):
        text = f"v1\n{{}}\n{json.dumps({'orders': {'0': end}})}"
        (root / f"offsets/{batch}").write_text(text)
    if finished is not None:
        for batch in range(finished + 1):
            (root / f"commits/{batch}").write_text("v1\n{}")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SEMEL_LEDGER", f"sqlite:///{tmp_path / 'shop.ledger'}")
    return str(tmp_path / "shop.ledger")


@pytest.fixture
def world(url: str) -> World:
    """A pipeline that has committed offsets 0 to 20, and stopped."""
    world = World(SqliteLedger(url)).start()
    world.run()
    world.run()
    return world.stop()


@pytest.fixture
def shell(world: World) -> Shell:
    return Shell(world)


def adopt(shell: Shell, checkpoint: Path, *more: str, code: int = 0):
    done = shell.type("adopt", "--app", "shop", "--checkpoint", str(checkpoint), "--json", *more)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("start", "means", "words"),
    [
        (20, "continues", "goes on where the ledger ends"),
        (5, "overlap", "15 offsets, 5 to 20, are processed a second time"),
        (50, "gap", "30 offsets, 20 to 50, are never processed"),
    ],
)
def test_overlap_and_gap_are_said_in_words_first(shell, tmp_path, start, means, words):
    write_checkpoint(tmp_path / "cp", [start, start + 10], finished=None)

    document = adopt(shell, tmp_path / "cp", "--dry-run")

    assert set(document) == {
        "command", "format", "exit", "adopted", "who", "why", "generation", "plan",
    }  # fmt: skip
    (change,) = document["plan"]["positions"]
    assert (change["before"], change["after"]) == (20, start)
    assert (change["means"], change["words"]) == (means, words)
    assert document["adopted"] is False
    assert shell.world.ledger.generations(shell.world.scope)[-1].number == 1
    text = shell.type("adopt", "--app", "shop", "--checkpoint", str(tmp_path / "cp"), "--dry-run")
    assert words in text.output


def test_adopting_makes_the_next_generation_and_says_who_and_why(world, shell, tmp_path):
    write_checkpoint(tmp_path / "cp", [50, 60], finished=None)

    document = adopt(shell, tmp_path / "cp", *WHY, "--yes")

    assert (document["adopted"], document["generation"]) == (True, 2)
    positions = world.ledger.positions(world.scope, BatchRange()).ends
    assert positions["0", "orders/0"].end == 50
    act = world.ledger.acts(world.scope)[0]
    assert (act.who, act.act, act.why) == ("ann", "adopt", "disk lost")


def test_a_finished_batch_is_behind_the_start(shell, tmp_path):
    write_checkpoint(tmp_path / "cp", [0, 10, 20], finished=1)

    plan = adopt(shell, tmp_path / "cp", "--dry-run")["plan"]

    assert plan["first_batch"] == 2
    assert plan["positions"][0]["means"] == "continues"


def test_it_asks_and_wants_a_reason(world, shell, tmp_path):
    write_checkpoint(tmp_path / "cp", [20, 30], finished=None)
    command = ("adopt", "--app", "shop", "--checkpoint", str(tmp_path / "cp"))

    assert "--why" in adopt(shell, tmp_path / "cp", "--yes", code=2)["error"]
    assert shell.type(*command, *WHY, answer="n\n").exit_code == 130
    assert world.ledger.acts(world.scope) == []
    assert shell.type(*command, *WHY, answer="y\n").exit_code == 0


def test_the_loss_of_state_must_be_accepted(shell, tmp_path):
    write_checkpoint(tmp_path / "cp", [20, 30], finished=None)
    (tmp_path / "cp/state/0").mkdir(parents=True)

    refused = adopt(shell, tmp_path / "cp", *WHY, "--yes", code=4)
    accepted = adopt(shell, tmp_path / "cp", *WHY, "--yes", "--state-lost")

    assert "--state-lost" in refused["error"]
    assert accepted["adopted"] is True


def test_a_running_pipeline_is_not_adopted_behind_its_back(world, shell, tmp_path):
    write_checkpoint(tmp_path / "cp", [20, 30], finished=None)
    world.driver.start()

    held = adopt(shell, tmp_path / "cp", *WHY, "--yes", code=3)
    taken = adopt(shell, tmp_path / "cp", *WHY, "--yes", "--takeover")

    assert "--takeover" in held["error"]
    assert taken["adopted"] is True


def test_files_that_would_be_read_again_are_counted(world, shell, tmp_path):
    path = "file:///in/a.json"
    files = BatchRange((SourceRange("0", SourceKind.FILES, paths=(path,)),))
    world.driver.start()
    cycle = CycleId(world.scope, 1, 2)
    world.driver.run_cycle(cycle, lambda: files, local_stage(world.sinks, ["r"]))
    world.stop()
    root = tmp_path / "cp"
    write_checkpoint(root, [0], finished=None)
    (root / "offsets/0").write_text('v1\n{}\n{"logOffset":0}')
    entry = {"path": path, "timestamp": 1, "batchId": 0}
    (root / "sources/0/0").write_text(f"v1\n{json.dumps(entry)}")

    plan = adopt(shell, root, "--dry-run")["plan"]

    assert plan["files_repeated"] == [f"source 0: {path}"]


def committed_files(world: World, *paths: str) -> None:
    files = BatchRange((SourceRange("0", SourceKind.FILES, paths=paths),))
    world.driver.start()
    cycle = CycleId(world.scope, 1, 2)
    world.driver.run_cycle(cycle, lambda: files, local_stage(world.sinks, ["r"]))
    world.stop()


def test_committed_files_are_left_out_of_a_new_checkpoint(world, shell, tmp_path):
    committed_files(world, "file:///in/a", "file:///in/b")
    root = tmp_path / "cp"
    write_checkpoint(root, [0], finished=None)
    (root / "offsets/0").write_text('v1\n{}\n{"logOffset":0}')
    planned = [{"path": f"file:///in/{n}", "timestamp": 7, "batchId": 0} for n in "bc"]
    (root / "sources/0/0").write_text("\n".join(["v1", *map(json.dumps, planned)]))
    (root / "sources/0/.0.crc").write_text("of what Spark wrote")

    for _ in range(2):  # as after a crash in between
        document = adopt(shell, root, *WHY, "--yes", "--leave-out-files")

        assert (document["plan"]["first_batch"], document["plan"]["files_repeated"]) == (1, [])
        version, *lines = (root / "sources/0/0").read_text().splitlines()
        kept = [{"path": f"file:///in/{n}", "timestamp": 7, "batchId": 0} for n in "ab"]
        assert (version, [json.loads(line) for line in lines]) == ("v1", kept)
        assert (root / "commits/0").exists()
        assert not (root / "sources/0/.0.crc").exists()
    paths = world.ledger.positions(world.scope).paths["0"]
    assert set(paths) == {"file:///in/a", "file:///in/b"}


DAY_MS = 24 * 3600 * 1000


@pytest.mark.parametrize(
    ("times", "gone_at"),
    [
        ({"b": 1, "c": 9}, 9),  # c is new, and newer than all that is committed
        ({"c": 1, "d": 9}, 1),  # nothing that is committed is there any more
        ({"b": 7, "c": 1, "d": 9}, 1),
    ],
)
def test_a_committed_file_that_is_gone_makes_no_new_file_too_old(
    world, shell, tmp_path, times, gone_at
):
    root = tmp_path / "cp"
    kept = leave_out(world, shell, root, times)

    assert kept["file:///in/a"] == gone_at * DAY_MS
    assert kept.get("file:///in/b") == times.get("b", gone_at) * DAY_MS


def test_a_new_file_that_would_never_be_read_is_named_and_nothing_is_left_out(
    world, shell, tmp_path
):
    refused = leave_out(world, shell, tmp_path / "cp", {"b": 9, "c": 1, "d": 8}, code=4)

    assert "would never read 1 files that are not committed" in refused["error"]
    assert "file:///in/c;" in refused["error"]
    assert not list((tmp_path / "cp/commits").iterdir())
    assert len((tmp_path / "cp/sources/0/0").read_text().splitlines()) == 4


def leave_out(world: World, shell: Shell, root: Path, days: dict[str, int], code: int = 0):
    """Commit a and b; then leave them out of a checkpoint that has planned the files of *days*."""
    committed_files(world, "file:///in/a", "file:///in/b")
    write_checkpoint(root, [0], finished=None)
    (root / "offsets/0").write_text('v1\n{}\n{"logOffset":0}')
    planned = [
        {"path": f"file:///in/{name}", "timestamp": day * DAY_MS, "batchId": 0}
        for name, day in days.items()
    ]
    (root / "sources/0/0").write_text("\n".join(["v1", *map(json.dumps, planned)]))
    document = adopt(shell, root, *WHY, "--yes", "--leave-out-files", code=code)
    if code:
        return document
    entries = map(json.loads, (root / "sources/0/0").read_text().splitlines()[1:])
    return {entry["path"]: entry["timestamp"] for entry in entries}


def test_a_checkpoint_with_other_sources_is_left_as_it_is(world, shell, tmp_path):
    write_checkpoint(tmp_path / "cp", [20, 30], finished=None)

    refused = adopt(shell, tmp_path / "cp", *WHY, "--yes", "--leave-out-files", code=4)

    assert "whose sources are all of files" in refused["error"]
    assert not list((tmp_path / "cp/commits").iterdir())


def recreated(world: World, begin: int) -> None:
    """Commit one batch with a topic's id, then meet another topic of the same name."""

    def read(start: int, topic_id: str) -> BatchRange:
        span = {"orders/0": Span(start, start + 10)}
        return BatchRange(
            (SourceRange("0", SourceKind.OFFSETS, span, topic_ids={"orders": topic_id}),)
        )

    world.driver.start()
    for batch, found in ((2, read(20, "id-one")), (3, read(begin, "id-two"))):
        outcome = world.driver.run_cycle(
            CycleId(world.scope, 1, batch),
            lambda found=found: found,
            local_stage(world.sinks, ["r"]),
        )
    assert "created again" in outcome.reason
    world.stop()


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (30, "offsets 0 to 30 of the new one are never processed; to read it from its beginning"),
        (0, "goes on at the beginning of the new one"),
    ],
)
def test_a_topic_that_was_created_again_needs_a_flag(world, shell, tmp_path, start, words):
    recreated(world, begin=30)
    write_checkpoint(tmp_path / "cp", [start, start + 10], finished=None)

    (change,) = adopt(shell, tmp_path / "cp", "--dry-run")["plan"]["positions"]
    assert change["means"] == "recreated"
    assert "its id was id-one and is id-two" in change["words"]
    assert words in change["words"]
    refused = adopt(shell, tmp_path / "cp", *WHY, "--yes", code=4)
    assert "--topic-recreated" in refused["error"]

    adopt(shell, tmp_path / "cp", *WHY, "--yes", "--topic-recreated")
    position = world.ledger.positions(world.scope).ends["0", "orders/0"]
    assert (position.end, position.topic_id) == (start, "id-two")


def test_an_adoption_keeps_the_ids_of_topics(world, shell, tmp_path):
    ledger, scope = world.ledger, world.scope
    lease = ledger.acquire(scope, Owner.here(), 30.0)
    ledger.adopt_generation(lease, "old", 0, {("0", "orders/0"): Position(20, "id-one")})
    ledger.release(lease)
    write_checkpoint(tmp_path / "cp", [20, 30], finished=None)

    adopt(shell, tmp_path / "cp", *WHY, "--yes")

    assert ledger.positions(scope).ends["0", "orders/0"] == Position(20, "id-one")


def test_a_checkpoint_that_was_adopted_under_a_mistyped_name_is_adopted_under_the_right_one(
    world, shell, tmp_path
):
    write_checkpoint(tmp_path / "cp", [20, 30], finished=None)
    command = ("adopt", "--checkpoint", str(tmp_path / "cp"), *WHY, "--yes", "--app")
    assert shell.type(*command, "shpo").exit_code == 0

    assert shell.type(*command, "shop").exit_code == 0

    assert world.ledger.generations(world.scope)[-1].checkpoint == "new"


def test_the_checkpoint_of_another_app_is_recognised(world, shell, tmp_path):
    write_checkpoint(tmp_path / "cp", [20, 30], finished=0, name="checkpoint-1")
    command = ("adopt", "--app", "store", "--checkpoint", str(tmp_path / "cp"), "--json")

    plan = json.loads(shell.type(*command, "--dry-run").stdout)["plan"]
    refused = shell.type(*command, *WHY, "--yes")

    assert plan["belongs_to"] == "shop/main"
    assert refused.exit_code == 4
    error = json.loads(refused.stdout)["error"]
    assert "this checkpoint belongs to shop/main" in error
    assert "semel app rename --from shop" in error


def test_four_thousand_batches_of_files_are_adopted_in_seconds(world, shell, tmp_path):
    root, batches = tmp_path / "cp", 4000
    write_checkpoint(root, [0], finished=None)
    last = batches - 1
    (root / f"offsets/{last}").write_text(f'v1\n{{}}\n{{"logOffset":{last}}}')
    (root / f"commits/{last}").write_text("v1\n{}")
    (root / "sources/0/0").unlink()
    for compacted in (last - 10, last):  # Spark keeps all entries in each, and deletes the others
        entries = [
            json.dumps({"path": f"file:///in/{n}", "timestamp": n, "batchId": n})
            for n in range(compacted + 1)
        ]
        (root / f"sources/0/{compacted}.compact").write_text("\n".join(["v1", *entries]))

    began = time.monotonic()
    adopt(shell, root, *WHY, "--yes")

    assert time.monotonic() - began < 10
    assert len(world.ledger.positions(world.scope).paths["0"]) == batches


@pytest.mark.parametrize("missing", ["cp", "s3://bucket/cp"])
def test_a_checkpoint_that_cannot_be_read_is_named(shell, tmp_path, missing):
    where = missing if "://" in missing else str(tmp_path / missing)

    done = shell.type("adopt", "--app", "shop", "--checkpoint", where, *WHY, "--yes")

    assert done.exit_code in (2, 4)
    assert where in done.stderr
    assert "Traceback" not in done.stderr


def test_the_checkpoint_of_a_plain_query_is_adopted_into_a_new_ledger(url, tmp_path):
    write_checkpoint(tmp_path / "cp", [0, 10], finished=0, name="plain")
    shell = Shell(World())

    refused = adopt(shell, tmp_path / "cp", *WHY, "--yes", code=2)
    assert "--create-ledger" in refused["error"]
    assert not Path(url).exists()

    document = adopt(shell, tmp_path / "cp", *WHY, "--yes", "--create-ledger")

    assert document["plan"]["first_batch"] == 1
    ledger = SqliteLedger(url)
    driver = Driver("shop", ledger, shell.world.sinks)
    assert ledger.generations(driver.scope)[0].checkpoint == "plain"
