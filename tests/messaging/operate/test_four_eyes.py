"""Two people delete a message: two names, two accounts, and one payload."""

from __future__ import annotations

import pytest

from semel.codec import FromHeader
from semel.message import Coordinates, Message
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import DELETED, ClaimState
from semel.messaging.handler import consumer
from semel.messaging.outcome import Refused
from semel.messaging.records import conflict_id
from semel.messaging.send.outbox import parent_of
from semel.messaging.settings import ConsumerSettings
from semel.operate.audit import NotPossible
from semel.operate.deletion import (
    SameAccount,
    SamePerson,
    approve_delete,
    ask_to_delete,
    ask_to_delete_dead_letter,
    refuse_delete,
)
from semel.operate.parking import KeepId, classify, fix
from semel.operate.stores import Account, ApprovalDecision, acting_from, same_name
from semel.outboxes import Outbox
from tests.messaging.act_world import (
    ANN,
    BILLING,
    bury,
    claim_of,
    details,
    letter_of,
    park,
    waiting_of,
)
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world

SAME = [
    ("ann", " Ann\t"),
    ("ann", "ann\u200b"),
    ("ann", "a\u2060nn"),
    ("ann", "\u202eann"),
    ("ann", "a\u00adnn"),
    ("ann", "ann\ufe0f"),
    ("ann", "ann\u3164"),
    ("ann", "ａｎｎ"),
    ("ann lee", "ann\u00a0 lee"),
    ("Åsa", "A\u030asa"),
    ("Åsa", "\u212bsa"),
    ("straße", "STRASSE"),
]
DIFFERENT = [("ann", "anna"), ("ann", "a\u0301nn"), ("ann lee", "annlee"), ("Åsa", "Asa")]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_names_that_read_the_same_are_the_same(one, other):
    assert same_name(one, other)
    assert same_name(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_names_are_other_people(one, other):
    assert not same_name(one, other)


class FourEyes:
    @in_world
    async def test_a_name_that_reads_the_same_decides_nothing(self, world):
        await park(world, "m1")
        asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)

        for decide in (approve_delete, refuse_delete):
            with pytest.raises(SamePerson):
                await decide(world.database, asked.number, actor="Ann\u200b")

        assert await waiting_of(world, "m1") is not None

    @in_world
    async def test_an_approval_is_about_the_payload_that_was_asked_for(self, world):
        await park(world, "m1")
        asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)
        fixed = {"ids": KeepId(), "actor": "cy", "reason": "the amount was missing"}
        await fix(world.database, BILLING, "m1", b'{"amount": 1000}', **fixed)

        with pytest.raises(NotPossible, match="was changed"):
            await approve_delete(world.database, asked.number, actor="bob")
        still = await waiting_of(world, "m1")
        await refuse_delete(world.database, asked.number, actor="bob")
        again = await ask_to_delete(world.database, BILLING, "m1", **ANN)
        done = await approve_delete(world.database, again.number, actor="bob")

        assert still.payload == b'{"amount": 1000}'
        assert done.decision is ApprovalDecision.APPROVED
        assert await waiting_of(world, "m1") is None

    @in_world
    async def test_a_letter_that_came_back_with_another_payload_is_not_deleted(self, world):
        await bury(world)
        asked = await ask_to_delete_dead_letter(world.database, BILLING, "m1", **ANN)
        async with world.database.begin() as unit:
            await unit.dead_letters.remove(BILLING, "m1")
        await bury(world, payload=b"other")

        with pytest.raises(NotPossible, match="was changed"):
            await approve_delete(world.database, asked.number, actor="bob")

        assert (await letter_of(world, "m1")).payload == b"other"

    @in_world
    async def test_one_account_does_not_approve_what_it_asked_for(self, world):
        await park(world, "m1")
        with acting_from(Account("root@shop-1")):
            asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)
            with pytest.raises(SameAccount, match="root@shop-1"):
                await approve_delete(world.database, asked.number, actor="bob")
        still = await waiting_of(world, "m1")
        with acting_from(Account("bob@shop-1")):
            await approve_delete(world.database, asked.number, actor="bob")

        assert still is not None
        assert await waiting_of(world, "m1") is None
        assert (await details(world))["account"] == "bob@shop-1"

    @in_world
    async def test_one_account_is_the_same_person_on_another_host(self, world):
        await park(world, "m1")
        with acting_from(Account("ann@shop-1")):
            asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)
        with acting_from(Account("Ann@shop-2")), pytest.raises(SameAccount, match="ann@shop-1"):
            await approve_delete(world.database, asked.number, actor="bob")

        assert await waiting_of(world, "m1") is not None

    @in_world
    async def test_a_shared_account_approves_and_the_trail_says_so(self, world):
        await park(world, "m1")
        with acting_from(Account("ops@shop-1", shared=True)):
            asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)
            await approve_delete(world.database, asked.number, actor="bob")

        said = await details(world)
        assert (said["account"], said["shared_account"]) == ("ops@shop-1", True)
        assert await waiting_of(world, "m1") is None

    @in_world
    async def test_every_act_says_from_which_account_it_was_done(self, world):
        await park(world, "m1")
        with acting_from(Account("root@shop-1")):
            await classify(world.database, BILLING, "m1", "data", actor="ann")
        first = await details(world)
        await classify(world.database, BILLING, "m1", "schema", actor="ann")

        assert first == {"label": "data", "before": "", "account": "root@shop-1"}
        assert await details(world) == {"label": "schema", "before": "data"}

    @in_world
    async def test_a_deleted_letter_leaves_no_payload_and_a_claim_that_says_so(self, world):
        handle = telling()
        await handle_message(handle, world.database, message())
        asked = await ask_to_delete_dead_letter(world.database, BILLING, "m1", **ANN)

        await approve_delete(world.database, asked.number, actor="bob")

        claim = await claim_of(world, "m1")
        assert (claim.state, claim.marker) == (ClaimState.FAILED_TERMINAL, DELETED)
        assert await outgoing(world, "m1") == [("payments.dlq", None)]
        again = await handle_message(handle, world.database, message())
        assert again == Refused(f"dead letter ({DELETED})")
        assert await letter_of(world, "m1") is None

    @in_world
    async def test_a_deleted_conflict_leaves_what_its_namesake_sent(self, world):
        handle = telling(sends=Outbox())
        await handle_message(handle, world.database, message())
        await handle_message(handle, world.database, message(b'{"v": 2}'))
        made_up = conflict_id("m1", message(b'{"v": 2}').digest)
        asked = await ask_to_delete_dead_letter(world.database, BILLING, made_up, **ANN)

        await approve_delete(world.database, asked.number, actor="bob")

        claim = await claim_of(world, "m1")
        assert claim.state is ClaimState.COMPLETED
        assert await outgoing(world, made_up) == [("payments.dlq", None)]
        assert await outgoing(world, "m1") == [("invoices", b"1")]
        assert (await claim_of(world, made_up)).marker == DELETED


def telling(sends=None):
    """Return a consumer whose letters go to a topic; it fails where it sends nothing."""
    settings = ConsumerSettings(dead_letter_topic="payments.dlq")

    @consumer(BILLING, policy=settings, id_from=FromHeader("message-id"))
    async def handle(message, session):
        if sends is None:
            raise NonRetryableMessageError("no such account")
        await sends.add(session, topic="invoices", payload=b"1")

    return handle


def message(raw=b'{"v": 1}'):
    headers = {"message-id": b"m1"}
    return Message("m1", {}, raw, "k", headers=headers, source=Coordinates("payments", 0, 1))


async def outgoing(world, parent):
    async with world.database.begin() as unit:
        entries = await unit.outbox.children(parent_of(BILLING, parent))
    return [(entry.topic, entry.value) for entry in entries]


class TestFourEyesInSqlite(InSqlite, FourEyes):
    pass


class TestFourEyesInPostgres(InPostgres, FourEyes):
    pass
