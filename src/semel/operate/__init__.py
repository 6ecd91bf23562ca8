"""The operators' functions, for pipelines and messages: plain answers, without a terminal.

The commands call these functions.  A function that asks changes nothing.  A function that
acts takes an actor and a reason, and records both in the ledger or the audit trail.  Nothing
here prints.  Each module below is one noun:

    from semel.operate import Pipeline, recovery, status

Of a pipeline (`Pipeline.of(driver)` says which sinks are asked):

    status         status_of, history_of: who owns each scope, where it stands, what happened;
                   cut_of: through which cycle all sinks are visible
    doctor         diagnose: what is stranded, with evidence, and what to read about it
    guarantee      guarantee_of: what happens once, and which settings weaken it
    recovery       plan_recovery, recover: settle what an earlier owner left
    verification   cycles_to_verify, verify: rows staged against rows visible
    adoption       plan_adoption, adopt: go on with a checkpoint (`open_checkpoint`) that does
                   not follow from the ledger
    resolution     plan_resolution, resolve: carry a stuck cycle through; plan_undo, undo: take
                   the rows of a finished one away
    backfill       add_sink: write the cycles that were committed without a sink
    places         rename_sink, move_sink, rename_app: names and places change
    ledger         check, copy and restore the ledger itself

Of messages:

    consumers      overview: every consumer on one page; inbox_messages; hand_over
    replay         Replay: handle selected messages again; replays, replay_status, stop_replay,
                   abandon_replay
    selection      which messages: Ids, Letters, Waiting, Offsets, Times, parked_key
    dryrun         dry_runs: what handling them again would do
    parking        fix, release, skip and label parked messages
    deadletters    look at a dead letter; retry, park or skip it
    deletion       delete a message, with the approval of a second person
    explain        explain_message; claims_in_progress, stale_claims; open_gaps, close_gaps,
                   pass_over_gaps
    completeness   whether every offset was handled
    outbox         how full an outbox is; send parked messages again, drop them
    audit          what people did, and whether the record of it was changed; the act itself
    retention      delete what is old; erase a person's payloads

`acting_from(Account(…))` names the account in the audit trail, and `review` says what a policy
guarantees in an `Engine`.  For our own use: replay_message, stores (what only operators need of
a database).
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.operate import (
        adoption,
        audit,
        backfill,
        completeness,
        consumers,
        deadletters,
        deletion,
        doctor,
        dryrun,
        explain,
        guarantee,
        ledger,
        outbox,
        parking,
        places,
        recovery,
        replay,
        resolution,
        retention,
        selection,
        status,
        verification,
    )
    from semel.operate.status import Pipeline
    from semel.operate.stores import Account, acting_from
    from semel.policy.lint import review
    from semel.policy.vocabulary import Engine
    from semel.spark.checkpoint import open_checkpoint

__all__ = [
    "Account",
    "Engine",
    "Pipeline",
    "acting_from",
    "adoption",
    "audit",
    "backfill",
    "completeness",
    "consumers",
    "deadletters",
    "deletion",
    "doctor",
    "dryrun",
    "explain",
    "guarantee",
    "ledger",
    "open_checkpoint",
    "outbox",
    "parking",
    "places",
    "recovery",
    "replay",
    "resolution",
    "retention",
    "review",
    "selection",
    "status",
    "verification",
]

_ELSEWHERE = {
    "Account": "semel.operate.stores",
    "Engine": "semel.policy.vocabulary",
    "Pipeline": "semel.operate.status",
    "acting_from": "semel.operate.stores",
    "open_checkpoint": "semel.spark.checkpoint",
    "review": "semel.policy.lint",
}

__getattr__ = lazily(__name__, {name: f"{__name__}.{name}" for name in __all__} | _ELSEWHERE)


def __dir__() -> list[str]:
    return __all__
