"""`semel adopt`: accept a checkpoint that does not follow from the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from rich.text import Text

from semel.cli.options import LedgerOption, option
from semel.cli.preamble import Operator, changing, command
from semel.cli.render import Field, Line, Rows, Shape, counted, red
from semel.cli.target import ledger_url, open_existing
from semel.ledgers import open_ledger
from semel.operate.adoption import (
    Adoption,
    AdoptionPlan,
    Means,
    PositionChange,
    leave_out,
    plan_adoption,
)
from semel.operate.adoption import adopt as go_on
from semel.pipeline.txn import Scope

HARMLESS = (Means.CONTINUES, Means.NEW)
CHANGE = Shape(
    PositionChange,
    Field("source", head="source"),
    Field("partition", head="partition"),
    Field("before", head="before", right=True),
    Field("after", head="after", right=True),
    Field("means", head="means", style=lambda means: "" if means in HARMLESS else "bold red"),
    Field("words", head=" "),
)


@command("adopt", changing, Adoption)
def adopt(
    operator: Operator,
    *,
    app: Annotated[str, option("--app", "The pipeline's app.", "NAME")],
    checkpoint: Annotated[str, option("--checkpoint", "The checkpoint to go on with.", "PATH")],
    ledger: LedgerOption = None,
    query: Annotated[str, option("--query", "The pipeline's query.", "NAME")] = "main",
    state_lost: Annotated[
        bool, option("--state-lost", "Accept that a stateful query starts empty.")
    ] = False,
    repeat_files: Annotated[
        bool, option("--repeat-files", "Forget which files were committed: read them again.")
    ] = False,
    leave_out_files: Annotated[
        bool,
        option(
            "--leave-out-files",
            "Write into a new checkpoint of file sources that the committed files are done.",
        ),
    ] = False,
    topic_recreated: Annotated[
        bool, option("--topic-recreated", "Accept that a topic was deleted and created again.")
    ] = False,
    create_ledger: Annotated[
        bool, option("--create-ledger", "Make the ledger if there is none yet.")
    ] = False,
    dry_run: Annotated[bool, option("--dry-run", "Show what it means; change nothing.")] = False,
) -> None:
    """Accept a checkpoint whose start does not follow from the ledger.

    For a new checkpoint after the old one was lost, and for the checkpoint of a query that ran
    without semel until now.  Shows what would be repeated and what left out, asks, and keeps
    who and why in the ledger.

    Example: semel adopt --ledger sqlite:///pay.ledger --app payments --checkpoint /data/cp
    --why "disk lost, gap accepted"
    """
    from semel.spark.checkpoint import open_checkpoint, spark_for

    url = ledger_url(operator.answer, ledger)
    opened = (
        open_ledger(url)
        if create_ledger and not dry_run
        else open_existing(operator.answer, url, " (or make one with --create-ledger)")
    )
    found_at = open_checkpoint(checkpoint, spark_for(checkpoint))
    found = found_at.adoptable()
    scope = Scope(opened.ledger_id, app, query)
    plan = plan_adoption(opened, scope, checkpoint, found_at, found)
    if dry_run:
        only_looked = Adoption(False, operator.name, operator.why, None, plan)
        operator.answer.reply(only_looked, lambda _: _plan_lines(plan))
        return
    operator.answer.print(_plan_lines(plan))
    question = f"Adopt {checkpoint} for {scope}?"
    operator.confirm("adopting changes positions", question)
    if leave_out_files:
        found = leave_out(opened, plan, found_at, operator.takeover)
        plan = plan_adoption(opened, scope, checkpoint, found_at, found)
    done = go_on(
        opened,
        plan,
        found,
        who=operator.name,
        why=operator.why,
        state_lost=state_lost,
        repeat_files=repeat_files,
        topic_recreated=topic_recreated,
        takeover=operator.takeover,
    )
    operator.answer.reply(done, _adopted_lines)


def _plan_lines(plan: AdoptionPlan) -> Iterator[Line | Rows]:
    yield Text.assemble((str(plan.scope), "bold"), f" in {plan.ledger}, {plan.owner}")
    state = ", stateful" if plan.is_stateful else ""
    before = f"generation {plan.generation_before}" if plan.generation_before else "no generation"
    yield (
        f"checkpoint {plan.checkpoint} (id {plan.checkpoint_id}{state}) goes on with batch "
        f"{plan.first_batch}; the ledger has {before} so far"
    )
    if plan.is_known:
        yield "it is the checkpoint in use already"
    if plan.positions:
        yield CHANGE.table(plan.positions)
    if plan.files_repeated:
        count = counted(len(plan.files_repeated), "file")
        yield red(
            "overlap",
            f" {count} of the next batch committed already; semel refuses that batch: "
            f"--leave-out-files goes on without them, --repeat-files reads them again: "
            f"{', '.join(plan.files_repeated[:5])}",
        )
    if plan.belongs_to:
        yield red("in the way", f"  this checkpoint belongs to {plan.belongs_to}")
    for cycle in plan.open_cycles:
        yield red("in the way", f"  {cycle}: settle it with `semel recover` first")


def _adopted_lines(done: Adoption) -> Iterator[Line]:
    words = f": {done.plan.scope} goes on as generation {done.generation}"
    yield Text.assemble(("adopted", "green"), words)
