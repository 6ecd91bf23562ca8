"""What people ask and do, in both halves: plain answers, without a terminal.

    Replay, dry_runs         another turn for selected messages, and a look at what it would do
    Ids, Letters, Waiting, Offsets, Times, parked_key     which messages
    parking                  fix, release, skip and label what is parked
    deadletters              look at a dead letter, retry, park or skip it
    deletion                 delete a message, with a second person's approval
    explain_message          everything that is known about a message
    completeness             whether every offset was handled
    retention                delete what is old, erase what is a person's
    review                   what a policy really guarantees, and what is wrong with it
    adopt, open_checkpoint   go on with a checkpoint that the ledger does not know

Inside: `acts` and `audit` (who did what), `stores` (what only operators need of a database),
`selection`, `replay`, `replay_message`, `dryrun`, `explain`, `outbox`.

Every act is one transaction, takes *actor* and *reason*, and is in the audit trail.
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.messaging.outcome import OutcomeRange
    from semel.messaging.records import DeadLetterFilter, WaitingFilter
    from semel.operate import completeness, deadletters, deletion, parking, retention
    from semel.operate.dryrun import dry_runs
    from semel.operate.explain import explain_message
    from semel.operate.replay import Replay, ReplaySettings
    from semel.operate.selection import Ids, Letters, Offsets, Times, Waiting, parked_key
    from semel.pipeline.adopt import adopt
    from semel.policy import review
    from semel.spark.checkpoint import open_checkpoint

__all__ = [
    "DeadLetterFilter",
    "Ids",
    "Letters",
    "Offsets",
    "OutcomeRange",
    "Replay",
    "ReplaySettings",
    "Times",
    "Waiting",
    "WaitingFilter",
    "adopt",
    "completeness",
    "deadletters",
    "deletion",
    "dry_runs",
    "explain_message",
    "open_checkpoint",
    "parked_key",
    "parking",
    "retention",
    "review",
]

__getattr__ = lazily(
    __name__,
    {
        "DeadLetterFilter": "semel.messaging.records",
        "Ids": "semel.operate.selection",
        "Letters": "semel.operate.selection",
        "Offsets": "semel.operate.selection",
        "OutcomeRange": "semel.messaging.outcome",
        "Replay": "semel.operate.replay",
        "ReplaySettings": "semel.operate.replay",
        "Times": "semel.operate.selection",
        "Waiting": "semel.operate.selection",
        "WaitingFilter": "semel.messaging.records",
        "adopt": "semel.pipeline.adopt",
        "completeness": "semel.operate.completeness",
        "deadletters": "semel.operate.deadletters",
        "deletion": "semel.operate.deletion",
        "dry_runs": "semel.operate.dryrun",
        "explain_message": "semel.operate.explain",
        "open_checkpoint": "semel.spark.checkpoint",
        "parked_key": "semel.operate.selection",
        "parking": "semel.operate.parking",
        "retention": "semel.operate.retention",
        "review": "semel.policy",
    },
)


def __dir__() -> list[str]:
    return __all__
