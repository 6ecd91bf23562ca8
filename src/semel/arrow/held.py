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
from semel.errors import Fenced, Permanent, SemelError, reason_of
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
    """What every such sink does; a subclass says what is sent, and how."""

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
        token = {"attempt": txn.attempt, "digest": digest_of(receipts), "place": self.target}
        known = attempts.read(COMMITTED, txn) or attempts.read(PREPARED, txn)
        if known is not None:
            same = known["token"] == token
            return SinkOK(token) if same else SinkFatal(f"{txn} was prepared with other rows")
        if (wrong := self._below(txn)) is not None:
            return SinkFatal(wrong)
        chunks = [chunk for receipt in receipts for chunk in receipt.detail["chunks"]]
        if lost := self._area.missing(txn, chunks):
            return SinkFatal(f"{txn}: {lost}")
        total = tally_of(receipts)
        counted = {"rows": total.rows, "tally": [total.rows, total.hash]}
        promise = {"token": token, "chunks": chunks, **counted}
        attempts.write(PREPARED, txn, promise)
        reach(CrashPoint.HELD_PREPARE_SEALED, self.name)
        return SinkOK(token)

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Send every chunk, then write the proof that all were taken."""
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
                # Another process may have sent them since.
                if attempts.read(COMMITTED, txn) is None:
                    return SinkFatal(f"{txn} cannot be committed: {lost}")
            else:
                self._send(txn, known)
                reach(CrashPoint.HELD_SENT, self.name)
                attempts.keep_committed(txn, {"token": known["token"]})
        self._area.remove(txn)
        return SinkOK()

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
                    return SinkFinding(Found.VISIBLE, "every chunk was sent and taken")
                promise = attempts.read(PREPARED, txn)
                if promise is None:
                    return SinkFinding(Found.GONE, f"{self._area.label} has no promise of it")
                if lost := self._area.missing(txn, promise["chunks"]):
                    return SinkFinding(Found.GONE, f"prepared, but {lost}")
                text = f"{promise['rows']} rows wait in {self._area.label}; some may be sent"
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

    def _fenced(self, scope: Scope, mine: int, newest: int) -> str:
        return (
            f"{self.kind} sink {self.name}: scope {scope} belongs to epoch {newest}, this process "
            f"holds {mine}; it was fenced and must stop"
        )

    def _outcome(self, call: Callable[[], SinkOutcome]) -> SinkOutcome:
        try:
            return call()
        except Permanent as error:
            return SinkFatal(f"{self.kind} sink {self.name}: {reason_of(error)}")
        except (SemelError, OSError) as error:
            return SinkRetryable(f"{self.kind} sink {self.name}: {reason_of(error)}")
