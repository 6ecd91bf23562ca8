"""The benchmarks' arithmetic and page; no test here looks at a clock."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import count

import pytest

from bench.__main__ import MODULES, benchmark, main, printed
from bench.harness import Benchmark, Row, Scale, Spread, Table, Target, Times, compared, measure
from bench.page import FIGURES, PAGE, Run, load, render, render_table, save

TABLE = Table(
    "1,000 rows",
    ["ms", "ratio"],
    [
        Row("usual", ["10 (9..12)", "1"]),
        Row("fast", ["5", "2.00"], Target("≥ 1.5", True)),
        Row("slow", ["20", "0.50"], Target("≥ 0.9", False)),
    ],
    rounds=3,
)
RUN = Run([TABLE], "2026-01-02 03:04 UTC", "2 cores", "Python 3.11", 0.25)


def test_a_spread_is_the_median_with_the_smallest_and_the_largest():
    spread = Spread.of([3.0, 1.0, 2.0, 10.0])

    assert spread == Spread(2.5, 1.0, 10.0)
    assert spread.text(1) == "2.5 (1.0..10.0)"
    assert spread.text(0, "ms") == "2 (1..10) ms"


def test_a_spread_without_a_range_shows_none():
    assert Spread.of([1.5]).text(2) == "1.50"
    assert Spread.of([1.001, 1.002]).text(1, "s") == "1.0 s"


def test_a_ratio_is_taken_within_each_round_before_the_median():
    # The machine became ten times as slow in the last round; the ratio does not show it.
    times = Times({"usual": [2.0, 3.0, 30.0], "ours": [1.0, 2.0, 10.0]})

    assert times.ratio("ours", "usual") == Spread(2.0, 1.5, 3.0)
    assert times.ratio("usual", "usual") == Spread(1.0, 1.0, 1.0)
    assert times.spread("ours") == Spread(2000.0, 1000.0, 10000.0)
    assert times.rounds == 3


def test_alternatives_run_in_turns_every_second_round_backwards_and_warm_ups_do_not_count():
    calls: list[str] = []
    clock = count(1)

    def alternative(name):
        def run():
            calls.append(name)
            return float(next(clock))

        return run

    times = measure({"a": alternative("a"), "b": alternative("b")}, rounds=2, warm_ups=1)

    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert times.seconds == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (Target.at_least(1.5, Spread(1.5, 1.0, 2.0)), True),
        (Target.at_least(1.5, Spread(1.49, 1.4, 2.0)), False),
        (Target.at_most(2, Spread(2.0, 1.0, 3.0), "s"), True),
        (Target.at_most(2, Spread(2.01, 1.0, 3.0), "s"), False),
    ],
)
def test_a_target_is_about_the_median(target, is_met):
    assert target.is_met is is_met


def test_a_comparison_has_ratios_to_the_usual_way_and_to_the_limit():
    times = Times({"usual": [4.0, 4.0], "ours": [2.0, 2.0], "limit": [1.0, 1.0]})

    table = compared("1 row", times, "usual", {"ours": 1.9}, limit="limit")

    assert table.columns == ["ms", "× as fast as usual", "of limit"]
    assert [row.cells for row in table.rows] == [
        ["4000", "1", "0.25"],
        ["2000", "2.00", "0.50"],
        ["1000", "4.00", "1"],
    ]
    assert [row.target for row in table.rows] == [None, Target("≥ 1.9", True), None]


def test_a_table_says_which_targets_were_missed():
    assert render_table(TABLE).splitlines() == [
        "| 1,000 rows | ms | ratio | target | met |",
        "| --- | --- | --- | --- | --- |",
        "| usual | 10 (9..12) | 1 |  |  |",
        "| fast | 5 | 2.00 | ≥ 1.5 | yes |",
        "| slow | 20 | 0.50 | ≥ 0.9 | **no** |",
    ]
    assert printed(TABLE).row_count == 3


def test_figures_survive_being_kept(tmp_path):
    save({"some": RUN}, tmp_path / "figures.json")

    assert load(tmp_path / "figures.json") == {"some": RUN}
    assert load(tmp_path / "none.json") == {}


def test_the_page_has_a_section_for_every_benchmark_that_was_run():
    def nothing(scale: Scale) -> list[Table]:
        raise AssertionError

    some = Benchmark("some", "Some title", "What it is about.", nothing)
    other = replace(some, name="other", title="Never run")

    page = render([some, other], {"some": RUN})

    assert "## Some title\n\nWhat it is about.\n\n| 1,000 rows |" in page
    assert "3 rounds" in page
    assert "2026-01-02 03:04 UTC" in page
    assert "0.2 cores busy" in page
    assert "Never run" not in page


def test_quick_figures_are_not_written(capsys):
    with pytest.raises(SystemExit):
        main(["--quick", "--write"])

    assert "not worth writing down" in capsys.readouterr().err


@pytest.mark.spark
@pytest.mark.postgres
def test_every_benchmark_can_be_imported_and_has_the_name_it_is_asked_for_by():
    pytest.importorskip("pyspark")
    pytest.importorskip("psycopg")

    assert [benchmark(name).name for name in MODULES] == list(MODULES)
    assert import_module("bench.memory_task").main


@pytest.mark.spark
@pytest.mark.postgres
def test_the_page_is_what_the_kept_figures_say():
    pytest.importorskip("pyspark")
    pytest.importorskip("psycopg")
    if not FIGURES.exists():
        pytest.skip("no benchmark was written down yet")

    assert PAGE.read_text() == render([benchmark(name) for name in MODULES], load())
