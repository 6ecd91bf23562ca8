"""The leadership of one outbox, kept while something is done under it.

The lease makes other relays wait, the epoch makes a replaced one harmless.  A
leader that cannot renew its lease stops by itself when the lease is over: it
could do no harm, but what it publishes would be published twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from semel.clock import Clock
from semel.errors import InDoubt, Retryable
from semel.lease import Owner
from semel.messaging.database import Database
from semel.messaging.outbox import Leadership, LeadershipLost, OutboxStore
from semel.messaging.reasons import reason_of

log = logging.getLogger("semel.messaging")

RENEWALS_PER_LEASE: Final = 3
TRIES_PER_LEASE: Final = 15


class Leading:
    """One relay's way to lead."""

    def __init__(self, database: Database, outbox: str, lease_seconds: float, clock: Clock) -> None:
        self.patience_seconds = lease_seconds / RENEWALS_PER_LEASE
        """How long to wait before asking for the leadership again."""

        self._database = database
        self._outbox = outbox
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._ends = 0.0
        self._owner = ""

    def begin(self) -> None:
        """Become somebody new: a process that is forked or started again is another owner."""
        self._owner = json.dumps(Owner.here().to_json())

    async def take(self, outbox: OutboxStore) -> Leadership | None:
        """Take the leadership, if nobody has it who may still be alive."""
        ends = self._clock.monotonic() + self._lease_seconds
        taken = await outbox.lead(self._outbox, self._owner, self._lease_seconds)
        if taken is None:
            held = await outbox.leader(self._outbox)
            if held is not None and _is_gone(held.owner):
                taken = await outbox.lead(
                    self._outbox, self._owner, self._lease_seconds, instead_of=held.owner
                )
        if taken is not None:
            self._ends = ends
        return taken

    def check(self, leadership: Leadership) -> None:
        """Go on only within the lease.

        Raises:
            LeadershipLost: it is over; another relay may be at work.
        """
        if self._clock.monotonic() > self._ends:
            raise LeadershipLost(leadership.outbox, leadership.epoch)

    async def while_leading(
        self,
        leadership: Leadership,
        work: Coroutine[Any, Any, None],
        each_time: Callable[[], Awaitable[None]],
    ) -> None:
        """Do *work* and renew the lease meanwhile; resign when it ends.

        *each_time* is called at the beginning and with every renewal.

        Raises:
            LeadershipLost: another relay took over, or may have; the work was cancelled.
        """
        working = asyncio.create_task(work)
        renewing = asyncio.create_task(self._renew(leadership, each_time))
        try:
            await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await renewing
            await working
        except LeadershipLost:
            raise
        except Exception:
            await self._resign(leadership)
            raise
        finally:
            working.cancel()
            renewing.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)
        await self._resign(leadership)

    async def _renew(
        self, leadership: Leadership, each_time: Callable[[], Awaitable[None]]
    ) -> None:
        """Renew until cancelled, or until there is nothing left to renew."""
        await each_time()
        pause = self._lease_seconds / RENEWALS_PER_LEASE
        while True:
            await asyncio.sleep(pause)
            ends = self._clock.monotonic() + self._lease_seconds
            try:
                async with self._database.begin() as unit:
                    kept = await unit.outbox.lead(self._outbox, self._owner, self._lease_seconds)
            except (Retryable, InDoubt) as error:
                self.check(leadership)
                why = {"outbox": self._outbox, "reason": reason_of(error)}
                log.warning("lease not renewed, trying again", extra=why)
                pause = self._lease_seconds / TRIES_PER_LEASE
                continue
            if kept != leadership:
                raise LeadershipLost(leadership.outbox, leadership.epoch)
            self._ends = ends
            pause = self._lease_seconds / RENEWALS_PER_LEASE
            await each_time()

    async def _resign(self, leadership: Leadership) -> None:
        """Let the next one begin at once; without an answer it waits for the lease's end."""
        try:
            async with self._database.begin() as unit:
                await unit.outbox.resign(leadership)
        except (Retryable, InDoubt) as error:
            why = {"outbox": self._outbox, "reason": reason_of(error)}
            log.warning("not resigned, the lease has to end", extra=why)


def _is_gone(owner: str) -> bool:
    """Tell whether the owner was a process of this machine that surely runs no more."""
    known = Owner.read(owner)
    return known is not None and known.is_gone()
