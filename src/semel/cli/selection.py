"""The options that select the messages of a replay, and what handles them."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

from semel.cli.database import CodeFilter, KeyFilter
from semel.cli.options import option
from semel.cli.plain import given
from semel.cli.render import at, listed
from semel.cli.target import load_object
from semel.errors import Misuse
from semel.message import Partition
from semel.messaging.handler import Consumer
from semel.messaging.receive.broker import Reader
from semel.messaging.records import DeadLetterFilter, WaitingFilter, Waits
from semel.messaging.settings import ReplayRules
from semel.operate.selection import Ids, Letters, Offsets, Selection, Times, Waiting
from semel.policy.model import Policy
from semel.policy.vocabulary import Mode

POLICY_VARIABLE: Final = "SEMEL_POLICY"

HandlerOption: TypeAlias = Annotated[
    str,
    option(
        "--handler",
        "The consumer whose handler runs; looked for in this folder first.",
        "MODULE:NAME",
    ),
]
ReaderOption: TypeAlias = Annotated[
    str | None,
    option(
        "--reader",
        "What reads a topic again, or a function that returns it; for --partition.",
        "MODULE:NAME",
    ),
]
ModeOption: TypeAlias = Annotated[
    Mode | None,
    option("--mode", "How its handler is called, where the consumer itself does not say."),
]
PolicyOption: TypeAlias = Annotated[
    Path | None, option("--policy", "The policy file; what it forbids is refused.", "FILE")
]
ForbiddingOption: TypeAlias = Annotated[
    Path | None,
    option(
        "--policy",
        "A policy file that holds beside the one that running processes of the consumer follow.",
        "FILE",
        envvar=POLICY_VARIABLE,
    ),
]
StricterOption: TypeAlias = Annotated[
    Path | None,
    option(
        "--policy",
        "A policy file that holds beside the consumer's own: the stricter of both.",
        "FILE",
    ),
]


def selection_of(
    message: Annotated[
        list[str] | None,
        option("--message", "This message; may be given several times.", "ID", parser=given),
    ] = None,
    dead_letters: Annotated[
        bool, option("--dead-letters", "The dead letters, the oldest first.")
    ] = False,
    parked: Annotated[
        bool, option("--parked", "The parked messages; with --key, and all behind them.")
    ] = False,
    partition: Annotated[
        str | None,
        option(
            "--partition",
            "Records of this partition, by --offsets or by --since and --until.",
            "TOPIC/NUMBER",
        ),
    ] = None,
    key: KeyFilter = None,
    topic: Annotated[
        str | None, option("--topic", "Only dead letters of this topic.", "NAME")
    ] = None,
    error_code: CodeFilter = None,
    label: Annotated[
        str | None, option("--label", "Only parked messages classified so.", "WORD")
    ] = None,
    offsets: Annotated[
        str | None, option("--offsets", "These offsets, both ends included.", "FIRST:LAST")
    ] = None,
    since: Annotated[
        str | None, option("--since", "From then on, such as 2026-11-16T08.", "TIME")
    ] = None,
    until: Annotated[str | None, option("--until", "Before then.", "TIME")] = None,
) -> Selection | None:
    """Make a selection of the options; None where they select nothing.

    Raises:
        Misuse: they select several things, or halves of one.
    """
    chosen = [bool(message), dead_letters, parked, partition is not None]
    if chosen.count(True) > 1:
        raise Misuse("choose one of --message, --dead-letters, --parked and --partition")
    times = [None if text is None else time_of(text) for text in (since, until)]
    if message:
        return Ids(tuple(message))
    if dead_letters:
        return Letters(
            DeadLetterFilter(
                key=key, topic=topic, error_code=error_code, since=times[0], until=times[1]
            )
        )
    if parked:
        waits = None if key is not None else Waits.PARKED
        return Waiting(
            WaitingFilter(
                key=key,
                waits=waits,
                label=label,
                error_code=error_code,
                since=times[0],
                until=times[1],
            )
        )
    return None if partition is None else _stretch(partition_of(partition), offsets, *times)


def _stretch(
    partition: Partition, offsets: str | None, since: float | None, until: float | None
) -> Selection:
    if offsets is not None:
        first, _, last = offsets.partition(":")
        if not (first.isdecimal() and last.isdecimal()):
            raise Misuse(f"--offsets {offsets}: write it as FIRST:LAST, such as 100:199")
        return Offsets(partition, int(first), int(last))
    if since is None or until is None:
        raise Misuse("--partition needs --offsets FIRST:LAST, or --since and --until")
    return Times(partition, since, until)


def words_of(selection: Selection) -> str:
    """Say what a selection selects, for a question: ``dead letters (error_code REJECTED)``."""
    match selection:
        case Ids(ids):
            return f"messages {listed(ids)}"
        case Offsets(partition, first, last):
            return f"offsets {first:,} to {last:,} of {partition}"
        case Times(partition, since, until):
            return f"records of {partition} from {at(since)} to {at(until)}"
        case Letters(which) | Waiting(which):
            said = [
                f"{name} {at(value) if isinstance(value, float) else value}"
                for name, value in asdict(which).items()
                if value is not None
            ]
            kind = "dead letters" if isinstance(selection, Letters) else "waiting messages"
            return f"{kind} ({', '.join(said) or 'all'})"


def partition_of(text: str) -> Partition:
    """Read ``topic/number``.

    Raises:
        Misuse: it is something else.
    """
    topic, _, number = text.rpartition("/")
    if not topic or not number.isdecimal():
        raise Misuse(f"{text!r} is not a partition: write it as topic/number, such as payments/0")
    return Partition(topic, int(number))


def time_of(text: str) -> float:
    """Read a time of ISO 8601, in UTC where it does not say.

    Raises:
        Misuse: it is something else.
    """
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise Misuse(f"{text!r} is not a time: write it as 2026-11-16T08:30") from error
    return (found if found.tzinfo else found.replace(tzinfo=dt.UTC)).timestamp()


def load_consumer(spec: str, mode: Mode | None = None, option: str = "--handler") -> Consumer:
    """Import a consumer; of *mode*, where it does not say itself how its handler is called.

    Raises:
        Misuse: it is not there, or something else, or of another mode.
    """
    found = load_object(option, spec)
    found = getattr(found, "as_consumer", lambda: found)()  # a pipeline on Spark
    if not isinstance(found, Consumer):
        raise Misuse(
            f"{option} {spec}: found a {type(found).__name__}; it must be a consumer, as "
            f"`@consumer(…)` makes it, or a `MessagePipeline`"
        )
    if mode is None:
        return found
    if found.mode not in (None, mode):
        raise Misuse(f"--mode {mode}: consumer {found.name} is one of mode {found.mode}")
    return replace(found, mode=mode)


def load_reader(spec: str | None) -> Reader | None:
    """Import what reads a topic again.

    Raises:
        Misuse: it is not there, or something else.
    """
    if spec is None:
        return None
    found: Any = load_object("--reader", spec)
    if not hasattr(found, "read") and callable(found):
        found = found()
    if not hasattr(found, "read") or not hasattr(found, "bounds"):
        raise Misuse(f"--reader {spec}: found a {type(found).__name__}, which reads no topics")
    reader: Reader = found
    return reader


def rules_of(file: Path | None, consumer: str) -> ReplayRules:
    """Read what a policy file says about replays, beside what the consumer's own policy says."""
    if file is None:
        return ReplayRules()
    return ReplayRules.of_policy(Policy.load(file), consumer)
