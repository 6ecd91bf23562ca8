"""`semel recover`: settle what an earlier owner left, after saying how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Annotated

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from semel.cli.commands.doctor import unfinished_lines
from semel.cli.options import PipelineOption, option
from semel.cli.preamble import Operator, changing, command
from semel.cli.render import WRITERS, Field, Line, Rows, Shape, counted, pairs, red
from semel.cli.target import need_pipeline
from semel.errors import LeaseHeld
from semel.lease import Takeover
from semel.operate.doctor import short_name
from semel.operate.recovery import Recovered, RecoveryPlan, plan_recovery
from semel.operate.recovery import recover as carry_out
from semel.pipeline.recovery import SettledTxn
from semel.pipeline.txn import SinkTxnId

# Fewer are settled before a bar could be read.
MANY = 20

WRITERS[SinkTxnId] = attrgetter("label")
Shape(
    SettledTxn,
    Field("cycle", "txn.cycle.label"),
    Field("attempt", "txn.attempt"),
    Field("ledger_says", "says"),
    whole=True,
)
Shape(
    Recovered,
    Field("settled", "report.settled"),
    Field("finished", "report.finished"),
    Field("aborted", "report.aborted"),
    Field("swept", "report.swept"),
    Field("left_as_is", "report.left_as_is"),
    whole=True,
)


@command("recover", changing, Recovered, rehearsal=RecoveryPlan)
def recover(
    operator: Operator,
    *,
    pipeline: PipelineOption = None,
    dry_run: Annotated[
        bool, option("--dry-run", "Show the decisions; take no lease and change nothing at all.")
    ] = False,
) -> None:
    """Finish what is committed and give up what is not, in every sink.

    Says what it will do and asks before it does it; who and why are kept in the ledger.  A
    start of the job does the same by itself.  Exit code 1: with --dry-run, there is something
    to settle; else, something is left that only a person can settle.

    Example: semel recover --pipeline payments:pipeline --dry-run
    """
    known = need_pipeline(operator.answer, pipeline)
    plan = plan_recovery(known)
    act = partial(carry_out, known, who=operator.name, why=operator.why, plan=plan)
    if dry_run:
        operator.answer.reply(plan, _plan_lines)
        return
    if not plan.needs_attention:
        operator.answer.reply(act(), _recovered_lines)
        return
    operator.answer.print(_plan_lines(plan))
    if plan.owner.is_live and operator.takeover is not Takeover.FORCE:
        raise LeaseHeld(str(plan.scope), str(plan.owner), plan.owner.lease_left_seconds)
    question = f"Recover {plan.scope} in {plan.ledger}?"
    operator.confirm("recovery changes things", question)
    with _bar(len(plan.stranded)) as step:
        done = act(takeover=operator.takeover, progress=step)
    operator.answer.reply(done, _recovered_lines)


def _plan_lines(plan: RecoveryPlan) -> Iterator[Line | Rows]:
    yield Text.assemble((str(plan.scope), "bold"), f" in {plan.ledger}, {plan.owner}")
    if plan.is_empty:
        yield "nothing to settle"
    else:
        decisions = Counter(one.decision.value for one in plan.stranded)
        yield f"{counted(len(plan.attempts), 'open cycle')}; in the sinks: {pairs(decisions)}"
        yield from unfinished_lines(plan.attempts, plan.stranded)
        yield "then: rows that losing attempts left in the sinks are swept"
    for block in plan.blocked_by:
        yield red("in the way", f"  {block}")


def _recovered_lines(done: Recovered) -> Iterator[Line]:
    report = done.report
    if done.epoch is None:
        yield f"{done.scope}: nothing to settle; nothing was changed"
        return
    yield Text.assemble(
        ("recovered ", "green"),
        (str(done.scope), "bold"),
        f" as epoch {done.epoch}: {counted(len(report.finished), 'cycle')} finished, "
        f"{counted(len(report.aborted), 'attempt')} given up, swept: {pairs(report.swept)}",
    )
    for left in report.left_as_is:
        yield f"left as it is: {short_name(left.txn)} in sink {left.sink!r}, {left.says}"


@contextmanager
def _bar(steps: int) -> Iterator[Callable[[], None]]:
    if steps < MANY:
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"settling {counted(steps, 'transaction')}", total=steps)
        yield lambda: progress.advance(task)
