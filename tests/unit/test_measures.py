"""Measurements: who hears them, and what a broken listener does to the work."""

from __future__ import annotations

import logging

import pytest

from semel.errors import Misuse
from semel.events import Measurement, Measures, Metric


def test_a_subscriber_that_fails_is_logged_and_disturbs_nobody(caplog):
    measures, heard = Measures(), list[Measurement]()

    def broken(measured: Measurement) -> None:
        raise RuntimeError("the exporter's connection is closed")

    measures.subscribe(broken)
    measures.subscribe(heard.append)
    with caplog.at_level(logging.ERROR, logger="semel"):
        measures.count(Metric.OUTBOX_PENDING, "outbox", value=3)

    assert heard == [Measurement(Metric.OUTBOX_PENDING, {"outbox": "outbox"}, 3)]
    (line,) = caplog.records
    assert line.getMessage() == "measurement subscriber failed"
    assert vars(line)["metric"] == "outbox.pending"
    assert line.exc_info is not None


def test_nobody_hears_anything_behind_the_end_of_the_subscription():
    measures, heard = Measures(), list[Measurement]()
    stop = measures.subscribe(heard.append)
    assert measures.are_heard
    stop()
    measures.count(Metric.OUTBOX_PENDING, "outbox")
    assert not heard
    assert not measures.are_heard


def test_a_metric_has_its_own_labels_and_no_others():
    measures = Measures()
    measures.subscribe(lambda measured: None)
    with pytest.raises(Misuse, match="topic, consumer_group, partition"):
        measures.count(Metric.LAG, "payments", "billing")
