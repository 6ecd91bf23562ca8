"""What is known of messages: the history of one, claims in progress, gaps between versions.

A gap is closed after a person looked at it, or passed over: the person decides that the missing
versions never come, and the lowest version that did come is handled next.  Each act is one
transaction with its entry in the audit trail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

from semel.codec import coordinates_of
from semel.errors import Misuse
from semel.message import Coordinates
from semel.messaging.failed.waiting import release_version, waiting_versions
from semel.messaging.handle.claims import (
    DELETED,
    ERASED,
    REPLACED,
    SKIPPED,
    WITHOUT_EFFECT,
    ClaimRow,
    ClaimState,
)
from semel.messaging.handler import Consumer
from semel.messaging.outcome import HOLE, CycleOutcomes, OutcomeRange, is_delivery
from semel.messaging.records import (
    BEHIND,
    DeadLetter,
    DeadLetterFilter,
    FailedAttempt,
    Gap,
    InboxMessage,
    StoredMessage,
    WaitingFilter,
    WaitingMessage,
    Waits,
    hash_of_key,
    stored_id,
)
from semel.messaging.send.outbox import OutboxEntry, outgoing_id, parent_of
from semel.operate.audit import SENT_BACK, acting, need_reason, write_down
from semel.operate.selection import MOMENT_SECONDS
from semel.operate.stores import (
    Approval,
    ApprovalDecision,
    AuditEntry,
    OperatorDatabase,
    OperatorUnit,
    Revision,
)

MOST: Final = 1000


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a message."""

    at: float
    """Seconds since 1970, on the database's clock."""

    what: str
    """One word: ``seen``, ``claim``, ``failed``, ``dead letter``, ``waits``, ``act``, …"""

    words: str


@dataclass(frozen=True, slots=True)
class Story:
    """What one consumer knows of a message."""

    consumer: str
    standing: str
    """How it stands now, in a sentence."""

    state: str
    """Its claim's state; empty where it has no claim."""

    attempts: int
    key: str | None
    source: str
    """Topic, partition and offset; empty where they are not kept."""

    payload_hash: str
    moments: tuple[Moment, ...]
    children: str = ""
    """What is known of the messages that handling it sent, in a sentence."""

    failures: tuple[FailedAttempt, ...] = ()
    """Each attempt that failed, in order; of more than 50 the first 5 and the latest 45."""

    deliveries: str = ""
    """What is known of its deliveries, in a sentence."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of a message."""

    message_id: str
    stored_as: str
    """The id as the tables have it: a hash where it is long."""

    other_names: tuple[str, ...]
    """Ids that people gave to the message, or took from it."""

    stories: tuple[Story, ...]
    """One for each consumer that knows it."""

    acts: tuple[Moment, ...] = ()
    """What people did with the message for all consumers."""

    @property
    def needs_attention(self) -> bool:
        """Say whether no consumer knows the message."""
        return not self.stories and not self.acts


@dataclass(frozen=True, slots=True)
class _Known:
    """Everything that one consumer has about a message."""

    claim: ClaimRow | None
    attempts: Sequence[FailedAttempt]
    letter: DeadLetter | None
    waiting: WaitingMessage | None
    stored: InboxMessage | None
    revisions: Sequence[Revision]
    approvals: Sequence[Approval]
    acts: Sequence[AuditEntry]
    children: Sequence[OutboxEntry]
    gaps: Sequence[Gap]
    came: Sequence[OutcomeRange]
    cycles: Sequence[CycleOutcomes]
    """On Spark: the cycles that have read its offset."""

    @property
    def kept(self) -> StoredMessage | None:
        return self.waiting or self.letter or self.stored

    @property
    def source(self) -> str:
        if self.kept and self.kept.source:
            return str(self.kept.source)
        return self.claim.source if self.claim else ""


async def explain_message(
    database: OperatorDatabase,
    message_id: str,
    consumer: str | None = None,
    sent_to: Sequence[str] = (),
) -> Explanation:
    """Collect what is known of a message, for one consumer or for all that know it.

    Changes nothing, and returns no payload.  Of the messages that handling it sent, the outbox
    has those that were not delivered yet.  For the topics *sent_to* the ids of delivered messages
    are computed, and looked up at the consumers in this database.
    """
    async with database.begin() as unit:
        names = [consumer] if consumer is not None else await _consumers(unit, message_id)
        stories = [_story(name, await _known(unit, name, message_id)) for name in names]
        stories = [await _with_sent(unit, story, message_id, sent_to) for story in stories]
        other_names = await unit.revisions.other_names(message_id)
        everybodys = await unit.audit.about("", message_id)
    known = (story for story in stories if story.moments)
    return Explanation(
        message_id,
        stored_id(message_id),
        tuple(sorted(other_names)),
        tuple(known),
        tuple(_acts(everybodys)),
    )


async def _consumers(unit: OperatorUnit, message_id: str) -> list[str]:
    names = set(await unit.claims.consumers_of(message_id))
    letters = await unit.dead_letters.outlines(DeadLetterFilter(message_id=message_id), MOST)
    waiting = await unit.waiting.outlines(WaitingFilter(message_id=message_id), MOST)
    names |= {letter.consumer for letter in letters} | {kept.consumer for kept in waiting}
    return sorted(names | set(await unit.inbox.consumers_of(message_id)))


async def _known(unit: OperatorUnit, consumer: str, message_id: str) -> _Known:
    waiting = await unit.waiting.get(consumer, message_id)
    letter = await unit.dead_letters.get(consumer, message_id)
    key = waiting.key if waiting else letter.key if letter else None
    gaps = await unit.versions.gaps(consumer, MOST, key=key) if key is not None else ()
    known = _Known(
        await unit.claims.look_up(consumer, message_id),
        await unit.attempts.of(consumer, message_id),
        letter,
        waiting,
        await unit.inbox.get(consumer, message_id),
        await unit.revisions.of(consumer, message_id),
        await unit.approvals.about(consumer, message_id),
        await unit.audit.about(consumer, message_id),
        await unit.outbox.children(parent_of(consumer, message_id)),
        gaps,
        (),
        (),
    )
    at = _coordinates(known.source)
    if at is None:
        return known
    came = await unit.outcomes.covering(consumer, at)
    return replace(known, came=came, cycles=await unit.outcomes.cycles_covering(consumer, at))


def _coordinates(source: str) -> Coordinates | None:
    try:
        return coordinates_of(source)
    except Misuse:  # a program that claims without this engine may write any text here
        return None


def _story(consumer: str, known: _Known) -> Story:
    claim, kept = known.claim, known.kept
    hashes = [one.payload_hash for one in (claim, kept) if one is not None and one.payload_hash]
    counted = [one.attempts for one in (claim, kept) if one is not None]
    return Story(
        consumer,
        _standing(known),
        claim.state.value if claim else "",
        max(counted, default=0),
        kept.key if kept else None,
        known.source,
        hashes[0] if hashes else "",
        tuple(sorted(_moments(known), key=lambda moment: moment.at)),
        _children(known.children),
        tuple(known.attempts),
        _deliveries(known),
    )


def _deliveries(known: _Known) -> str:
    """Say how often its offset was delivered; outcomes are kept by offset, without ids."""
    elsewhere = "from another offset it is noted without its id"
    if known.cycles:
        read = (f"{one.cycle} (attempt {one.attempt})" for one in known.cycles)
        elsewhere = f"on Spark its offset was read in {', '.join(read)}; {elsewhere}"
    came = Counter(
        one.outcome for one in known.came if is_delivery(one.outcome) and one.outcome != HOLE
    )
    if not came:
        return f"none noted at its offset; {elsewhere}"
    said = (f"{what} {number} times" if number > 1 else what for what, number in came.items())
    return f"{came.total()} noted at its offset: {', '.join(said)}; {elsewhere}"


async def _with_sent(
    unit: OperatorUnit, story: Story, message_id: str, topics: Sequence[str]
) -> Story:
    """Add what became of delivered messages, whose ids follow from the topic and a counter."""
    moments, said = list(story.moments), [story.children]
    for topic in topics if moments else ():
        for number in count():
            child = outgoing_id(story.consumer, message_id, topic, number)
            takers = await _consumers(unit, child)
            if not takers:
                said.append(f"number {number + 1} to {topic}, if it was sent, is {child}")
                break
            for taker in takers:
                known = _story(taker, await _known(unit, taker, child))
                words = f"{child} to {topic}, for {taker}: {known.standing}"
                moments.append(Moment(known.moments[0].at, "child", words))
    moments.sort(key=lambda moment: moment.at)
    return replace(story, moments=tuple(moments), children="; ".join(said))


def _children(left: Sequence[OutboxEntry]) -> str:
    """Say what the outbox has; it deletes what was delivered."""
    waiting = (
        f"{len(left)} of its outgoing messages in the outbox" if left else "none in the outbox"
    )
    return f"{waiting}; those that were delivered are not kept"


_WAITS: Final = {
    Waits.RETRY: "it waits for its next attempt",
    Waits.PARKED: "it is parked, and waits for a person",
    Waits.BEHIND: "it waits behind an earlier message of its key",
}


def _standing(known: _Known) -> str:
    if known.waiting is not None:
        return _WAITS[known.waiting.waits]
    if known.letter is not None:
        return "it is a dead letter"
    if known.stored is not None and known.claim is None:
        return _in_inbox(known.stored)
    if known.claim is None:
        return "it has no claim: it was never handled, or its claim was pruned"
    return _claimed(known.claim)


def _in_inbox(stored: InboxMessage) -> str:
    if stored.processed_at is None:
        return "it is in the inbox, and not handled yet"
    if stored.error:
        return f"a person ended it in the inbox, without an effect ({stored.error})"
    return "it was handled, through the inbox"


def _claimed(claim: ClaimRow) -> str:
    match claim.state:
        case ClaimState.COMPLETED if claim.marker in WITHOUT_EFFECT:
            return f"it counts as handled, without an effect ({claim.marker})"
        case ClaimState.COMPLETED:
            return "it was handled"
        case ClaimState.IN_PROGRESS:
            return f"{claim.owner or 'a worker'} handles it now, under a lease"
        case ClaimState.FAILED_RETRYABLE:
            return "it failed, and the broker delivers it again"
        case ClaimState.FAILED_TERMINAL:
            return (
                f"it was given up, and its dead letter is gone ({claim.marker or claim.error_code})"
            )
        case ClaimState.PARKED:
            return "its claim says parked, but the waiting table does not have it"


def _moments(known: _Known) -> Iterator[Moment]:
    if known.claim is not None:
        yield Moment(known.claim.first_seen_at, "seen", "its consumer saw it for the first time")
    if known.stored is not None:
        yield Moment(known.stored.received_at, "stored", "it was stored in the inbox")
    yield from _of_attempts(known)
    if known.claim is not None:
        yield _of_claim(known.claim, known.acts)
    if known.stored is not None:
        yield from _of_inbox(known.stored)
    if known.letter is not None:
        yield _of_letter(known.letter)
    if known.waiting is not None:
        yield from _of_waiting(known.waiting)
    for revision in known.revisions:
        yield Moment(revision.at, "revision", _revision(revision))
    for approval in known.approvals:
        yield from _of_approval(approval)
    yield from _acts(known.acts)
    for entry in known.children:
        why = f", parked: {entry.parked_reason}" if entry.parked_reason else ", not sent yet"
        yield Moment(entry.created_at, "child", f"{entry.message_id} to {entry.topic}{why}")
    for cycle in known.cycles:
        yield _of_cycle(cycle)
    for gap in known.gaps:
        words = f"version {gap.found} came, {gap.expected} was next"
        yield Moment(gap.since, "gap", words)


BY_A_PERSON: Final = frozenset({SKIPPED, REPLACED, DELETED, ERASED, BEHIND})
"""Markers of claims that no failed attempt wrote."""


def _of_attempts(known: _Known) -> Iterator[Moment]:
    for attempt in known.attempts:
        reason = f": {attempt.reason}" if attempt.reason else ""
        words = f"attempt {attempt.number} failed with {attempt.error_code}{reason}"
        yield Moment(attempt.at, "failed", words)
    first_failures = [one.first_failed_at for one in (known.letter, known.waiting) if one]
    if not known.attempts and any(first_failures):
        yield Moment(min(filter(None, first_failures)), "failed", "it failed for the first time")
    # A claim marked without this engine, and a parked record that is unreadable, has no attempt.
    claim, latest = known.claim, max((one.at for one in known.attempts), default=0.0)
    if claim is None or claim.failed_at is None or claim.marker in BY_A_PERSON:
        return
    if claim.failed_at > latest:
        over = claim.state is ClaimState.COMPLETED
        number = claim.attempts - 1 if over else claim.attempts
        code = f" with {claim.error_code}" if claim.error_code else ""
        words = f"attempt {number} failed{code}" if number else claim.error_code
        yield Moment(claim.failed_at, "failed", words)


def _of_claim(claim: ClaimRow, acts: Sequence[AuditEntry]) -> Moment:
    said = f"{claim.state} after {_times(claim.attempts)}"
    if claim.marker:
        said += f", {claim.marker}"
    elif claim.error_code:
        said += f", the last failure was {claim.error_code}"
    # One statement writes both times, and PostgreSQL asks its clock for each.
    at = max(claim.updated_at, claim.failed_at or 0.0)
    if claim.state is ClaimState.COMPLETED:
        # A replay writes its entry after the handler: the message was sent back before that.
        sent_back = [entry.at for entry in acts if entry.act.act in SENT_BACK]
        at = max([at, *(one + MOMENT_SECONDS for one in sent_back)])
    return Moment(at, "claim", said)


def _of_inbox(stored: InboxMessage) -> Iterator[Moment]:
    if stored.processed_at is not None:
        # A handled row has no error; this one is a person's decision.
        what, words = ("ended", stored.error) if stored.error else ("handled", "through the inbox")
        yield Moment(stored.processed_at, what, words)


def _of_letter(letter: DeadLetter) -> Moment:
    owner = f", owned by {letter.owner}" if letter.owner else ""
    words = f"{letter.error_code}: {letter.reason}, after {_times(letter.attempts)}{owner}"
    return Moment(letter.last_failed_at, "dead letter", words)


def _of_waiting(waiting: WaitingMessage) -> Iterator[Moment]:
    label = f", classified as {waiting.label}" if waiting.label else ""
    reason = ": ".join(filter(None, (waiting.error_code, waiting.reason)))
    yield Moment(waiting.since, "waits", f"{waiting.waits}{label}: {reason}")
    if waiting.waits is Waits.RETRY:
        yield Moment(waiting.due_at, "due", "its next attempt")


def _of_cycle(cycle: CycleOutcomes) -> Moment:
    totals = ", ".join(f"{total} {outcome}" for outcome, total in cycle.totals.items())
    words = f"{cycle.cycle}, attempt {cycle.attempt}, offsets {cycle.first} to {cycle.last}"
    return Moment(cycle.at, "cycle", f"{words}: {totals}")


def _revision(revision: Revision) -> str:
    said = f"number {revision.number}, {revision.payload_hash[:12]}"
    said += f" by {revision.actor}" if revision.actor else ", the original"
    said += f", {revision.id_policy}" if revision.id_policy else ""
    return f"{said} ({revision.reason})" if revision.reason else said


def _of_approval(approval: Approval) -> Iterator[Moment]:
    words = f"{approval.asked_by} asked for {approval.act} ({approval.reason})"
    yield Moment(approval.asked_at, "asked", words)
    if approval.decision is not ApprovalDecision.OPEN and approval.decided_at is not None:
        yield Moment(approval.decided_at, "decided", f"{approval.decided_by}: {approval.decision}")


def _acts(entries: Sequence[AuditEntry]) -> Iterator[Moment]:
    for entry in entries:
        reason = f" ({entry.act.reason})" if entry.act.reason else ""
        yield Moment(entry.at, "act", f"{entry.act.actor}: {entry.act.act}{reason}")


def _times(number: int) -> str:
    return "1 attempt" if number == 1 else f"{number} attempts"


@dataclass(frozen=True, slots=True)
class LeasedClaim:
    """One claim under a lease."""

    row: ClaimRow
    seconds_left: float
    """Until the lease ends, on the database's clock; negative after it ended."""


@dataclass(frozen=True, slots=True)
class LeasedClaims:
    """The answer of `claims_in_progress` and `stale_claims`."""

    consumer: str
    claims: Sequence[LeasedClaim]
    has_more: bool
    """There are more than were asked for."""

    @property
    def needs_attention(self) -> bool:
        """Say whether a lease has ended."""
        return any(claim.seconds_left <= 0 for claim in self.claims)


async def claims_in_progress(database: OperatorDatabase, consumer: str, limit: int) -> LeasedClaims:
    """List the claims under a lease, the oldest lease first."""
    return await _leased(database, consumer, limit, expired=False)


async def stale_claims(database: OperatorDatabase, consumer: str, limit: int) -> LeasedClaims:
    """List the claims whose lease has ended, the oldest lease first."""
    return await _leased(database, consumer, limit, expired=True)


async def _leased(
    database: OperatorDatabase, consumer: str, limit: int, *, expired: bool
) -> LeasedClaims:
    async with database.begin() as unit:
        rows = await unit.claims.in_progress(consumer, limit + 1, expired=expired)
        now = await unit.now()
    claims = [LeasedClaim(row, row.lease_until - now) for row in rows[:limit]]
    return LeasedClaims(consumer, claims, len(rows) > limit)


MOST_GAPS: Final = 10_000
"""How many gaps of one key are closed at once."""


async def open_gaps(database: OperatorDatabase, consumer: str | None, limit: int) -> list[Gap]:
    """Return the open gaps, the oldest first."""
    async with database.begin() as unit:
        return list(await unit.versions.gaps(consumer, limit))


async def gaps_of_key(database: OperatorDatabase, consumer: str, key: str) -> list[Gap]:
    """Return a key's open gaps, the oldest first.

    Raises:
        Misuse: the key has no open gap.
    """
    async with database.begin() as unit:
        return await _gaps(unit, consumer, key)


async def close_gaps(
    database: OperatorDatabase, consumer: str, key: str, *, actor: str, reason: str
) -> list[Gap]:
    """Close a key's gaps, and return them; nothing else changes.

    Raises:
        Misuse: the key has no open gap, or no reason is given.
    """
    async with acting(database) as unit:
        gaps = await _gaps(unit, consumer, key)
        await _close(unit, gaps, "gap.close", actor, reason)
    return gaps


async def pass_over_gaps(
    database: OperatorDatabase, consumer: Consumer, key: str, *, actor: str, reason: str
) -> list[Gap]:
    """Decide that a key's missing versions never come, up to the lowest one that did come.

    That version is next: it is handled if it only waited for the missing ones, and stays parked
    until a person releases it if it was parked.  What is missing behind it stays listed.
    Returns the gaps that were passed over.

    Raises:
        Misuse: the key has no open gap, its next version waits, or no reason is given.
    """
    name = consumer.name
    async with acting(database) as unit:
        if consumer.settings.holds_waiting_keys:
            # Lock the key, so no message joins its queue while it is read here.
            await unit.waiting.hold(name, [key])
        gaps = await _gaps(unit, name, key)
        current = await unit.versions.current(name, key)
        ahead = [gap for gap in gaps if current is None or gap.found - 1 > current]
        done = [gap for gap in gaps if gap not in ahead]
        rest: list[Gap] = []
        if ahead:
            due = min(gap.expected for gap in ahead) if current is None else current + 1
            came = await waiting_versions(consumer, unit, key) | {gap.found for gap in ahead}
            following = min(one for one in came if current is None or one > current)
            if following > due:
                done.append(replace(ahead[0], expected=due, found=following))
                rest = await _shorten(unit, ahead, following, came)
                await unit.versions.advance(name, key, following - 1)
                await release_version(consumer, unit, key, following)
            elif not done:
                raise Misuse(
                    f"version {following} of the key {key!r} is next, and waits: release or skip it"
                )
        await _close(unit, done, "gap.pass", actor, reason)
        for gap in rest:
            await unit.versions.open_gap(gap)
    return done


async def _shorten(
    unit: OperatorUnit, gaps: list[Gap], following: int, came: Set[int]
) -> list[Gap]:
    """End the gaps that go on behind *following* before it; return what is missing behind it."""
    rest: list[Gap] = []
    for gap in gaps:
        if gap.expected <= following < gap.found:
            await unit.versions.open_gap(replace(gap, found=following))
            rest += _missing(gap, following, came)
    return rest


def _missing(gap: Gap, after: int, came: Set[int]) -> Iterator[Gap]:
    before = after
    for version in sorted(one for one in came if after < one <= gap.found):
        if version > before + 1:
            yield replace(gap, expected=before + 1, found=version)
        before = version


async def _gaps(unit: OperatorUnit, consumer: str, key: str) -> list[Gap]:
    gaps = list(await unit.versions.gaps(consumer, MOST_GAPS, key=key))
    if not gaps:
        raise Misuse(f"consumer {consumer} has no open gap of the key {key!r}")
    return gaps


async def _close(unit: OperatorUnit, gaps: list[Gap], act: str, actor: str, reason: str) -> None:
    reason = need_reason(reason, "closing a gap")
    consumer, key = gaps[0].consumer, gaps[0].key
    missing = [[gap.expected, gap.found - 1] for gap in gaps]
    await unit.versions.close_gaps(consumer, key, max(gap.found for gap in gaps) - 1, reason)
    said = {"reason": reason, "key_hash": hash_of_key(key)}
    await write_down(unit, actor, act, consumer, **said, missing=missing)
