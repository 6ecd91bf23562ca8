"""`semel audit list | verify | completeness`: what operators did, and what became of offsets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.text import Text

from semel.cli.answer import Answer
from semel.cli.database import Books, ConsumerFilter, ConsumerOption, LimitOption, asking
from semel.cli.options import MOST
from semel.cli.plain import given
from semel.cli.preamble import begins_with
from semel.cli.render import WRITERS, Field, Line, Rows, Shape, at, column, counted, listed, red
from semel.cli.selection import ReaderOption, load_reader, partition_of
from semel.errors import Misuse
from semel.message import Partition
from semel.operate.audit import (
    AuditEntries,
    Broken,
    NotedHead,
    Verified,
    audit_entries,
    verify_audit,
)
from semel.operate.completeness import (
    Completeness,
    Extent,
    PartitionAudit,
    Stretch,
    audit_completeness,
)
from semel.operate.stores import AuditEntry

app = typer.Typer(no_args_is_help=True, help="Read and verify the audit trail.")


def _message(entry: AuditEntry) -> str:
    return f"{entry.act.consumer} {entry.act.message_id}".strip()


ENTRY = Shape(
    AuditEntry,
    Field("number", head="number", right=True),
    Field("at", head="when", cell=at),
    Field("actor", "act.actor", head="who"),
    Field("act", "act.act", head="act"),
    column("message", _message),
    Field("consumer", "act.consumer"),
    Field("message_id", "act.message_id"),
    Field("reason", "act.reason", head="reason"),
    Field("details", "act.details", head="details"),
    Field("hash", means="The sha256 over the entry and the hash of the one before it."),
)


def is_whole(found: Verified | Broken) -> bool:
    """Whether the trail is unchanged."""
    return isinstance(found, Verified)


def entries_of(found: Verified | Broken) -> int | None:
    """How many entries the chain has, where it is whole."""
    return found.entries if isinstance(found, Verified) else None


def head_of(found: Verified | Broken) -> str | None:
    """Number and hash of the last entry, as `--head` takes them; write it down elsewhere."""
    return f"{found.entries}:{found.hash}" if isinstance(found, Verified) else None


def broken_where(found: Verified | Broken) -> str:
    """Where it is broken; empty where it is whole."""
    return found.where if isinstance(found, Broken) else ""


for kind in (Verified, Broken):
    Shape(
        kind,
        Field("whole", is_whole),
        Field("entries", entries_of),
        Field("head", head_of),
        Field("broken", broken_where),
    )


def _counts(audit: PartitionAudit) -> dict[str, int]:
    return {standing: number for standing, number in audit.counts.items() if number}


def _missing(audit: PartitionAudit) -> str:
    return _words(audit.missing) if audit.missing else "nothing"


WRITERS[Partition] = str
PARTITION = Shape(
    PartitionAudit,
    Field("partition", head="partition"),
    Field("complete", "is_complete"),
    Field("first"),
    Field("until"),
    Field("total", head="offsets", right=True),
    Field(
        "counts",
        means="Each offset once: handled, skipped, deleted, dead, parked, waiting, "
        "duplicate, refused, hole.",
    ),
    column("accounted for as", _counts),
    Field("missing"),
    Field(
        "",
        _missing,
        head="missing",
        style=lambda text: "green" if text == "nothing" else "bold red",
    ),
    Field(
        "lost",
        means="Those of them whose messages waited, were parked or dead, and are in "
        "no table any more.",
    ),
    Field("holes", means="Offsets without a record: markers, compaction."),
    Field("holes_checked", "checked_holes", means="The broker confirmed the holes."),
    Field("repeated", means="Offsets that came more than once."),
    Field("not_reached"),
)
Shape(Completeness, Field("known"), whole=True)


@app.command("list")
@begins_with(asking, "audit list")
def list_entries(
    answer: Answer,
    books: Books,
    *,
    consumer: ConsumerFilter = None,
    message: Annotated[
        str | None,
        typer.Option(
            "--message", metavar="ID", parser=given, help="Only entries about this message."
        ),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option("--after", metavar="NUMBER", min=0, max=MOST, help="Entries after this one."),
    ] = None,
    limit: LimitOption = 50,
) -> None:
    """List what people did: the newest entries, or those about one message.

    Example: semel audit list --consumer billing --message m-17 --database postgresql://db/shop
    """
    if (consumer is None) != (message is None):
        raise Misuse("give --consumer and --message together")
    about = (consumer, message) if consumer is not None and message is not None else None
    found = books.ask(
        lambda database: audit_entries(database, about=about, after=after, limit=limit)
    )
    answer.reply(found, entry_lines, database=books.name)


@app.command("verify")
@begins_with(asking, "audit verify")
def verify(
    answer: Answer,
    books: Books,
    *,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="NUMBER:HASH",
            help="What an earlier verification printed; with it, an end that was cut off is found.",
        ),
    ] = None,
) -> None:
    """Walk the whole chain of the audit trail, and compare its end with its head.

    Exit code 1: somebody changed it.

    Example: semel audit verify --database postgresql://db/shop
    """
    noted = _noted(head)

    def progress(done: int, of: int) -> None:
        if done < of:  # else the answer itself comes next
            answer.tell(lambda: f"{done:,} of {counted(of, 'entry', 'entries')} are whole so far")

    found = books.ask(lambda database: verify_audit(database, noted, progress))
    answer.reply(found, verified_lines, database=books.name)


def _noted(head: str | None) -> NotedHead | None:
    if head is None:
        return None
    found = re.fullmatch(r"(\d+):([0-9a-f]{64})", head.strip())
    if found is None:
        raise Misuse("--head is a number, a colon, and 64 hex digits, as `audit verify` prints it")
    return NotedHead(int(found[1]), found[2])


@app.command("completeness")
@begins_with(asking, "audit completeness")
def completeness(
    answer: Answer,
    books: Books,
    *,
    consumer: ConsumerOption,
    committed: Annotated[
        list[str] | None,
        typer.Option(
            "--committed",
            metavar="TOPIC/N=OFFSET",
            help="What the broker has as committed; everything before it must be accounted for.",
        ),
    ] = None,
    first: Annotated[
        list[str] | None,
        typer.Option(
            "--first",
            metavar="TOPIC/N=OFFSET",
            help="Where to begin; else with the broker's log, and without --reader with what "
            "is known.",
        ),
    ] = None,
    reader: ReaderOption = None,
) -> None:
    """Add up what became of every offset: handled, skipped, parked, dead, and so on, and holes.

    A message that waits, is parked or dead must be in the waiting table or among the dead letters.
    With --reader the broker says where its log begins, and which holes are losses.
    Exit code 1: offsets are missing, or nothing is known of a consumer of this name.

    Example: semel audit completeness --consumer billing --committed payments/0=1200
    """
    extents = _extents(first or [], committed or [])
    read_again = load_reader(reader)
    found = books.ask(lambda database: audit_completeness(database, consumer, extents, read_again))
    answer.reply(Completeness(consumer, found), completeness_lines, database=books.name)


def _extents(first: list[str], committed: list[str]) -> Mapping[Partition, Extent]:
    extents: dict[Partition, Extent] = {}
    for text in committed:
        place, offset = _offset("--committed", text)
        extents[place] = replace(extents.get(place, Extent()), committed=offset)
    for text in first:
        place, offset = _offset("--first", text)
        extents[place] = replace(extents.get(place, Extent()), first=offset)
    return extents


def _offset(option: str, text: str) -> tuple[Partition, int]:
    place, _, offset = text.rpartition("=")
    if not offset.isdecimal():
        raise Misuse(f"{option} {text}: write it as topic/number=offset, such as payments/0=1200")
    return partition_of(place), int(offset)


def entry_lines(found: AuditEntries) -> Iterator[Line | Rows]:
    """Put entries of the trail for people."""
    yield ENTRY.table(found.entries)


def verified_lines(found: Verified | Broken) -> Iterator[Line]:
    """Put whether the chain is whole for people."""
    if isinstance(found, Verified):
        entries = counted(found.entries, "entry", "entries")
        yield Text.assemble(("the chain is whole", "green"), f", {entries}")
        yield f"head {head_of(found)}"
    else:
        yield red("the chain is broken", f": {found.where}")


def completeness_lines(found: Completeness) -> Iterator[Line | Rows]:
    """Put one line for each partition, and what is missing, for people."""
    if not found.known:
        yield (
            f"nothing is known of a consumer {found.consumer!r}: it has handled nothing that is "
            f"noted in this database, or it has another name"
        )
        if not found.partitions:
            return
    yield PARTITION.table(found.partitions)
    for one in found.partitions:
        if one.lost:
            yield (
                f"{one.partition}: {_words(one.lost)} waited, or were parked or dead, and are "
                f"neither in the waiting table nor among the dead letters any more"
            )
    bad = sum(not one.is_complete for one in found.partitions)
    partitions = counted(len(found.partitions), "partition")
    yield f"{partitions}: " + (f"{bad} incomplete" if bad else "all accounted for")


def _words(stretches: Sequence[Stretch]) -> str:
    return listed(
        str(one.first) if one.first == one.last else f"{one.first} to {one.last}"
        for one in stretches
    )
