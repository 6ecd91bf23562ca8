"""The oracle convicts, and says what of."""

from __future__ import annotations

from semel.testing.sink_audit import audit_sinks

ROWS = [{"id": 1, "tags": ["a"]}, {"id": 2, "tags": []}, {"id": 3, "tags": None}]


def test_the_same_rows_in_any_order_are_clean():
    found = audit_sinks(ROWS, {"files": ROWS[::-1], "postgres": ROWS})

    assert found.is_clean
    assert [sink.found for sink in found.sinks] == [3, 3]


def test_what_is_missing_doubled_or_foreign_is_found_in_the_sink_that_has_it():
    strange = {"id": 9, "tags": []}

    found = audit_sinks(ROWS, {"files": ROWS, "postgres": [ROWS[0], ROWS[1], ROWS[1], strange]})

    files, postgres = found.sinks
    assert files.is_clean
    assert not found.is_clean
    assert [len(postgres.missing), len(postgres.duplicated), len(postgres.foreign)] == [1, 1, 1]


def test_a_changed_row_is_one_missing_and_one_foreign():
    (sink,) = audit_sinks(ROWS, {"s": [*ROWS[:2], {"id": 3, "tags": ["changed"]}]}).sinks

    assert (len(sink.missing), len(sink.foreign), len(sink.duplicated)) == (1, 1, 0)


def test_a_row_that_the_source_has_twice_is_expected_twice():
    assert audit_sinks([1, 1, 2], {"s": [1, 2, 1]}).is_clean
    assert not audit_sinks([1, 1, 2], {"s": [1, 2]}).is_clean


def test_a_cycle_that_is_visible_in_part_is_torn():
    (sink,) = audit_sinks(
        [1, 2, 3],
        {"s": [1, 3]},
        cycles={"s": {"b0": [1], "b1": [3]}},
        cycle_rows={"b0": [1, 2], "b1": [3]},
    ).sinks

    assert sink.torn == ("b0",)


def test_whatever_is_left_behind_is_not_clean():
    assert not audit_sinks([1], {"s": [1]}, left_behind={"s": ["g1.b0.a1"]}).is_clean


def test_positions_that_differ_from_the_rows_are_not_clean():
    found = audit_sinks([1], {"s": [1]}, ends={"events/0": (7, 6), "events/1": (3, 3)})

    assert not found.is_clean
    assert "partition events/0: the rows end at 7, the ledger says 6" in found.table()


def test_the_table_has_a_line_for_every_sink_and_one_for_every_finding():
    table = audit_sinks([1, 2], {"files": [1, 2], "postgres": [2, 2]}).table()

    lines = table.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["sink", "files", "postgres"]
    assert lines[1].split()[1:] == ["2", "2", "0", "0", "0", "0", "0"]
    assert lines[2].split()[1:] == ["2", "2", "1", "1", "0", "0", "0"]
    assert lines[3:] == ["postgres: missing: 1", "postgres: twice: 2"]
