"""What a person can do about a replay: stop it for a while, or let it go for good.

Each is one transaction with its entry in the audit trail.
"""

from __future__ import annotations

from collections.abc import Collection

from semel.errors import Misuse
from semel.messaging.acts import acting, need_actor, need_reason
from semel.messaging.audit import Act
from semel.messaging.database import Database
from semel.messaging.replays import OVER, ReplayState


async def stop_replay(database: Database, name: str, *, actor: str, reason: str = "") -> None:
    """Let a replay stop before its next message, whichever process runs it.

    Raises:
        Misuse: there is no such replay, or it does not run.
    """
    running = {ReplayState.RUNNING}
    await _end(
        database, name, running, ReplayState.STOPPED, Act(actor, "replay.stop", reason=reason)
    )


async def abandon_replay(database: Database, name: str, *, actor: str, reason: str) -> None:
    """Let a replay go for good, whichever process runs it: retention need not wait for it.

    Nobody can go on with it; what it has not handled is selected by another replay.

    Raises:
        Misuse: there is no such replay, it is over already, or no reason is given.
    """
    reason = need_reason(reason, "abandoning a replay")
    act = Act(actor, "replay.abandon", reason=reason)
    await _end(database, name, {*ReplayState} - OVER, ReplayState.ABANDONED, act)


async def _end(
    database: Database, name: str, before: Collection[ReplayState], after: ReplayState, act: Act
) -> None:
    async with acting(database) as unit:
        run = await unit.replays.get(name)
        if run is None:
            raise Misuse(f"there is no replay {name!r}")
        if run.state not in before:
            what = "does not run" if after is ReplayState.STOPPED else "is over"
            raise Misuse(f"replay {name!r} {what}: it is {run.state}")
        if not await unit.replays.set_state(name, run.state, after):
            raise Misuse(f"replay {name!r} changed meanwhile: look at it again")
        details = {"replay": name, "was": run.state.value}
        said = Act(need_actor(act.actor), act.act, run.consumer, reason=act.reason, details=details)
        await unit.audit.append(said)
