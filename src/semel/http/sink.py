"""The HTTP sink: tasks send chunks, and prepare, commit and abort are one request each.

    PUT  /chunks/{txn}/{task}/{number}     a chunk of rows, as JSON lines
    POST /prepare/{txn}                    the winning chunks, and the digest
    POST /commit/{txn}   /abort/{txn}
    GET  /txn/{txn}      /pending/{scope}  /scopes/{scope}  /scopes
    POST /fence/{scope}  /rename/{scope}   /tidy/{txn}
    DELETE /chunks/{txn}/{task}

Every request may be repeated; no answer means unknown, and the next one asks.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.arrow.formats import Format, check_schema, encode_lines
from semel.arrow.rowfiles import safe_name
from semel.arrow.tally import tally
from semel.errors import Fenced, Misuse, Permanent, SemelError, reason_of
from semel.http.client import Headers, ReceiverClient, ReceiverRefused, checked_url
from semel.pipeline.sink import (
    Batch,
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
    Tally,
    Tenant,
    Token,
    digest_of,
    tally_of,
)
from semel.pipeline.txn import Scope, SinkTxnId, checked_name

# Small enough for the usual limits of gateways, large enough for few requests.
DEFAULT_CHUNK_BYTES: Final = 4 << 20


class HttpSink:
    """Rows as JSON lines to a receiver at *url* that takes part in the decision.

    *headers* is called before each request (a token that expires); Spark pickles it to the
    executors, so it is a function of a module.  *chunk_bytes* is the size before compression.
    """

    uncounted = (
        "a receiver is not asked for its rows; apply gets the cycle's name to keep beside them, "
        "and --reread compares the source with what was staged"
    )

    def __init__(
        self,
        url: str,
        rows: Any = None,
        *,
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
        self._epochs: dict[Scope, int] = {}

    def __repr__(self) -> str:
        return f"HttpSink({self.place!r}, name={self.name!r})"

    @property
    def place(self) -> str:
        """The receiver's URL."""
        return self.client.url

    def check(self, schema: Schema | None) -> None:
        """Ask the receiver a question, and check that every column has a form in JSON."""
        self.client.request("GET", "/scopes")
        if schema is not None:
            check_schema(Format.JSONL, schema)

    def fence(self, scope: Scope, epoch: int) -> None:
        about = {"epoch": epoch, **_about(scope, self.name)}
        try:
            self.client.request("POST", f"/fence/{scope.slug}", epoch=epoch, json=about)
        except ReceiverRefused as error:
            if error.status == 409:
                raise Fenced(f"http sink {self.name}: {reason_of(error)}") from error
            raise
        self._epochs[scope] = epoch

    def stager(self, txn: SinkTxnId) -> HttpStager:
        epoch = self._epochs.get(txn.scope, 0)
        return HttpStager(self.client, txn, epoch, self.compression, self.chunk_bytes)

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Name the winning chunks to the receiver, which checks that it has each of them."""
        total = tally_of(receipts)
        token = {
            "attempt": txn.attempt,
            "digest": digest_of(receipts),
            "rows": total.rows,
            "hash": total.hash,
            "place": self.place,
        }
        chunks = [
            [safe_name(receipt.task), number, *chunk]
            for receipt in receipts
            for number, chunk in enumerate(receipt.detail["chunks"])
        ]
        outcome = self._outcome("prepare", txn, {"token": token, "chunks": chunks})
        return SinkOK(token) if isinstance(outcome, SinkOK) else outcome

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        if token.get("place") != self.place:
            return SinkFatal(f"{txn}: the token is of the receiver {token.get('place')!r}")
        return self._outcome("commit", txn, {"token": dict(token)})

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        return self._outcome("abort", txn, {})

    def _outcome(self, act: str, txn: SinkTxnId, content: Any) -> SinkOutcome:
        about = {"scope": txn.scope.slug, "txn": txn.label, **content}
        try:
            self._ask("POST", f"/{act}/{_id(txn)}", txn.scope, json=about)
        except Permanent as error:
            return SinkFatal(f"http sink {self.name}, {txn}: {reason_of(error)}")
        except SemelError as error:
            return SinkRetryable(f"http sink {self.name}, {txn}: {reason_of(error)}")
        return SinkOK()

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        try:
            found = self._ask("GET", f"/txn/{_id(txn)}", txn.scope)
            return SinkFinding(Found(found["state"]), found["evidence"], found.get("since"))
        except (SemelError, KeyError, TypeError, ValueError) as error:
            return SinkFinding(Found.UNREACHABLE, f"http sink {self.name}: {reason_of(error)}")

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        return [txn for txn, state in self._pending(scope) if state == "held"]

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        swept = []
        for txn, state in self._pending(scope):
            if state == "finished":
                self._ask("POST", f"/tidy/{_id(txn)}", scope)
            elif not is_loser(txn) or not isinstance(self.abort(txn, None), SinkOK):
                continue
            swept.append(txn)
        return swept

    def leftovers(self, scope: Scope) -> list[Leftover]:
        found = self._pending(scope)
        return [Leftover(txn, "chunks at the receiver") for txn, at in found if at != "held"]

    def _pending(self, scope: Scope) -> list[tuple[SinkTxnId, str]]:
        found = self._ask("GET", f"/pending/{scope.slug}", scope)
        txns = [(SinkTxnId.parse(scope, one["txn"]), one["state"]) for one in found]
        return sorted(txns, key=lambda one: (one[0].cycle, one[0].attempt))

    def mark(self, scope: Scope) -> SinkTxnId | None:
        found = self._ask("GET", f"/scopes/{scope.slug}", scope)
        return SinkTxnId.parse(scope, found["mark"]) if found["mark"] else None

    def find_place(self) -> str:
        return f"receiver {self.place}"

    def tenants(self) -> list[Tenant]:
        found = []
        for one in self.client.request("GET", "/scopes"):
            # One that no sink has named must not stop those that have nothing to do with it.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                scope = Scope(one["ledger"], one["app"], one["query"])
                if one["mark"]:
                    found.append(Tenant(scope, one["sink"], one["mark"]))
        return found

    def rename(self, old: Tenant, new: Tenant) -> None:
        about = {"to": new.scope.slug, **_about(new.scope, new.sink)}
        # An operator has fenced no owner: the receiver refuses if somebody does so from now on.
        listed = self.client.request("GET", "/scopes")
        epochs = [one["epoch"] for one in listed if one["slug"] == old.scope.slug]
        path = f"/rename/{old.scope.slug}"
        self.client.request("POST", path, epoch=max(epochs, default=0), json=about)

    def guarantee(self) -> Guarantee:
        return Guarantee(
            effect=f"the rows of a cycle at the receiver {self.place}, applied once",
            readers_see="what the receiver shows: whole batches, if it keeps the contract",
            not_covered=(
                "a receiver that forgets what it confirmed, or applies rows outside its commit",
            ),
        )

    def close(self) -> None:
        self.client.close()

    def _ask(self, method: str, path: str, scope: Scope, json: Any = None) -> Any:
        return self.client.request(method, path, epoch=self._epochs.get(scope, 0), json=json)


@dataclass(frozen=True, slots=True)
class HttpStager:
    """The settings that a task needs to send chunks for one transaction."""

    client: ReceiverClient
    txn: SinkTxnId
    epoch: int
    compression: str
    chunk_bytes: int

    def open(self, task: str) -> HttpWriter:
        return HttpWriter(self, task)


class HttpWriter:
    """The chunks of one task attempt; a task without rows sends none."""

    def __init__(self, stager: HttpStager, task: str) -> None:
        self._stager = stager
        # Connections of its own, which end with the task.
        self._client = copy.copy(stager.client)
        self._task = task
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._chunks: list[Any] = []
        self._tally = Tally()

    def write(self, batch: Batch) -> None:
        """Send the rows that fill a chunk; one request at a time."""
        for line in encode_lines(batch):
            self._waiting.append(line.encode())
            self._bytes += len(self._waiting[-1]) + 1
            if self._bytes >= self._stager.chunk_bytes:
                self._send()
        self._tally += tally(batch)

    def _send(self) -> None:
        stager = self._stager
        body, rows = packed(self._waiting, stager.compression), len(self._waiting)
        more = {"Semel-Rows": str(rows), **content_headers(stager.compression)}
        path = f"/chunks/{_id(stager.txn)}/{safe_name(self._task)}/{len(self._chunks)}"
        self._client.request("PUT", path, epoch=stager.epoch, content=body, more=more)
        self._chunks.append([hashlib.sha256(body).hexdigest(), rows])
        self._waiting, self._bytes = [], 0

    def finish(self) -> Receipt:
        if self._waiting:
            self._send()
        self._client.close()
        return Receipt(self._task, self._tally, {"chunks": self._chunks})

    def discard(self) -> None:
        """Delete the task's chunks, as far as possible."""
        self._waiting = []
        stager = self._stager
        path = f"/chunks/{_id(stager.txn)}/{safe_name(self._task)}"
        # What is left, the next sweep finds.
        with contextlib.suppress(SemelError):
            self._client.request("DELETE", path, epoch=stager.epoch)
        self._client.close()


def packed(lines: Sequence[bytes], compression: str) -> bytes:
    """Return the body of a chunk: JSON lines, the same bytes for the same rows."""
    body = b"".join(line + b"\n" for line in lines)
    return gzip.compress(body, 5, mtime=0) if compression == "gzip" else body


def content_headers(compression: str) -> dict[str, str]:
    """Return what a request says of a chunk."""
    encoding = {"Content-Encoding": "gzip"} if compression == "gzip" else {}
    return {"Content-Type": "application/jsonl", **encoding}


def _about(scope: Scope, sink: str) -> dict[str, str]:
    return {"ledger": scope.ledger, "app": scope.app, "query": scope.query, "sink": sink}


def _id(txn: SinkTxnId) -> str:
    return f"{txn.scope.slug}.{txn.label}"
