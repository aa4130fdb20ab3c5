"""The harness and the tables of the documentation, without running a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.__main__ import FURTHER, SUITE, main
from benchmarks.harness import RESULTS, Report, interleave, json_text, ratios

BYTES_MAX = 100_000


def test_each_results_file_names_its_source_and_is_small() -> None:
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert path.stat().st_size < BYTES_MAX, path.name
        assert all(len(row) == len(result["columns"]) for row in result["rows"]), path.name
        if result["source"] == "measured":
            assert result["machine"]["commit"], path.name
            assert not result.get("smoke"), path.name
        else:
            assert result["source"].endswith("raw samples not kept"), path.name
            assert result["page commit"], path.name


def test_each_table_of_the_documentation_has_a_results_file() -> None:
    names = list(tables.names_in_pages())
    assert len(names) >= 40
    for name in names:
        assert tables.block(name)


def test_an_unknown_table_is_a_lookup_error() -> None:
    with pytest.raises(LookupError, match=r"benchmarks/results/b99\.json"):
        tables.block("b99")


def test_two_views_of_one_result_show_the_same_figures() -> None:
    modes, piped = tables.block("b1_modes"), tables.block("b1_pipeline")
    assert any("| Quorum(4) | 8.69 |" in line for line in modes)
    assert any("| Quorum(4) | 8.69 |" in line for line in piped)


def test_writing_a_page_anew_changes_nothing_but_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- table: heads -->\nold\n<!-- end of table -->\nafter\n")
    text = tables.page(path)
    assert text.startswith("before\n<!-- table: heads -->\n")
    assert text.endswith("<!-- end of table -->\nafter\n")
    assert "old" not in text
    path.write_text(text)
    assert tables.page(path) == text


def test_a_figure_in_a_sentence_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    begin = "<!-- figure: b8_recovery; Paceline, mpi; stall -->"
    path.write_text(f"within {begin}7<!-- / --> s\n")
    assert tables.page(path) == f"within {begin}0.09<!-- / --> s\n"
    with pytest.raises(LookupError, match="no row 'nobody'"):
        tables.figure("b8_recovery", "nobody", "stall")


def test_a_published_report_can_be_shown_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report("topic", "Title", ("what", "ms"), rows=[("a", 1.23456789)])
    report.at_most("a", 1.0, 2.0)
    report.samples["a"] = [0.5, 1.23456789]
    assert report.publish(tmp_path, "name") == 0
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    lines = tables.block("name")
    assert "| a | 1.23 |" in lines
    assert "- met: a: 1 (bar <= 2)" in lines
    assert any(line.startswith("*Measured on ") for line in lines)
    assert json.loads((tmp_path / "name.json").read_text())["samples"] == {"a": [0.5, 1.23457]}


def test_a_broken_check_makes_the_exit_code_1() -> None:
    report = Report("topic", "Title", ("what",), checks={"holds": True, "does not": False})
    assert report.publish(None) == 1


def test_each_round_begins_with_another_side() -> None:
    order: list[str] = []

    def side(name: str) -> int:
        order.append(name)
        return len(order)

    times = interleave(3, {name: lambda name=name: side(name) for name in "ab"})  # type: ignore[misc]
    assert "".join(order) == "abbaab"
    assert times == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert ratios([2.0, 6.0], [1.0, 2.0]) == [2.0, 3.0]


def test_a_results_file_has_one_line_per_row() -> None:
    text = json_text({"title": "x", "rows": [("a", 1 / 3), ("b", 2.0)], "checks": {}})
    assert text.splitlines()[2:5] == [' "rows": [', '  ["a", 0.333333],', '  ["b", 2.0]']
    assert json.loads(text)["checks"] == {}


def test_each_benchmark_declares_distinct_names() -> None:
    assert not set(SUITE) & set(FURTHER)
    assert len({*SUITE.values(), *FURTHER.values()}) == len(SUITE) + len(FURTHER)


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["b99", "--smoke"])
    assert left.value.code == 2
    assert "there is no benchmark b99" in capsys.readouterr().err
