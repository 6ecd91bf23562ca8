"""How far a replay is: what it writes of itself, and what it tells."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from semel.messaging.replay_turns import Replayed, Turn
from semel.messaging.replays import ReplayRun, ReplayState

# Some reasons name their message: a long replay must not collect them all.
MOST_REASONS: Final = 5
OTHER_REASONS: Final = "other reasons"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """How far a replay is."""

    name: str
    state: ReplayState
    counts: dict[Turn, int]
    why: str = ""
    """Why it does not go on, where it has not finished."""

    last: Replayed | None = None
    """The message that had its turn last."""

    refusals: Mapping[str, int] = field(default_factory=dict)
    """Why messages were refused, and how many for each reason."""

    asks: bool = False
    """It stopped behind a stage of the canary, for somebody to look and run it again."""

    @property
    def done(self) -> int:
        """Messages that had their turn."""
        return sum(self.counts.values())

    @property
    def tried(self) -> int:
        """Messages whose handler was called."""
        return self.counts[Turn.HANDLED] + self.counts[Turn.FAILED]


Progress = Callable[[ReplayReport], None]


@dataclass(slots=True)
class Cursor:
    """How far a replay is; written as JSON."""

    after: Any = None
    hand: list[Any] | None = None
    """Id and place of the message that was about to be tried."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def count(self, done: Replayed) -> None:
        """Count a turn; of refusals, keep the reasons."""
        self.counts[done.turn.value] += 1
        if done.turn is Turn.REFUSED:
            is_one_more = done.why not in self.refusals and len(self.refusals) >= MOST_REASONS
            self.refusals[OTHER_REASONS if is_one_more else done.why] += 1

    def text(self) -> str:
        """Write it for a table."""
        said = {"after": self.after, "hand": self.hand, "counts": dict(self.counts)}
        return json.dumps({**said, "refusals": dict(self.refusals)})

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Read what `text` wrote."""
        said = json.loads(text)
        counts, refusals = Counter(said["counts"]), Counter(said.get("refusals", {}))
        return cls(said["after"], said["hand"], counts, refusals)

    def report(self, name: str, state: ReplayState, last: Replayed | None = None) -> ReplayReport:
        """Say how far the replay of this name is."""
        counts = {turn: self.counts[turn.value] for turn in Turn}
        return ReplayReport(name, state, counts, last=last, refusals=dict(self.refusals))


def report_of(run: ReplayRun) -> ReplayReport:
    """Read how far a replay is that some process runs, or ran."""
    return Cursor.read(run.cursor).report(run.name, run.state)
