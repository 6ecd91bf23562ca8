"""The fallback for receivers without two phases: one idempotent POST per chunk.

    tasks: chunks in a shared place ──prepare: promised──▶ commit: POST each, then the proof

Each POST has an `Idempotency-Key` of the sink, the cycle and the chunk, and is repeated until
it is answered.  A receiver that remembers the keys takes each chunk once; one that does not may
take some twice.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from semel.arrow.area import Area
from semel.arrow.formats import Format, check_schema
from semel.arrow.held import HeldSink
from semel.arrow.rowfiles import safe_name
from semel.errors import Misuse
from semel.http.client import ANSWERS, Headers, ReceiverClient, Response, checked_url
from semel.http.sink import DEFAULT_CHUNK_BYTES, HttpWriter, content_headers, packed
from semel.pipeline.sink import Guarantee, Schema
from semel.pipeline.txn import SinkTxnId

POST_ANSWERS: Final = {
    **ANSWERS,
    202: (Response.DONE, "taken"),
    409: (Response.LATER, "a request with this key is under way"),
    422: (Response.REFUSED, "the receiver refuses the rows, or had others under this key"),
}
"""As `ANSWERS`, but for what it means to a POST with an idempotency key."""

_AT_ONCE: Final = 4


class HttpPostSink(HeldSink):
    """Rows as JSON lines to a service at *url* that takes each chunk by one POST.

    *staging* is a folder that the driver and all executors mount, or the URI of a bucket: what a
    batch sends is kept there until the decision.  The other arguments are those of `HttpSink`.
    """

    kind = "http"
    uncounted = (
        "the service is not asked which rows it shows; compare the source with what was staged "
        "(--reread)"
    )

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
        super().__init__(rows, name, staging)
        if compression not in ("gzip", "none"):
            raise Misuse(f"http sink {name}: compression must be 'gzip' or 'none'")
        if chunk_bytes < 1 or tries < 1 or timeout_seconds <= 0:
            raise Misuse(f"http sink {name}: sizes, tries and seconds must be greater than 0")
        self.compression = compression
        self.chunk_bytes = chunk_bytes
        self.client = ReceiverClient(checked_url(url), headers, ca_file, timeout_seconds, tries)

    def __repr__(self) -> str:
        return f"HttpPostSink({self.client.url!r}, name={self.name!r})"

    @property
    def target(self) -> str:
        """The service's URL."""
        return self.client.url

    @property
    def place(self) -> str:
        """The same; two sinks of a pipeline need two services."""
        return self.client.url

    def check(self, schema: Schema | None) -> None:
        """Check the shared place, and that every column has a form in JSON; sends nothing."""
        super().check(schema)
        if schema is not None:
            check_schema(Format.JSONL, schema)

    def stager(self, txn: SinkTxnId) -> PostStager:
        return PostStager(self._area, self.client, txn, self.compression, self.chunk_bytes)

    def _send(self, txn: SinkTxnId, promise: Mapping[str, Any]) -> None:
        post = partial(self._post_one, txn, content_headers(self.compression))
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
        # Of the cycle and not of the attempt: a cycle is posted by one attempt only.  A service
        # may keep the keys of all its URLs together, and take those of another sink for its own.
        where = hashlib.sha256(self.place.encode()).hexdigest()[:12]
        key = f"{txn.scope.slug}.{self.name}.{where}.{txn.cycle.label}.{number}"
        epoch = self._epochs.get(txn.scope, 0)
        about = {**more, "Semel-Rows": str(chunk["rows"])}
        # The whole URL: a path below it would end with a slash.
        self.client.request(
            "POST", self.place, epoch=epoch, key=key, content=body, more=about, answers=POST_ANSWERS
        )

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
