"""Settings of a Spark session, read as Spark reads them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from semel.spark.query import has_speculation


@pytest.mark.parametrize(
    ("settings", "speculates"),
    [
        ({}, False),
        ({"spark.speculation": "false"}, False),
        ({"spark.speculation": "true"}, True),
        ({"spark.speculation": "True"}, True),
        ({"spark.speculation": " TRUE "}, True),
    ],
)
def test_speculation_is_noticed_however_it_is_spelled(settings, speculates):
    df = SimpleNamespace(sparkSession=SimpleNamespace(conf=settings))

    assert has_speculation(df) is speculates
