"""The crash points: every place where a crash could lose or repeat an effect, by name.

Code that changes something outside the process calls `reach` right before and
right after.  In production that costs one global read.  The crash kit raises
there, the simulation stops and wakes drivers there, and a process started
with ``SEMEL_CRASH_AT=commit_2pc:postgres:after`` kills itself there with
SIGKILL; with ``SEMEL_STOP_AT=…`` it stops there until SIGCONT.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Final

CRASH_VARIABLE: Final = "SEMEL_CRASH_AT"
STOP_VARIABLE: Final = "SEMEL_STOP_AT"
ONCE_VARIABLE: Final = "SEMEL_CRASH_ONCE"


class CrashPoint(StrEnum):
    """One crash point; if it belongs to one sink, its spelling includes the sink's name."""

    ACQUIRE_AFTER = "acquire:after"
    FENCE_BEFORE = "fence:before"
    FENCE_AFTER = "fence:after"
    RECOVER_COMMIT_BEFORE = "recover_commit:before"
    RECOVER_COMMIT_AFTER = "recover_commit:after"
    RECOVER_ABORT_BEFORE = "recover_abort:before"
    RECOVER_ABORT_AFTER = "recover_abort:after"
    RECOVER_FINISH_BEFORE = "recover_finish:before"
    RECOVER_FINISH_AFTER = "recover_finish:after"
    SWEEP_BEFORE = "sweep:before"
    SWEEP_AFTER = "sweep:after"

    BEGIN_TXN_BEFORE = "begin_txn:before"
    BEGIN_TXN_AFTER = "begin_txn:after"
    FLUSH_BEFORE = "flush:before"
    STAGE_BEFORE = "stage:before"
    STAGE_WRITTEN = "stage:written"
    STAGE_AFTER = "stage:after"
    FLUSH_AFTER = "flush:after"
    COMMIT_OFFSETS_BEFORE = "commit_offsets:before"
    COMMIT_OFFSETS_AFTER = "commit_offsets:after"
    PRE_COMMIT_2PC_BEFORE = "pre_commit_2pc:before"
    PRE_COMMIT_2PC_AFTER = "pre_commit_2pc:after"
    TOKENS_BEFORE = "tokens:before"
    TOKENS_AFTER = "tokens:after"
    COMMIT_TXN_BEFORE = "commit_txn:before"
    COMMIT_TXN_AFTER = "commit_txn:after"
    COMMIT_2PC_BEFORE = "commit_2pc:before"
    COMMIT_2PC_AFTER = "commit_2pc:after"
    STORE_COMMIT_BEFORE = "store_commit:before"
    STORE_COMMIT_AFTER = "store_commit:after"
    ABORT_TXN_BEFORE = "abort_txn:before"
    ABORT_TXN_AFTER = "abort_txn:after"
    ABORT_2PC_BEFORE = "abort_2pc:before"
    ABORT_2PC_AFTER = "abort_2pc:after"

    FILES_PREPARE_MOVED = "files_prepare_moved:after"
    FILES_PREPARE_SEALED = "files_prepare_sealed:after"
    FILES_COMMIT_RENAMED = "files_commit_renamed:after"
    S3_PREPARE_SEALED = "s3_prepare_sealed:after"
    S3_COMMIT_COMPLETED = "s3_commit_completed:after"
    S3_COMMIT_MANIFEST = "s3_commit_manifest:after"
    POSTGRES_STAGE_COPIED = "postgres_stage_copied:after"
    POSTGRES_TASK_PREPARED = "postgres_task_prepared:after"
    POSTGRES_PREPARE_RAN = "postgres_prepare_ran:after"
    POSTGRES_COMMIT_SENT = "postgres_commit_sent:after"
    POSTGRES_PROOF_WRITTEN = "postgres_proof_written:after"
    POSTGRES_COMMIT_PREPARED_ONE = "postgres_commit_prepared_one:after"
    TABLE_PREPARE_RECORDED = "table_prepare_recorded:after"
    TABLE_COMMIT_REWRITTEN = "table_commit_rewritten:after"
    TABLE_COMMIT_SENT = "table_commit_sent:after"

    HELD_PREPARE_SEALED = "held_prepare_sealed:after"
    HELD_SENT = "held_sent:after"

    KAFKA_SLOT_COMMIT_BEFORE = "kafka_slot_commit:before"
    KAFKA_SLOT_COMMIT_AFTER = "kafka_slot_commit:after"

    SPARK_BATCH_BEFORE = "spark_batch:before"
    SPARK_BATCH_AFTER = "spark_batch:after"

    MEMBER_ENTER_AFTER = "member_enter:after"
    MEMBER_LEAVE_BEFORE = "member_leave:before"
    CAREFUL_ATTEMPT_AFTER = "careful_attempt:after"
    CLAIM_BEFORE = "claim:before"
    CLAIM_AFTER = "claim:after"
    HANDLE_AFTER = "handle:after"
    MESSAGE_COMMIT_BEFORE = "message_commit:before"
    MESSAGE_COMMIT_AFTER = "message_commit:after"
    LEASED_CLAIM_AFTER = "leased_claim:after"
    LEASED_COMPLETE_BEFORE = "leased_complete:before"
    LEASED_COMPLETE_AFTER = "leased_complete:after"
    FAILURE_BEFORE = "failure:before"
    FAILURE_AFTER = "failure:after"
    RETRY_TAKE_AFTER = "retry_take:after"
    OUTCOMES_AFTER = "outcomes:after"
    SETTLE_BEFORE = "settle:before"
    SETTLE_AFTER = "settle:after"
    RELAY_READ_AFTER = "relay_read:after"
    RELAY_PUBLISH_BEFORE = "relay_publish:before"
    RELAY_PUBLISH_AFTER = "relay_publish:after"
    RELAY_DELETE_BEFORE = "relay_delete:before"
    RELAY_DELETE_AFTER = "relay_delete:after"
    ACT_BEFORE = "act:before"
    ACT_AFTER = "act:after"
    REPLAY_BEFORE = "replay:before"
    REPLAY_AFTER = "replay:after"

    @property
    def step(self) -> str:
        """The part before the last colon, the step."""
        return self.value.rpartition(":")[0]

    @property
    def side(self) -> str:
        """``before``, ``after``, or another word for a window inside the step."""
        return self.value.rpartition(":")[2]

    def at(self, sink: str | None) -> str:
        """Return the name with its *sink*, as ``SEMEL_CRASH_AT`` spells it."""
        return f"{self.step}:{sink}:{self.side}" if sink else self.value


Hook = Callable[[CrashPoint, str | None], None]


def install(hook: Hook | None) -> Hook | None:
    """Call *hook* at every crash point from now on; return the previous hook."""
    global _hook
    before, _hook = _hook, hook
    return before


def reach(point: CrashPoint, sink: str | None = None) -> None:
    """Call the hook, if there is one, which may raise or kill the process."""
    if _hook is not None:
        _hook(point, sink)


def signaller(spec: str, number: signal.Signals, once: str = "") -> Hook:
    """Make a hook that sends this process a signal at *spec*.

    *spec* is ``step:side`` or ``step:sink:side``; with ``#3`` appended, the third time
    counts.  With *once*, only the process that creates this file sends the signal: Spark
    retries a task in a new process, which would die, too.
    """
    where, _, count = spec.partition("#")
    left = int(count or 1)

    def hook(point: CrashPoint, sink: str | None) -> None:
        nonlocal left
        if where in (point.value, point.at(sink)):
            left -= 1
            if left == 0 and _is_first(once):
                # To this thread: another thread could receive a signal to the process,
                # and this one would continue for a moment.
                signal.pthread_kill(threading.get_ident(), number)

    return hook


def _is_first(once: str) -> bool:
    if not once:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def hook_from_environment() -> Hook | None:
    """Return the hook that the environment variables ask for, or None."""
    once = os.environ.get(ONCE_VARIABLE, "")
    if spec := os.environ.get(CRASH_VARIABLE):
        return signaller(spec, signal.SIGKILL, once)
    if spec := os.environ.get(STOP_VARIABLE):
        return signaller(spec, signal.SIGSTOP, once)
    return None


_hook: Hook | None = hook_from_environment()
