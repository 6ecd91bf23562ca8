"""What the demo says about the counts: the table, and what went wrong without semel."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from examples.demo.audit import Count, Counts
from examples.demo.place import Variant
from examples.demo.progress import listed
from examples.demo.run import Plan, RunReport

TITLES = {
    Variant.SEMEL: "with semel",
    Variant.PLAIN: "plain foreachBatch",
}


def money(cents: int) -> str:
    """Write an amount with its thousands apart."""
    whole, rest = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole:,}.{rest:02}"


def audit_table(audited: Sequence[Counts], kills: int) -> Table:
    """The table worth a screenshot: the source, and every sink of every variant."""
    table = Table(
        title=f"The audit, after {number_of(kills, 'kill -9', 'kills -9')}",
        box=box.SIMPLE_HEAD,
        title_style="bold",
        pad_edge=False,
    )
    table.add_column("")
    table.add_column("")
    for name in ("rows", "sum", "duplicates", "missing"):
        table.add_column(name, justify="right")
    table.add_column("")
    _add_source(table, audited[0])
    for counts in audited:
        _add_variant(table, counts)
    return table


def _add_source(table: Table, counts: Counts) -> None:
    rows, amount = f"{counts.source_rows:,}", money(counts.source_cents)
    source = Text("source", style="bold")
    if counts.records:
        table.add_row(source, "records", f"{counts.records:,}")
        source = Text("")
    table.add_row(source, "all payments", rows, amount)
    large = {(sink.expected, sink.expected_cents) for sink in counts.sinks}
    for expected, cents in large - {(counts.source_rows, counts.source_cents)}:
        table.add_row("", "large ones", f"{expected:,}", money(cents))


def _add_variant(table: Table, counts: Counts) -> None:
    table.add_section()
    for place, sink in enumerate(counts.sinks):
        title = TITLES[counts.variant] if place == 0 else ""
        table.add_row(
            Text(title, style="bold"),
            sink.sink,
            _compared(f"{sink.rows:,}", sink.rows == sink.expected),
            _compared(money(sink.cents), sink.cents == sink.expected_cents),
            _compared(f"{sink.duplicates:,}", sink.duplicates == 0),
            _compared(f"{sink.missing:,}", sink.missing == 0),
            _verdict(sink),
        )


def _compared(text: str, equal: bool) -> Text:
    return Text(text, style="green" if equal else "bold red")


def _verdict(sink: Count) -> Text:
    if sink.is_clean:
        return Text("✓ once", style="bold green")
    if sink.foreign:
        return Text(f"✗ {sink.foreign:,} foreign", style="bold red")
    if sink.left_behind:
        return Text(f"✗ {sink.left_behind:,} left behind", style="bold red")
    return Text("✗ wrong", style="bold red")


def verdict_with_semel(counts: Counts, report: RunReport) -> str:
    """Say in a sentence what semel's run shows, with its scope."""
    killed = number_of(len(report.kills), "kill", "kills")
    if counts.is_clean:
        messages = (
            " Each large one has its receipt in the outbox, payments of an account are in order, "
            "the record that is not JSON is a dead letter, with its bytes, and nothing waits."
        )
        return (
            f"With semel every payment is in Postgres and in Iceberg once, every large one in S3 "
            f"and in Parquet once, and nothing is left behind, in spite of {killed} of the driver "
            f"at random moments.{messages if counts.records else ''}"
        )
    messages = (
        f" ({counts.letters_off} dead letters too many or too few, {counts.waiting} messages "
        f"waiting, {counts.overtaken} out of order)"
    )
    return (
        f"With semel the sinks differ from the source after {killed}"
        f"{messages if counts.records else ''}: that must never happen. Please report it with the "
        f"folder named below."
    )


def verdict_without(counts: Counts, report: RunReport, plan: Plan) -> str:
    """Say the outcome of the plain run."""
    if counts.is_clean:
        killed = number_of(len(report.kills), "kill", "kills")
        return (
            f"The plain foreachBatch was lucky: this time none of the {killed} came between its "
            f"first write and the end of its batch. Nothing makes that certain; try "
            f"--seed {plan.seed + 1}.{_of_messages(counts)}"
        )
    hit = [kill.where for kill in report.kills if kill.batch in report.reruns]
    wrong = [_wrong(sink) for sink in counts.sinks if not sink.is_clean]
    batches = ", ".join(str(batch) for batch in report.reruns)
    parts = [
        f"The plain foreachBatch was killed {listed(hit)}.",
        f"Spark's checkpoint had not noted {_plural(report.reruns, 'batch', 'batches')} {batches} "
        f"as done, so Spark ran {_plural(report.reruns, 'it', 'them')} again, as it must; what "
        f"the first run had already written was written twice: {' and '.join(wrong)}.",
    ]
    if counts.sinks[0].duplicates:
        parts.append(
            "A primary key would turn the duplicates in Postgres into a query that fails for ever; "
            "an upsert would hide them there, and nowhere else."
        )
    return " ".join(parts) + _of_messages(counts)


def _of_messages(counts: Counts) -> str:
    """Say what a plain query makes of messages, apart from repeating them."""
    if not counts.records:
        return ""
    return (
        f" It has no trace of the record that is not JSON, wrote {counts.misspelled} misspelled "
        f"payments as they came, and {counts.overtaken:,} rows in Postgres after a later one of "
        f"their account."
    )


def _wrong(sink: Count) -> str:
    off = money(sink.cents - sink.expected_cents)
    words = []
    if sink.duplicates:
        words.append(f"{sink.duplicates:,} payments twice in {sink.sink} (sum off by {off})")
    if sink.missing:
        words.append(f"{sink.missing:,} missing in {sink.sink}")
    return ", ".join(words) or f"{sink.sink} differs"


def _plural(things: Sequence[object], one: str, several: str) -> str:
    return one if len(things) == 1 else several


def number_of(number: int, one: str, several: str) -> str:
    """Write ``1 kill`` or ``3 kills``."""
    return f"{number} {one if number == 1 else several}"
