"""A replay: handle selected messages again, in careful steps; handled ones are skipped.

    begin ─▶ 1 ─▶ 10 ─▶ the rest ─▶ end        a canary before everything else
              └──────┴── failures ─▶ stop       the next run goes on from there

The message's id stays, so a message that was handled is a duplicate and has no second
effect.  The cursor is committed before a message is tried, and again in the transaction that
ends it: a replay that is killed goes on with the message that it was trying.

If a pipeline on Spark runs the consumer, nothing is handled here: dead letters and parked
messages are made due, records of a topic are put beside them, each in a transaction with its
entry in the audit trail, and the pipeline handles them.  The canary waits for what it makes of
them.

A person can stop a replay for a while, or abandon it; each is one transaction with its entry
in the audit trail.
"""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, Misuse, Permanent
from semel.messaging.handler import Consumer
from semel.messaging.receive.broker import Reader
from semel.messaging.settings import ReplayRule, ReplayRules
from semel.operate.audit import acting, need_actor, need_reason, write_down
from semel.operate.deadletters import MOST_RETRIES
from semel.operate.replay_message import (
    Found,
    Handle,
    Replayed,
    Replayer,
    ReplayOptions,
    ReplayResult,
)
from semel.operate.selection import (
    MessageSource,
    SelectedMessage,
    Selection,
    asked,
    for_the_trail,
    from_json,
    settled,
    to_json,
    topic_of,
)
from semel.operate.stores import OVER, OperatorDatabase, OperatorUnit, ReplayRun, ReplayState

# Some reasons name their message: a long replay must not collect them all.
MOST_REASONS: Final = 5


OTHER_REASONS: Final = "other reasons"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """How far a replay is."""

    name: str
    state: ReplayState
    counts: dict[ReplayResult, int]
    why: str = ""
    """Why it does not go on, where it has not finished."""

    last: Replayed | None = None
    """The message that was looked at last."""

    refusals: Mapping[str, int] = field(default_factory=dict)
    """Why messages were refused, and how many for each reason."""

    asks: bool = False
    """It stopped after a stage of the canary, for a person to look and run it again."""

    @property
    def done(self) -> int:
        """Messages that it is done with."""
        return sum(self.counts.values())

    @property
    def tried(self) -> int:
        """Messages whose handler was called, or will be by a pipeline."""
        tried = (ReplayResult.HANDLED, ReplayResult.FAILED, ReplayResult.SENT)
        return sum(self.counts[result] for result in tried)


@dataclass(frozen=True, slots=True)
class ReplayStatus:
    """One replay, and how far it is."""

    run: ReplayRun
    report: ReplayReport

    @property
    def needs_attention(self) -> bool:
        """It failed, or left something for a person."""
        counts = self.report.counts
        left = (ReplayResult.FAILED, ReplayResult.REFUSED, ReplayResult.MISSING)
        return self.report.state is ReplayState.FAILED or any(counts[result] for result in left)


@dataclass(frozen=True, slots=True)
class ReplayList:
    """The answer of `replays`."""

    replays: Sequence[ReplayStatus]


async def replays(
    database: OperatorDatabase, consumer: str | None = None, limit: int = 20
) -> ReplayList:
    """List replays, the newest first."""
    async with database.begin() as unit:
        runs = await unit.replays.find(consumer, limit)
    return ReplayList([ReplayStatus(run, report_of(run)) for run in runs])


async def replay_status(database: OperatorDatabase, name: str) -> ReplayStatus:
    """Say how far a replay is.

    Raises:
        Misuse: there is no such replay.
    """
    async with database.begin() as unit:
        run = await unit.replays.get(name)
    if run is None:
        raise Misuse(f"there is no replay {name!r}; see `semel replay list`")
    return ReplayStatus(run, report_of(run))


Progress = Callable[[ReplayReport], None]


@dataclass(slots=True)
class Cursor:
    """How far a replay is; written as JSON."""

    after: Any = None
    hand: list[Any] | None = None
    """Id and place of the message that is being tried."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def past(self, place: Any, done: Replayed) -> Cursor:
        """Return the cursor behind a message, with its result counted."""
        cursor = Cursor(place, None, Counter(self.counts), Counter(self.refusals))
        cursor.count(done)
        return cursor

    def count(self, done: Replayed) -> None:
        """Count a result; of refusals, keep the reasons."""
        self.counts[done.result.value] += 1
        if done.result is ReplayResult.REFUSED:
            is_one_more = done.why not in self.refusals and len(self.refusals) >= MOST_REASONS
            self.refusals[OTHER_REASONS if is_one_more else done.why] += 1

    @property
    def done(self) -> int:
        """Messages that it is done with."""
        return self.counts.total()

    def text(self) -> str:
        """Write it for a table."""
        said = {"after": self.after, "hand": self.hand, "counts": dict(self.counts)}
        return json.dumps({**said, "refusals": dict(self.refusals)})

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Read what `text` wrote."""
        said = json.loads(text or "{}")  # a replay that has done nothing yet has an empty one
        counts, refusals = Counter(said.get("counts", {})), Counter(said.get("refusals", {}))
        return cls(said.get("after"), said.get("hand"), counts, refusals)

    def report(self, name: str, state: ReplayState, last: Replayed | None = None) -> ReplayReport:
        """Say how far the replay of this name is."""
        counts = {turn: self.counts[turn.value] for turn in ReplayResult}
        return ReplayReport(name, state, counts, last=last, refusals=dict(self.refusals))


def report_of(run: ReplayRun) -> ReplayReport:
    """Read how far a stored replay is."""
    return Cursor.read(run.cursor).report(run.name, run.state)


# The cursor is written after this many messages that are not tried: after a crash, at most
# this many are looked at twice.
LOOKED_AT_PER_WRITE: Final = 100


class ReplayNotAllowed(Permanent):
    """A policy, of the topic or of the consumer, forbids the replay; a dry run is allowed."""


class _NotOurs(Exception):
    """Rolls back: a person or another process has changed the replay."""


class ReplayTaken(Fenced):
    """Another process has resumed the replay: this one does nothing more."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"replay {self.name!r}: another process has resumed it; this one stops"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How carefully a replay goes."""

    canary: tuple[int, ...] = (1, 10)
    """How many messages are tried in each stage before the rest; one failure ends a stage."""

    asks_after_canary: bool = False
    """Stop after every stage of the canary, until the replay is run again."""

    canary_seconds: float = 60.0
    """How long the canary waits for what a pipeline makes of a message."""

    stop_after_failures: int = 1
    """How many failures of one run stop it, after the canary."""

    per_second: float | None = None
    """How many messages are tried in a second, at most."""

    most_replays: int = MOST_RETRIES
    """The loop guard: how often one message may be sent back."""

    refusal: str | None = None
    """Why it is forbidden altogether."""

    window_seconds: float | None = None
    """How old records without a claim may be; None: as policies say, or a week.

    The claims of older records may be deleted, so it is unknown whether they were handled."""

    rules: ReplayRules = field(default_factory=ReplayRules)
    """Another policy besides the consumer's own; the stricter of both holds."""

    def __post_init__(self) -> None:
        if self.stop_after_failures < 1 or self.most_replays < 1 or min(self.canary, default=1) < 1:
            raise Misuse("canary, stop_after_failures and most_replays must be at least 1")
        if self.per_second is not None and self.per_second <= 0:
            raise Misuse(f"per_second must be greater than 0, got {self.per_second:g}")
        if self.window_seconds is not None and not 0 <= self.window_seconds < math.inf:
            raise Misuse(f"window_seconds must be finite and at least 0, got {self.window_seconds}")


class Replay:
    """One replay by its name: the first `run` begins it, every other resumes it."""

    def __init__(
        self,
        consumer: Consumer,
        database: OperatorDatabase,
        selection: Selection | None,
        settings: ReplaySettings | None = None,
        *,
        actor: str,
        name: str = "",
        reason: str = "",
        reader: Reader | None = None,
        clock: Clock = SYSTEM_CLOCK,
        progress: Progress = lambda report: None,
        handle: Handle | None = None,
    ) -> None:
        """Prepare a replay; without a *selection* it must have been begun before.

        The consumer's policy about replays holds, even if the settings allow more.
        *handle* is how its messages are handled, where its mode does not say that.
        """
        self.consumer = consumer
        self.database = database
        self.selection = selection
        self.settings = settings or ReplaySettings()
        self.name = name or f"replay-{uuid.uuid4().hex[:8]}"
        self._actor = need_actor(actor)
        self._reason = reason
        self._reader = reader
        self._clock = clock
        self._progress = progress
        given = ReplayRule(self.settings.refusal, self.settings.window_seconds)
        self._rules = consumer.replays.joined(self.settings.rules).joined(ReplayRules(own=given))
        options = ReplayOptions(
            self._actor,
            f"replay {self.name}" + (f": {reason}" if reason else ""),
            self.settings.most_replays,
            self._rules,
        )
        self._replayer = Replayer(consumer, database, options, handle)
        self._cursor = Cursor()
        self._written = ""
        self._failures = 0
        self._next_at = 0.0

    async def run(self) -> ReplayReport:
        """Begin or resume, until it has finished, has to stop, or a person stops it.

        A crash leaves it running; the next run resumes where it was.

        Raises:
            ReplayNotAllowed: a policy forbids it; nothing was changed.
            Misuse: it was begun with another selection, or was abandoned.
            ReplayTaken: another process has resumed it.
            Retryable: the database does not answer; run it again.
        """
        run = await self._begin_or_go_on()
        if run.state is ReplayState.FINISHED:
            return self._report(run.state)
        source = MessageSource(from_json(run.selection), self.consumer, self.database, self._reader)
        try:
            return await self._through(source) or await self._end(ReplayState.FINISHED)
        except _NotOurs:
            return await self._no_longer_ours()

    async def _through(self, source: MessageSource) -> ReplayReport | None:
        """Replay every message; return a report where it must not go on."""
        if self._cursor.hand is not None:
            stop = await self._replay(await source.again(*self._cursor.hand))
            if stop is not None:
                return stop
        async with aclosing(source.items(self._cursor.after)) as items:
            async for item in items:
                await self._in_time()
                stop = await self._replay(item)
                if stop is not None:
                    return stop
        return None

    async def _replay(self, item: SelectedMessage) -> ReplayReport | None:
        """Replay one message; return a report where the replay must not go on."""
        # An earlier run was trying it, and did not end it.
        was_in_hand = self._cursor.hand is not None
        trying = replace(self._cursor, hand=[item.message_id, item.place])
        async with self.database.begin() as unit:
            found = await self._replayer.look(unit, item)
            if not isinstance(found, Replayed):
                await self._need_ours(unit, trying)
        if not isinstance(found, Replayed):
            self._is_at(trying)
            return await self._take(item, found)
        if was_in_hand and found.result is ReplayResult.DUPLICATE:
            # It was no duplicate then, so that run has handled it.
            found = replace(found, result=ReplayResult.HANDLED)
        self._cursor = self._cursor.past(item.place, found)
        if was_in_hand or self._cursor.done % LOOKED_AT_PER_WRITE == 0:
            async with self.database.begin() as unit:
                await self._need_ours(unit, self._cursor)
            self._is_at(self._cursor)
        return await self._tell(found, was_tried=was_in_hand)

    async def _take(self, item: SelectedMessage, found: Found) -> ReplayReport | None:
        """Try a message; the transaction that ends it advances the cursor."""
        is_ours = False

        async def write(unit: OperatorUnit, done: Replayed) -> None:
            # If a person stopped the replay meanwhile, the message is finished all the same.
            nonlocal is_ours
            is_ours = await self._advance(unit, self._cursor.past(item.place, done))

        if self.settings.per_second is not None:
            now = max(self._clock.monotonic(), self._next_at)
            self._next_at = now + 1 / self.settings.per_second
        reach(CrashPoint.REPLAY_BEFORE, self.consumer.name)
        done = await self._replayer.take(item, found, write)
        reach(CrashPoint.REPLAY_AFTER, self.consumer.name)
        if not is_ours:
            raise _NotOurs
        self._is_at(self._cursor.past(item.place, done))
        if done.result is ReplayResult.SENT and self._is_canary:
            seconds = self.settings.canary_seconds
            ended = await self._replayer.ended(item.message_id, seconds)
            if ended is None:
                why = f"{done.why}, and has not within {seconds:g} s: does it run?"
                return await self._end(ReplayState.STOPPED, f"message {done.message_id!r}: {why}")
            done = ended
        return await self._tell(done, was_tried=True)

    @property
    def _is_canary(self) -> bool:
        return self._report(ReplayState.RUNNING).tried <= sum(self.settings.canary)

    async def _tell(self, done: Replayed, *, was_tried: bool) -> ReplayReport | None:
        report = self._report(ReplayState.RUNNING, last=done)
        self._progress(report)
        return await self._stop_if_needed(report, done) if was_tried else None

    async def _stop_if_needed(self, report: ReplayReport, done: Replayed) -> ReplayReport | None:
        stages = list(accumulate(self.settings.canary))
        if done.result is ReplayResult.FAILED:
            self._failures += 1
            if self._is_canary or self._failures >= self.settings.stop_after_failures:
                why = f"message {done.message_id!r} failed: {done.why}"
                return await self._end(ReplayState.FAILED, why, done)
        if (
            self.settings.asks_after_canary
            and done.result is ReplayResult.HANDLED
            and report.tried in stages
        ):
            why = f"{report.tried} tried: look at what they did, then run it again"
            stopped = await self._end(ReplayState.STOPPED, why, done)
            return replace(stopped, asks=stopped.state is ReplayState.STOPPED)
        return None

    async def _begin_or_go_on(self) -> ReplayRun:
        self._failures = 0
        async with self.database.begin() as unit:
            await self._replayer.find_engine(unit)
            run = await unit.replays.get(self.name)
            if run is None:
                return await self._begin(unit)
            self._check_same(run)
            self._cursor, self._written = Cursor.read(run.cursor), run.cursor
            if run.state is not ReplayState.FINISHED:
                self._check_allowed(from_json(run.selection))
                if not await unit.replays.set_state(self.name, run.state, ReplayState.RUNNING):
                    # It was changed since it was read.
                    self._check_same(await unit.replays.get(self.name) or run)
                    raise ReplayTaken(self.name)
                await self._audit(unit, "replay.resume")
            return run

    async def _begin(self, unit: OperatorUnit) -> ReplayRun:
        if self.selection is None:
            raise Misuse(f"there is no replay {self.name!r} to go on with: select its messages")
        self._check_allowed(self.selection)
        selection = await settled(self.selection, self.consumer.name, unit, self._reader)
        self._is_at(Cursor())
        run = ReplayRun(
            self.name, self.consumer.name, to_json(selection), self._actor, cursor=self._written
        )
        if not await unit.replays.begin(run):
            raise ReplayTaken(self.name)
        await self._audit(unit, "replay.begin", selection=for_the_trail(selection))
        return run

    def _check_same(self, run: ReplayRun) -> None:
        if run.consumer != self.consumer.name:
            raise Misuse(f"replay {self.name!r} is one of consumer {run.consumer}")
        if run.state is ReplayState.ABANDONED:
            raise Misuse(f"replay {self.name!r} was abandoned; begin another one")
        if self.selection is None:
            return
        now, before = to_json(asked(self.selection)), to_json(asked(from_json(run.selection)))
        if now != before:
            raise Misuse(
                f"replay {self.name!r} was begun with another selection: {before}, not {now}; "
                f"leave it out to go on with it, or give this one a name of its own"
            )

    def _check_allowed(self, selection: Selection) -> None:
        """Raise if the policy forbids every message of the selection."""
        topic = topic_of(selection)
        refusal = self._rules.refusal if topic is None else self._rules.of(topic).refusal
        if refusal is not None:
            raise ReplayNotAllowed(f"{refusal}; a dry run is allowed")

    async def _advance(
        self, unit: OperatorUnit, cursor: Cursor, state: ReplayState = ReplayState.RUNNING
    ) -> bool:
        """Write a cursor; False where a person or another process has changed the replay."""
        failed = cursor.counts[ReplayResult.FAILED.value]
        run = ReplayRun(self.name, self.consumer.name, "", self._actor, state, cursor.text())
        run = replace(run, done=cursor.done, failed=failed)
        return await unit.replays.advance(run, self._written)

    async def _need_ours(
        self, unit: OperatorUnit, cursor: Cursor, state: ReplayState = ReplayState.RUNNING
    ) -> None:
        """Write a cursor, or raise `_NotOurs`."""
        if not await self._advance(unit, cursor, state):
            raise _NotOurs

    def _is_at(self, cursor: Cursor) -> None:
        """Go on from a cursor that is durable."""
        self._cursor, self._written = cursor, cursor.text()

    async def _end(
        self, state: ReplayState, why: str = "", last: Replayed | None = None
    ) -> ReplayReport:
        report = replace(self._report(state, last=last), why=why)
        async with self.database.begin() as unit:
            await self._need_ours(unit, self._cursor, state)
            counts = {turn.value: number for turn, number in report.counts.items()}
            said = why
            if last is not None and last.result is ReplayResult.FAILED:
                # The audit trail is never erased, so it must not quote the message.
                said = f"message {last.message_id!r} failed: {last.code}"
            await self._audit(unit, "replay.end", state=state.value, why=said, counts=counts)
        return report

    async def _no_longer_ours(self) -> ReplayReport:
        """Report the state that another process or a person gave the replay.

        Raises:
            ReplayTaken: another process has resumed it.
        """
        async with self.database.begin() as unit:
            run = await unit.replays.get(self.name)
        if run is None or run.state is ReplayState.RUNNING:
            raise ReplayTaken(self.name)
        did = "abandoned" if run.state is ReplayState.ABANDONED else "stopped"
        return replace(self._report(run.state), why=f"somebody {did} it")

    async def _audit(self, unit: OperatorUnit, act: str, **details: Any) -> None:
        details = {"replay": self.name, **details}
        name, reason = self.consumer.name, self._reason
        await write_down(unit, self._actor, act, name, reason=reason, **details)

    async def _in_time(self) -> None:
        """Wait after a message that was tried, to keep to the rate."""
        seconds = self._next_at - self._clock.monotonic()
        if seconds > 0:
            await asyncio.to_thread(self._clock.sleep, seconds)

    def _report(self, state: ReplayState, last: Replayed | None = None) -> ReplayReport:
        return self._cursor.report(self.name, state, last)


async def stop_replay(
    database: OperatorDatabase, name: str, *, actor: str, reason: str = ""
) -> ReplayStatus:
    """Stop a replay before its next message; it may run in another process.

    Raises:
        Misuse: there is no such replay, or it does not run.
    """
    before, after = {ReplayState.RUNNING}, ReplayState.STOPPED
    return await _change(database, name, before, after, "replay.stop", actor, reason)


async def abandon_replay(
    database: OperatorDatabase, name: str, *, actor: str, reason: str
) -> ReplayStatus:
    """End a replay permanently, so retention need not wait for it.

    It may run in another process. It cannot be resumed; another replay can select the
    messages that it has not handled.

    Raises:
        Misuse: there is no such replay, it is over already, or no reason is given.
    """
    reason = need_reason(reason, "abandoning a replay")
    before, after = {*ReplayState} - OVER, ReplayState.ABANDONED
    return await _change(database, name, before, after, "replay.abandon", actor, reason)


async def _change(
    database: OperatorDatabase,
    name: str,
    before: Collection[ReplayState],
    after: ReplayState,
    act: str,
    actor: str,
    reason: str,
) -> ReplayStatus:
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
        await write_down(unit, actor, act, run.consumer, reason=reason, **details)
    return await replay_status(database, name)
