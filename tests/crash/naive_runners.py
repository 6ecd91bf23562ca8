"""Runners as they are often written: right in peace, and wrong when they are killed."""

from __future__ import annotations

from collections.abc import Sequence

from semel.crashpoints import CrashPoint, reach
from semel.message import Coordinates, Message, Record
from semel.messaging.handle.attempt import handling
from semel.messaging.handle.claims import Claimed, ClaimRequest
from semel.messaging.outcome import Handled, Outcome, Skipped
from semel.messaging.receive.runner import Arrival, Runner


class AckFirst(Runner):
    """Commits the offsets as soon as the records are there."""

    async def _carefully(
        self, records: Sequence[Record], outcomes: dict[Coordinates, Outcome]
    ) -> Sequence[Record]:
        await self.subscription.commit({r.at.place: r.at.offset + 1 for r in records})
        reach(CrashPoint.SETTLE_AFTER, self.consumer.name)
        return await super()._carefully(records, outcomes)


class ClaimFirst(Runner):
    """Commits the claim as completed, then handles the message in another transaction."""

    async def _handle(self, arrival: Arrival) -> Outcome:
        assert isinstance(arrival, Message)
        async with self.database.begin() as unit:
            answer = await unit.claims.try_claim(self.consumer.name, ClaimRequest.of(arrival))
        reach(CrashPoint.CLAIM_AFTER, self.consumer.name)
        if not isinstance(answer, Claimed):
            return Skipped()
        async with self.database.begin() as unit:
            with handling(self.consumer.name, arrival):
                await self.consumer.invoke(arrival, unit.session)
        return Handled()


class EffectFirst(Runner):
    """Handles the message in one transaction, and claims it in another one."""

    async def _handle(self, arrival: Arrival) -> Outcome:
        assert isinstance(arrival, Message)
        name = self.consumer.name
        async with self.database.begin() as unit:
            if await unit.claims.look_up(name, arrival.id) is not None:
                return Skipped()
            with handling(name, arrival):
                await self.consumer.invoke(arrival, unit.session)
        reach(CrashPoint.HANDLE_AFTER, name)
        async with self.database.begin() as unit:
            await unit.claims.try_claim(name, ClaimRequest.of(arrival))
        return Handled()
