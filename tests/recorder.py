"""Coordinators for tests of the cycle itself: one that writes down, one that fails on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.pipeline.cycle import AbortAnswer, CommitAnswer, SinkAnswer
from semel.pipeline.sink import SinkOK, SinkOutcome
from semel.pipeline.txn import CycleId, Scope, SinkTxnId


def example_txn(batch: int = 0, attempt: str = "a1") -> SinkTxnId:
    """Name a transaction of a scope that belongs to no ledger."""
    return CycleId(Scope("no-ledger", "app", "main"), 1, batch).attempt(attempt)


class RecordingCoordinator:
    """A coordinator for which everything succeeds; `calls` has its steps in order."""

    def __init__(self, sinks: Sequence[str] = (), txn: SinkTxnId | None = None) -> None:
        self.calls: list[str] = []
        self.sinks = tuple(sinks)
        self.txn = txn or example_txn()

    @property
    def label(self) -> str:
        """The cycle's name in reasons, logs and events."""
        return str(self.txn.cycle)

    @property
    def scope_label(self) -> str:
        """The scope's name in events."""
        return str(self.txn.scope)

    def begin_txn(self) -> None:
        """Open the transaction."""
        self._answer("begin_txn", None)

    def flush(self) -> None:
        """Stage nothing."""
        self._answer("flush", None)

    def commit_offsets(self) -> None:
        """Keep no positions."""
        self._answer("commit_offsets", None)

    def pre_commit_2pc(self) -> Sequence[SinkAnswer]:
        """Prepare every sink."""
        return self._sink_answers("pre_commit_2pc")

    def commit_txn(self) -> CommitAnswer:
        """Decide COMMIT."""
        return self._answer("commit_txn", CommitAnswer.COMMITTED)  # type: ignore[no-any-return]

    def commit_2pc(self) -> Sequence[SinkAnswer]:
        """Finish every sink."""
        return self._sink_answers("commit_2pc")

    def store_commit(self) -> None:
        """Close the cycle."""
        self._answer("store_commit", None)

    def abort_txn(self, reason: str) -> AbortAnswer:
        """Win ABORT."""
        return self._answer("abort_txn", AbortAnswer.WON)  # type: ignore[no-any-return]

    def store_abort(self) -> None:
        """Drop nothing."""
        self._answer("store_abort", None)

    def abort_2pc(self) -> Sequence[SinkAnswer]:
        """Abort every sink."""
        return self._sink_answers("abort_2pc")

    def _sink_answers(self, step: str) -> Sequence[SinkAnswer]:
        outcomes: Mapping[str, SinkOutcome] = self._answer(step, {})
        return [SinkAnswer(s, self.txn, outcomes.get(s, SinkOK({}))) for s in self.sinks]

    def _answer(self, step: str, usual: Any) -> Any:
        self.calls.append(step)
        return usual


class ScriptedCoordinator(RecordingCoordinator):
    """A recording coordinator that answers as it is told.

    *script* has the answers of a step's calls in turn: an exception is raised,
    anything else is returned; steps of the sinks are answered by a mapping from the
    sink's name to its outcome.  After the last answer the step succeeds again.
    """

    def __init__(
        self,
        script: Mapping[str, Sequence[Any]],
        sinks: Sequence[str] = (),
        txn: SinkTxnId | None = None,
    ) -> None:
        super().__init__(sinks, txn)
        unknown = [step for step in script if not hasattr(self, step)]
        if unknown:
            raise ValueError(f"a coordinator has no step {unknown[0]!r}")
        self._script = {step: list(answers) for step, answers in script.items()}

    def _answer(self, step: str, usual: Any) -> Any:
        super()._answer(step, usual)
        answers = self._script.get(step)
        if not answers:
            return usual
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer
