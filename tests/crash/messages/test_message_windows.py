"""A pipeline of messages, crashed at every window, and met by a service and by an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import pytest
from sqlalchemy import text

from semel.crashpoints import CrashPoint
from semel.errors import Misuse, Retryable
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import SKIPPED
from semel.messaging.handler import Consumer
from semel.messaging.outcome import Handled, RetryLater, Skipped
from semel.operate import audit
from semel.operate.audit import CycleUnsettled, NoSuchMessage
from semel.operate.consumers import NotHandedOver, hand_over
from semel.operate.deadletters import retry_dead_letter
from semel.operate.parking import KeepId, fix, release, skip
from semel.postgres.connect import pool
from semel.testing.crash import Crash, CrashWindow, WindowCounter, hooked, trace
from tests.crash.messages.message_scene import (
    BATCHES,
    CONSUMER,
    ENDS,
    READING,
    SETTINGS,
    Scene,
    make_scene,
    record_of,
)
from tests.unit.postgres.messages.message_place import asked, empty

pytestmark = pytest.mark.postgres


T = TypeVar("T")
ANN: Final = {"actor": "ann", "reason": "it was wrong"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(audit, "SETTLE_SECONDS", 0.05)


@pytest.fixture(scope="module")
def place(quick_postgres_server) -> Iterator[str]:
    url = quick_postgres_server.create_database("windows")
    make_scene(url)
    yield url
    pool().close_all()
    quick_postgres_server.drop_database("windows")


@pytest.fixture(scope="module")
def new_scene(place) -> Callable[[], Scene]:
    """Return what makes a scene with empty tables and a ledger of its own."""

    def make(**how: Any) -> Scene:
        pool().close_all()
        empty(place, "effects", "audit_entry", "audit_head", "message_revision")
        return Scene(place, **how)

    return make


@pytest.fixture(scope="module")
def windows(new_scene) -> list[CrashWindow]:
    """Every window of a run without a crash, which ends as it should."""
    scene = new_scene()
    with trace() as windows:
        scene.run()
    assert scene.verdicts() == []
    assert len(windows) > 150
    return windows


def every(quick: int):
    """Run a test at every *quick*-th window, and in a soak at each."""
    return pytest.mark.parametrize("every", [quick, pytest.param(1, marks=pytest.mark.soak)])


def some(windows: Sequence[T], every: int) -> Sequence[T]:
    return windows[every // 2 :: every]


def told(scene: Scene, window: CrashWindow, ask: Callable[[Scene], Any], *, crashes: bool) -> Any:
    """Run to the end, and ask at a window or after a crash there; return the answer."""
    counter, answers = WindowCounter(), []

    def hook(point: CrashPoint, sink: str | None) -> None:
        if counter.pass_through(point, sink) == window:
            if crashes:
                raise Crash
            answers.append(ask(scene))

    with hooked(hook):
        scene.survive()
    if crashes:
        answers.append(ask(scene))
        scene.run()
    [answer] = answers
    return answer


@every(24)
@pytest.mark.parametrize("claims", ["all", "lean"])
def test_a_crash_at_a_window_loses_and_doubles_nothing(new_scene, windows, claims, every):
    wrong = {}
    for window in some(windows, every):
        scene = new_scene(claims=claims)
        told(scene, window, lambda _: None, crashes=True)
        wrong[window] = scene.verdicts()

    assert not any(wrong.values()), wrong


PHASES: Final = {
    CrashPoint.BEGIN_TXN_BEFORE: "before",
    CrashPoint.POSTGRES_STAGE_COPIED: "read",
    CrashPoint.POSTGRES_PREPARE_RAN: "held",
    CrashPoint.PRE_COMMIT_2PC_AFTER: "promised",
    CrashPoint.POSTGRES_COMMIT_SENT: "over",
}
"""The phases of a cycle, by the point with which each begins; it is decided while promised."""

ANSWERS: Final = {
    ("b1", "live"): ("done", "done", "locked", "locked", "gone"),
    ("b1", "crashed"): ("done", "done", "done", "refused", "gone"),
    **dict.fromkeys(
        [(one, how) for one in ("f1", "d1") for how in ("live", "crashed")],
        ("done", "done", "done", "refused", "done"),
    ),
}
"""What an act meets in each phase; b1 is handled by the cycle, its driver lives or has crashed."""

FIXED: Final = {"payload": record_of("b1", fixed=True).value, "ids": KeepId()}
ACTS: Final = {
    "skip": (skip, "b1", {"b1": SKIPPED}, {}),
    "fix": (fix, "b1", {"b1": "COMPLETED"}, FIXED),
    "release": (release, "f1", {"f1": "COMPLETED", "f2": "COMPLETED"}, {}),
    "send back": (retry_dead_letter, "d1", {"d1": "COMPLETED"}, {}),
}
"""What a person does, with which message, and what becomes of messages if it is done."""


def act(scene: Scene, name: str) -> str:
    function, message_id, ends, options = ACTS[name]
    words = {NoSuchMessage: "gone", CycleUnsettled: "refused", Retryable: "locked"}

    async def done(database):
        await function(database, CONSUMER, message_id, **ANN, **options)

    try:
        asked(scene.url, done, lock_seconds=0.1)
    except tuple(words) as error:
        return next(word for kind, word in words.items() if isinstance(error, kind))
    scene.repaired |= {name for name, end in ends.items() if ENDS[name] != end}
    return "done"


@every(12)
@pytest.mark.parametrize("how", ["live", "crashed"])
@pytest.mark.parametrize("name", ACTS)
def test_an_act_costs_one_attempt_or_is_refused_once_a_cycle_is_promised(
    new_scene, windows, name, how, every
):
    _, message_id, ends, _ = ACTS[name]
    is_handled = message_id == "b1"
    begins = [n for n, window in enumerate(windows) if window.point is CrashPoint.BEGIN_TXN_BEFORE]
    first = 2 if is_handled else 3
    phase, phases = "", {}
    for window in windows[begins[first] : begins[first + 1]]:
        phases[window] = phase = PHASES.get(window.point, phase)
    answers = dict(zip(PHASES.values(), ANSWERS[message_id, how], strict=True))
    for window in some([*phases], every):
        scene = new_scene()

        answer = told(scene, window, lambda of: act(of, name), crashes=how == "crashed")

        assert answer == answers[phases[window]], window
        assert scene.verdicts(ends if answer == "done" else {}) == [], window
        if how == "live":
            # What the cycle has read has changed: nothing else costs an attempt.
            again = is_handled and phases[window] == "read"
            assert scene.attempts == len(BATCHES) + again, window


def serve(scene: Scene, *, hands_over: bool) -> type:
    """Handle s1 as a service does; return what became of it."""

    async def handle(message, session):
        effect = text("INSERT INTO public.effects (id, key) VALUES (:id, :key)")
        await session.execute(effect, {"id": message.id, "key": message.key})

    async def ask(database):
        if hands_over:
            with suppress(NotHandedOver, Misuse):  # Misuse: services run it already
                await hand_over(database, CONSUMER, scene.ledger, **ANN)
        service = Consumer(CONSUMER, handle, READING, SETTINGS)
        return await handle_message(service, database, READING.read(record_of("s1")))

    return type(asked(scene.url, ask, lock_seconds=0.1))


@every(24)
@pytest.mark.parametrize("crashes", [False, True])
def test_a_service_handles_nothing_while_a_pipeline_may_change_its_messages(
    new_scene, windows, crashes, every
):
    """After a crash somebody hands the consumer over, which an open cycle forbids."""
    entered = windows.index(CrashWindow(CrashPoint.FENCE_AFTER, "messages"))
    begun = windows.index(CrashWindow(CrashPoint.BEGIN_TXN_AFTER))
    handled = windows.index(CrashWindow(CrashPoint.STORE_COMMIT_AFTER, None, 2))
    settled = CrashPoint.BEGIN_TXN_BEFORE, CrashPoint.STORE_COMMIT_AFTER
    for window in some(windows[: handled + 1], every):
        scene, place = new_scene(), windows.index(window)

        answer = told(scene, window, lambda of: serve(of, hands_over=crashes), crashes=crashes)

        is_free = place < begun or window.point in settled
        wanted = RetryLater
        if place < entered or (crashes and is_free):
            wanted = Skipped if place == handled else Handled
        assert answer is wanted, window
        assert scene.verdicts(by_service="s1" if answer is Handled else None) == [], window
