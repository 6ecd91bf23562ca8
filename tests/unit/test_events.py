"""What happens, as values and log lines that disturb nothing."""

from __future__ import annotations

import logging
import pickle

import pytest

from semel import events as module
from semel.events import (
    CommitSlow,
    CycleEnded,
    Event,
    Events,
    LeaseTaken,
    StepDone,
    StepFailed,
)

DONE = StepDone("app/main", "g1.b0", "flush", 1.5)


@pytest.fixture
def events() -> Events:
    return Events()


def test_subscribers_are_called_in_order_until_they_stop(events):
    seen = []
    stop = events.subscribe(lambda event: seen.append(("first", event)))
    events.subscribe(lambda event: seen.append(("second", event)))

    events.emit(DONE)
    stop()
    stop()
    events.emit(DONE)

    assert seen == [("first", DONE), ("second", DONE), ("second", DONE)]


def test_a_subscriber_that_fails_is_logged_and_disturbs_nobody(events, caplog):
    seen = []
    events.subscribe(lambda event: 1 / 0)
    events.subscribe(seen.append)

    events.emit(DONE)

    assert seen == [DONE]
    assert "event subscriber failed" in caplog.text


def test_a_subscriber_may_stop_while_it_is_called(events):
    seen = []
    stops = []
    stops.append(events.subscribe(lambda event: stops[0]()))
    events.subscribe(seen.append)

    events.emit(DONE)
    events.emit(DONE)

    assert seen == [DONE, DONE]


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (DONE, logging.INFO),
        (StepFailed("s", "c", "flush", "flush: no"), logging.WARNING),
        (CommitSlow("s", "c", 5.0, 10.0), logging.WARNING),
        (CycleEnded("s", "c", "succeeded"), logging.INFO),
        (CycleEnded("s", "c", "aborted", "why"), logging.INFO),
        (CycleEnded("s", "c", "fatal", "why"), logging.ERROR),
    ],
    ids=lambda value: getattr(value, "sentence", value),
)
def test_an_event_is_a_log_line_with_the_glossarys_nouns(events, caplog, event, level):
    caplog.set_level(logging.DEBUG, logger="semel")

    events.emit(event)

    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().startswith(f"{event.sentence}: scope ")
    assert record.scope == event.scope
    assert record.cycle == event.cycle


def test_a_sentence_is_the_class_in_words():
    assert LeaseTaken("s", 1, "process 7").sentence == "lease taken"


def kinds() -> list[type[Event]]:
    found = [kind for kind in vars(module).values() if isinstance(kind, type)]
    return [kind for kind in found if issubclass(kind, Event) and kind is not Event]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_no_field_of_an_event_clashes_with_a_log_records_own(kind, events):
    logging.getLogger("semel").makeRecord(
        *("semel", logging.INFO, "file", 1, "words", (), None),
        extra=dict.fromkeys(kind.__dataclass_fields__),
    )


def test_a_copy_in_another_process_starts_without_subscribers(events):
    events.subscribe(lambda event: None)

    copy = pickle.loads(pickle.dumps(events))

    assert copy._subscribers == ()
