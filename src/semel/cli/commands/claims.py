"""`semel claims list`: what is handled under a lease now, and what was never finished."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from semel.cli.database import Books, ConsumerOption, LimitOption, asking
from semel.cli.options import option
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Rows, Shape, at, counted, lasting, name_of
from semel.operate.explain import LeasedClaim, LeasedClaims, claims_in_progress, stale_claims


def _lease(seconds: float) -> str:
    return f"{lasting(seconds)} left" if seconds > 0 else f"ended {lasting(-seconds)} ago"


def _red_if_ended(seconds: float) -> str:
    return "" if seconds > 0 else "red"


CLAIM = Shape(
    LeasedClaim,
    Field("message_id", "row.message_id", head="message", cell=name_of),
    Field("seconds_left", head="lease", cell=_lease, style=_red_if_ended),
    Field("owner", "row.owner", head="owner", means="Who holds the lease, or held it last."),
    Field("attempts", "row.attempts", head="attempts"),
    Field("source", "row.source", head="source"),
    Field("first_seen_at", "row.first_seen_at", head="since", cell=at),
    Field("error_code", "row.error_code", head="code", means="Of the last failure."),
    Field("lease_until", "row.lease_until"),
)


@command("claims list", asking, LeasedClaims)
def list_claims(
    books: Books,
    *,
    consumer: ConsumerOption,
    stale: Annotated[bool, option("--stale", "Only those whose lease has ended.")] = False,
    limit: LimitOption = 50,
) -> None:
    """List the claims of a leased consumer that are in progress, the oldest lease first.

    Exit code 1: a lease has ended.  Its owner died, hangs, or cannot reach the database; the
    consumer's stale policy decides what happens to the message.

    Example: semel claims list --consumer exports --stale --database postgresql://db/shop
    """
    ask = stale_claims if stale else claims_in_progress
    books.reply(books.ask(ask, consumer, limit), _claim_lines)


def _claim_lines(found: LeasedClaims) -> Iterator[Line | Rows]:
    yield CLAIM.table(found.claims)
    more = "; there are more, see --limit" if found.has_more else ""
    yield f"{counted(len(found.claims), 'claim')} of {found.consumer} in progress{more}"
