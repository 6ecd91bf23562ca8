"""Measurements: who hears them, and what a broken listener does to the work."""

from __future__ import annotations

import logging

import pytest

from semel.errors import Misuse
from semel.events import Events, Measurement, Metric


def test_a_subscriber_that_fails_is_logged_and_disturbs_nobody(caplog):
    events, heard = Events(), list[Measurement]()

    def broken(measured: Measurement) -> None:
        raise RuntimeError("the exporter's connection is closed")

    events.subscribe(broken, Measurement)
    events.subscribe(heard.append, Measurement)
    with caplog.at_level(logging.ERROR, logger="semel"):
        events.measure(Metric.OUTBOX_PENDING, "outbox", value=3)

    assert heard == [Measurement(Metric.OUTBOX_PENDING, {"outbox": "outbox"}, 3)]
    (line,) = caplog.records
    assert line.getMessage() == "event subscriber failed"
    assert vars(line)["event"] == "outbox.pending"
    assert line.exc_info is not None


def test_nobody_hears_anything_behind_the_end_of_the_subscription():
    events, heard = Events(), list[Measurement]()
    stop = events.subscribe(heard.append, Measurement)
    assert events.is_measured
    stop()
    events.measure(Metric.OUTBOX_PENDING, "outbox")
    assert not heard
    assert not events.is_measured


def test_a_metric_has_its_own_labels_and_no_others():
    events = Events()
    events.subscribe(lambda measured: None, Measurement)
    with pytest.raises(Misuse, match="topic, consumer_group, partition"):
        events.measure(Metric.LAG, "payments", "billing")
