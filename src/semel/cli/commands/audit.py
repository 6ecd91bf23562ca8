"""`semel audit list | verify | completeness`: what operators did, and what became of offsets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from rich.text import Text

from semel.cli.database import Books, ConsumerFilter, ConsumerOption, LimitOption, asking
from semel.cli.options import MOST, option
from semel.cli.plain import given
from semel.cli.preamble import command
from semel.cli.render import WRITERS, Field, Line, Rows, Shape, at, column, counted, listed, red
from semel.cli.selection import ReaderOption, load_reader, partition_of
from semel.errors import Misuse
from semel.message import Partition
from semel.operate import audit, completeness
from semel.operate.stores import AuditEntry


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


def is_whole(found: audit.Verified | audit.Broken) -> bool:
    """Whether the trail is unchanged."""
    return isinstance(found, audit.Verified)


def entries_of(found: audit.Verified | audit.Broken) -> int | None:
    """How many entries the chain has, where it is whole."""
    return found.entries if isinstance(found, audit.Verified) else None


def head_of(found: audit.Verified | audit.Broken) -> str | None:
    """Number and hash of the last entry, as `--head` takes them; write it down elsewhere."""
    return f"{found.entries}:{found.hash}" if isinstance(found, audit.Verified) else None


def broken_where(found: audit.Verified | audit.Broken) -> str:
    """Where it is broken; empty where it is whole."""
    return found.where if isinstance(found, audit.Broken) else ""


for kind in (audit.Verified, audit.Broken):
    Shape(
        kind,
        Field("whole", is_whole),
        Field("entries", entries_of),
        Field("head", head_of),
        Field("broken", broken_where),
    )


def _counts(audit: completeness.PartitionAudit) -> dict[str, int]:
    return {standing: number for standing, number in audit.counts.items() if number}


def _missing(audit: completeness.PartitionAudit) -> str:
    return _words(audit.missing) if audit.missing else "nothing"


WRITERS[Partition] = str
PARTITION = Shape(
    completeness.PartitionAudit,
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
Shape(completeness.Completeness, Field("known"), whole=True)


@command("audit list", asking, audit.AuditEntries)
def list_entries(
    books: Books,
    *,
    consumer: ConsumerFilter = None,
    message: Annotated[
        str | None, option("--message", "Only entries about this message.", "ID", parser=given)
    ] = None,
    after: Annotated[
        int | None, option("--after", "Entries after this one.", "NUMBER", min=0, max=MOST)
    ] = None,
    limit: LimitOption = 50,
) -> None:
    """List what people did: the newest entries, or those about one message.

    Example: semel audit list --consumer billing --message m-17 --database postgresql://db/shop
    """
    if (consumer is None) != (message is None):
        raise Misuse("give --consumer and --message together")
    about = (consumer, message) if consumer is not None and message is not None else None
    books.reply(books.ask(audit.audit_entries, about=about, after=after, limit=limit), _entry_lines)


@command("audit verify", asking, audit.Verified)
def verify(
    books: Books,
    *,
    head: Annotated[
        str | None,
        option(
            "--head",
            "What an earlier verification printed; with it, an end that was cut off is found.",
            "NUMBER:HASH",
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
            books.answer.tell(
                lambda: f"{done:,} of {counted(of, 'entry', 'entries')} are whole so far"
            )

    books.reply(books.ask(audit.verify_audit, noted, progress), _verified_lines)


def _noted(head: str | None) -> audit.NotedHead | None:
    if head is None:
        return None
    found = re.fullmatch(r"(\d+):([0-9a-f]{64})", head.strip())
    if found is None:
        raise Misuse("--head is a number, a colon, and 64 hex digits, as `audit verify` prints it")
    return audit.NotedHead(int(found[1]), found[2])


@command("audit completeness", asking, completeness.Completeness)
def add_up(
    books: Books,
    *,
    consumer: ConsumerOption,
    committed: Annotated[
        list[str] | None,
        option(
            "--committed",
            "What the broker has as committed; everything before it must be accounted for.",
            "TOPIC/N=OFFSET",
        ),
    ] = None,
    first: Annotated[
        list[str] | None,
        option(
            "--first",
            "Where to begin; else with the broker's log, and without --reader with what is known.",
            "TOPIC/N=OFFSET",
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
    found = books.ask(completeness.audit_completeness, consumer, extents, read_again)
    books.reply(completeness.Completeness(consumer, found), _completeness_lines)


def _extents(first: list[str], committed: list[str]) -> Mapping[Partition, completeness.Extent]:
    extents: dict[Partition, completeness.Extent] = {}
    given = [("committed", text) for text in committed] + [("first", text) for text in first]
    for end, text in given:
        place, offset = _offset(f"--{end}", text)
        extents[place] = replace(extents.get(place, completeness.Extent()), **{end: offset})
    return extents


def _offset(option: str, text: str) -> tuple[Partition, int]:
    place, _, offset = text.rpartition("=")
    if not offset.isdecimal():
        raise Misuse(f"{option} {text}: write it as topic/number=offset, such as payments/0=1200")
    return partition_of(place), int(offset)


def _entry_lines(found: audit.AuditEntries) -> Iterator[Line | Rows]:
    yield ENTRY.table(found.entries)


def _verified_lines(found: audit.Verified | audit.Broken) -> Iterator[Line]:
    if isinstance(found, audit.Verified):
        entries = counted(found.entries, "entry", "entries")
        yield Text.assemble(("the chain is whole", "green"), f", {entries}")
        yield f"head {head_of(found)}"
    else:
        yield red("the chain is broken", f": {found.where}")


def _completeness_lines(found: completeness.Completeness) -> Iterator[Line | Rows]:
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


def _words(stretches: Sequence[completeness.Stretch]) -> str:
    return listed(
        str(one.first) if one.first == one.last else f"{one.first} to {one.last}"
        for one in stretches
    )
