"""Where the shards of the Kafka sink are."""

from __future__ import annotations

import pickle

from semel.kafka.staging import Area


def test_a_relative_place_is_the_drivers_in_every_task(tmp_path, monkeypatch):
    (tmp_path / "driver").mkdir()
    (tmp_path / "executor").mkdir()
    monkeypatch.chdir(tmp_path / "driver")
    sent = pickle.dumps(Area("staging", "kafka"))

    monkeypatch.chdir(tmp_path / "executor")

    assert pickle.loads(sent).opened()[1] == str(tmp_path / "driver" / "staging" / "kafka")
