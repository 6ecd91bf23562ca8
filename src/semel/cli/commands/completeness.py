"""`semel audit completeness`: every offset is accounted for, or named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table
from semel.cli.database import Books, ConsumerOption, asking
from semel.cli.preamble import begins_with
from semel.cli.reports.completeness import (
    CompletenessReport,
    StretchReport,
    completeness_report,
)
from semel.cli.selection import ReaderOption, load_reader, partition_of
from semel.cli.words import counted, listed, pairs
from semel.errors import Misuse
from semel.message import Partition
from semel.operate.completeness import Extent, audit_completeness


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

    What waits, is parked or dead must be in the waiting room or among the dead letters.
    With --reader the broker says where its log begins, and whether a hole is one, or a loss.
    Exit code 1: offsets are missing, or nothing is known of a consumer of this name.

    Example: semel audit completeness --consumer billing --committed payments/0=1200
    """
    extents = _extents(first or [], committed or [])
    read_again = load_reader(reader)
    found = books.ask(lambda database: audit_completeness(database, consumer, extents, read_again))
    answer.give(completeness_report(books.name, consumer, found), show_completeness)


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


def show_completeness(console: Console, report: CompletenessReport) -> None:
    """Print one line for each partition, and what is missing."""
    if not report.known:
        console.print(
            f"nothing is known of a consumer {report.consumer!r}: it has handled nothing that is "
            f"noted in {report.database}, or it is called otherwise",
            markup=False,
        )
        if not report.partitions:
            return
    rows = table("partition", "offsets", "accounted for as", "missing", right=("offsets",))
    for one in report.partitions:
        counts = {name: number for name, number in one.counts.items() if number}
        missing = _words(one.missing)
        colored = f"[bold red]{missing}[/]" if one.missing else "[green]nothing[/]"
        rows.add_row(escape(one.partition), f"{one.total:,}", pairs(counts), colored)
    console.print(rows)
    for one in report.partitions:
        if one.lost:
            console.print(
                f"{one.partition}: {_words(one.lost)} waited, or were parked or dead, and are "
                f"neither in the waiting room nor among the dead letters any more",
                markup=False,
            )
    bad = sum(not one.complete for one in report.partitions)
    partitions = counted(len(report.partitions), "partition")
    console.print(f"{partitions}: " + (f"{bad} incomplete" if bad else "all accounted for"))


def _words(stretches: list[StretchReport]) -> str:
    return listed(
        str(one.first) if one.first == one.last else f"{one.first} to {one.last}"
        for one in stretches
    )
