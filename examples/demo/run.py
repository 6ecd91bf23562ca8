"""One run: payments arrive, a driver writes them, and is killed and started again.

this process    sends payments · reads the driver's events · kills · shows
the driver      Spark, in a process group of its own
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import psycopg

from examples.demo.payments import Producer, TopicProducer
from examples.demo.place import Place, Variant
from examples.demo.progress import Progress, Tail
from semel.testing import services

# After the first batch a driver still has a backlog for about this long.
KILL_SECONDS: Final = (0.0, 3.0)

# A kill that finds no batch under way waits for one, but not for ever.
IDLE_SECONDS: Final = 3.0

# How long the provider stays away once the pipeline has noticed.
OUTAGE_SECONDS: Final = 3.0

LOOK_SECONDS: Final = 0.02
COUNT_SECONDS: Final = 0.5

# For one driver, from its start to its end or its death; ten times what it needs.
PATIENCE_SECONDS: Final = 150.0


ROOT: Final = str(Path(__file__).parents[2])


class DemoFailed(Exception):
    """A run did not come to its end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in a run; the same for every variant."""

    seed: int
    seconds: float
    kills: int
    per_second: int

    @property
    def total(self) -> int:
        """The number of payments."""
        return max(1, round(self.seconds * self.per_second))

    @property
    def moments(self) -> list[Moment]:
        """When the drivers are killed, one after the other."""
        choose = random.Random(f"kills {self.seed}")
        return [Moment(choose.uniform(*KILL_SECONDS), choose.random()) for _ in range(self.kills)]


class Moment(NamedTuple):
    """When a driver is killed: some time after its first batch, somewhere in a batch."""

    seconds: float
    share: float
    """The part of a batch that is over by then, measured by the batch before."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL."""

    driver: int
    where: str
    batch: int | None


@dataclass(slots=True)
class RunReport:
    """What happened in a run."""

    variant: Variant
    place: Place
    seconds: float = 0.0
    kills: list[Kill] = field(default_factory=list)
    reruns: list[int] = field(default_factory=list)
    """Batches that Spark ran again after a kill."""


class Screen(Protocol):
    """Where a run is shown."""

    def note(self, seconds: float, heading: str, text: str) -> None:
        """Add a line that stays."""
        ...

    def show(self, seconds: float, progress: Progress, producer: Producer, visible: int) -> None:
        """Show where the run is now; called many times a second."""
        ...


class Run:
    """One variant's run, from the first payment to the last."""

    def __init__(
        self,
        variant: Variant,
        place: Place,
        plan: Plan,
        screen: Screen,
        temporary: Path | None = None,
        repair: Callable[[Place], None] | None = None,
    ) -> None:
        """*temporary* is removed even if this process is killed.

        *repair* is what a person does at the end; where there is one, there is an outage, too.
        """
        self._plan = plan
        self._temporary = temporary
        self._place = place
        self._screen = screen
        self._report = RunReport(variant, place)
        numbers = plan.seed, plan.total, plan.per_second
        self._producer = Producer(place.input, *numbers)
        if place.bootstrap:
            self._producer = TopicProducer(place.bootstrap, place.topic, *numbers)
        self._producing_since: float | None = None
        self._repair = repair
        self._has_outage = repair is not None
        self._back_at: float | None = None
        self._is_repaired = False
        self._moments = plan.moments
        self._progress = Progress(variant, driver=0)
        self._began = time.monotonic()
        self._rows = RowCount(place.url)

    def run(self) -> RunReport:
        """Return when everything is written.

        Raises:
            DemoFailed: a driver ended by itself with an error, or is stuck; names its log.
        """
        self._began = time.monotonic()
        with self._rows:
            while not self._one_driver():
                pass
        self._report.seconds = self._elapsed
        self._note("done", f"all {self._producer.total:,} payments are through")
        return self._report

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _note(self, heading: str, text: str) -> None:
        self._screen.note(self._elapsed, heading, text)

    def _one_driver(self) -> bool:
        """Start a driver and watch it; return whether it came to the end of the source."""
        number = self._progress.driver + 1
        self._progress = Progress(self._report.variant, number, self._progress.last_batch)
        child = start_driver(self._report.variant, self._place, number, self._temporary)
        try:
            self._note("started", f"driver {number}, process {child.pid}")
            return self._watch(child, Tail(self._place.events(number)))
        finally:
            child.end(signal.SIGKILL)

    def _watch(self, child: services.Child, tail: Tail) -> bool:
        killer = Killer(self._moments[0] if self._moments else None)
        patience = time.monotonic() + PATIENCE_SECONDS + self._plan.seconds
        while True:
            is_alive = child.is_alive()
            self._hear(tail)
            self._produce()
            if not is_alive:
                return self._ended(child)
            if time.monotonic() > patience:
                raise DemoFailed(f"driver {self._progress.driver} is stuck: see {child.log}")
            self._mend()
            if not self._is_in_outage() and killer.is_due(self._progress):
                child.end(signal.SIGKILL)
                self._hear(tail)
                self._killed()
                return False
            visible = self._rows.recent()
            self._screen.show(self._elapsed, self._progress, self._producer, visible)
            time.sleep(LOOK_SECONDS)

    def _hear(self, tail: Tail) -> None:
        for event in tail.new_events():
            for heading, text in self._progress.hear(event):
                self._note(heading, text)

    def _produce(self) -> None:
        if self._producing_since is None and self._progress.is_ready:
            self._producing_since = time.monotonic()
        if self._producing_since is not None:
            elapsed = time.monotonic() - self._producing_since
            if self._has_outage and not self._place.outage.exists():
                elapsed = min(elapsed, self._plan.seconds / 2)  # the rest meets the outage
            self._producer.produce(elapsed)
        if self._producer.is_done and not self._moments and not self._place.source_ended.exists():
            self._place.source_ended.touch()

    def _is_in_outage(self) -> bool:
        """Let the provider be down once, after a batch; return whether that is still to end."""
        now, progress = time.monotonic(), self._progress
        if self._has_outage and progress.batches_done and not self._place.outage.exists():
            self._place.outage.touch()
            self._note("outage", "the provider that the handler asks is down")
        elif progress.stands_still and self._back_at is None:
            self._back_at = now + OUTAGE_SECONDS
        elif self._has_outage and self._back_at is not None and now > self._back_at:
            self._place.outage.unlink()
            self._note("restarted", "the provider is back")
            self._has_outage = False
        return self._has_outage or progress.stands_still

    def _mend(self) -> None:
        """Deal with what is parked, once everything else is handled."""
        if self._place.mended.exists() or not self._progress.ends_read:
            return
        if self._repair is None:
            self._place.mended.touch()
        elif not self._is_repaired and self._rows.waiting("retry") == 0:
            self._note("done", "everything is read; what is parked waits for a person")
            self._repair(self._place)
            self._is_repaired = True
        elif self._is_repaired and self._rows.waiting() == 0:
            self._note("mended", "nothing waits any more")
            self._place.mended.touch()

    def _killed(self) -> None:
        self._moments.pop(0)
        progress = self._progress
        self._report.kills.append(Kill(progress.driver, progress.where, progress.batch))
        self._remember_rerun()
        self._note("kill -9", f"driver {progress.driver} {progress.where}")

    def _ended(self, child: services.Child) -> bool:
        self._remember_rerun()
        if child.exit_code == 0 and self._place.mended.exists():
            return True
        raise DemoFailed(
            f"driver {self._progress.driver} ended by itself with exit code "
            f"{child.exit_code}: see {child.log}"
        )

    def _remember_rerun(self) -> None:
        if self._progress.rerun is not None:
            self._report.reruns.append(self._progress.rerun)


class Killer:
    """Decides when a driver dies; without a *moment* it lives."""

    def __init__(self, moment: Moment | None) -> None:
        self._moment = moment
        self._due: float | None = None
        self._batch: int | None = None
        self._since = 0.0
        self._took = 0.0

    def is_due(self, progress: Progress) -> bool:
        """Return whether the moment has come; asked many times a second."""
        now = time.monotonic()
        self._follow(progress.batch, now)
        if self._moment is None or progress.batches_done == 0:
            return False
        if self._due is None:
            self._due = now + self._moment.seconds
        if now < self._due:
            return False
        if self._batch is None:
            return now > self._due + IDLE_SECONDS
        return now >= self._since + self._moment.share * self._took

    def _follow(self, batch: int | None, now: float) -> None:
        """Measure how long batches take."""
        if batch != self._batch:
            if self._batch is not None:
                self._took = now - self._since
            self._batch, self._since = batch, now


class RowCount:
    """How many rows a reader of the table sees."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rows = 0
        self._next = 0.0

    def __enter__(self) -> RowCount:
        self._connection = psycopg.connect(self._url, autocommit=True)
        return self

    def __exit__(self, *failure: object) -> None:
        self._connection.close()

    def recent(self) -> int:
        """Return a count that is at most half a second old."""
        if time.monotonic() >= self._next:
            found = self._connection.execute("SELECT count(*) FROM entries").fetchone()
            self._rows = found[0] if found else 0
            self._next = time.monotonic() + COUNT_SECONDS
        return self._rows

    def waiting(self, waits: str = "%") -> int:
        """Return how many messages wait: for another attempt, for a person, or for anything."""
        asked = "SELECT count(*) FROM semel.waiting_message WHERE waits LIKE %s"
        found = self._connection.execute(asked, [waits]).fetchone()
        return found[0] if found else 0


def start_driver(
    variant: Variant, place: Place, number: int, temporary: Path | None
) -> services.Child:
    """Start the Spark driver in a process group of its own."""
    command = [sys.executable, "-m", "examples.demo.job"]
    command += [str(place.folder), variant, str(number), place.bootstrap, place.s3, place.catalog]
    environment = {
        # Not an argument: every account can read those, and the password is in the URL.
        "DATABASE_URL": place.url,
        # Killed, Python and the JVM leave their temporary files; here they go with the folder.
        "TMPDIR": str(place.scratch),
        "PYTHONUNBUFFERED": "1",
        # Where Spark's Python workers find the handler.
        "PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")])),
    }
    return services.Child(command, place.log, environment, temporary=temporary)
