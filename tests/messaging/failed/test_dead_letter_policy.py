"""What a policy says of dead letters is carried out: their topic, and who looks at them first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.codec import Unread, Unreadable
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Partition, Record
from semel.messaging.failed.deadletters import headers_of, record_of
from semel.messaging.handle.attempt import handle_unreadable
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.records import DeadLetterFilter
from semel.messaging.send.relay import Relay
from semel.operate.audit import NotPossible
from semel.operate.deadletters import (
    inspect_dead_letter,
    park_dead_letter,
    retry_dead_letter,
)
from semel.operate.selection import Letters, Offsets
from tests.messaging.act_world import ANN, BILLING, letter_of, letters, waiting_of
from tests.messaging.outgoing import pending
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.replay_world import DEAD, P0, Service, counts, message
from tests.stores.deadletters import LETTER
from tests.stores.world import DatabaseContract, in_world

DLQ = "payments.dlq"
TOLD = replace(DEAD, dead_letter_topic=DLQ, dead_letter_owner="team-billing")
REVIEWED = replace(DEAD, review_dead_letters=True)


async def dead_service(world, settings, *ids):
    service = await Service(world, settings).open()
    service.refuse(*ids)
    await service.deliver(*ids, key="customer-7")
    service.heal()
    return service


class DeadLetterTopic(DatabaseContract):
    @in_world
    async def test_a_dead_letter_goes_to_its_topic_through_the_outbox(self, world):
        await dead_service(world, TOLD, "m1")
        broker = MemoryBroker({DLQ: 1})

        await Relay(world.database, broker.publisher()).run_until_empty()

        (record,) = await broker.reader().read(Partition(DLQ, 0), 0, 10)
        assert record.value == message("m1", "customer-7").raw
        assert record.key == b"customer-7"
        said = {
            name.removeprefix("dead-letter-"): value.decode()
            for name, value in record.headers.items()
            if name.startswith("dead-letter-")
        }
        assert said["consumer"] == BILLING
        assert said["message-id"] == "m1"
        assert (said["topic"], said["partition"], said["offset"]) == ("payments", "0", "1")
        assert said["error-code"] == "REJECTED"
        assert said["exception"].endswith("NonRetryableMessageError")
        assert (said["reason"], said["attempts"]) == ("no such account", "1")
        assert said["owner"] == "team-billing"
        assert said["last-failed-at"].endswith("+00:00")
        assert record.headers["message-id"] != b"m1"
        assert await letters(world) == 1

    @in_world
    async def test_without_a_topic_nothing_is_published(self, world):
        await dead_service(world, DEAD, "m1")

        assert await letters(world) == 1
        assert await pending(world) == []

    @in_world
    async def test_a_message_that_fails_again_is_published_again_under_another_id(self, world):
        service = await dead_service(world, TOLD, "m1")
        service.refuse("m1")
        await world.age(60.0)

        await service.run(Letters(DeadLetterFilter()))

        first, second = await pending(world)
        assert first.message_id != second.message_id
        assert await letters(world) == 1

    @in_world
    async def test_a_record_that_was_no_message_is_published_with_its_bytes(self, world):
        service = await Service(world, TOLD).open()
        record = Record(Coordinates("payments", 0, 3), b"\xff\x00", b"k\xff\x00", {}, 0.0)
        unreadable = Unreadable(record, Unread.UNDECODABLE, "not JSON")

        await handle_unreadable(service.consumer, world.database, unreadable)

        (entry,) = await pending(world)
        assert entry.value == b"\xff\x00"
        assert entry.headers["dead-letter-outcome"] == b"deserialization_failure"

    @in_world
    async def test_a_letter_of_the_inbox_is_published_too(self, world):
        service = await Service(world, TOLD).open()
        service.refuse("m1")
        await Inbox(service.consumer, world.database).store(message("m1"))

        await InboxWorker(service.consumer, world.database).run_until_empty()

        (entry,) = await pending(world)
        assert (entry.topic, entry.headers["dead-letter-message-id"]) == (DLQ, b"m1")


class DeadLetterReview(DatabaseContract):
    @in_world
    async def test_nobody_sends_a_letter_back_that_nobody_has_looked_at(self, world):
        await dead_service(world, REVIEWED, "m1")
        assert (await letter_of(world, "m1")).needs_review

        for act in (retry_dead_letter, park_dead_letter):
            with pytest.raises(NotPossible, match=r"dlq\.manualReviewRequired"):
                await act(world.database, BILLING, "m1", **ANN)
        await inspect_dead_letter(world.database, BILLING, "m1", actor="bob")

        assert await retry_dead_letter(world.database, BILLING, "m1", **ANN) == 1

    @in_world
    async def test_a_letter_that_failed_again_is_looked_at_again(self, world):
        service = await dead_service(world, REVIEWED, "m1")
        await inspect_dead_letter(world.database, BILLING, "m1", actor="bob")
        service.refuse("m1")
        assert counts(await service.run(Letters(DeadLetterFilter()))) == {"failed": 1}

        with pytest.raises(NotPossible, match="there was no review since its last failure"):
            await retry_dead_letter(world.database, BILLING, "m1", **ANN)

    @in_world
    async def test_a_replay_refuses_what_nobody_has_looked_at(self, world):
        service = await dead_service(world, REVIEWED, "m1", "m2")
        await inspect_dead_letter(world.database, BILLING, "m2", actor="bob")

        report = await service.run(Letters(DeadLetterFilter()))

        assert counts(report) == {"handled": 1, "refused": 1}
        assert await letter_of(world, "m1") is not None
        assert await waiting_of(world, "m1") is None

    @in_world
    async def test_an_inbox_tries_nothing_again_that_nobody_has_looked_at(self, world):
        service = await Service(world, REVIEWED).open()
        inbox = Inbox(service.consumer, world.database)
        service.refuse("m1")
        await inbox.store(message("m1"))
        await InboxWorker(service.consumer, world.database).run_until_empty()
        service.heal()

        with pytest.raises(NotPossible, match=r"dlq\.manualReviewRequired"):
            await retry_dead_letter(world.database, BILLING, "m1", **ANN)
        assert counts(await service.run(Letters())) == {"refused": 1}
        await InboxWorker(service.consumer, world.database).run_until_empty()
        unseen = await service.paid()
        await inspect_dead_letter(world.database, BILLING, "m1", actor="bob")

        assert unseen == []
        assert await retry_dead_letter(world.database, BILLING, "m1", **ANN) == 1

    @in_world
    async def test_a_range_does_not_bring_back_an_unreadable_record_that_nobody_has_looked_at(
        self, world
    ):
        service = await Service(world, REVIEWED).open()
        service.put("m1", value=b"not json")
        await service.run(Offsets(P0, 0, 0), name="first")
        service.read_everything()

        unseen = [
            counts(await service.run(Letters(), name="letters")),
            counts(await service.run(Offsets(P0, 0, 0), name="range")),
        ]
        paid = await service.paid()
        await inspect_dead_letter(world.database, BILLING, "unreadable:payments/0/0", actor="bob")
        seen = await service.run(Offsets(P0, 0, 0), name="again")

        assert (unseen, paid) == ([{"refused": 1}, {"refused": 1}], [])
        assert counts(seen) == {"handled": 1}
        assert await service.paid() == ["m1"]
        assert await letters(world) == 0

    @in_world
    async def test_without_that_policy_nobody_has_to_look(self, world):
        await dead_service(world, DEAD, "m1")

        assert await retry_dead_letter(world.database, BILLING, "m1", **ANN) == 1


class TestTopicInSqlite(InSqlite, DeadLetterTopic):
    pass


class TestTopicInPostgres(InPostgres, DeadLetterTopic):
    pass


class TestReviewInSqlite(InSqlite, DeadLetterReview):
    pass


class TestReviewInPostgres(InPostgres, DeadLetterReview):
    pass


def test_the_thirteen_fields_are_in_the_record():
    record = record_of(LETTER, DLQ, "outbox")

    assert record.value == LETTER.payload
    assert record.key == LETTER.key
    assert set(LETTER.headers) < set(record.headers)
    names = {name.removeprefix("dead-letter-") for name in record.headers}
    assert names >= {
        "topic",
        "partition",
        "offset",
        "key",
        "consumer",
        "reason",
        "exception",
        "attempts",
        "first-failed-at",
        "last-failed-at",
        "schema-version",
        "correlation-id",
    }


def test_the_records_own_id_is_the_relays_to_write():
    letter = replace(LETTER, headers={"message-id": b"m1", "trace": b"t"}, key="nul\0inside")

    assert "message-id" not in headers_of(letter)
    assert record_of(letter, DLQ, "outbox").key == "nul\0inside"
