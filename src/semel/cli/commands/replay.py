"""`semel replay run | dry-run | status | list | stop | abandon`: handle messages again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import typer
from rich.text import Text

from semel.cli.database import (
    Actor,
    Books,
    ConsumerFilter,
    LimitOption,
    acting,
    asking,
)
from semel.cli.messages import Payload, headers_of, payload_of
from semel.cli.options import option
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Rows, Shape, at, column, counted, document, pairs
from semel.cli.selection import (
    HandlerOption,
    ModeOption,
    ReaderOption,
    StricterOption,
    load_consumer,
    load_reader,
    rules_of,
    selection_of,
    words_of,
)
from semel.errors import Misuse
from semel.messaging.outcome import told
from semel.messaging.settings import DAY_SECONDS
from semel.operate.deadletters import MOST_RETRIES
from semel.operate.dryrun import DryRun, DryRuns, dry_runs
from semel.operate.explain import explain_message
from semel.operate.replay import (
    Replay,
    ReplayList,
    ReplayReport,
    ReplaySettings,
    ReplayStatus,
    abandon_replay,
    replay_status,
    replays,
    stop_replay,
)
from semel.operate.replay_message import ReplayResult
from semel.operate.retention import MOST_DAYS
from semel.operate.selection import Ids, Selection
from semel.operate.stores import OperatorDatabase, ReplayState, RowChange


def what_was_selected(status: ReplayStatus) -> dict[str, Any]:
    """Which messages; ``kind`` is ids, letters, waiting, offsets or times."""
    selected: dict[str, Any] = json.loads(status.run.selection)
    return selected


def _count(result: ReplayResult) -> Callable[[ReplayStatus], int]:
    return lambda status: status.report.counts[result]


REPLAY = Shape(
    ReplayStatus,
    Field("name", "run.name", head="replay"),
    Field("consumer", "run.consumer", head="consumer"),
    Field("state", "report.state", head="state"),
    Field("why", "report.why"),
    Field(
        "counts",
        "report.counts",
        means="What became of its messages: handled, duplicate (handled before), failed, refused "
        "(a person has to look at them), left (waiting, or with another worker), missing (their "
        "payload is in no table any more).",
    ),
    *(column(result, _count(result)) for result in ReplayResult),
    Field("refusals", "report.refusals"),
    Field("selection", what_was_selected),
    Field("actor", "run.actor", head="begun by"),
    Field("began_at", "run.began_at", head="at", cell=at),
    Field("updated_at", "run.updated_at"),
)


@dataclass(frozen=True, slots=True)
class OutgoingShown:
    """A message that the handler would send."""

    message_id: str
    topic: str
    key: str | None
    payload: Payload
    headers: dict[str, str]


def claim_of(one: DryRun) -> str:
    """The state of its claim; empty where its consumer has never seen it."""
    return one.claim.value if one.claim else ""


def outcome_of(one: DryRun) -> str:
    """What would become of it; empty where it cannot be handled."""
    return told(one.outcome).value if one.outcome else ""


def outgoing_of(one: DryRun) -> list[OutgoingShown]:
    """What the handler would send."""
    return [
        OutgoingShown(e.message_id, e.topic, e.key, payload_of(e.value, ""), headers_of(e.headers))
        for e in one.outgoing
    ]


Shape(
    DryRun,
    Field("message_id"),
    Field("claim", claim_of),
    Field("outcome", outcome_of),
    Field("why", means="Why it fails, or cannot be handled."),
    Field("changes", means="What the handler would change; secrets are hidden."),
    Field("outgoing", outgoing_of),
)

NameArgument: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="The replay.")]


@command("replay run", acting, ReplayStatus, selection_of)
def run(
    actor: Actor,
    selection: Selection | None,
    *,
    spec: HandlerOption,
    name: Annotated[str, option("--name", "Of the replay; give it again to resume.")] = "",
    reader: ReaderOption = None,
    policy: StricterOption = None,
    mode: ModeOption = None,
    window: Annotated[
        float | None,
        option(
            "--window-days",
            "How old records without a claim may be; 7 where no policy says. Not longer "
            "than retention keeps claims.",
            min=0.0,
            max=MOST_DAYS,
        ),
    ] = None,
    canary: Annotated[str, option("--canary", "Messages tried first, by stages.", "N,N")] = "1,10",
    per_second: Annotated[
        float | None, option("--per-second", "How many messages at most.", min=0.001)
    ] = None,
    stop_after: Annotated[
        int, option("--stop-after", "Failures that stop it, after the canary.", min=1)
    ] = 1,
    at_most: Annotated[
        int, option("--at-most", "How often one message may be sent back.", min=1)
    ] = MOST_RETRIES,
) -> None:
    """Handle selected messages again, under their own ids: first 1, then 10, then the rest.

    A message that was handled before is a duplicate and has no second effect.  After every
    stage of the canary you are asked whether to go on; --yes goes on without asking.  A replay
    that was stopped or killed is resumed by its --name alone.  Exit code 1: a message failed,
    or a person has to look at one.

    Example: semel replay run --handler shop:billing --dead-letters --reason "fixed in 2.4.1"
    """
    handler = load_consumer(spec, mode)
    if selection is None and not name:
        raise Misuse("say what to replay: --message, --dead-letters, --parked or --partition")
    settings = ReplaySettings(
        canary=_stages(canary),
        asks_after_canary=not actor.yes,
        stop_after_failures=stop_after,
        per_second=per_second,
        most_replays=at_most,
        window_seconds=None if window is None else window * DAY_SECONDS,
        rules=rules_of(policy, handler.name),
    )
    read_again = load_reader(reader)
    _need_known(actor, handler.name, selection, name)
    if handler.replays.joined(settings.rules).refusal is None:
        what = name if selection is None else words_of(selection)
        actor.confirm(f"Replay {what} to {handler.name} in {actor.database}?")

    def progress(report: ReplayReport) -> None:
        actor.answer.tell(lambda: f"{report.name}: {_counts(report)}")

    async def once(database: OperatorDatabase) -> ReplayStatus:
        replay = Replay(
            handler,
            database,
            selection,
            settings,
            name=name,
            reader=read_again,
            progress=progress,
            actor=actor.name,
            reason=actor.reason,
        )
        report = await replay.run()
        return replace(await replay_status(database, replay.name), report=report)

    status = actor.ask(once)
    while status.report.asks:
        actor.answer.say(status.report.why)
        name = status.run.name
        actor.confirm("Go on?")
        status = actor.ask(once)
    actor.reply(status, _replay_lines)


def _need_known(actor: Actor, consumer: str, selection: Selection | None, name: str) -> None:
    """Check that there is something to replay, before a person is asked.

    Raises:
        Misuse: there is no such replay to resume, or the consumer knows none of the messages.
    """
    if selection is None:
        actor.ask(replay_status, name)
    elif isinstance(selection, Ids) and not any(
        actor.ask(explain_message, one, consumer).stories for one in selection.ids
    ):
        raise Misuse(f"consumer {consumer} knows no message {', '.join(map(repr, selection.ids))}")


def _stages(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise Misuse(f"--canary {text}: write it as numbers with commas, such as 1,10")
    return tuple(map(int, parts))


def _counts(report: ReplayReport) -> str:
    return pairs({result.value: number for result, number in report.counts.items() if number})


@command("replay dry-run", asking, DryRuns, selection_of)
def dry_run(
    books: Books,
    selection: Selection | None,
    *,
    spec: HandlerOption,
    reader: ReaderOption = None,
    mode: ModeOption = None,
    limit: LimitOption = 10,
) -> None:
    """Run the handler in a transaction that is rolled back, and show what it would do.

    Shows row changes and outgoing messages, without secrets.  What the handler does outside
    of its database really happens.  Exit code 1: it fails for a message.

    Example: semel replay dry-run --handler shop:billing --message m-17
    """
    handler = load_consumer(spec, mode)
    if selection is None:
        raise Misuse("say what to try: --message, --dead-letters, --parked or --partition")
    read_again = load_reader(reader)
    found = books.ask(
        lambda database: dry_runs(handler, database, selection, limit=limit, reader=read_again)
    )
    books.reply(DryRuns(handler.name, found), _dry_run_lines)


@command("replay status", asking, ReplayStatus)
def status(books: Books, *, name: NameArgument) -> None:
    """Show how far one replay is.

    Example: semel replay status replay-1f3a9c07 --database postgresql://db/shop
    """
    books.reply(books.ask(replay_status, name), _replay_lines)


@command("replay list", asking, ReplayList)
def list_replays(books: Books, *, consumer: ConsumerFilter = None, limit: LimitOption = 20) -> None:
    """List replays, the newest first.

    Example: semel replay list --database postgresql://db/shop
    """
    found = books.ask(replays, consumer, limit)
    # Each replay names its database, as in the documents of the other commands.
    listed = [{"database": books.database, **document(one)} for one in found.replays]
    books.reply({"replays": listed}, lambda _: _list_lines(found))


@command("replay stop", acting, ReplayStatus)
def stop(actor: Actor, *, name: NameArgument) -> None:
    """Stop a replay before its next message; `replay run --name` resumes it.

    Example: semel replay stop replay-1f3a9c07 --reason "the provider complains"
    """
    actor.ask(replay_status, name)
    actor.confirm(f"Stop {name}?")
    actor.reply(actor.ask(stop_replay, name, **actor.given), _replay_lines)


@command("replay abandon", acting, ReplayStatus)
def abandon(actor: Actor, *, name: NameArgument) -> None:
    """End a replay permanently; needs a reason.

    Until then retention deletes no claims of its consumer: the replay would need them.

    Example: semel replay abandon replay-1f3a9c07 --reason "the rest was paid by hand"
    """
    actor.ask(replay_status, name)
    actor.confirm(f"Abandon {name}? It cannot be resumed then.")
    actor.reply(actor.ask(abandon_replay, name, **actor.given), _replay_lines)


def _replay_lines(status: ReplayStatus) -> Iterator[Line | Rows]:
    run, report = status.run, status.report
    colour = {"finished": "green", "failed": "bold red"}.get(report.state, "yellow")
    yield Text.assemble(
        (run.name, "bold"),
        f" of {run.consumer}: ",
        (report.state, colour),
        f", begun by {run.actor} at {at(run.began_at)}",
    )
    yield REPLAY.table([status], without=("replay", "consumer", "state", "begun by", "at"))
    yield from (f"{number:,} refused: {reason}" for reason, number in report.refusals.items())
    if report.why:
        yield report.why
    if report.state in (ReplayState.STOPPED, ReplayState.FAILED):
        yield (
            f"go on with `semel replay run --name {run.name} …`, or end it permanently with "
            f"`semel replay abandon {run.name}`: until then retention deletes no claims"
        )


def _list_lines(found: ReplayList) -> Iterator[Line | Rows]:
    yield REPLAY.table(found.replays, without=("duplicate", "refused", "left", "missing"))


def _dry_run_lines(found: DryRuns) -> Iterator[Line]:
    for one in found.messages:
        claim, outcome = claim_of(one), outcome_of(one) or "not possible"
        yield Text.assemble(
            (one.message_id, "bold"), f" (its claim: {claim})" if claim else "", f": {outcome}"
        )
        if one.why:
            yield f"  {one.why}"
        yield from (f"  {_change(change)}" for change in one.changes)
        for entry in outgoing_of(one):
            text = entry.payload.text or f"<{entry.payload.bytes} bytes>"
            yield f"  send to {entry.topic}, key {entry.key or '-'}: {text}"
    yield f"{counted(len(found.messages), 'message')} tried; nothing was kept"


def _change(change: RowChange) -> str:
    rows = "" if change.rows == 1 else f" ({'?' if change.rows is None else change.rows} rows)"
    where = f"{change.change} {change.table} {change.key}".rstrip() + rows
    if change.before and change.after:
        return f"{where}: " + ", ".join(
            f"{name} {change.before.get(name)} → {value}" for name, value in change.after.items()
        )
    return f"{where}: {pairs(change.after or change.before)}"
