"""Every history of a small world, to a given depth: crashes, faults, and woken owners.

    explore_crashes      every window as first crash × every window of the restart × …
    explore_faults       every failure of every call, alone and with a crash at every window
    explore_woken        an owner stopped anywhere, its successor stopped anywhere, the first wakes
    explore_late_tasks   an owner killed anywhere, its tasks write on anywhere

Windows and calls are not listed anywhere: each history finds those of the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

from semel.crashpoints import CrashPoint
from semel.lease import Takeover
from semel.pipeline.cycle import CommitAborted, CommitFatal
from semel.testing.crash import Crash, CrashWindow, WindowCounter, hooked
from semel.testing.faults import IN_DOUBT_METHODS, OUTCOME_METHODS, Fault, FaultKind
from semel.testing.world import LEDGER, Invariant, Process, Violation, World

Faults: TypeAlias = Mapping[str, Sequence[Fault]]
MakeWorld: TypeAlias = Callable[[Faults], World]

# Staging and the checkpoint change the world without a call that is counted.
_UNCOUNTED: Final = frozenset(p for p in CrashPoint if p.step in ("stage", "spark_batch"))

# Whether their answer is lost or they never ran comes to the same.
_READS: Final = frozenset(
    {
        *("recover", "mark", "scope_record", "generations", "positions"),
        *("open_attempts", "attempt", "attempts", "committed"),
    }
)


def failings(thing: str, method: str) -> list[tuple[FaultKind, int]]:
    """List how a call of *method* can fail, with the delay of those that come late."""
    if thing != LEDGER and method in OUTCOME_METHODS:
        kinds = [FaultKind.REFUSED, FaultKind.FATAL, FaultKind.BROKEN, FaultKind.LOST_REPLY]
        return [*((kind, 0) for kind in kinds), (FaultKind.LATE, 1), (FaultKind.LATE, 3)]
    if thing == LEDGER and method in IN_DOUBT_METHODS:
        kinds = [FaultKind.REFUSED, FaultKind.BROKEN, FaultKind.LOST_REPLY]
        return [*((kind, 0) for kind in kinds), *((FaultKind.LATE, n) for n in (1, 2, 4))]
    if method in _READS:
        return [(FaultKind.REFUSED, 0)]
    return [(FaultKind.REFUSED, 0), (FaultKind.BROKEN, 0), (FaultKind.LOST_REPLY, 0)]


@dataclass
class ExploredHistory:
    """The record of one history: the windows of its last process, and every call that was made."""

    windows: list[CrashWindow] = field(default_factory=list)
    distinct: list[CrashWindow] = field(default_factory=list)
    """The windows after a call to a sink, the ledger or the source.

    A crash in any other window leaves the same state as in the one before it.
    """

    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    """By sink's name or `LEDGER`: how often each method was called, all processes together."""


class _Listener:
    """Notes the windows of one process in an `ExploredHistory`."""

    def __init__(self, world: World, told: ExploredHistory) -> None:
        self._world = world
        self._told = told
        self._counter = WindowCounter()
        self._calls = -1

    def hear(self, point: CrashPoint, sink: str | None) -> None:
        self.pass_through(point, sink)

    def pass_through(self, point: CrashPoint, sink: str | None) -> CrashWindow:
        window = self._counter.pass_through(point, sink)
        self._told.windows.append(window)
        calls = self._world.calls
        if calls != self._calls or point in _UNCOUNTED:
            self._told.distinct.append(window)
            self._calls = calls
        return window


@dataclass
class Census:
    """How many histories were walked, and which crash points they reached."""

    histories: int = 0
    points: set[CrashPoint] = field(default_factory=set)

    def add(self, told: ExploredHistory) -> ExploredHistory:
        """Count one history."""
        self.histories += 1
        self.points.update(window.point for window in told.windows)
        return told


@contextmanager
def _telling(history: str) -> Iterator[None]:
    try:
        yield
    except Violation as violation:
        violation.history = history
        raise


def tell(
    make_world: MakeWorld, crashes: Sequence[CrashWindow] = (), faults: Faults | None = None
) -> ExploredHistory:
    """Walk one history: a process for every crash, one that is left in peace, a last start.

    Raises:
        Violation: an invariant does not hold.
    """
    world = make_world(faults or {})
    names = [str(crash) for crash in crashes]
    names += [f"{thing}.{fault}" for thing, found in (faults or {}).items() for fault in found]
    with _telling(" → ".join(names) or "undisturbed"):
        for crash in crashes:
            _run_until(world, crash)
            world.let_lease_end()
        told = ExploredHistory()
        with hooked(_Listener(world, told).hear):
            _run_to_the_end(world)
        told.calls = {thing: dict(plan.calls) for thing, plan in world.plans.items()}
        _finish(world)
    return told


def _run_until(world: World, crash: CrashWindow) -> None:
    counter = WindowCounter()

    def hook(point: CrashPoint, sink: str | None) -> None:
        if counter.pass_through(point, sink) == crash:
            raise Crash(str(crash))

    with hooked(hook):
        try:
            Process(world).run()
        except Crash:
            world.check()


def _run_to_the_end(world: World, takeover: Takeover = Takeover.WAIT) -> None:
    """Start the program as often as a patient operator would."""
    for _ in range(3):
        process = Process(world, takeover)
        if process.run():
            return
        world.let_lease_end()
    what = f"finished batches: {sorted(world.finished)}; the last to be heard was: {process.last}"
    raise Violation(Invariant.PROGRESS, what)


def _finish(world: World) -> None:
    """Let everything late arrive, start once more, and look for leavings."""
    world.land_late()
    world.let_lease_end()
    _run_to_the_end(world)
    world.check_final()


def explore_crashes(make_world: MakeWorld, depth: int, every: int = 1) -> Census:
    """Crash at every window, *depth* times in a row; *every* n-th only, for slow sinks."""
    census = Census()
    frontier: list[tuple[CrashWindow, ...]] = [()]
    while frontier:
        crashes = frontier.pop()
        told = census.add(tell(make_world, crashes))
        if len(crashes) < depth:
            windows = told.distinct if crashes else told.windows
            frontier += [(*crashes, window) for window in windows[::every]]
    return census


def explore_faults(
    make_world: MakeWorld,
    *,
    crashes: int = 1,
    spare: Collection[str] = (),
    every: int = 1,
) -> Census:
    """Let every call fail in every way: alone, then a call of its abort, then with a crash.

    With *crashes* 0 there is none; with 1 it comes at every window of the disturbed history,
    and faults also strike the calls that are made only because of it.  Sinks in
    *spare* never fail, nor does the `LEDGER` if it is in there.
    """
    census = Census()
    calm = census.add(tell(make_world))
    for fault in islice(_faults(calm.calls, spare), 0, None, every):
        told = census.add(tell(make_world, (), _as_faults(fault)))
        for second in islice(_faults(told.calls, spare, calm.calls), 0, None, every):
            census.add(tell(make_world, (), _as_faults(fault, second)))
        if crashes:
            for window in told.distinct:
                census.add(tell(make_world, (window,), _as_faults(fault)))
    if crashes:
        for window in calm.distinct:
            crashed = census.add(tell(make_world, (window,)))
            for fault in _faults(crashed.calls, spare, calm.calls):
                census.add(tell(make_world, (window,), _as_faults(fault)))
    return census


_Named: TypeAlias = tuple[str, Fault]


def _as_faults(*named: _Named) -> Faults:
    faults: dict[str, list[Fault]] = {}
    for thing, fault in named:
        faults.setdefault(thing, []).append(fault)
    return faults


def _faults(
    calls: Mapping[str, Mapping[str, int]],
    spare: Collection[str],
    beyond: Mapping[str, Mapping[str, int]] | None = None,
) -> Iterator[_Named]:
    for thing, counts in calls.items():
        if thing in spare:
            continue
        for method, times in counts.items():
            first = (beyond or {}).get(thing, {}).get(method, 0) + 1
            for occurrence in range(first, times + 1):
                for failing, later in failings(thing, method):
                    yield thing, Fault(method, failing, occurrence, later)


def explore_woken(
    make_world: MakeWorld, takeover: Takeover, depth: int = 2, every: int = 1
) -> Census:
    """Stop an owner at every window; its successor runs to every window; the first one wakes.

    Then the successor goes on, undisturbed, to its end.  With a *depth* of 1 the first one
    only wakes after that end.
    """
    census = Census()
    for stop in census.add(tell(make_world)).distinct[::every]:
        told = census.add(_tell_woken(make_world, stop, None, takeover))
        for wake in told.distinct if depth > 1 else ():
            census.add(_tell_woken(make_world, stop, wake, takeover))
    return census


def _tell_woken(
    make_world: MakeWorld, stop: CrashWindow, wake: CrashWindow | None, takeover: Takeover
) -> ExploredHistory:
    """Walk one such history; *wake* None means that the first wakes after its successor's end."""
    world = make_world({})
    with _telling(f"stopped at {stop}, woken at {wake or 'the end'}, takeover by {takeover}"):
        successor = _Successor(world, wake, takeover)
        first = Process(world)
        counter = WindowCounter()
        woken = False

        def hook(point: CrashPoint, sink: str | None) -> None:
            nonlocal woken
            if threading.current_thread() is successor.thread:
                successor.pass_through(point, sink)
            elif not woken and counter.pass_through(point, sink) == stop:
                woken = True
                if takeover is Takeover.WAIT:
                    world.let_lease_end()
                successor.run_until_paused()
                successor.before = _decisions(world)

        with hooked(hook):
            try:
                first.run()
                _check_fenced(world, successor)
            finally:
                successor.run_to_the_end()
        _check_undisturbed(successor)
        _finish(world)
    return successor.told


class _Successor:
    """A second owner in a thread of its own; it and the first take turns, never both at once."""

    def __init__(self, world: World, wake: CrashWindow | None, takeover: Takeover) -> None:
        self.told = ExploredHistory()
        self.process: Process | None = None
        self.before: object = None
        self._world = world
        self._wake = wake
        self._takeover = takeover
        self._listener = _Listener(world, self.told)
        self._paused = threading.Semaphore(0)
        self._go_on = threading.Semaphore(0)
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="successor", daemon=True)

    def run_until_paused(self) -> None:
        self.thread.start()
        self._paused.acquire()

    def run_to_the_end(self) -> None:
        if self.thread.ident is not None:
            self._go_on.release()
            self.thread.join()
        if self._error is not None:
            raise self._error

    def pass_through(self, point: CrashPoint, sink: str | None) -> None:
        if self._listener.pass_through(point, sink) == self._wake:
            self._paused.release()
            self._go_on.acquire()

    def _run(self) -> None:
        try:
            self.process = Process(self._world, self._takeover)
            self.process.run()
        except BaseException as error:  # noqa: BLE001  it is raised again where it is waited for
            self._error = error
        finally:
            self._paused.release()


def _decisions(world: World) -> object:
    """Everything that a fenced owner must not touch: positions, and decisions of its successor."""
    records = world.ledger.history(world.scope, limit=10_000)
    scope = world.ledger.scope_record(world.scope)
    newest = scope.epoch if scope else 0
    return (
        dict(world.ledger.positions(world.scope).ends),
        {r.txn for r in records if r.state.is_committed},
        {r.txn: r.state for r in records if r.epoch == newest},
    )


def _check_fenced(world: World, successor: _Successor) -> None:
    if successor.before is not None and _decisions(world) != successor.before:
        what = f"before: {successor.before}; after: {_decisions(world)}"
        raise Violation(Invariant.FENCED, what)


def _check_undisturbed(successor: _Successor) -> None:
    outcomes = successor.process.outcomes if successor.process else []
    disturbed = [o for o in outcomes if isinstance(o, CommitAborted | CommitFatal)]
    if disturbed:
        raise Violation(Invariant.FENCED, f"the successor was disturbed: {disturbed[0]}")


def explore_late_tasks(make_world: MakeWorld, depth: int = 2, every: int = 1) -> Census:
    """Kill an owner at every window; its tasks go on, and write at every window of the restart.

    With a *depth* of 1 they write at the first window of the restart and at its end only.
    """
    census = Census()
    for crash in census.add(tell(make_world)).distinct[::every]:
        writes = census.add(tell(make_world, (crash,))).distinct
        for write in writes if depth > 1 else [writes[0], writes[-1]]:
            census.add(_tell_late_task(make_world, crash, write))
    return census


def _tell_late_task(
    make_world: MakeWorld, crash: CrashWindow, write: CrashWindow
) -> ExploredHistory:
    world = make_world({})
    with _telling(f"{crash} → a late task writes at {write}"):
        _run_until(world, crash)
        world.let_lease_end()
        orphans = world.attempts[-1:]
        sinks = world.make_sinks()
        counter = WindowCounter()

        def hook(point: CrashPoint, sink: str | None) -> None:
            if counter.pass_through(point, sink) == write:
                for txn in orphans:
                    for late in sinks:
                        rows = world.batches[txn.cycle.batch]
                        writer = late.stager(txn).open("late-1")
                        writer.write(world.as_batch(rows))
                        writer.finish()

        with hooked(hook):
            _run_to_the_end(world)
        _finish(world)
    return ExploredHistory()
