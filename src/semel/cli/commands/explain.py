"""`semel explain` and `semel gaps list | close`: the history of a message; missing versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from rich.text import Text

from semel.cli.database import (
    Actor,
    Books,
    ConsumerFilter,
    LimitOption,
    MessageArgument,
    acting,
    asking,
)
from semel.cli.options import option
from semel.cli.plain import given
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Rows, Shape, at, bold, column, counted, listed, name_of
from semel.cli.selection import load_consumer
from semel.errors import Misuse
from semel.messaging.records import FailedAttempt, Gap
from semel.operate.explain import (
    Explanation,
    Moment,
    close_gaps,
    explain_message,
    gaps_of_key,
    open_gaps,
    pass_over_gaps,
)


def last_missing(gap: Gap) -> int:
    """The last version that is missing."""
    return gap.found - 1


def _missing(gap: Gap) -> str:
    last = last_missing(gap)
    return str(last) if gap.expected == last else f"{gap.expected} to {last}"


MOMENT = Shape(
    Moment,
    Field("at", head="  when", cell=lambda seconds: f"  {at(seconds)}"),
    Field("what", head="what"),
    Field("words", head=" "),
)
Shape(FailedAttempt, Field("at", means="When it failed."), whole=True)
GAP = Shape(
    Gap,
    Field("consumer", head="consumer"),
    Field("key", head="key", cell=name_of),
    column("missing", _missing),
    Field("first_missing", "expected"),
    Field("last_missing", last_missing),
    Field("found", head="came", cell=str, right=True),
    Field("since", head="since", cell=at),
)


@dataclass(frozen=True, slots=True)
class OpenGaps:
    """The answer to `semel gaps list`."""

    gaps: list[Gap]

    @property
    def needs_attention(self) -> bool:
        """Say whether a version did not come."""
        return bool(self.gaps)


@dataclass(frozen=True, slots=True)
class ClosedGaps:
    """The answer to `semel gaps close`."""

    gaps: list[Gap]
    passed_over: bool
    """The missing versions are not waited for any more."""


@command("explain", asking, Explanation)
def explain(
    books: Books,
    *,
    message: MessageArgument,
    consumer: ConsumerFilter = None,
    sent_to: Annotated[
        list[str] | None,
        option("--sent-to", "Look for what it sent there; may be repeated.", "TOPIC"),
    ] = None,
) -> None:
    """Tell one message's story: where it came from, what was tried, who did what, what it sent.

    For every consumer that knows it; no payload is shown.  Of what it sent, the outbox has what
    was not delivered yet; with --sent-to the ids of the rest are computed, and looked up at the
    consumers in this database.  Exit code 2: no consumer knows it.

    Example: semel explain m-17 --sent-to invoices --database postgresql://db/shop
    """
    found = books.ask(explain_message, message, consumer, sent_to or ())
    if found.needs_attention:
        raise Misuse(f"no consumer in {books.database} knows a message {message!r}")
    books.reply(found, _story_lines)


@command("gaps list", asking, OpenGaps)
def list_gaps(books: Books, *, consumer: ConsumerFilter = None, limit: LimitOption = 50) -> None:
    """List versions that did not come, the oldest gap first.

    Exit code 1: there are some.

    Example: semel gaps list --database postgresql://db/shop
    """
    gaps = books.ask(open_gaps, consumer, limit)
    shown = GAP.table(gaps) if gaps else bold("nothing is missing", "green")
    books.reply(OpenGaps(gaps), lambda _: (shown,))


@command("gaps close", acting, ClosedGaps, adds=("actor", "reason"))
def close(
    actor: Actor,
    *,
    key: Annotated[str, option("--key", "The aggregate's key.", "KEY", parser=given)],
    consumer: ConsumerFilter = None,
    spec: Annotated[
        str | None,
        option(
            "--handler",
            "With --pass-over, instead of --consumer: its code reads the versions.",
            "MODULE:NAME",
        ),
    ] = None,
    pass_over: Annotated[
        bool, option("--pass-over", "The versions never come: the lowest one that waits is next.")
    ] = False,
) -> None:
    """Take a key's gaps off the list; needs a reason, which the audit trail keeps.

    With --pass-over, what is missing behind the lowest version that waits stays on the list.

    Example: semel gaps close --consumer billing --key case-7 --reason "back-filled by hand"
    """
    if not actor.reason.strip():
        raise Misuse("closing a gap needs a reason, which the audit trail keeps: add --reason '…'")
    if pass_over is (spec is None) or pass_over is (consumer is not None):
        raise Misuse("give --consumer NAME, or --pass-over with --handler MODULE:NAME")
    if spec is not None:
        handler = load_consumer(spec)
        actor.ask(gaps_of_key, handler.name, key)
        actor.confirm(f"Go on without the missing versions of {key!r} for {handler.name}?")
        gaps = actor.ask(pass_over_gaps, handler, key, **actor.given)
    elif consumer is not None:
        actor.ask(gaps_of_key, consumer, key)
        actor.confirm(f"Close the gaps of {key!r} for {consumer}?")
        gaps = actor.ask(close_gaps, consumer, key, **actor.given)
    word = "passed over" if pass_over else "closed"
    lines = (GAP.table(gaps), word)
    closed = ClosedGaps(gaps, pass_over)
    actor.reply(closed, lambda _: lines, **actor.given)


def _story_lines(found: Explanation) -> Iterator[Line | Rows]:
    yield bold(found.message_id)
    if found.stored_as != found.message_id:
        yield f"  stored as {found.stored_as}"
    if found.other_names:
        yield f"  other ids: {listed(found.other_names)}"
    for story in found.stories:
        yield Text.assemble((story.consumer, "bold"), f": {story.standing}")
        where = f"from {story.source}, " if story.source else ""
        key = f"key {story.key}, " if story.key is not None else ""
        attempts = counted(story.attempts, "attempt")
        yield f"  {where}{key}{attempts}, payload {story.payload_hash[:12]}"
        yield f"  deliveries: {story.deliveries}"
        yield f"  sent: {story.children}"
        yield MOMENT.table(story.moments)
    if found.acts:
        yield bold("for all consumers")
        yield MOMENT.table(found.acts)
