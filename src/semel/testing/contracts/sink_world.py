"""What a sink's author supplies to the contract, and the words its tests are written in."""

from __future__ import annotations

import json
import pickle
import unittest
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar

from semel.errors import require
from semel.pipeline.sink import (
    Batch,
    Found,
    Receipt,
    Schema,
    SinkFatal,
    SinkFinding,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Token,
    TwoPhaseSink,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.testing.contracts.contract import Contract

Row = Mapping[str, Any]


class Capability(StrEnum):
    """What not every sink, or not every set-up of a test, is able to do."""

    LOSE_PREPARED = "lose_prepared"
    """The test can destroy prepared rows behind the sink's back."""

    LIST_LEAVINGS = "list_leavings"
    """The test can list whatever is staged or prepared."""

    KEEP_EQUAL_ROWS = "keep_equal_rows"
    """Two equal rows in one batch are two visible rows."""

    COMPARE_TOKENS = "compare_tokens"
    """Every field of a token is compared with what the sink knows itself."""


class SinkWorld(Contract):
    """The hooks to override, and helpers.

    Rows have an ``id`` (64-bit integer) and a ``text``.  A test gets a new
    instance, and so a store of its own.
    """

    cannot: ClassVar[Mapping[str, str]] = {}
    """What the sink or the test cannot do (a `Capability`), with the reason to skip its tests."""

    secrets: ClassVar[tuple[str, ...]] = ()
    """Texts that must appear in no token, reason, evidence or repr: passwords, keys."""

    scope: ClassVar[Scope] = Scope("ledger-1", "payments", "main")
    other_scopes: ClassVar[tuple[Scope, ...]] = (
        Scope("ledger-1", "payments", "other"),
        Scope("ledger-1", "refunds", "main"),
        Scope("ledger-2", "payments", "main"),
    )

    def make_sink(self) -> TwoPhaseSink:
        """Return a new object on this test's store, as another process would have it."""
        raise NotImplementedError

    def visible_rows(self, sink: TwoPhaseSink) -> Iterable[Row]:
        """Return the rows that a reader of the store sees now."""
        raise NotImplementedError

    def leavings(self, sink: TwoPhaseSink) -> Sequence[Any]:
        """List whatever is staged or prepared in the store, of any attempt and scope."""
        raise NotImplementedError

    def lose(self, sink: TwoPhaseSink, txn: SinkTxnId) -> None:
        """Destroy what *txn* prepared, as a careless operator would."""
        raise NotImplementedError

    def crash(self, sink: TwoPhaseSink) -> None:
        """Take away what a process loses when it is killed: connections, open transactions."""

    def schema(self) -> Schema:
        """Return the schema of the rows."""
        pa = require("pyarrow", "files")
        return pa.schema([("id", pa.int64()), ("text", pa.string())])

    def make_batch(self, ids: Sequence[int]) -> Batch:
        """Return a batch with one row per id."""
        pa = require("pyarrow", "files")
        return pa.RecordBatch.from_pylist([self.row(i) for i in ids], schema=self.schema())

    def row(self, number: int) -> dict[str, Any]:
        """Return the row with this id."""
        return {"id": number, "text": f"row {number}"}

    # The words of the tests.

    def needs(self, capability: Capability) -> None:
        """Skip the test where *capability* is missing."""
        if capability in self.cannot:
            raise unittest.SkipTest(self.cannot[capability])

    def process(self, *scopes: Scope) -> TwoPhaseSink:
        """Start another process: a new object that fences its predecessors."""
        sink = self.make_sink()
        epochs = self.__dict__.setdefault("_epochs", {})
        for scope in scopes or (self.scope,):
            epochs[scope] = epochs.get(scope, 0) + 1
            sink.fence(scope, epochs[scope])
        return sink

    def successor(self, sink: TwoPhaseSink, *scopes: Scope) -> TwoPhaseSink:
        """Kill the process of *sink* and start the next one."""
        self.crash(sink)
        return self.process(*scopes)

    def cycle(self, batch: int = 0, generation: int = 1, scope: Scope | None = None) -> CycleId:
        """Name a cycle."""
        return CycleId(scope or self.scope, generation, batch)

    def txn(self, batch: int = 0, generation: int = 1, scope: Scope | None = None) -> SinkTxnId:
        """Name a new attempt at a cycle."""
        return self.cycle(batch, generation, scope).attempt()

    def stage(self, sink: TwoPhaseSink, txn: SinkTxnId, *tasks: Sequence[int]) -> list[Receipt]:
        """Stage each sequence of ids by a task of its own, in what could be another process."""
        return [self.run_task(sink, txn, [ids]) for ids in tasks]

    def run_task(
        self, sink: TwoPhaseSink, txn: SinkTxnId, batches: Iterable[Sequence[int]]
    ) -> Receipt:
        """Stage several batches of ids by one task attempt."""
        stager = pickle.loads(pickle.dumps(sink.stager(txn)))
        writer = stager.open(f"task-{uuid.uuid4().hex[:12]}")
        for ids in batches:
            writer.write(self.make_batch(ids))
        return Receipt.from_json(writer.finish().to_json())

    def prepare(self, sink: TwoPhaseSink, txn: SinkTxnId, receipts: Sequence[Receipt]) -> Token:
        """Prepare, which must succeed; return the token as the ledger would give it back."""
        outcome = sink.prepare(txn, receipts)
        assert isinstance(outcome, SinkOK), f"prepare of {txn}: {outcome}"
        assert outcome.token is not None, f"prepare of {txn} gave no token"
        return through_json(outcome.token)

    def prepared(self, sink: TwoPhaseSink, txn: SinkTxnId, *tasks: Sequence[int]) -> Token:
        """Stage and prepare."""
        return self.prepare(sink, txn, self.stage(sink, txn, *tasks))

    def committed(self, sink: TwoPhaseSink, txn: SinkTxnId, *tasks: Sequence[int]) -> Token:
        """Stage, prepare and commit."""
        token = self.prepared(sink, txn, *tasks)
        is_ok(sink.commit(txn, token))
        return token

    def shows(self, sink: TwoPhaseSink, *ids: int) -> None:
        """Assert that readers see exactly the rows with these ids."""
        seen = sorted((dict(row) for row in self.visible_rows(sink)), key=lambda row: row["id"])
        wanted = [self.row(number) for number in sorted(ids)]
        assert seen == wanted, f"readers see {seen}, not {wanted}"

    def holds(self, sink: TwoPhaseSink, *txns: SinkTxnId, scope: Scope | None = None) -> None:
        """Assert that `recover` lists exactly these."""
        listed = sink.recover(scope or self.scope)
        assert len(listed) == len(set(listed)), f"recover lists one twice: {listed}"
        assert set(listed) == set(txns), f"recover lists {listed}, not {list(txns)}"

    def leaves_nothing(self, sink: TwoPhaseSink) -> None:
        """Assert that nothing is staged or prepared, if the test can observe it."""
        if Capability.LIST_LEAVINGS not in self.cannot:
            left = list(self.leavings(sink))
            assert not left, f"left behind: {left}"

    def leavings_now(self, sink: TwoPhaseSink) -> list[str]:
        """Describe what is staged and prepared, for comparisons; empty if it cannot be listed."""
        if Capability.LIST_LEAVINGS in self.cannot:
            return []
        return sorted(map(repr, self.leavings(sink)))


def through_json(token: Token) -> Token:
    """Return *token* as another process reads it from the ledger."""
    text = json.dumps(token, allow_nan=False)
    loaded: Token = json.loads(text)
    return loaded


def changed_tokens(token: Token) -> Iterator[tuple[str, Token]]:
    """Yield the token with each of its fields changed, retyped and left out, and with one more."""
    for field, value in token.items():
        yield field, {**token, field: _changed(value)}
        yield field, {**token, field: {"/../../elsewhere": [5]}}
        yield field, {name: kept for name, kept in token.items() if name != field}
    yield "one more", {**token, "one_more": "/../../elsewhere"}


def _changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"{value}/../elsewhere"
        case list() if value:
            return [_changed(value[0]), *value[1:]]
        case dict() if value:
            return {name: _changed(inner) for name, inner in value.items()}
    return ["elsewhere"]


def is_ok(outcome: SinkOutcome) -> None:
    """Assert the outcome."""
    assert isinstance(outcome, SinkOK), f"not OK: {outcome}"


def is_fatal(outcome: SinkOutcome) -> None:
    """Assert the outcome, with a reason that a person can read."""
    assert isinstance(outcome, SinkFatal), f"not fatal: {outcome}"
    assert outcome.reason.strip(), "a fatal outcome without a reason"


def is_refused(outcome: SinkOutcome) -> None:
    """Assert that the outcome is not OK."""
    assert isinstance(outcome, SinkFatal | SinkRetryable), f"not refused: {outcome}"


def is_found(finding: SinkFinding, found: Found) -> None:
    """Assert what was found, and that there is evidence for it."""
    assert isinstance(finding, SinkFinding), f"not a finding: {finding}"
    assert finding.found is found, f"not {found}: {finding}"
    assert finding.evidence.strip(), f"{found} without evidence"
