"""`semel erase`: remove the payloads of a key or of a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from semel.cli.database import Actor, acting
from semel.cli.options import option
from semel.cli.plain import given
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Shape, counted
from semel.errors import Misuse
from semel.operate.explain import explain_message
from semel.operate.retention import Erased
from semel.operate.retention import erase as erase_payloads

Shape(Erased, Field("left"), whole=True)


@command("erase", acting, Erased, adds=("actor", "reason"))
def erase(
    actor: Actor,
    *,
    key: Annotated[
        str | None, option("--key", "All messages of this key.", "KEY", parser=given)
    ] = None,
    message: Annotated[
        str | None,
        option("--message", "This message, under every id it was given.", "ID", parser=given),
    ] = None,
) -> None:
    """Remove payloads and headers everywhere, for all consumers; needs a reason.

    From dead letters, waiting messages, their revisions, the inbox, the outbox and kept
    results.  An erased message is never handled and never sent.  Hashes and the audit trail
    stay.  Only what is stored is erased: if a message is being handled now, run it again later.

    Example: semel erase --key customer-7 --reason "request 4711 of the customer"
    """
    if (key is None) == (message is None):
        raise Misuse("say what to erase: --key, or --message")
    what = f"the key {key!r}" if key is not None else f"message {message!r}"
    if message is not None and not (actor.yes or actor.answer.as_json):
        known = actor.ask(explain_message, message)
        if known.needs_attention:
            raise Misuse(f"no consumer knows message {message!r}; --yes erases without looking")
    actor.confirm(f"Erase every payload of {what} in {actor.database}, permanently?")

    def progress(messages: int) -> None:
        actor.answer.tell(lambda: f"{counted(messages, 'waiting message')} closed so far")

    erased = actor.ask(
        erase_payloads, key=key, message_id=message, progress=progress, **actor.given
    )
    actor.reply(erased, _erased_lines, **actor.given)


def _erased_lines(erased: Erased) -> Iterator[Line]:
    yield (
        f"erased: {counted(erased.dead_letters, 'dead letter')}, "
        f"{counted(erased.waiting, 'waiting message')}, "
        f"{counted(erased.revisions, 'revision')}, {erased.inbox} in the inbox, "
        f"{erased.outbox} in the outbox, {counted(erased.results, 'kept result')}"
    )
    yield erased.left
