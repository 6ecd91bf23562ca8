"""The fallback for receivers without two phases: one idempotent POST per chunk.

    tasks: chunks in a shared place ──prepare: promised──▶ commit: POST each, then the proof

Each POST has an `Idempotency-Key` of the cycle and the chunk, and is repeated until it is
answered.  A receiver that remembers the keys takes each chunk once; one that does not may take
some twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from semel.arrow.area import Area
from semel.arrow.attempts import COMMITTED, PREPARED
from semel.arrow.formats import Format, check_schema
from semel.arrow.rowfiles import safe_name
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, Misuse, Permanent, SemelError, reason_of
from semel.http.client import ANSWERS, Headers, ReceiverClient, Response, checked_url
from semel.http.sink import DEFAULT_CHUNK_BYTES, HttpWriter, content_headers, packed
from semel.pipeline.sink import (
    Found,
    Guarantee,
    Leftover,
    Receipt,
    Schema,
    SinkFatal,
    SinkFinding,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Token,
    digest_of,
    tally_of,
)
from semel.pipeline.txn import Scope, SinkTxnId, checked_name

POST_ANSWERS: Final = {
    **ANSWERS,
    202: (Response.DONE, "taken"),
    409: (Response.LATER, "a request with this key is under way"),
    422: (Response.REFUSED, "the receiver refuses the rows, or had others under this key"),
}
"""As `ANSWERS`, but for what it means to a POST with an idempotency key."""

_AT_ONCE: Final = 4


class HttpPostSink:
    """Rows as JSON lines to a service at *url* that takes each chunk by one POST.

    *staging* is a folder that the driver and all executors mount, or the URI of a bucket: what a
    batch sends is kept there until the decision.  The other arguments are those of `HttpSink`.
    """

    def __init__(
        self,
        url: str,
        rows: Any = None,
        *,
        staging: str,
        name: str = "http",
        compression: str = "gzip",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        headers: Headers | None = None,
        ca_file: str | None = None,
        timeout_seconds: float = 30.0,
        tries: int = 4,
    ) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        if compression not in ("gzip", "none"):
            raise Misuse(f"http sink {name}: compression must be 'gzip' or 'none'")
        if chunk_bytes < 1 or tries < 1 or timeout_seconds <= 0:
            raise Misuse(f"http sink {name}: sizes, tries and seconds must be greater than 0")
        self.compression = compression
        self.chunk_bytes = chunk_bytes
        self.client = ReceiverClient(checked_url(url), headers, ca_file, timeout_seconds, tries)
        self._area = Area(str(staging), name)
        self._epochs: dict[Scope, int] = {}

    def __repr__(self) -> str:
        return f"HttpPostSink({self.client.url!r}, name={self.name!r})"

    @property
    def place(self) -> str:
        """The service's URL."""
        return self.client.url

    def check(self, schema: Schema | None) -> None:
        """Check the shared place, and that every column has a form in JSON; sends nothing."""
        with self._area.faults():
            self._area.attempts(Scope("probe", "probe", "probe")).raise_epoch(1)
        if schema is not None:
            check_schema(Format.JSONL, schema)

    def fence(self, scope: Scope, epoch: int) -> None:
        with self._area.faults():
            attempts = self._area.attempts(scope)
            if epoch < attempts.epoch():
                raise Fenced(self._fenced(scope, epoch, attempts.epoch()))
            attempts.raise_epoch(epoch)
        self._epochs[scope] = epoch

    def stager(self, txn: SinkTxnId) -> PostStager:
        return PostStager(self._area, self.client, txn, self.compression, self.chunk_bytes)

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Check that the winners' chunks are there, and write down which ones will be posted."""
        return self._outcome(lambda: self._prepare(txn, receipts))

    def _prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        attempts = self._area.attempts(txn.scope)
        mine, newest = self._epochs.get(txn.scope, 0), attempts.epoch()
        if mine < newest:
            return SinkFatal(self._fenced(txn.scope, mine, newest))
        token = {"attempt": txn.attempt, "digest": digest_of(receipts), "place": self.place}
        known = attempts.read(COMMITTED, txn) or attempts.read(PREPARED, txn)
        if known is not None:
            same = known["token"] == token
            return SinkOK(token) if same else SinkFatal(f"{txn} was prepared with other rows")
        if (wrong := self._below(txn)) is not None:
            return SinkFatal(wrong)
        chunks = [chunk for receipt in receipts for chunk in receipt.detail["chunks"]]
        if lost := self._area.missing(txn, chunks):
            return SinkFatal(f"{txn}: {lost}")
        rows = tally_of(receipts).rows
        promise = {"token": token, "rows": rows, "chunks": chunks, "packing": self.compression}
        attempts.write(PREPARED, txn, promise)
        reach(CrashPoint.HTTP_PREPARE_SEALED, self.name)
        return SinkOK(token)

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Post every chunk, then write the proof that all were answered."""
        return self._outcome(lambda: self._commit(txn, token))

    def _commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        attempts = self._area.attempts(txn.scope)
        promise = attempts.read(PREPARED, txn)
        proof = attempts.read(COMMITTED, txn)
        known = proof or promise
        if known is None:
            return SinkFatal(
                self._below(txn)
                or f"{txn} cannot be committed: {self._area.label} has neither "
                f"its promise nor its proof: never prepared, aborted, or lost"
            )
        if known["token"] != dict(token):
            return SinkFatal(f"{txn}: its token is not the one that prepare returned")
        if proof is None:
            if (wrong := self._below(txn)) is not None:
                return SinkFatal(wrong)
            if (lost := self._area.missing(txn, known["chunks"])) is not None:
                # Another process may have posted them since.
                if attempts.read(COMMITTED, txn) is None:
                    return SinkFatal(f"{txn} cannot be committed: {lost}")
            else:
                self._post(txn, known)
                reach(CrashPoint.HTTP_CHUNKS_POSTED, self.name)
                attempts.keep_committed(txn, {"token": known["token"]})
        self._area.remove(txn)
        return SinkOK()

    def _post(self, txn: SinkTxnId, promise: Mapping[str, Any]) -> None:
        post = partial(self._post_one, txn, content_headers(promise["packing"]))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(post, range(len(promise["chunks"])), promise["chunks"]):
                pass

    def _post_one(
        self, txn: SinkTxnId, more: Mapping[str, str], number: int, chunk: Mapping[str, Any]
    ) -> None:
        with self._area.faults() as system:
            path = f"{self._area.folder(txn)}/{chunk['file']}"
            with system.open_input_stream(path) as stream:
                body = stream.read()
        # Of the cycle and not of the attempt: a cycle is posted by one attempt only.
        key = f"{txn.scope.slug}.{txn.cycle.label}.{number}"
        epoch = self._epochs.get(txn.scope, 0)
        about = {**more, "Semel-Rows": str(chunk["rows"])}
        # The whole URL: a path below it would end with a slash.
        self.client.request(
            "POST", self.place, epoch=epoch, key=key, content=body, more=about, answers=POST_ANSWERS
        )

    def _below(self, txn: SinkTxnId) -> str | None:
        mark = self.mark(txn.scope)
        if mark is None or mark.cycle < txn.cycle:
            return None
        return f"{txn} is at or below the mark {mark}: another attempt was committed"

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        return self._outcome(lambda: self._abort(txn))

    def _abort(self, txn: SinkTxnId) -> SinkOutcome:
        if self._area.attempts(txn.scope).read(COMMITTED, txn) is not None:
            return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
        self._area.remove(txn)
        return SinkOK()

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        try:
            with self._area.faults():
                attempts = self._area.attempts(txn.scope)
                if attempts.read(COMMITTED, txn) is not None:
                    return SinkFinding(Found.VISIBLE, "every chunk was posted and answered")
                promise = attempts.read(PREPARED, txn)
                if promise is None:
                    return SinkFinding(Found.GONE, f"{self._area.label} has no promise of it")
                if lost := self._area.missing(txn, promise["chunks"]):
                    return SinkFinding(Found.GONE, f"prepared, but {lost}")
                text = f"{promise['rows']} rows wait in {self._area.label}; some may be posted"
                return SinkFinding(Found.HELD, text)
        except (SemelError, OSError) as error:
            return SinkFinding(Found.UNREACHABLE, reason_of(error))

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        with self._area.faults():
            attempts = self._area.attempts(scope)
            done = set(attempts.records(COMMITTED))
            return [txn for txn in attempts.records(PREPARED) if txn not in done]

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        swept = []
        with self._area.faults():
            attempts = self._area.attempts(scope)
            done = set(attempts.records(COMMITTED))
            left = {*attempts.records(PREPARED), *attempts.with_files(self.mark(scope))}
            for txn in sorted(left, key=lambda txn: (txn.cycle, txn.attempt)):
                if txn in done or is_loser(txn):
                    self._area.remove(txn)
                    swept.append(txn)
        return swept

    def leftovers(self, scope: Scope) -> list[Leftover]:
        with self._area.faults():
            attempts = self._area.attempts(scope)
            done = set(attempts.records(COMMITTED))
            return attempts.leftovers(self.mark(scope), done.__contains__)

    def mark(self, scope: Scope) -> SinkTxnId | None:
        with self._area.faults():
            records = self._area.attempts(scope).records(COMMITTED)
        return records[-1] if records else None

    def guarantee(self) -> Guarantee:
        return Guarantee(
            effect=f"the rows of a cycle posted to {self.place}, each chunk under one key",
            readers_see="chunk after chunk: the service may show a part of a batch",
            not_covered=(
                f"a place {self._area.label} that loses what it has confirmed",
                "another name of the sink, or a new ledger: a service does not tell who has posted",
            ),
            weakened_by=(
                "the service has no two phases: a chunk is posted again after a crash or a lost "
                "answer, and counts once only where the service remembers Idempotency-Key; it may "
                "refuse rows after the decision, and then a person must act. Mount "
                "semel.sinks.receiver and use HttpSink",
            ),
        )

    def close(self) -> None:
        self.client.close()

    def _fenced(self, scope: Scope, mine: int, newest: int) -> str:
        return (
            f"http sink {self.name}: scope {scope} belongs to epoch {newest}, this process holds "
            f"{mine}; it was fenced and must stop"
        )

    def _outcome(self, call: Callable[[], SinkOutcome]) -> SinkOutcome:
        try:
            return call()
        except Permanent as error:
            return SinkFatal(f"http sink {self.name}: {reason_of(error)}")
        except (SemelError, OSError) as error:
            return SinkRetryable(f"http sink {self.name}: {reason_of(error)}")


@dataclass(frozen=True, slots=True)
class PostStager:
    """The settings that a task needs to keep chunks for one transaction."""

    area: Area
    client: ReceiverClient
    txn: SinkTxnId
    compression: str
    chunk_bytes: int

    def open(self, task: str) -> PostWriter:
        self.area.check_shared(self.txn.scope)
        writer: Any = PostWriter
        found: PostWriter = writer(self, task)
        return found


class PostWriter(HttpWriter):
    """The chunks of one task attempt, each a file in the shared place."""

    _stager: Any

    def _send(self) -> None:
        stager = self._stager
        name = f"{safe_name(self._task)}-{len(self._chunks):05d}.jsonl"
        body = packed(self._waiting, stager.compression)
        stager.area.write(stager.txn, name, body)
        self._chunks.append({"file": name, "size": len(body), "rows": len(self._waiting)})
        self._waiting, self._bytes = [], 0

    def discard(self) -> None:
        """Remove the task's chunks, as far as possible."""
        self._waiting = []
        for chunk in self._chunks:
            with contextlib.suppress(Exception):
                self._stager.area.delete(self._stager.txn, chunk["file"])
