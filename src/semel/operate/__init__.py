"""The operators' functions, for pipelines and messages: plain answers, without a terminal.

The commands call these functions.  A function that asks changes nothing.  A function that
acts takes an actor and a reason, and records both in the ledger or the audit trail.  Nothing
here prints.

Of a pipeline (`Pipeline.of(driver)` says which sinks are asked):

    status_of, history_of          who owns each scope, where it stands, what happened
    diagnose                       what is stranded, with evidence, and what to read about it
    guarantee_of                   what happens once, and which settings weaken it
    plan_recovery, recover         settle what an earlier owner left
    cycles_to_verify, verify       rows staged against rows visible
    plan_adoption, adopt           go on with a checkpoint that does not follow from the ledger
    plan_resolution, resolve       carry a stuck cycle through
    ledger                         check, copy and restore the ledger itself

Of messages:

    Replay, dry_runs               handle selected messages again, or see what that would do
    replays, replay_status         how far replays are; stop_replay, abandon_replay
    Ids, Letters, Waiting, Offsets, Times, parked_key    which messages
    parking                        fix, release, skip and label parked messages
    deadletters                    look at a dead letter; retry, park or skip it
    deletion                       delete a message, with the approval of a second person
    explain_message                what is known about a message
    claims_in_progress, stale_claims    what is handled under a lease, and whose lease has ended
    open_gaps, close_gaps, pass_over_gaps    versions of a key that did not come
    completeness                   whether every offset was handled
    outbox                         how full an outbox is; send parked messages again, drop them
    audit                          what people did, and whether the record of it was changed
    retention                      delete what is old; erase a person's payloads
    review                         what a policy guarantees, and what is wrong with it

Files: adoption doctor guarantee ledger recovery resolution status verification
(pipelines); replay replay_message selection dryrun parking deadletters deletion explain
completeness retention outbox (messages); acts (one audited act), audit (the trail), stores
(what only operators need of a database).
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.messaging.outcome import OutcomeRange
    from semel.messaging.records import DeadLetterFilter, WaitingFilter
    from semel.operate import (
        audit,
        completeness,
        deadletters,
        deletion,
        ledger,
        outbox,
        parking,
        retention,
    )
    from semel.operate.adoption import adopt, plan_adoption
    from semel.operate.doctor import Patient, diagnose
    from semel.operate.dryrun import dry_runs
    from semel.operate.explain import (
        claims_in_progress,
        close_gaps,
        explain_message,
        open_gaps,
        pass_over_gaps,
        stale_claims,
    )
    from semel.operate.guarantee import guarantee_of
    from semel.operate.recovery import plan_recovery, recover
    from semel.operate.replay import (
        Replay,
        ReplaySettings,
        abandon_replay,
        replay_status,
        replays,
        stop_replay,
    )
    from semel.operate.resolution import Choice, Way, plan_resolution, resolve
    from semel.operate.selection import Ids, Letters, Offsets, Times, Waiting, parked_key
    from semel.operate.status import Files, Pipeline, history_of, status_of
    from semel.operate.stores import Account, acting_from
    from semel.operate.verification import cycles_to_verify, verify
    from semel.policy.lint import review
    from semel.spark.checkpoint import open_checkpoint

__all__ = [
    "Account",
    "Choice",
    "DeadLetterFilter",
    "Files",
    "Ids",
    "Letters",
    "Offsets",
    "OutcomeRange",
    "Patient",
    "Pipeline",
    "Replay",
    "ReplaySettings",
    "Times",
    "Waiting",
    "WaitingFilter",
    "Way",
    "abandon_replay",
    "acting_from",
    "adopt",
    "audit",
    "claims_in_progress",
    "close_gaps",
    "completeness",
    "cycles_to_verify",
    "deadletters",
    "deletion",
    "diagnose",
    "dry_runs",
    "explain_message",
    "guarantee_of",
    "history_of",
    "ledger",
    "open_checkpoint",
    "open_gaps",
    "outbox",
    "parked_key",
    "parking",
    "pass_over_gaps",
    "plan_adoption",
    "plan_recovery",
    "plan_resolution",
    "recover",
    "replay_status",
    "replays",
    "resolve",
    "retention",
    "review",
    "stale_claims",
    "status_of",
    "stop_replay",
    "verify",
]

__getattr__ = lazily(
    __name__,
    {
        "Account": "semel.operate.stores",
        "Choice": "semel.operate.resolution",
        "DeadLetterFilter": "semel.messaging.records",
        "Files": "semel.operate.status",
        "Ids": "semel.operate.selection",
        "Letters": "semel.operate.selection",
        "Offsets": "semel.operate.selection",
        "OutcomeRange": "semel.messaging.outcome",
        "Patient": "semel.operate.doctor",
        "Pipeline": "semel.operate.status",
        "Replay": "semel.operate.replay",
        "ReplaySettings": "semel.operate.replay",
        "Times": "semel.operate.selection",
        "Waiting": "semel.operate.selection",
        "WaitingFilter": "semel.messaging.records",
        "Way": "semel.operate.resolution",
        "abandon_replay": "semel.operate.replay",
        "acting_from": "semel.operate.stores",
        "adopt": "semel.operate.adoption",
        "claims_in_progress": "semel.operate.explain",
        "close_gaps": "semel.operate.explain",
        "audit": "semel.operate.audit",
        "completeness": "semel.operate.completeness",
        "cycles_to_verify": "semel.operate.verification",
        "deadletters": "semel.operate.deadletters",
        "deletion": "semel.operate.deletion",
        "diagnose": "semel.operate.doctor",
        "dry_runs": "semel.operate.dryrun",
        "explain_message": "semel.operate.explain",
        "guarantee_of": "semel.operate.guarantee",
        "history_of": "semel.operate.status",
        "ledger": "semel.operate.ledger",
        "open_checkpoint": "semel.spark.checkpoint",
        "open_gaps": "semel.operate.explain",
        "outbox": "semel.operate.outbox",
        "parked_key": "semel.operate.selection",
        "parking": "semel.operate.parking",
        "pass_over_gaps": "semel.operate.explain",
        "plan_adoption": "semel.operate.adoption",
        "plan_recovery": "semel.operate.recovery",
        "plan_resolution": "semel.operate.resolution",
        "recover": "semel.operate.recovery",
        "replay_status": "semel.operate.replay",
        "replays": "semel.operate.replay",
        "resolve": "semel.operate.resolution",
        "retention": "semel.operate.retention",
        "review": "semel.policy.lint",
        "stale_claims": "semel.operate.explain",
        "status_of": "semel.operate.status",
        "stop_replay": "semel.operate.replay",
        "verify": "semel.operate.verification",
    },
)


def __dir__() -> list[str]:
    return __all__
