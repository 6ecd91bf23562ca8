"""How `semel parking` prints its answers."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from semel.cli.answer import table, tell_shortened
from semel.cli.commands.dlq import show_facts
from semel.cli.messages import payload_lines
from semel.cli.plain import shortened
from semel.cli.reports.parking import (
    FixReport,
    KeyList,
    RequestAnswer,
    RequestList,
    RequestReport,
    WaitingList,
    WaitingReport,
)
from semel.cli.words import at, counted, pairs, some_of


def show_waiting_list(console: Console, report: WaitingList) -> None:
    """Print waiting messages."""
    rows = table(
        "consumer", "message", "waits", "key", "label", "code", "attempts", "since", "reason"
    )
    for one in report.messages:
        rows.add_row(
            one.consumer,
            escape(shortened(one.message_id)),
            one.waits,
            escape(shortened(one.key or "-")),
            escape(one.label or "-"),
            one.error_code or "-",
            str(one.attempts),
            at(one.since),
            escape("(erased) " if one.erased else "") + escape(one.reason),
        )
    console.print(rows)
    tell_shortened(console, (name for one in report.messages for name in (one.message_id, one.key)))
    shown = len(report.messages)
    console.print(some_of(shown, report.total, "waiting message", report.database), markup=False)


def show_keys(console: Console, report: KeyList) -> None:
    """Print held keys."""
    rows = table("key", "head", "waits", "behind", "held since", "reason", right=("behind",))
    for key in report.keys:
        rows.add_row(
            escape(shortened(key.key)),
            escape(shortened(key.head.message_id)),
            key.head.waits,
            f"{key.behind:,}",
            at(key.since),
            escape(key.head.reason),
        )
    console.print(rows)
    tell_shortened(
        console, (name for one in report.keys for name in (one.key, one.head.message_id))
    )
    found = counted(len(report.keys), "held key")
    more = "; there are more, see --limit" if report.has_more else ""
    console.print(f"{found} of {report.consumer}{more}", markup=False)


def show_waiting(console: Console, report: WaitingReport) -> None:
    """Print one waiting message."""
    one = report.message
    due = f", due {at(one.due_at)}" if one.due_at is not None else ""
    facts = {
        "message": f"{one.message_id} of {one.consumer}, {one.waits}{due}",
        "claim": report.claim or "none",
        "key": f"{one.key or '-'}; {report.ahead} ahead, {report.behind} behind",
        "label": one.label or "-",
        "source": one.source or "-",
        "reason": one.reason,
        "exception": f"{one.exception or '-'} ({one.error_code or '-'})",
        "attempts": f"{one.attempts}, first failed {at(report.first_failed_at or None)}",
        "since": at(one.since),
        "type": f"{report.message_type or '-'}, schema {report.schema_version or '-'}",
        "correlation": report.correlation_id or "-",
        "headers": pairs(report.headers),
        "acts": "; ".join(report.acts),
    }
    show_facts(console, facts)
    for revision in report.revisions:
        new = f", as {revision.new_id}" if revision.new_id else ""
        who = f"by {revision.actor}: {revision.reason}" if revision.actor else "the original"
        line = (
            f"revision {revision.number} {revision.ids}{new}  {who}  {revision.payload.hash[:12]}"
        )
        console.print(line, markup=False)
    for request in report.requests:
        console.print(_request(request), markup=False)
    for said in payload_lines(report.payload):
        console.print(said, markup=False)


def show_fixed(console: Console, report: FixReport) -> None:
    """Print that the payload was replaced; the difference was shown before."""
    console.print(
        f"revision {report.revision} of {report.message_id} will be handled as "
        f"{report.handled_as}; release it with `semel parking release`",
        markup=False,
    )


def show_requests(console: Console, report: RequestList) -> None:
    """Print open requests."""
    for request in report.requests:
        console.print(_request(request), markup=False)
    console.print(f"{len(report.requests):,} open requests in {report.database}", markup=False)


def show_decided(console: Console, report: RequestAnswer) -> None:
    """Print what became of a request."""
    request = report.request
    done = "deleted" if request.decision == "approved" else "kept"
    console.print(
        f"request {request.number} {request.decision}: message {request.message_id} of "
        f"{request.consumer} was {done}",
        markup=False,
    )


def _request(request: RequestReport) -> str:
    state = request.decision or "open"
    return (
        f"request {request.number} ({state}): {request.act} {request.message_id} of "
        f"{request.consumer}, asked by {request.asked_by} at {at(request.asked_at)}: "
        f"{request.reason}"
    )
