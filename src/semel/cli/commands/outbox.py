"""`semel outbox status | parked | retry | drop`: messages that wait to be sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

from semel.cli.database import (
    Actor,
    AnyMessagesArgument,
    Books,
    LimitOption,
    MessagesArgument,
    acting,
    asking,
)
from semel.cli.messages import ACTED, act_on_each
from semel.cli.options import MOST_ROWS, option
from semel.cli.preamble import command
from semel.cli.render import (
    Field,
    Line,
    Rows,
    Shape,
    at,
    column,
    counted,
    facts,
    lasting,
    name_of,
    some_of,
)
from semel.errors import Misuse
from semel.lease import Owner
from semel.messaging.send.outbox import Leader, OutboxEntry
from semel.operate.audit import Acts
from semel.operate.outbox import (
    NotParked,
    OutboxStatus,
    ParkedEntries,
    need_outbox,
    outbox_status,
    parked_entries,
    parked_ids,
    send_again,
)
from semel.operate.outbox import drop as drop_message

OutboxOption: TypeAlias = Annotated[str, option("--outbox", "Which outbox.", "NAME")]


def owner_of(leader: Leader) -> str:
    """Process and host of the relay; empty where the last relay was stopped."""
    try:
        return str(Owner.from_json(json.loads(leader.owner)))
    except (ValueError, TypeError):
        return leader.owner


def is_erased(entry: OutboxEntry) -> bool:
    """Whether its payload was erased."""
    return entry.erased_at is not None


def _reason(entry: OutboxEntry) -> str:
    return ("(erased) " if is_erased(entry) else "") + entry.parked_reason


Shape(
    OutboxStatus,
    Field("outbox"),
    Field("pending", "numbers.pending"),
    Field("parked", "numbers.parked"),
    Field("oldest_seconds", "numbers.oldest_seconds"),
    Field("leader"),
)
Shape(Leader, Field("owner", owner_of), whole=True)
ENTRY = Shape(
    OutboxEntry,
    Field("message_id", head="message", cell=name_of),
    Field("topic", head="topic"),
    Field("key", head="key", cell=name_of, means="Later messages of this key and topic wait."),
    Field("attempts", head="attempts", right=True),
    Field("created_at", head="written", cell=at),
    column("reason", _reason),
    Field("reason", "parked_reason"),
    Field("erased", is_erased),
)


@command("outbox status", asking, OutboxStatus)
def status(books: Books, *, outbox: OutboxOption = "outbox") -> None:
    """Show how many messages wait, for how long, and which process relays them.

    Exit code 1: messages are parked, or they wait and no relay runs.

    Example: semel outbox status --database postgresql://db/shop
    """
    books.ask(need_outbox, outbox)
    books.reply(books.ask(outbox_status, outbox), _status_lines)


@command("outbox parked", asking, ParkedEntries)
def parked(books: Books, *, outbox: OutboxOption = "outbox", limit: LimitOption = 50) -> None:
    """List messages that the broker will never take as they are, without their payloads.

    Example: semel outbox parked --database postgresql://db/shop
    """
    books.ask(need_outbox, outbox)
    books.reply(books.ask(parked_entries, outbox, limit), _parked_lines)


@command("outbox retry", acting, Acts, adds=("outbox", *ACTED))
def retry(
    actor: Actor,
    *,
    messages: AnyMessagesArgument = None,
    every: Annotated[bool, option("--all", "Every parked message instead of named ones.")] = False,
    topic: Annotated[
        str | None, option("--topic", "With --all: only this topic's.", "TOPIC")
    ] = None,
    refused_with: Annotated[
        str | None, option("--refused-with", "With --all: only where the reason says this.", "TEXT")
    ] = None,
    outbox: OutboxOption = "outbox",
) -> None:
    """Let the relay send parked messages again; later messages of their keys follow them.

    With --all: all of them, or those of one topic or with one reason; never one whose payload
    was erased.  Exit code 1: one of them could not be sent again.

    Example: semel outbox retry m-17 --reason "the topic exists now"
    """
    filters = (topic, refused_with)
    meant = messages or []
    if bool(meant) is every or (meant and filters != (None, None)):
        raise Misuse("name the messages, or say --all; --topic and --refused-with go with --all")
    if every:
        meant = actor.ask(parked_ids, outbox, topic=topic, refused_with=refused_with)
    if meant:
        _need_parked(actor, outbox, meant)
        actor.confirm(f"Send {counted(len(meant), 'message')} of {outbox} again?")
    act_on_each(actor, send_again, meant, "the relay sends it again", outbox=outbox)


@command("outbox drop", acting, Acts, adds=("outbox", *ACTED))
def drop(actor: Actor, *, messages: MessagesArgument, outbox: OutboxOption = "outbox") -> None:
    """Delete parked messages: they are never sent; needs a reason.

    Later messages of their keys go on.  Exit code 1: one of them could not be dropped.

    Example: semel outbox drop m-17 --reason "the customer was called"
    """
    _need_parked(actor, outbox, messages)
    actor.confirm(f"Drop {counted(len(messages), 'message')} of {outbox} permanently?")
    act_on_each(actor, drop_message, messages, "dropped", outbox=outbox)


def _need_parked(actor: Actor, outbox: str, messages: Sequence[str]) -> None:
    """Check that some of the messages are parked."""
    parked = actor.ask(parked_entries, outbox, MOST_ROWS).messages
    if not {entry.message_id for entry in parked}.intersection(messages):
        raise NotParked(outbox, messages[0])


def _status_lines(status: OutboxStatus) -> Iterator[Line]:
    numbers, leader = status.numbers, status.leader
    if leader is None:
        relays = "no relay ever ran"
    elif leader.seconds_left > 0:
        relays = f"{owner_of(leader)}, for {lasting(leader.seconds_left)} more unless renewed"
    else:
        relays = f"none; the last was {owner_of(leader) or 'stopped'}"
    yield facts(
        {
            "outbox": status.outbox,
            "pending": counted(numbers.pending, "message"),
            "oldest": lasting(numbers.oldest_seconds) if numbers.pending else "-",
            "parked": counted(numbers.parked, "message"),
            "relayed by": relays,
        }
    )


def _parked_lines(found: ParkedEntries) -> Iterator[Line | Rows]:
    yield ENTRY.table(found.messages)
    yield some_of(len(found.messages), found.total, "parked message", found.outbox)
