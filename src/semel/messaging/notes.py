"""Notes of tries: which worker wrote one, and whether its process can still outlive that.

    written ─▶ the writer runs: says nothing ─▶ taken back, or inherited when it is old
       └─▶ the writer is gone: not outlived, the message is a suspect

A writer that runs is at the message now, or could not take its note back; a worker
owes that, whoever handles the message meanwhile, and pays when the database answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final

from semel.lease import Owner, owner_text, this_process
from semel.messaging.database import Database, Unit
from semel.messaging.members import Member, Note
from semel.messaging.reasons import reason_of

log = logging.getLogger("semel.messaging")

LEFT_SECONDS: Final = 60.0
"""How old a note is when a process elsewhere that has no row as a member is gone, and one that
runs has left it behind."""


class Writer:
    """One worker of one consumer, which tries one thing after another.

    A process may have several, and one that came too late would take back what another noted.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.owed: set[str] = set()
        """Of which messages it may have left a note that it could not take back yet."""

    async def pay(self, consumer: str, database: Database) -> None:
        """Take back what it owes, if anything; between two tries, or at its end."""
        with noting_as(self):
            await take_back(consumer, database, ())


_WRITER: Final[ContextVar[Writer | None]] = ContextVar("semel_writer", default=None)


@contextmanager
def noting_as(writer: Writer) -> Iterator[None]:
    """Write the notes of the block as those of one worker of this process."""
    token = _WRITER.set(writer)
    try:
        yield
    finally:
        _WRITER.reset(token)


def _me() -> str:
    writer, process = _WRITER.get(), this_process()
    if writer is None:
        return process
    return owner_text(Owner.from_json(json.loads(process)), writer.name)


async def note_try(unit: Unit, consumer: str, message_id: str) -> int:
    """Note that a message is about to be tried; return how many tries count, with this one.

    More than one makes it a suspect: so many less one were not outlived.
    """
    me = _me()
    before = (await unit.members.note(consumer, [message_id], me)).get(message_id)
    if before is None:
        return 1
    if before.writer == me:
        # This worker has outlived it, and only could not say so.
        return before.tries
    if await _is_gone(unit, consumer, before):
        return await unit.members.suspect(consumer, message_id, me)
    await _inherit(unit, consumer, message_id, before)
    return 1


async def note_tries(unit: Unit, consumer: str, message_ids: Collection[str]) -> frozenset[str]:
    """Note one try of each of several messages, together; return those that are suspects.

    What was noted before stays as it is: a suspect is to be tried alone.
    """
    me = _me()
    before = await unit.members.note(consumer, message_ids, me)
    suspects = set()
    for message_id, note in before.items():
        is_mine = note.writer == me
        if note.tries > 1 if is_mine else await _is_gone(unit, consumer, note):
            suspects.add(message_id)
        elif not is_mine:
            await _inherit(unit, consumer, message_id, note)
    return frozenset(suspects)


async def _inherit(unit: Unit, consumer: str, message_id: str, note: Note) -> None:
    """Write one's own note for an old one of a process that runs, and could not take it back.

    A message that its writer is at is locked or leased, and nobody else gets as far as this.
    """
    if await unit.now() >= note.noted_at + LEFT_SECONDS:
        await unit.members.acquit_many(consumer, [message_id], note.writer)
        await unit.members.note(consumer, [message_id], _me())


async def outlived(unit: Unit, consumer: str, message_ids: Collection[str]) -> None:
    """Take back what this worker noted; what others did is theirs."""
    await unit.members.acquit_many(consumer, message_ids, _me())


@asynccontextmanager
async def outliving(
    consumer: str, database: Database, message_ids: Collection[str]
) -> AsyncIterator[None]:
    """Take back what was noted of messages however the block ends, unless the process does.

    A database that refuses or a stop's deadline is no death.
    """
    async with unless_begun(consumer, database, message_ids):
        yield
    await take_back(consumer, database, message_ids)


@asynccontextmanager
async def unless_begun(
    consumer: str, database: Database, message_ids: Collection[str]
) -> AsyncIterator[None]:
    """Take back what was noted of messages if the block raises: nothing is tried then.

    Around the transaction that notes it, too: a commit whose answer was lost leaves the note.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError):
        await take_back(consumer, database, message_ids)
        raise


async def take_back(
    consumer: str, database: Database, message_ids: Collection[str], *, whoever: bool = False
) -> None:
    """Do what `outlived` does in a transaction of its own, if the database answers.

    Where it does not, a note stays that says nothing while this process runs.  A worker owes
    it, and takes it back with the next ones, whatever they are.  *whoever* wrote them: for
    messages that are over.
    """
    writer = _WRITER.get()
    owed = set[str]() if writer is None else writer.owed
    owed.update(message_ids)
    if not owed:
        return
    now = frozenset(owed)
    try:
        async with database.begin() as unit:
            await outlived(unit, consumer, now)
            for message_id in message_ids if whoever else ():
                await unit.members.acquit(consumer, message_id)
    except Exception as error:  # noqa: BLE001  what became of the messages matters more
        why = {"consumer": consumer, "reason": reason_of(error)}
        log.warning("a note of tries stays", extra=why)
    else:
        owed -= now


async def is_noted_by_another(unit: Unit, consumer: str, message_id: str) -> bool:
    """Tell whether the note of a message is that of another worker."""
    note = (await unit.members.notes(consumer, [message_id])).get(message_id)
    return note is not None and note.writer != _me()


async def forget_note(unit: Unit, consumer: str, message_id: str) -> None:
    """Take back what was noted of a message that is over, unless its writer is still at it."""
    note = (await unit.members.notes(consumer, [message_id])).get(message_id)
    if note is None:
        return
    if note.writer == _me() or await _is_gone(unit, consumer, note):
        await unit.members.acquit_many(consumer, [message_id], note.writer)


def is_gone(member: Member) -> bool:
    """Tell whether a member's process surely runs no more; one that runs writes its row again."""
    owner = Owner.read(member.owner)
    return owner is not None and owner.is_gone()


async def _is_gone(unit: Unit, consumer: str, note: Note) -> bool:
    """Tell whether the writer of a note runs no more, as far as anybody can know."""
    owner = Owner.read(note.writer)
    if owner is not None and owner.is_gone():
        return True
    if owner is not None and owner.is_running():
        return False
    if await unit.now() < note.noted_at + LEFT_SECONDS:
        return False
    for member in await unit.members.running(consumer):
        known = Owner.read(member.owner)
        if known is not None and owner is not None and owner_text(known) == owner_text(owner):
            return False
    return True
