"""What is going on in the driver process, as far as its events tell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from examples.demo.place import Variant
from semel import RecoveryDecision, Step

SINK_NAMES: Final = {
    "postgres": "Postgres",
    "iceberg": "Iceberg",
    "s3": "S3",
    "files": "Parquet",
    "messages": "semel's tables",
    "outbox": "Outbox",
}

STEPS: Final[Mapping[Variant, tuple[str, ...]]] = {
    Variant.SEMEL: tuple(Step),
    Variant.PLAIN: ("files", "postgres"),
}
"""What a batch goes through, in order."""

# What recovery did with a cycle, and why that was right.
REMEDIES: Final[Mapping[str, str]] = {
    RecoveryDecision.COMMIT_FROM_TOKEN: "was decided: carried through in",
    RecoveryDecision.ABORT_FROM_TOKEN: "was not decided: aborted in",
    RecoveryDecision.UNKNOWN_LEAVE_AS_IS: "is unknown: left as it is in",
}


def listed(phrases: Sequence[str]) -> str:
    """Write ``one, two and three``."""
    if len(phrases) < 2:
        return "".join(phrases)
    return f"{', '.join(phrases[:-1])} and {phrases[-1]}"


class Tail:
    """Reads the whole lines that were added to a file since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new_events(self) -> Iterator[dict[str, Any]]:
        """Yield the progress since the last call; a torn last line waits for its end."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                added = file.read()
        except FileNotFoundError:
            return
        whole, newline, _ = added.rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.splitlines():
            yield json.loads(line)


@dataclass(slots=True)
class Progress:
    """One driver's life, from its start to its death; its successor starts a new one."""

    variant: Variant
    driver: int
    last_batch: int | None = None
    """The last batch that any driver has begun."""

    is_ready: bool = False
    stands_still: bool = False
    """A system that the handler needs is down."""

    ends_read: int = 0
    """How often the driver has come to the end of all that there was."""

    batch: int | None = None
    """The batch under way."""

    batches_done: int = 0
    epoch: int = 0
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds by step, of the batch under way."""

    last_done: int | None = None
    """The last batch that this driver finished."""

    last_steps: dict[str, float] = field(default_factory=dict)
    """The steps of that batch."""

    rerun: int | None = None
    """The batch that was begun before, by a predecessor."""

    _settled: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @property
    def noun(self) -> str:
        """What a batch is called here."""
        return "cycle" if self.variant is Variant.SEMEL else "batch"

    @property
    def step(self) -> str:
        """The step under way."""
        names = STEPS[self.variant]
        if self.variant is Variant.PLAIN:
            return next(reversed(self.steps), names[0])
        return next((name for name in names if name not in self.steps), names[-1])

    @property
    def where(self) -> str:
        """Say what the driver was doing, in words."""
        if self.batch is None:
            return "between batches"
        if self.variant is Variant.PLAIN:
            return f"in batch {self.batch} (writing to {SINK_NAMES[self.step]})"
        return f"in cycle {self.batch} ({self.step})"

    def hear(self, event: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Take in what the driver tells; yield what is worth a line, with its heading."""
        match event["event"]:
            case "SparkReady":
                self.is_ready = True
            case "AllRead":
                self.ends_read += 1
            case "CircuitOpened":
                self.stands_still = True
                yield "outage", "the batch stands still: nothing is written, no attempt is counted"
            case "CircuitClosed":
                self.stands_still = False
                yield "restarted", f"the batch goes on after {event['seconds']:.1f} s"
            case "LeaseTaken":
                self.epoch = event["epoch"]
            case "CycleRecovered":
                cycle = event["cycle"].rpartition(".b")[2]
                sinks = self._settled.setdefault(cycle, {}).setdefault(event["decision"], [])
                sinks.append(event["sink"])
            case "BatchBegun":
                yield from self._begin(event["batch"])
            case "StepDone":
                self.steps[event["step"]] = event["seconds"]
            case "Writing":
                self.steps[event["sink"]] = 0.0
            case "BatchDone":
                self.batch = None
                self.batches_done += 1
                self.last_done = event["batch"]
                self.last_steps, self.steps = self.steps, {}
            case "StepFailed":
                yield "failed", f"cycle {self.batch}, {event['reason']}"
            case "CycleEnded" if event["outcome"] == "replayed":
                yield "replayed", f"cycle {self.batch} is committed already: nothing written again"

    def _begin(self, batch: int) -> Iterator[tuple[str, str]]:
        is_rerun = self.last_batch is not None and batch <= self.last_batch
        if is_rerun:
            self.rerun = batch
        if self.batches_done == 0 and self.driver > 1:
            yield from self._what_recovery_did()
            again = f"Spark runs batch {batch} again" if is_rerun else f"on with batch {batch}"
            if self.variant is Variant.SEMEL:
                yield "recovered", f"epoch {self.epoch}; {again}"
            else:
                yield "restarted", again
        self.batch = self.last_batch = batch
        self.steps = {}

    def _what_recovery_did(self) -> Iterator[tuple[str, str]]:
        for cycle, decisions in self._settled.items():
            for decision, sinks in decisions.items():
                names = listed([SINK_NAMES.get(sink, sink) for sink in dict.fromkeys(sinks)])
                yield "recovered", f"cycle {cycle} {REMEDIES[decision]} {names}"
