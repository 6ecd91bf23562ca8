"""`semel dlq list | show | retry | park | skip | delete`: the dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

from semel.cli.database import (
    Actor,
    Books,
    CodeFilter,
    ConsumerFilter,
    ConsumerOption,
    KeyFilter,
    LimitOption,
    MessageArgument,
    MessagesArgument,
    acting,
    asking,
    inspecting,
)
from semel.cli.messages import (
    ACTED,
    CONTENT,
    Request,
    act_on_each,
    acts_of,
    content_facts,
    is_erased,
    payload_lines,
    payload_shown,
    reason_shown,
    reply_asked,
)
from semel.cli.options import option
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Rows, Shape, at, column, counted, facts, name_of, some_of
from semel.cli.selection import ForbiddingOption, rules_of
from semel.messaging.records import DeadLetter, DeadLetterFilter
from semel.operate import deadletters
from semel.operate.audit import Acts, need_letter
from semel.operate.deletion import ask_to_delete_dead_letter

LETTER = Shape(
    DeadLetter,
    Field("consumer", head="consumer"),
    Field("message_id", head="message", cell=name_of),
    Field("key", head="key", cell=name_of),
    Field("source", means="Topic, partition and offset of the record."),
    Field("outcome", head="outcome"),
    Field("error_code", head="code"),
    Field("attempts", head="attempts"),
    Field("first_failed_at"),
    Field("last_failed_at", head="failed", cell=at),
    column("reason", reason_shown),
    Field("reason"),
    Field("exception"),
    Field("owner"),
    Field("erased", is_erased),
)
Shape(
    deadletters.LetterInspection,
    Field("letter", "message"),
    *CONTENT,
    Field("timestamp", "message.timestamp", means="The broker's time of the record."),
    Field("expected_hash", "message.expected_hash"),
    Field("sent_back"),
    Field("acts", acts_of),
)


@command("dlq list", asking, deadletters.DeadLetterList)
def list_letters(
    books: Books,
    *,
    consumer: ConsumerFilter = None,
    key: KeyFilter = None,
    topic: Annotated[str | None, option("--topic", "Only from this topic.", "NAME")] = None,
    error_code: CodeFilter = None,
    outcome: Annotated[
        str | None,
        option(
            "--outcome", "dlq, deserialization_failure, schema_incompatible or conflict.", "NAME"
        ),
    ] = None,
    limit: LimitOption = 50,
) -> None:
    """List dead letters, the oldest first, without their payloads.

    Example: semel dlq list --database postgresql://db/shop --consumer billing
    """
    which = DeadLetterFilter(
        consumer=consumer, key=key, topic=topic, error_code=error_code, outcome=outcome
    )
    found = books.ask(deadletters.dead_letters, which, limit)
    total = some_of(len(found.letters), found.total, "dead letter", books.database)
    books.reply(found, lambda _: (LETTER.table(found.letters), total))


@command("dlq show", inspecting, deadletters.LetterInspection)
def show(actor: Actor, *, message: MessageArgument, consumer: ConsumerOption) -> None:
    """Show one dead letter with its payload; the audit trail says that you looked.

    Example: semel dlq show m-17 --consumer billing --database postgresql://db/shop
    """
    found = actor.ask(deadletters.inspect_dead_letter, consumer, message, actor=actor.name)
    actor.reply(found, _inspection_lines)


@command("dlq retry", acting, Acts, adds=("consumer", *ACTED))
def retry(
    actor: Actor,
    *,
    messages: MessagesArgument,
    consumer: ConsumerOption,
    at_most: Annotated[
        int, option("--at-most", "How often one letter may be sent back.", min=1)
    ] = deadletters.MOST_RETRIES,
    policy: ForbiddingOption = None,
) -> None:
    """Send dead letters back to their consumer, under their own ids.

    They wait for the consumer's retry worker, due at once.  A policy that forbids replays
    forbids this, too: --policy, $SEMEL_POLICY, or that of a running process of the consumer.
    Exit code 1: one of them could not be sent back.

    Example: semel dlq retry m-17 m-18 --consumer billing --reason "fixed in 2.4.1"
    """
    actor.confirm_about(
        need_letter,
        consumer,
        messages,
        f"Send {counted(len(messages), 'dead letter')} back to {consumer}?",
    )
    rules = rules_of(policy, consumer)
    act = partial(deadletters.retry_dead_letter, at_most=at_most, rules=rules)
    note = "sent back (attempt {})".format
    act_on_each(actor, act, messages, note, consumer=consumer)


@command("dlq park", acting, Acts, adds=("consumer", *ACTED))
def park(actor: Actor, *, messages: MessagesArgument, consumer: ConsumerOption) -> None:
    """Move dead letters to the parking lot, where they can be fixed.

    Example: semel dlq park m-17 --consumer billing --reason "the amount must be corrected"
    """
    actor.confirm_about(
        need_letter,
        consumer,
        messages,
        f"Park {counted(len(messages), 'dead letter')} of {consumer}?",
    )
    act_on_each(actor, deadletters.park_dead_letter, messages, "parked", consumer=consumer)


@command("dlq skip", acting, Acts, adds=("consumer", *ACTED))
def skip(actor: Actor, *, messages: MessagesArgument, consumer: ConsumerOption) -> None:
    """Decide that dead letters never have an effect; needs a reason.

    Example: semel dlq skip m-17 --consumer billing --reason "a test order"
    """
    actor.confirm_about(
        need_letter,
        consumer,
        messages,
        f"Skip {counted(len(messages), 'dead letter')} of {consumer} permanently?",
    )
    act_on_each(actor, deadletters.skip_dead_letter, messages, "skipped", consumer=consumer)


@command("dlq delete", acting, Request)
def delete(actor: Actor, *, message: MessageArgument, consumer: ConsumerOption) -> None:
    """Ask for the deletion of a dead letter; a second person must approve it.

    The approval is `semel parking approve`, with the number that this prints.

    Example: semel dlq delete m-17 --consumer billing --reason "sent to the wrong topic"
    """
    actor.confirm_about(
        need_letter, consumer, [message], f"Ask to delete the dead letter {message} of {consumer}?"
    )
    reply_asked(actor, ask_to_delete_dead_letter, consumer, message)


def _inspection_lines(found: deadletters.LetterInspection) -> Iterator[Line | Rows]:
    one = found.message
    yield facts(
        {
            "message": f"{one.message_id} of {one.consumer}, {one.outcome}",
            "key": one.key,
            "source": one.source,
            "reason": one.reason,
            "exception": f"{one.exception or '-'} ({one.error_code})",
            "attempts": f"{one.attempts}, first failed {at(one.first_failed_at)}, "
            f"last {at(one.last_failed_at)}",
            "owner": one.owner or "none",
            **content_facts(one),
            "sent back": f"{found.sent_back} times",
            "acts": acts_of(found),
        }
    )
    yield from payload_lines(payload_shown(found))
