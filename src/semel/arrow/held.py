"""A sink over something that cannot hold rows: they wait in a shared place until the decision.

    tasks: chunks in a shared place ──prepare: promised──▶ commit: send each, then the proof

What was sent before a crash is sent again: the other side must recognise it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from semel.arrow.area import Area
from semel.arrow.attempts import COMMITTED, PREPARED
from semel.crashpoints import CrashPoint, reach
from semel.errors import NEVER_PASSES, Fenced, SemelError, reason_of
from semel.pipeline.sink import (
    Found,
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


class HeldSink:
    """What every such sink does; a subclass says what is sent, and how.

    The proofs are kept in the shared place, unless a subclass has them where it sends.
    """

    kind = "held"

    def __init__(self, rows: Any, name: str, staging: str) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        self._area = Area(str(staging), name)
        self._epochs: dict[Scope, int] = {}

    @property
    def target(self) -> str:
        """Where the rows go; a token of another target is refused."""
        raise NotImplementedError

    def _send(self, txn: SinkTxnId, promise: Mapping[str, Any]) -> None:
        """Send what was promised; after a crash once more."""
        raise NotImplementedError

    def _promised(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> Mapping[str, Any]:
        """Return what else to keep for `_send`, once the other side is known to take the rows.

        Raises:
            Permanent: it never will.
        """
        return {}

    def _done(self, scope: Scope) -> list[SinkTxnId]:
        """List the newest committed attempts, in the order of their cycles."""
        return self._area.attempts(scope).records(COMMITTED)

    def _proof(self, txn: SinkTxnId) -> str | None:
        """Return the digest of the token that was committed."""
        proof = self._area.attempts(txn.scope).read(COMMITTED, txn)
        return None if proof is None else str(proof["token"]["digest"])

    def _carry_out(
        self, txn: SinkTxnId, promise: Mapping[str, Any], lost: str | None
    ) -> str | None:
        """Send what was promised and write the proof, unless it is there; return why not."""
        done = self._done(txn.scope)
        if txn in done:
            return None
        if wrong := _below(txn, done) or lost:
            return wrong
        self._send(txn, promise)
        reach(CrashPoint.HELD_SENT, self.name)
        self._area.attempts(txn.scope).keep_committed(txn, {"token": promise["token"]})
        return None

    def check(self, schema: Schema | None) -> None:
        """Try to write into the shared place."""
        self._area.check()

    def fence(self, scope: Scope, epoch: int) -> None:
        with self._area.faults():
            attempts = self._area.attempts(scope)
            if epoch < attempts.epoch():
                raise Fenced(self._fenced(scope, epoch, attempts.epoch()))
            attempts.raise_epoch(epoch)
        self._epochs[scope] = epoch

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Check that the winners' chunks are there, and write down which ones will be sent."""
        return self._outcome(lambda: self._prepare(txn, receipts))

    def _prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        attempts = self._area.attempts(txn.scope)
        mine, newest = self._epochs.get(txn.scope, 0), attempts.epoch()
        if mine < newest:
            return SinkFatal(self._fenced(txn.scope, mine, newest))
        token = self._token(txn, digest_of(receipts))
        promise, done = attempts.read(PREPARED, txn), self._done(txn.scope)
        if promise is not None or txn in done:
            same = token == (promise["token"] if promise else self._token(txn, self._proof(txn)))
            return SinkOK(token) if same else SinkFatal(f"{txn} was prepared with other rows")
        if (wrong := _below(txn, done)) is not None:
            return SinkFatal(wrong)
        chunks = [chunk for receipt in receipts for chunk in receipt.detail["chunks"]]
        if lost := self._area.missing(txn, chunks):
            return SinkFatal(f"{txn}: {lost}")
        total = tally_of(receipts)
        counted = {"rows": total.rows, "tally": [total.rows, total.hash]}
        more = self._promised(txn, receipts)
        attempts.write(PREPARED, txn, {"token": token, "chunks": chunks, **counted, **more})
        reach(CrashPoint.HELD_PREPARE_SEALED, self.name)
        return SinkOK(token)

    def _token(self, txn: SinkTxnId, digest: str | None) -> dict[str, Any]:
        return {"attempt": txn.attempt, "digest": digest, "place": self.target}

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Send every chunk, then write the proof that all were taken."""
        return self._outcome(lambda: self._commit(txn, token))

    def _commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        # First the promise: another process removes it after it has written the proof.
        promise, proof = self._area.attempts(txn.scope).read(PREPARED, txn), None
        if promise is None and (proof := self._proof(txn)) is None:
            return SinkFatal(
                _below(txn, self._done(txn.scope))
                or f"{txn} cannot be committed: {self._area.label} has no promise of it, and "
                f"there is no proof: never prepared, aborted, or lost"
            )
        if dict(token) != (promise["token"] if promise else self._token(txn, proof)):
            return SinkFatal(f"{txn}: its token is not the one that prepare returned")
        if promise is not None:
            lost = self._area.missing(txn, promise["chunks"])
            if (wrong := self._carry_out(txn, promise, lost)) is not None:
                return SinkFatal(f"{txn} cannot be committed: {wrong}")
        self._area.remove(txn)
        return SinkOK()

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        return self._outcome(lambda: self._abort(txn))

    def _abort(self, txn: SinkTxnId) -> SinkOutcome:
        if txn in self._done(txn.scope):
            return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
        self._area.remove(txn)
        return SinkOK()

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        """Look for the proof, then for the promise in the shared place."""
        try:
            with self._area.faults():
                if txn in self._done(txn.scope):
                    return SinkFinding(Found.VISIBLE, "everything was sent, and the proof is there")
                attempts = self._area.attempts(txn.scope)
                promise = attempts.read(PREPARED, txn)
                if promise is None:
                    staged = len(attempts.files(txn))
                    return SinkFinding(Found.GONE, f"not prepared; {staged} files were staged")
                if lost := self._area.missing(txn, promise["chunks"]):
                    return SinkFinding(Found.GONE, f"prepared, but {lost}")
                text = f"{promise['rows']} rows wait in {self._area.label}; some may be sent"
                return SinkFinding(Found.HELD, text)
        except (SemelError, OSError) as error:
            return SinkFinding(Found.UNREACHABLE, reason_of(error))

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        with self._area.faults():
            done = self._done(scope)
            return [txn for txn in self._area.attempts(scope).records(PREPARED) if txn not in done]

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        swept = []
        with self._area.faults():
            attempts, done = self._area.attempts(scope), self._done(scope)
            left = {*attempts.records(PREPARED), *attempts.with_files(_last(done))}
            for txn in sorted(left, key=lambda txn: (txn.cycle, txn.attempt)):
                if txn in done or is_loser(txn):
                    self._area.remove(txn)
                    swept.append(txn)
        return swept

    def leftovers(self, scope: Scope) -> list[Leftover]:
        with self._area.faults():
            done = self._done(scope)
            return self._area.attempts(scope).leftovers(_last(done), done.__contains__)

    def mark(self, scope: Scope) -> SinkTxnId | None:
        with self._area.faults():
            return _last(self._done(scope))

    def _fenced(self, scope: Scope, mine: int, newest: int) -> str:
        return (
            f"{self.kind} sink {self.name}: scope {scope} belongs to epoch {newest}, this process "
            f"holds {mine}; it was fenced and must stop"
        )

    def _outcome(self, call: Callable[[], SinkOutcome]) -> SinkOutcome:
        try:
            return call()
        except NEVER_PASSES as error:
            return SinkFatal(self._words(error))
        except (SemelError, OSError) as error:
            return SinkRetryable(self._words(error))

    def _words(self, error: Exception) -> str:
        words, name = reason_of(error), f"sink {self.name}: "
        return words if words.startswith(name) else f"{self.kind} {name}{words}"


def _last(done: Sequence[SinkTxnId]) -> SinkTxnId | None:
    return done[-1] if done else None


def _below(txn: SinkTxnId, done: Sequence[SinkTxnId]) -> str | None:
    mark = _last(done)
    if mark is None or mark.cycle < txn.cycle:
        return None
    return f"{txn} is at or below the mark {mark}: another attempt was committed"
