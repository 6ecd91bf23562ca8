"""The contract of an HTTP receiver in any language, checked by its URL alone.

    class TestMyReceiver(ReceiverContract):
        url = "http://127.0.0.1:8000/semel"

`semel receiver check URL` runs the same rules.  Every rule works in a new scope, with
rows of an ``id`` and a ``text``, which stay where the receiver puts them: check one whose rows
do not matter.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from semel.http.client import Headers, ReceiverClient, ReceiverRefused, checked_url
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.testing.contracts.contract import Contract

_REFUSED = frozenset({400, 404, 405, 409, 410, 413, 415, 422})

Chunks = Sequence[Sequence[Any]]


class ReceiverWorld(Contract):
    """Where the receiver is, and the words of the rules."""

    url: ClassVar[str] = ""
    headers: ClassVar[Headers | None] = None
    """Returns the headers of a request, such as those of a login; use `staticmethod`."""

    ca_file: ClassVar[str | None] = None
    timeout_seconds: ClassVar[float] = 30.0

    read_rows: ClassVar[Callable[[], Iterable[Mapping[str, Any]]] | None] = None
    """Returns the rows that readers of the receiver see now; use `staticmethod`.

    Without it, rows that are shown twice or too early are not noticed.
    """

    @property
    def scope(self) -> Scope:
        """The scope of this rule alone."""
        name = uuid.uuid4().hex[:12]
        found: Scope = self.__dict__.setdefault("_scope", Scope(f"check-{name}", "check", name))
        return found

    def txn(self, batch: int = 0) -> SinkTxnId:
        """Name a new attempt at a cycle."""
        return CycleId(self.scope, 1, batch).attempt()

    def ask(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        """Return the status of an answer, 200 for any success, and its JSON."""
        try:
            return 200, self._client.request(method, path, **more)
        except ReceiverRefused as error:
            return error.status, None

    @property
    def _client(self) -> ReceiverClient:
        client = self.__dict__.get("_connected")
        if client is None:
            # Its connections are closed when it is collected.
            client = self.__dict__["_connected"] = ReceiverClient(
                checked_url(self.url), type(self).headers, self.ca_file, self.timeout_seconds
            )
        found: ReceiverClient = client
        return found

    def expect(self, wanted: int, method: str, path: str, **more: Any) -> Any:
        """Fail unless the answer has this status; return its JSON."""
        status, content = self.ask(method, path, **more)
        assert status == wanted, f"{method} {path} was answered {status} and not {wanted}"
        return content

    def fenced(self, epoch: int = 1, wanted: int = 200) -> None:
        """Raise the epoch of the scope."""
        self.__dict__.setdefault("_before", self._seen())
        about = {"ledger": self.scope.ledger, "app": self.scope.app, "query": self.scope.query}
        content = {"epoch": epoch, **about, "sink": "http"}
        self.expect(wanted, "POST", f"/fence/{self.scope.slug}", json=content, epoch=epoch)

    def put(
        self,
        txn: SinkTxnId,
        *ids: int,
        task: str = "task-1",
        number: int = 0,
        wanted: int = 200,
        text: str = "",
    ) -> list[Any]:
        """Send a chunk, and return what prepare says of it."""
        lines = [json.dumps({"id": n, "text": f"row {n}{text}"}) + "\n" for n in ids]
        body = gzip.compress("".join(lines).encode(), mtime=0)
        more = {"Content-Encoding": "gzip", "Content-Type": "application/jsonl"}
        path = f"/chunks/{name_of(txn)}/{task}/{number}"
        self.expect(wanted, "PUT", path, content=body, more=more, epoch=1)
        return [task, number, hashlib.sha256(body).hexdigest(), len(ids)]

    def prepare(
        self,
        txn: SinkTxnId,
        chunks: Chunks,
        *,
        digest: str = "d",
        wanted: int = 200,
        epoch: int = 1,
    ) -> dict[str, Any]:
        """Prepare, and return the token."""
        rows = sum(chunk[3] for chunk in chunks)
        token = {"attempt": txn.attempt, "digest": digest, "rows": rows, "hash": 1, "place": "x"}
        content = {"scope": self.scope.slug, "txn": txn.label, "token": token, "chunks": chunks}
        self.expect(wanted, "POST", f"/prepare/{name_of(txn)}", json=content, epoch=epoch)
        return token

    def prepared(self, txn: SinkTxnId, *ids: int) -> dict[str, Any]:
        """Send a chunk and prepare it."""
        return self.prepare(txn, [self.put(txn, *ids)])

    def commit(self, txn: SinkTxnId, token: Mapping[str, Any], wanted: int = 200) -> None:
        """Commit."""
        self.expect(wanted, "POST", f"/commit/{name_of(txn)}", json={"token": token}, epoch=1)

    def committed(self, txn: SinkTxnId, *ids: int) -> dict[str, Any]:
        """Send a chunk, prepare and commit it."""
        token = self.prepared(txn, *ids)
        self.commit(txn, token)
        return token

    def abort(self, txn: SinkTxnId, wanted: int = 200) -> None:
        """Abort."""
        self.expect(wanted, "POST", f"/abort/{name_of(txn)}", json={}, epoch=1)

    def shows(self, *ids: int) -> None:
        """Fail unless readers see exactly the rows with these ids, beside those of other rules."""
        if type(self).read_rows is not None:
            seen = self._seen() - self.__dict__["_before"]
            assert seen == Counter(ids), f"readers see {dict(seen)}, not {ids}, each once"

    def _seen(self) -> Counter[int]:
        read = type(self).read_rows
        return Counter(row["id"] for row in read()) if read is not None else Counter()

    def is_found(self, txn: SinkTxnId, state: str) -> None:
        """Fail unless the receiver says so."""
        answer = self.expect(200, "GET", f"/txn/{name_of(txn)}", epoch=1)
        assert answer["state"] == state, f"GET /txn says {answer['state']!r} and not {state!r}"

    def is_pending(self, wanted: Mapping[SinkTxnId, str]) -> None:
        """Fail unless exactly these are pending."""
        answer = self.expect(200, "GET", f"/pending/{self.scope.slug}", epoch=1)
        found = {one["txn"]: one["state"] for one in answer}
        named = {txn.label: state for txn, state in wanted.items()}
        assert found == named, f"GET /pending says {found} and not {named}"

    def mark(self) -> str | None:
        """Return the label of the highest committed transaction."""
        mark: str | None = self.expect(200, "GET", f"/scopes/{self.scope.slug}", epoch=1)["mark"]
        return mark


def name_of(txn: SinkTxnId) -> str:
    """Return a transaction as paths spell it."""
    return f"{txn.scope.slug}.{txn.label}"


class ReceiverHolds(ReceiverWorld):
    """Chunks and prepared transactions are out of sight, and are kept."""

    def test_a_chunk_may_be_sent_again_but_not_with_other_rows(self) -> None:
        self.fenced()
        txn = self.txn()
        assert self.put(txn, 1) == self.put(txn, 1)
        self.put(txn, 2, wanted=409)
        self.put(txn, 2, number=1)

    def test_a_chunk_may_be_plain_or_gzipped_and_nothing_unknown(self) -> None:
        self.fenced()
        txn, body = self.txn(), b'{"id": 1, "text": "plain"}\n'
        path = f"/chunks/{name_of(txn)}/task-1/0"
        self.expect(200, "PUT", path, content=body, epoch=1)
        chunk = ["task-1", 0, hashlib.sha256(body).hexdigest(), 1]
        self.commit(txn, self.prepare(txn, [chunk]))
        more = {"Content-Encoding": "x-unknown"}
        path = f"/chunks/{name_of(self.txn(1))}/task-1/0"
        status, _ = self.ask("PUT", path, content=body, more=more)
        assert status in _REFUSED, f"an unknown Content-Encoding was answered {status}"

    def test_what_is_prepared_is_held(self) -> None:
        self.fenced()
        txn = self.txn()
        self.put(txn, 1)
        self.shows()
        self.is_found(txn, "gone")
        self.prepare(txn, [self.put(txn, 1)])
        self.is_found(txn, "held")
        self.shows()

    def test_preparing_again_changes_nothing_and_with_another_token_is_refused(self) -> None:
        self.fenced()
        txn = self.txn()
        chunk = self.put(txn, 1)
        self.prepare(txn, [chunk])
        self.prepare(txn, [chunk])
        self.prepare(txn, [chunk], digest="other", wanted=409)
        self.is_found(txn, "held")

    def test_preparing_a_chunk_that_is_not_here_is_refused(self) -> None:
        self.fenced()
        txn = self.txn()
        chunk = self.put(txn, 1)
        self.prepare(txn, [chunk, ["task-2", 0, "0" * 64, 1]], wanted=410)
        self.prepare(txn, [[*chunk[:2], "0" * 64, 1]], wanted=410)
        self.is_found(txn, "gone")

    def test_a_transaction_without_rows_is_prepared_and_committed(self) -> None:
        self.fenced()
        txn = self.txn()
        self.commit(txn, self.prepare(txn, []))
        self.is_found(txn, "visible")

    def test_a_large_chunk_is_taken(self) -> None:
        self.fenced()
        txn = self.txn()
        chunk = self.put(txn, *range(2_000), text=uuid.uuid4().hex * 64)
        self.commit(txn, self.prepare(txn, [chunk]))
        self.is_found(txn, "visible")

    def test_a_task_that_gives_up_leaves_no_chunk_and_one_that_is_prepared_keeps_its_own(
        self,
    ) -> None:
        self.fenced()
        txn = self.txn()
        self.put(txn, 1)
        self.expect(200, "DELETE", f"/chunks/{name_of(txn)}/task-1", epoch=1)
        self.is_pending({})
        self.prepared(txn, 2)
        self.ask("DELETE", f"/chunks/{name_of(txn)}/task-1", epoch=1)
        self.is_found(txn, "held")


class ReceiverCommits(ReceiverWorld):
    """A prepared transaction is committed or aborted, once; every request may be repeated."""

    def test_a_commit_makes_visible_and_may_be_repeated(self) -> None:
        self.fenced()
        txn = self.txn()
        token = self.committed(txn, 1, 2)
        self.is_found(txn, "visible")
        self.shows(1, 2)
        self.commit(txn, token)
        self.prepare(txn, [["task-1", 0, "0" * 64, 2]])
        self.is_found(txn, "visible")
        self.shows(1, 2)

    def test_a_commit_shows_the_chunks_that_were_prepared_and_no_others(self) -> None:
        self.fenced()
        txn, other = self.txn(), self.txn(1)
        winner = self.put(txn, 1)
        self.put(txn, 2, task="losing-task")
        self.prepared(other, 3)
        self.commit(txn, self.prepare(txn, [winner]))
        self.shows(1)

    def test_what_is_not_prepared_cannot_be_committed(self) -> None:
        self.fenced()
        never, staged = self.txn(), self.txn(1)
        self.put(staged, 1)
        for txn in (never, staged):
            self.commit(txn, {"attempt": txn.attempt}, wanted=410)
            self.is_found(txn, "gone")

    def test_a_commit_with_another_token_is_refused(self) -> None:
        self.fenced()
        txn = self.txn()
        token = self.prepared(txn, 1)
        for field in token:
            self.commit(txn, {**token, field: "other"}, wanted=409)
        self.is_found(txn, "held")
        self.commit(txn, token)
        self.commit(txn, {**token, "digest": "other"}, wanted=409)

    def test_an_abort_forgets_and_may_be_repeated(self) -> None:
        self.fenced()
        never, staged, held = self.txn(), self.txn(), self.txn()
        self.put(staged, 1)
        token = self.prepared(held, 1)
        for _ in range(2):
            for txn in (never, staged, held):
                self.abort(txn)
                self.is_found(txn, "gone")
        self.is_pending({})
        self.commit(held, token, wanted=410)
        self.shows()

    def test_what_is_committed_cannot_be_aborted(self) -> None:
        self.fenced()
        txn = self.txn()
        self.committed(txn, 1)
        self.abort(txn, wanted=409)
        self.is_found(txn, "visible")
        self.shows(1)

    def test_only_one_attempt_of_a_cycle_is_committed(self) -> None:
        self.fenced()
        winner, loser = self.txn(), self.txn()
        lost = self.prepared(loser, 2)
        self.committed(winner, 1)
        self.commit(loser, lost, wanted=409)
        self.is_found(winner, "visible")
        late = self.txn()
        self.prepare(late, [self.put(late, 3)], wanted=409)
        self.abort(loser)
        self.is_found(winner, "visible")
        self.shows(1)

    def test_two_commits_of_one_transaction_at_once_are_both_answered_done(self) -> None:
        self.fenced()
        for batch in range(4):
            txn = self.txn(batch)
            token = self.prepared(txn, batch)
            path = f"/commit/{name_of(txn)}"
            found = self._at_once([("POST", path, {"token": token})] * 2)
            assert found == [200, 200], f"two commits at once were answered {found}"
        self.shows(*range(4))

    def test_of_two_attempts_committed_at_once_one_wins(self) -> None:
        self.fenced()
        for batch in range(4):
            txns = [self.txn(batch), self.txn(batch)]
            calls = [
                ("POST", f"/commit/{name_of(txn)}", {"token": self.prepared(txn, n)})
                for n, txn in enumerate(txns)
            ]
            found = self._at_once(calls)
            assert sorted(found) == [200, 409], f"two attempts at once were answered {found}"

    def _at_once(self, calls: Sequence[tuple[str, str, Any]]) -> list[int]:
        with ThreadPoolExecutor(len(calls)) as pool:
            done = pool.map(lambda c: self.ask(c[0], c[1], json=c[2], epoch=1)[0], calls)
            return list(done)


class ReceiverRemembers(ReceiverWorld):
    """Recovery finds what is unfinished, and older owners are refused."""

    def test_pending_lists_what_is_stored_and_not_committed(self) -> None:
        self.fenced()
        done, held, staged = self.txn(0), self.txn(1), self.txn(2)
        self.committed(done, 1)
        self.prepared(held, 2)
        self.put(staged, 3)
        self.is_pending({held: "held", staged: "staged"})

    def test_what_losing_tasks_left_of_a_committed_transaction_is_tidied(self) -> None:
        self.fenced()
        txn = self.txn()
        self.committed(txn, 1)
        self.put(txn, 2, task="late-task")
        self.is_pending({txn: "finished"})
        self.expect(200, "POST", f"/tidy/{name_of(txn)}", json={}, epoch=1)
        self.is_pending({})
        self.is_found(txn, "visible")

    def test_an_older_epoch_is_refused(self) -> None:
        self.fenced(2)
        self.fenced(2)
        self.fenced(1, wanted=409)
        txn = self.txn()
        self.prepare(txn, [self.put(txn, 1)], wanted=409)
        self.prepare(txn, [self.put(txn, 1)], epoch=2)

    def test_the_mark_is_the_highest_committed_cycle_and_nothing_goes_below_it(self) -> None:
        self.fenced()
        assert self.mark() is None, "a new scope has no mark"
        low, high, below = self.txn(9), self.txn(10), self.txn(3)
        tokens = [self.prepared(txn, 1) for txn in (low, high)]
        self.commit(high, tokens[1])
        self.commit(low, tokens[0])
        assert self.mark() == high.label, f"the mark is {self.mark()}, not {high.label}"
        self.prepare(below, [self.put(below, 2)], wanted=409)

    def test_scopes_are_listed_with_what_was_told_of_them(self) -> None:
        self.fenced(7)
        listed = self.expect(200, "GET", "/scopes")
        (mine,) = [one for one in listed if one["slug"] == self.scope.slug]
        told = {name: mine[name] for name in ("ledger", "app", "query", "sink", "epoch", "mark")}
        scope = self.scope
        about = {"ledger": scope.ledger, "app": scope.app, "query": scope.query}
        assert told == {**about, "sink": "http", "epoch": 7, "mark": None}, f"it says {told}"

    def test_a_renamed_scope_takes_its_mark_along(self) -> None:
        self.fenced()
        txn = self.txn(5)
        self.committed(txn, 1)
        new = Scope(self.scope.ledger, "renamed", self.scope.query)
        about = {"ledger": new.ledger, "app": new.app, "query": new.query, "sink": "http"}
        path = f"/rename/{self.scope.slug}"
        self.fenced(2)
        self.expect(409, "POST", path, json={"to": new.slug, **about}, epoch=1)
        for _ in range(2):
            self.expect(200, "POST", path, json={"to": new.slug, **about}, epoch=2)
        assert self.mark() is None, "the old name still has a mark"
        self.__dict__["_scope"] = new
        assert self.mark() == txn.label, "the new name does not have the mark"

    def test_names_that_no_sink_sends_are_refused(self) -> None:
        for method, path in [
            ("GET", "/txn/x"),
            ("GET", f"/txn/{self.scope.slug}.g1.b1.."),
            ("GET", "/pending/x"),
            ("POST", f"/prepare/{self.scope.slug}"),
            ("POST", "/commit/%2e%2e"),
        ]:
            status, _ = self.ask(method, path)
            assert status in _REFUSED, f"{method} {path} was answered {status}"


class ReceiverContract(ReceiverHolds, ReceiverCommits, ReceiverRemembers):
    """A receiver takes part in one decision with other sinks."""
