"""`semel retention`: delete a consumer's old rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

from semel.cli.database import Actor, ConsumerOption, acting
from semel.cli.options import MOST_ROWS, option
from semel.cli.preamble import command
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


def _days(name: str, words: str) -> Any:
    return option(name, words, min=0.0, max=MOST_DAYS)


def retention_terms(
    policy: PolicyOption = None,
    ttl: Annotated[float | None, _days("--ttl-days", "How long claims are kept.  [14]")] = None,
    topic: Annotated[
        float | None, _days("--topic-days", "How long the broker keeps messages.  [7]")
    ] = None,
    replay: Annotated[
        float | None, _days("--replay-days", "How far back you may replay.  [7]")
    ] = None,
    letters: Annotated[
        float | None, _days("--dlq-days", "How old dead letters may become.  [7]")
    ] = None,
    parked: Annotated[
        float | None, _days("--parking-days", "How long messages may be parked.  [7]")
    ] = None,
    safety: Annotated[
        float | None,
        option(
            "--safety",
            f"The longest window is multiplied by this.  [{DEFAULT_SAFETY:g}]",
            min=1.0,
            max=100.0,
        ),
    ] = None,
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


@command(
    "retention",
    acting,
    Pruned,
    retention_terms,
    adds=("consumer", "ttl_seconds", "shortest_seconds"),
)
def retention(
    actor: Actor,
    terms: Retention | Policy,
    *,
    consumer: ConsumerOption,
    reader: ReaderOption = None,
    batch: Annotated[
        int, option("--batch", "How many rows one transaction deletes.", min=1, max=MOST_ROWS)
    ] = 1000,
) -> None:
    """Delete a consumer's old claims, and what is stored about things that are over.

    In small transactions: claims and inbox rows of messages that are over, finished replays,
    closed gaps, old crash notes, decided requests; with --reader the outcomes of offsets that
    the broker has deleted.  Refuses a time to live that is shorter than one of the windows,
    and stops while a replay of the consumer is neither finished nor abandoned.  With --policy
    its keys decide: claims.ttl, the topics' retention, replay.window, dlq.keep, parking.keep.
    Dead letters expire only where it says dlq.expire.

    Example: semel retention --consumer billing --ttl-days 30 --topic-days 14 --yes
    """
    said = retention_of(terms, consumer) if isinstance(terms, Policy) else terms
    settings = replace(said, batch=batch)
    age = lasting(settings.ttl_seconds)
    actor.confirm(f"Delete what is over and older than {age} of {consumer}?")

    def progress(pruned: Pruned) -> None:
        actor.answer.tell(lambda: f"{counted(pruned.total, 'row')} deleted so far")

    read_again = load_reader(reader)

    pruned = actor.ask(prune, consumer, settings, progress, read_again, **actor.given)
    actor.reply(
        pruned,
        _pruned_lines,
        consumer=consumer,
        ttl_seconds=settings.ttl_seconds,
        shortest_seconds=settings.shortest_seconds,
    )


def _pruned_lines(pruned: Pruned) -> Iterator[Line]:
    yield (
        f"deleted: {counted(pruned.claims, 'claim')}, "
        f"{counted(pruned.days, 'day')} of lean claims, "
        f"{counted(pruned.dead_letters, 'expired dead letter')}, {pruned.inbox} of the inbox, "
        f"{counted(pruned.attempts, 'failed attempt')}, "
        f"{counted(pruned.keys, 'lock')} of keys, {counted(pruned.replays, 'replay')}, "
        f"{counted(pruned.gaps, 'gap')}, {counted(pruned.notes, 'crash note')}, "
        f"{counted(pruned.approvals, 'decided request')}, "
        f"{counted(pruned.outcomes, 'range')} of offsets"
    )
