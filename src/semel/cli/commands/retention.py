"""`semel retention`: delete a consumer's old rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

import typer

from semel.cli.answer import Answer
from semel.cli.database import Actor, Books, ConsumerOption, acting
from semel.cli.options import MOST_ROWS
from semel.cli.preamble import begins_with
from semel.cli.render import Line, counted, lasting
from semel.cli.selection import PolicyOption, ReaderOption, load_reader
from semel.errors import Misuse
from semel.messaging.settings import DAY_SECONDS
from semel.operate.retention import (
    DEFAULT_SAFETY,
    MOST_DAYS,
    Pruned,
    Retention,
    prune,
    retention_of,
)
from semel.policy.model import Policy

TtlOption: TypeAlias = Annotated[
    float | None,
    typer.Option("--ttl-days", min=0.0, max=MOST_DAYS, help="How long claims are kept.  [14]"),
]
TopicOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--topic-days", min=0.0, max=MOST_DAYS, help="How long the broker keeps messages.  [7]"
    ),
]
ReplayOption: TypeAlias = Annotated[
    float | None,
    typer.Option("--replay-days", min=0.0, max=MOST_DAYS, help="How far back you may replay.  [7]"),
]
LettersOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--dlq-days", min=0.0, max=MOST_DAYS, help="How old dead letters may become.  [7]"
    ),
]
ParkedOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--parking-days", min=0.0, max=MOST_DAYS, help="How long messages may be parked.  [7]"
    ),
]
SafetyOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--safety",
        min=1.0,
        max=100.0,
        help=f"The longest window is multiplied by this.  [{DEFAULT_SAFETY:g}]",
    ),
]


def retention_terms(
    policy: PolicyOption = None,
    ttl: TtlOption = None,
    topic: TopicOption = None,
    replay: ReplayOption = None,
    letters: LettersOption = None,
    parked: ParkedOption = None,
    safety: SafetyOption = None,
) -> Retention | Policy:
    """Make the settings of the options, or read the policy that says them.

    Raises:
        Misuse: both are given, a window is longer than the time to live, or the policy is
            invalid.
    """
    days = {
        "ttl_seconds": ttl,
        "topic_retention_seconds": topic,
        "replay_window_seconds": replay,
        "dead_letter_age_seconds": letters,
        "parking_age_seconds": parked,
    }
    said: dict[str, Any] = {
        name: number * DAY_SECONDS for name, number in days.items() if number is not None
    }
    if safety is not None:
        said["safety"] = safety
    if policy is None:
        return Retention(**said)
    if said:
        raise Misuse("the policy says how long claims are kept: give --policy, or the days")
    return Policy.load(policy)


@begins_with(acting, "retention", retention_terms)
def retention(
    answer: Answer,
    books: Books,
    actor: Actor,
    terms: Retention | Policy,
    *,
    consumer: ConsumerOption,
    reader: ReaderOption = None,
    batch: Annotated[
        int,
        typer.Option(
            "--batch", min=1, max=MOST_ROWS, help="How many rows one transaction deletes."
        ),
    ] = 1000,
) -> None:
    """Delete a consumer's old claims, and what is stored about things that are over.

    In small transactions: claims and inbox rows of messages that are over, finished replays,
    closed gaps, old crash notes, decided requests; with --reader the outcomes of offsets that
    the broker has deleted.  Refuses a time to live that is shorter than one of the windows,
    and stops while a replay of the consumer is neither finished nor abandoned.  With --policy
    its keys decide: claims.ttl, the topics' retention, replay.window, dlq.keep, parking.keep.

    Example: semel retention --consumer billing --ttl-days 30 --topic-days 14 --yes
    """
    said = retention_of(terms, consumer) if isinstance(terms, Policy) else terms
    settings = replace(said, batch=batch)
    age = lasting(settings.ttl_seconds)
    actor.confirm(answer, f"Delete what is over and older than {age} of {consumer}?")

    def progress(pruned: Pruned) -> None:
        answer.tell(lambda: f"{counted(pruned.total, 'row')} deleted so far")

    read_again = load_reader(reader)

    pruned = books.ask(
        lambda database: prune(database, consumer, settings, progress, read_again, **actor.given)
    )
    answer.reply(
        pruned,
        pruned_lines,
        database=books.name,
        consumer=consumer,
        ttl_seconds=settings.ttl_seconds,
        shortest_seconds=settings.shortest_seconds,
    )


def pruned_lines(pruned: Pruned) -> Iterator[Line]:
    """Put how much was deleted for people."""
    yield (
        f"deleted: {counted(pruned.claims, 'claim')}, {pruned.inbox} of the inbox, "
        f"{counted(pruned.attempts, 'failed attempt')}, "
        f"{counted(pruned.keys, 'lock')} of keys, {counted(pruned.replays, 'replay')}, "
        f"{counted(pruned.gaps, 'gap')}, {counted(pruned.notes, 'crash note')}, "
        f"{counted(pruned.approvals, 'decided request')}, "
        f"{counted(pruned.outcomes, 'range')} of offsets"
    )
