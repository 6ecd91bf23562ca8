"""`semel replay run | dry-run | status | list | stop | abandon`: messages handled again."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table
from semel.cli.database import (
    Actor,
    Books,
    ConsumerFilter,
    LimitOption,
    acting,
    asking,
)
from semel.cli.preamble import begins_with
from semel.cli.reports.replays import (
    ChangeReport,
    DryRunReport,
    Rehearsal,
    ReplayAnswer,
    ReplayList,
    rehearsal,
    replay_answer,
    replay_list,
)
from semel.cli.selection import (
    HandlerOption,
    ModeOption,
    ReaderOption,
    StricterOption,
    load_consumer,
    load_reader,
    rules_of,
    selection_of,
)
from semel.cli.words import at, counted, pairs
from semel.errors import Misuse
from semel.messaging.settings import DAY_SECONDS
from semel.operate.deadletters import MOST_RETRIES
from semel.operate.dryrun import dry_runs
from semel.operate.replay import Replay, ReplayReport, ReplaySettings, abandon_replay, stop_replay
from semel.operate.retention import MOST_DAYS
from semel.operate.selection import Selection
from semel.operate.stores import OperatorDatabase, ReplayRun, ReplayState

app = typer.Typer(no_args_is_help=True, help="Handle messages again, carefully.")

NameArgument: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The replay.")]


@app.command("run")
@begins_with(acting, "replay run", selection_of)
def run(
    answer: Answer,
    books: Books,
    actor: Actor,
    selection: Selection | None,
    *,
    consumer: HandlerOption,
    name: Annotated[
        str, typer.Option("--name", help="Of the replay; give it again to go on.")
    ] = "",
    reader: ReaderOption = None,
    policy: StricterOption = None,
    mode: ModeOption = None,
    window: Annotated[
        float | None,
        typer.Option(
            "--window-days",
            min=0.0,
            max=MOST_DAYS,
            help="How old records without a claim may be; 7 where no policy says. Not more "
            "than retention keeps claims for.",
        ),
    ] = None,
    canary: Annotated[
        str, typer.Option("--canary", metavar="N,N", help="Messages tried first, by stages.")
    ] = "1,10",
    per_second: Annotated[
        float | None, typer.Option("--per-second", min=0.001, help="At most so many messages.")
    ] = None,
    stop_after: Annotated[
        int, typer.Option("--stop-after", min=1, help="Failures that stop it, after the canary.")
    ] = 1,
    at_most: Annotated[
        int, typer.Option("--at-most", min=1, help="How often one message may be sent back.")
    ] = MOST_RETRIES,
) -> None:
    """Handle selected messages again, under their own ids: first 1, then 10, then the rest.

    What was handled is a duplicate, and nothing is done.  You are asked behind every stage of
    the canary; --yes goes on by itself.  A replay that was stopped or killed goes on with its
    --name alone.  Exit code 1: something failed, or is left for a person.

    Example: semel replay run --consumer shop:billing --dead-letters --reason "fixed in 2.4.1"
    """
    handler = load_consumer(consumer, mode)
    if selection is None and not name:
        raise Misuse("say what to replay: --message, --dead-letters, --parked or --partition")
    settings = ReplaySettings(
        canary=_stages(canary),
        asks_after_canary=not actor.yes,
        stop_after_failures=stop_after,
        per_second=per_second,
        most_replays=at_most,
        window_seconds=None if window is None else window * DAY_SECONDS,
        rules=rules_of(policy, handler),
    )
    if handler.replays.joined(settings.rules).refusal is None:
        actor.confirm(answer, f"Replay {selection or name} to {handler.name} in {books.name}?")

    def told(report: ReplayReport) -> None:
        answer.tell(lambda: f"{report.name}: {_counts(report)}")

    read_again = load_reader(reader)

    async def once(database: OperatorDatabase) -> tuple[ReplayRun, ReplayReport]:
        replay = Replay(
            handler,
            database,
            selection,
            settings,
            actor=actor.name,
            name=name,
            reason=actor.reason,
            reader=read_again,
            progress=told,
        )
        report = await replay.run()
        async with database.begin() as unit:
            kept = await unit.replays.get(replay.name)
        assert kept is not None
        return kept, report

    kept, report = books.ask(once)
    while report.asks:
        answer.say(report.why)
        name = report.name
        actor.confirm(answer, "Go on?")
        kept, report = books.ask(once)
    answer.give(replay_answer(books.name, kept, report), show_replay)


def _stages(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise Misuse(f"--canary {text}: write it as numbers with commas, such as 1,10")
    return tuple(map(int, parts))


def _counts(report: ReplayReport) -> str:
    return pairs({turn.value: number for turn, number in report.counts.items() if number})


@app.command("dry-run")
@begins_with(asking, "replay dry-run", selection_of)
def dry_run(
    answer: Answer,
    books: Books,
    selection: Selection | None,
    *,
    consumer: HandlerOption,
    reader: ReaderOption = None,
    mode: ModeOption = None,
    limit: LimitOption = 10,
) -> None:
    """Run the handler in a transaction that is rolled back, and show what it would do.

    Row changes and outgoing messages are shown, secrets hidden.  Whatever the handler does
    outside of its database really happens.  Exit code 1: it fails for a message.

    Example: semel replay dry-run --consumer shop:billing --message m-17
    """
    handler = load_consumer(consumer, mode)
    if selection is None:
        raise Misuse("say what to try: --message, --dead-letters, --parked or --partition")
    read_again = load_reader(reader)
    found = books.ask(
        lambda database: dry_runs(handler, database, selection, limit=limit, reader=read_again)
    )
    report = DryRunReport(books.name, handler.name, [rehearsal(one) for one in found])
    answer.give(report, show_dry_run)


@app.command("status")
@begins_with(asking, "replay status")
def status(answer: Answer, books: Books, *, name: NameArgument) -> None:
    """Show how far one replay is.

    Example: semel replay status replay-1f3a9c07 --database postgresql://db/shop
    """
    answer.give(books.ask(lambda database: _status(database, books.name, name)), show_replay)


async def _status(database: OperatorDatabase, where: str, name: str) -> ReplayAnswer:
    async with database.begin() as unit:
        run = await unit.replays.get(name)
    if run is None:
        raise Misuse(f"there is no replay {name!r}; see `semel replay list`")
    return replay_answer(where, run)


@app.command("list")
@begins_with(asking, "replay list")
def list_replays(
    answer: Answer, books: Books, *, consumer: ConsumerFilter = None, limit: LimitOption = 20
) -> None:
    """List replays, the newest first.

    Example: semel replay list --database postgresql://db/shop
    """
    report = books.ask(lambda database: replay_list(database, books.name, consumer, limit))
    answer.give(report, show_list)


@app.command("stop")
@begins_with(acting, "replay stop")
def stop(answer: Answer, books: Books, actor: Actor, *, name: NameArgument) -> None:
    """Stop a replay before its next message; `replay run --name` goes on.

    Example: semel replay stop replay-1f3a9c07 --reason "the provider complains"
    """
    actor.confirm(answer, f"Stop {name}?")

    async def act(database: OperatorDatabase) -> ReplayAnswer:
        await stop_replay(database, name, actor=actor.name, reason=actor.reason)
        return await _status(database, books.name, name)

    answer.give(books.ask(act), show_replay)


@app.command("abandon")
@begins_with(acting, "replay abandon")
def abandon(answer: Answer, books: Books, actor: Actor, *, name: NameArgument) -> None:
    """Let a replay go that nobody will go on with; needs a reason.

    Until then retention deletes no claims of its consumer: the replay would need them.

    Example: semel replay abandon replay-1f3a9c07 --reason "the rest was paid by hand"
    """
    actor.confirm(answer, f"Abandon {name}? Nobody can go on with it then.")

    async def act(database: OperatorDatabase) -> ReplayAnswer:
        await abandon_replay(database, name, actor=actor.name, reason=actor.reason)
        return await _status(database, books.name, name)

    answer.give(books.ask(act), show_replay)


def show_replay(console: Console, report: ReplayAnswer) -> None:
    """Print how far one replay is."""
    counts = report.counts
    colour = {"finished": "green", "failed": "bold red"}.get(report.state, "yellow")
    console.print(
        f"[bold]{escape(report.name)}[/] of {escape(report.consumer)}: "
        f"[{colour}]{report.state}[/], begun by {escape(report.actor)} at {at(report.began_at)}"
    )
    rows = table("handled", "duplicate", "failed", "refused", "left", "missing")
    numbers = (counts.handled, counts.duplicate, counts.failed, counts.refused)
    rows.add_row(*(f"{n:,}" for n in (*numbers, counts.left, counts.missing)))
    console.print(rows)
    for reason, number in report.refusals.items():
        console.print(f"{number:,} refused: {reason}", markup=False)
    if report.why:
        console.print(report.why, markup=False)
    if report.state in (ReplayState.STOPPED, ReplayState.FAILED):
        console.print(
            f"go on with `semel replay run --name {report.name} …`, or let it go with `semel "
            f"replay abandon {report.name}`: until then retention deletes no claims",
            markup=False,
        )


def show_list(console: Console, report: ReplayList) -> None:
    """Print one line for each replay."""
    rows = table("replay", "consumer", "state", "handled", "failed", "begun by", "at")
    for one in report.replays:
        rows.add_row(
            escape(one.name),
            escape(one.consumer),
            one.state,
            f"{one.counts.handled:,}",
            f"{one.counts.failed:,}",
            escape(one.actor),
            at(one.began_at),
        )
    console.print(rows)


def show_dry_run(console: Console, report: DryRunReport) -> None:
    """Print what handling each message would do."""
    for one in report.messages:
        _show_rehearsal(console, one)
    console.print(f"{counted(len(report.messages), 'message')} tried; nothing was kept")


def _show_rehearsal(console: Console, one: Rehearsal) -> None:
    known = f" (its claim: {one.claim})" if one.claim else ""
    console.print(f"[bold]{escape(one.message_id)}[/]{known}: {one.outcome or 'not possible'}")
    if one.why:
        console.print(f"  {one.why}", markup=False)
    for change in one.changes:
        console.print(f"  {_change(change)}", markup=False)
    for entry in one.outgoing:
        text = entry.payload.text or f"<{entry.payload.bytes} bytes>"
        console.print(f"  send to {entry.topic}, key {entry.key or '-'}: {text}", markup=False)


def _change(change: ChangeReport) -> str:
    rows = "" if change.rows == 1 else f" ({'?' if change.rows is None else change.rows} rows)"
    where = f"{change.change} {change.table} {change.key}".rstrip() + rows
    if change.before and change.after:
        return f"{where}: " + ", ".join(
            f"{name} {change.before.get(name)} → {value}" for name, value in change.after.items()
        )
    return f"{where}: {pairs(change.after or change.before)}"
