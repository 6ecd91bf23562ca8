"""One member of a Kafka consumer group.

    event loop   fetch · commit · seek · pause            ─ calls ─▶   one thread
    buffer       records, by partition                    ◀─ records ─ owns the client, polls

The thread polls all the time, even while handlers work, so a rebalance is served at once and the
broker never takes a slow handler for a dead one.  Partitions whose buffer is full are paused.
While the thread waits in a rebalance for the revocation listeners, it goes on serving calls:
their commits arrive there.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

from semel.errors import Fenced, NeedsOperator, Retryable, SemelError
from semel.kafka.client import (
    CALL_SECONDS,
    FENCED,
    REFUSED,
    GroupProtocol,
    Start,
    kafka,
    make,
    meaning,
)
from semel.message import Coordinates, Partition, Record, headers_from
from semel.messaging.handle.cancel import rung
from semel.messaging.receive.broker import MemberEnded, Revoked

log = logging.getLogger("semel.kafka")

Answer = TypeVar("Answer")

BUFFERED: Final = 2_000
"""How many records of a partition are held; above it, the partition is paused."""

BUFFERED_BYTES: Final = 16 * 1024**2
"""The same for the bytes of their keys and values."""

# While records wait in the buffer, calls are expected: then the thread waits for calls, and
# otherwise for records.  Each bounds how long the other kind waits.
BUSY_SECONDS: Final = 0.005
IDLE_SECONDS: Final = 0.02

JOIN_SECONDS: Final = 5.0
"""How long the first fetch waits until partitions are assigned, and something came of each."""

LOOP_SECONDS: Final = 300.0
"""An event loop that does not answer for so long is taken for dead: the member stops polling.

The broker then gives its partitions to others, after `max.poll.interval.ms`.
"""

AGAIN_SECONDS: Final = 0.2
"""How long to wait before the broker is asked again."""

LOOK_SECONDS: Final = 10.0
"""How often a member of the classic protocol asks whether its topics are still the same.

The client would read on in a topic that was made again, from the offset of the old one.  With the
other protocol, the broker takes the partitions of the old topic away.
"""

TOPIC_ID: Final = "topic-id:"
"""The prefix of the metadata of a commit, which names the topic's id."""


@dataclass(slots=True)
class _Waiting:
    """Records of one partition that were not fetched yet."""

    records: deque[Record] = field(default_factory=deque)
    size: int = 0
    """The bytes of their keys and values."""

    @property
    def fill(self) -> float:
        """The partition is paused if this is at least 1."""
        return max(len(self.records) / BUFFERED, self.size / BUFFERED_BYTES)

    def append(self, record: Record) -> None:
        self.records.append(record)
        self.size += _size(record)

    def popleft(self) -> Record:
        record = self.records.popleft()
        self.size -= _size(record)
        return record


def _size(record: Record) -> int:
    return len(record.key or b"") + len(record.value or b"")


class KafkaSubscription:
    """A member of *group*; `KafkaBroker.subscribe` makes it."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        group: str,
        topics: Sequence[str],
        protocol: GroupProtocol,
        start: Start,
        topic_ids: Callable[[Collection[str]], Mapping[str, str]],
    ) -> None:
        self._settings = dict(settings)
        self._group = group
        self._topics = list(topics)
        self._protocol = protocol
        self._start = start
        self._ask_topic_ids = topic_ids
        self._topic_ids: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Revoked] = []
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = (
            queue.SimpleQueue()
        )
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        # Guarded by the lock: the loop and the thread both change them.
        self._buffer: dict[Partition, _Waiting] = {}
        self._seeks: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._leaving: frozenset[Partition] = frozenset()
        self._assigned: frozenset[Partition] = frozenset()
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._client: Any = None
        self._paused_there: set[Partition] = set()
        self._asked_loop = self._loop_answered = self._looked = self._served = time.monotonic()
        self._has_read = False
        """Something came of each partition of the first assignment: a record, or its end."""

        self._unread: set[Partition] = set()
        self._reached: dict[Partition, int] = {}
        """The offset behind the last record that came, or where the client began to read."""

        self._ends: dict[Partition, tuple[int, int]] = {}
        """The end that the client came to, and what it had reached there."""

        self._begun: dict[Partition, int] = {}
        """Where partitions without a committed offset began."""

        self._join()
        self._thread = threading.Thread(target=self._run, name=f"semel-kafka-{group}", daemon=True)
        self._thread.start()

    # On the event loop.

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._group

    @property
    def assignment(self) -> frozenset[Partition]:
        """The partitions that this member owns now."""
        return self._assigned

    def on_revoked(self, listener: Revoked) -> None:
        """Call *listener* before partitions are revoked.

        Not for partitions that are lost already, because the session ended: nothing that it
        could commit would be accepted.
        """
        self._listeners.append(listener)

    async def fetch(self, max_records: int, wait_seconds: float) -> Sequence[Record]:
        """Return buffered records; wait for the first one at most *wait_seconds*.

        The first fetch of a member waits for its partitions, and for an answer about each: before
        that, an empty answer would not mean that there is nothing to read.

        Raises:
            NeedsOperator: records that were not handled are gone from the broker.
            Permanent: the broker refuses this member.
            MemberEnded: the client has failed permanently.
        """
        if not self._has_read:
            await self._first_answers()
        until = time.monotonic() + wait_seconds
        while True:
            self._arrived.clear()
            if self._error is not None:
                raise self._error
            found = self._take(max_records)
            if found:
                return found
            left = until - time.monotonic()
            if left <= 0 or self._closed.is_set():
                return []
            await rung(self._arrived, left)

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit the next offset to read of each partition.

        Raises:
            Fenced: a partition is no longer this member's; nothing was committed.
            Retryable: the group rebalances, or the broker does not answer; the same offsets may
                be committed later.
        """
        if offsets:
            await self._call(lambda: self._commit(offsets))

    async def committed(self, partition: Partition) -> int:
        """Return the committed offset; without one, the first offset that exists."""
        return await self._call(lambda: self._committed([partition])[0][0].offset)

    async def end(self, partition: Partition) -> int:
        """Return the end of what can be read: the offset of the next record.

        Records of an open transaction cannot be read yet.  Where only marks of transactions are
        left to read, this is the offset behind the last record.
        """
        return await self._call(lambda: self._end(partition))

    def seek(self, partition: Partition, offset: int) -> None:
        """Fetch from *offset* on, the next time."""
        with self._lock:
            if partition in self._assigned:
                self._seeks[partition] = offset
                self._buffer.pop(partition, None)

    def pause(self, partition: Partition) -> None:
        """Leave the partition out of fetches."""
        with self._lock:
            if partition in self._assigned:
                self._paused.add(partition)

    def resume(self, partition: Partition) -> None:
        """Fetch from a paused partition again; ignored if it is no longer assigned."""
        with self._lock:
            self._paused.discard(partition)
        self._arrived.set()

    async def close(self) -> None:
        """Call the listeners, then leave the group.

        A static member (`instance_id`) keeps its partitions at the broker until its session
        ends, so that its next start finds them.  So does every member whose broker is away.
        """
        self._closing.set()
        # A commit waits for as long as the broker is away, and cannot be interrupted.
        while self._thread.is_alive() and time.monotonic() - self._served < CALL_SECONDS:
            await asyncio.sleep(BUSY_SECONDS)
        if self._thread.is_alive():
            log.warning("no broker answers; left without a goodbye", extra={"group": self._group})

    async def _first_answers(self) -> None:
        """Wait for the first records; a member too many gets none, and waits only once."""
        until = time.monotonic() + JOIN_SECONDS
        while (left := until - time.monotonic()) > 0:
            self._arrived.clear()
            if self._has_read or self._error is not None or self._closed.is_set():
                break
            await rung(self._arrived, left)
        self._has_read = True

    def _take(self, max_records: int) -> list[Record]:
        found: list[Record] = []
        with self._lock:
            hidden = self._paused | self._leaving | self._seeks.keys()
            for partition in [p for p in self._buffer if p not in hidden]:
                # To the end, so that the next fetch begins with another partition.
                waiting = self._buffer.pop(partition)
                while waiting.records and len(found) < max_records:
                    found.append(waiting.popleft())
                if waiting.records:
                    self._buffer[partition] = waiting
                if len(found) == max_records:
                    break
        return found

    async def _call(self, function: Callable[[], Answer]) -> Answer:
        """Let the thread call *function* with the client.

        Raises:
            Retryable: there was no answer in time; the thread may still make the call.
        """
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._calls.put((function, future))
        if self._closed.is_set():
            # It came after the thread's last look.
            self._serve(0.0)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await future
        except TimeoutError as error:
            raise Retryable(f"group {self._group}: the broker does not answer") from error

    # On the thread.

    def _join(self) -> None:
        settings = {**self._settings, "group.id": self._group, "error_cb": self._broker_error}
        settings["group.protocol"] = self._protocol.value
        if self._protocol is GroupProtocol.CLASSIC:
            settings["partition.assignment.strategy"] = "cooperative-sticky"
        self._client = make("Consumer", settings)
        self._client.subscribe(
            self._topics,
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._serve(BUSY_SECONDS if self._buffer else 0.0)
                self._seek_and_pause()
                self._look_at_topics()
                if self._loop_lives():
                    self._poll(0.0 if self._buffer else IDLE_SECONDS)
                else:
                    time.sleep(IDLE_SECONDS)
            self._revoke(self._assigned)
            self._assigned = frozenset()
        except Exception as error:
            log.exception("the thread of a subscription failed", extra={"group": self._group})
            self._fail(error)
        finally:
            with suppress(kafka.KafkaException):
                self._client.close()
            self._assigned = frozenset()
            self._closed.set()
            self._serve(0.0)
            self._ring()

    def _serve(self, wait_seconds: float) -> None:
        """Carry out the calls that wait; wait for the first one."""
        while True:
            self._served = time.monotonic()
            try:
                function, future = self._calls.get(
                    timeout=wait_seconds or None, block=wait_seconds > 0
                )
            except queue.Empty:
                return
            wait_seconds = 0.0
            answer: Any = None
            error: Exception | None = None
            try:
                answer = self._has_left() if self._closed.is_set() else function()
            except kafka.KafkaException as failed:
                error = meaning(failed, f"group {self._group}")
            except Exception as failed:  # noqa: BLE001  it is raised where the call was made
                error = failed
            self._on_loop(_settle, future, answer, error)

    def _loop_lives(self) -> bool:
        """Ask the event loop for an answer once in a second: a handler may block it for ever."""
        now = time.monotonic()
        if now - self._asked_loop > 1.0:
            self._asked_loop = now
            self._on_loop(self._answer_for_loop)
        return now - self._loop_answered < LOOP_SECONDS

    def _answer_for_loop(self) -> None:
        self._loop_answered = time.monotonic()

    def _look_at_topics(self) -> None:
        """Compare the topics' ids now and then, on another thread: the broker may be away."""
        now = time.monotonic()
        if self._protocol is GroupProtocol.CLASSIC and now - self._looked > LOOK_SECONDS:
            self._looked = now
            threading.Thread(target=self._compare_topics, daemon=True).start()

    def _compare_topics(self) -> None:
        seen = {topic: id for topic, id in list(self._topic_ids.items()) if id}
        with suppress(SemelError):
            for topic, id in self._ask_topic_ids(seen.keys()).items():
                if id != seen[topic]:
                    self._fail(self._made_again(topic, seen[topic], id))

    def _has_left(self) -> NoReturn:
        raise Fenced(f"group {self._group}: this member has left")

    def _poll(self, wait_seconds: float) -> None:
        first = self._client.poll(wait_seconds)
        if first is None:
            return
        # One after the other: a rebalance inside the second call forgets what came before it.
        self._keep([first])
        self._keep(self._client.consume(500, 0.0))
        self._has_read = self._has_read or (bool(self._assigned) and not self._unread)
        self._ring()

    def _keep(self, messages: Iterable[Any]) -> None:
        """Put records into the buffer."""
        for message in messages:
            if message.topic() is not None:
                self._unread.discard(Partition(message.topic(), message.partition()))
            if message.error() is not None:
                self._message_error(message)
            else:
                record = record_of(message)
                with self._lock:
                    if record.at.place in self._assigned:
                        self._reached[record.at.place] = record.at.offset + 1
                        self._buffer.setdefault(record.at.place, _Waiting()).append(record)

    def _message_error(self, message: Any) -> None:
        error = message.error()
        if error.code() == kafka.KafkaError._PARTITION_EOF:
            at = Partition(message.topic(), message.partition())
            if at in self._reached:
                self._ends[at] = (message.offset(), self._reached[at])
        elif error.code() == kafka.KafkaError._FATAL and self._may_be_classic:
            log.warning(
                "the broker refuses the group protocol 'consumer'; using 'classic'",
                extra={"group": self._group, "why": error.str()},
            )
            self._client.close()
            self._protocol = GroupProtocol.CLASSIC
            self._join()
        elif error.code() == kafka.KafkaError._MAX_POLL_EXCEEDED or error.code() in FENCED:
            log.warning("partitions lost", extra={"group": self._group, "why": error.str()})
        else:
            where = f"{message.topic()}/{message.partition()}" if message.topic() else self._group
            found = meaning(error, f"group {self._group}, {where}")
            if isinstance(found, Retryable) and not isinstance(found, MemberEnded):
                log.warning("broker error", extra={"group": self._group, "why": str(found)})
            else:
                self._fail(found)

    @property
    def _may_be_classic(self) -> bool:
        """This member has got no partition yet, perhaps because the broker is too old.

        Not with an instance id: it is refused as long as another member has the same one.
        """
        is_static = "group.instance.id" in self._settings
        return self._protocol is GroupProtocol.CONSUMER and not (self._topic_ids or is_static)

    def _broker_error(self, error: Any) -> None:
        if error.code() == kafka.KafkaError._ALL_BROKERS_DOWN:
            log.warning("no broker answers", extra={"group": self._group, "why": error.str()})
        elif error.code() in REFUSED:
            self._fail(meaning(error, f"group {self._group}"))

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._ring()

    def _seek_and_pause(self) -> None:
        """Do what the event loop asked for, and pause partitions whose buffer is full."""
        for partition, offset in list(self._seeks.items()):
            try:
                self._client.seek(kafka.TopicPartition(partition.topic, partition.number, offset))
            except kafka.KafkaException as error:
                if error.args[0].code() == kafka.KafkaError._STATE:
                    continue  # right after an assignment; the partition stays hidden until then
                raise
            with self._lock:
                # What was consumed before the seek is from the old position.
                self._buffer.pop(partition, None)
                self._reached[partition] = offset
                self._ends.pop(partition, None)
                if self._seeks.get(partition) == offset:
                    del self._seeks[partition]
        with self._lock:
            wanted = {
                p
                for p, waiting in self._buffer.items()
                if waiting.fill >= (0.5 if p in self._paused_there else 1.0)
            } - self._leaving
        for change, partitions in (
            (self._client.pause, wanted - self._paused_there),
            (self._client.resume, (self._paused_there & self._assigned) - wanted),
        ):
            if partitions:
                change(_places(partitions))
        self._paused_there = wanted

    def _commit(self, offsets: Mapping[Partition, int]) -> None:
        foreign = sorted(offsets.keys() - self._assigned)
        if foreign:
            # The broker would accept it: it checks the member's generation, not its partitions.
            raise Fenced(f"group {self._group}: {foreign[0]} is no longer this member's")
        self._commit_places(offsets)

    def _commit_places(self, offsets: Mapping[Partition, int]) -> None:
        """Commit offsets, with the id of their topic beside each."""
        places = [
            kafka.TopicPartition(
                p.topic, p.number, offset, metadata=f"{TOPIC_ID}{self._topic_ids.get(p.topic, '')}"
            )
            for p, offset in offsets.items()
        ]
        _checked(self._client.commit(offsets=places, asynchronous=False))

    def _committed(self, partitions: Iterable[Partition]) -> tuple[list[Any], list[Any]]:
        """Return places with the offsets to read next; also those that had none committed."""
        places = _checked(self._client.committed(_places(partitions), timeout=CALL_SECONDS))
        new = [place for place in places if place.offset < 0]
        for place in new:
            # Asked once: the answer waits behind a fetch that waits for records.
            if (at := _place(place)) not in self._begun:
                self._begun[at] = self._watermarks(at)[0]
            place.offset = self._begun[at]
        return places, new

    def _watermarks(self, partition: Partition) -> tuple[int, int]:
        place = kafka.TopicPartition(partition.topic, partition.number)
        low, high = self._client.get_watermark_offsets(place, timeout=CALL_SECONDS)
        return low, high

    def _end(self, partition: Partition) -> int:
        end = self._watermarks(partition)[1]
        at, reached = self._ends.get(partition, (-1, end))
        return reached if at == end else end

    # Rebalances: the client calls these inside a poll.

    def _on_assign(self, client: Any, places: list[Any]) -> None:
        partitions = _partitions(places)
        positions = self._positions(partitions)
        if self._closing.is_set():
            return
        client.incremental_assign(positions)
        self._paused_there -= partitions
        self._unread |= partitions
        self._reached |= {_place(at): at.offset for at in positions}
        self._assigned |= partitions
        self._ring()

    def _positions(self, partitions: Collection[Partition]) -> list[Any]:
        """Return where to begin, asking until the broker answers.

        Explicit offsets: without one, the client reports a partition that is merely new as gone.
        """
        while not self._closing.is_set():
            try:
                places, new = self._committed(partitions)
                self._check_topics(places)
                if self._start is Start.END and new:
                    self._commit_ends({at.topic for at in new})
                    places, _ = self._committed(partitions)
            except (kafka.KafkaException, Retryable) as error:
                log.warning(
                    "offsets are not known yet", extra={"group": self._group, "why": str(error)}
                )
                self._serve(AGAIN_SECONDS)
            else:
                return places
        return []

    def _commit_ends(self, topics: Iterable[str]) -> None:
        """Commit the ends of topics of which the group has committed nothing.

        Those of all partitions, also of other members' ones: a partition without a commit is then
        one that was added to the topic, or whose offset has expired, and nothing of it is skipped.
        """
        for topic in topics:
            known = self._client.list_topics(topic, timeout=CALL_SECONDS).topics[topic].partitions
            whole = [Partition(topic, number) for number in known]
            places = self._client.committed(_places(whole), timeout=CALL_SECONDS)
            if all(place.offset < 0 for place in _checked(places)):
                self._commit_places({at: self._watermarks(at)[1] for at in whole})

    def _check_topics(self, places: list[Any]) -> None:
        """Compare the topics' ids with those of the commits, and with those seen before."""
        found = self._ask_topic_ids({place.topic for place in places})
        for place in places:
            now = found.get(place.topic, "")
            kept = place.metadata or ""
            # Without the prefix, another client has committed, and says something else with it.
            noted = kept.removeprefix(TOPIC_ID) if kept.startswith(TOPIC_ID) else ""
            seen = self._topic_ids.setdefault(place.topic, noted or now)
            known = next((one for one in (noted, seen) if one and one != now), now)
            if now and now != known:
                self._fail(self._made_again(place.topic, known, now))

    def _made_again(self, topic: str, known: str, now: str) -> NeedsOperator:
        return NeedsOperator(
            f"group {self._group}: topic {topic} was deleted and made again (id {known} is now "
            f"{now}): offsets of the old one mean nothing in the new one; reset the group's "
            f"offsets with kafka-consumer-groups.sh --reset-offsets --to-earliest, then start again"
        )

    def _on_revoke(self, client: Any, places: list[Any]) -> None:
        self._revoke(_partitions(places))
        self._unassign(client, places)

    def _on_lost(self, client: Any, places: list[Any]) -> None:
        log.warning("partitions lost", extra={"group": self._group, "partitions": str(places)})
        self._unassign(client, places)

    def _unassign(self, client: Any, places: list[Any]) -> None:
        paused = self._paused_there & _partitions(places)
        with suppress(kafka.KafkaException):
            if paused:
                # The client would remember the pause when the partition comes back.
                client.resume(_places(paused))
            client.incremental_unassign(places)
        self._forget(_partitions(places))

    def _revoke(self, partitions: frozenset[Partition]) -> None:
        """Hide partitions, then wait for the listeners, serving their calls."""
        with self._lock:
            self._leaving |= partitions
        if not partitions or not self._listeners:
            return
        try:
            told = asyncio.run_coroutine_threadsafe(self._tell(partitions), self._loop)
        except RuntimeError:
            return  # the loop is closed: no task is left to commit anything
        while not told.done() and self._loop.is_running():
            self._serve(BUSY_SECONDS)

    async def _tell(self, partitions: Collection[Partition]) -> None:
        for listener in self._listeners:
            try:
                await listener(partitions)
            except Exception:
                log.exception("a revocation listener failed", extra={"group": self._group})

    def _forget(self, partitions: frozenset[Partition]) -> None:
        with self._lock:
            self._assigned -= partitions
            self._leaving -= partitions
            self._paused -= partitions
            self._paused_there -= partitions
            self._unread -= partitions
            for partition in partitions:
                self._buffer.pop(partition, None)
                self._seeks.pop(partition, None)
                self._reached.pop(partition, None)
                self._ends.pop(partition, None)
                self._begun.pop(partition, None)

    def _ring(self) -> None:
        self._on_loop(self._arrived.set)

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no task waits any more
            self._loop.call_soon_threadsafe(function, *arguments)


def _settle(future: asyncio.Future[Any], answer: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)


def _checked(places: list[Any]) -> list[Any]:
    """Return places whose answers are no errors."""
    for place in places:
        if place.error is not None:
            raise kafka.KafkaException(place.error)
    return places


def _places(partitions: Iterable[Partition]) -> list[Any]:
    return [kafka.TopicPartition(p.topic, p.number) for p in sorted(partitions)]


def _partitions(places: Iterable[Any]) -> frozenset[Partition]:
    return frozenset(map(_place, places))


def _place(place: Any) -> Partition:
    return Partition(place.topic, place.partition)


def record_of(message: Any) -> Record:
    """Make a record of a message of the client."""
    _, milliseconds = message.timestamp()
    return Record(
        Coordinates(message.topic(), message.partition(), message.offset()),
        message.value(),
        message.key(),
        headers_from(message.headers() or ()),
        milliseconds / 1_000,
    )
