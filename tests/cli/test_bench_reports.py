"""What becomes of a benchmark's figures: files read again, comparisons, pictures, pages."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from crossrail.cli.bench import page, plot, report
from crossrail.cli.bench.compare import compare
from crossrail.cli.bench.hosts import sweep
from crossrail.cli.bench.outputs import Outputs
from crossrail.cli.bench.saved import FORMAT, Saved, read_json, to_json
from crossrail.cli.bench.spec import Bar, Line, Point, Sample
from crossrail.cli.bench.spec import Result as Figure
from crossrail.cli.main import main
from crossrail.errors import CrossrailError

STEADY = (2.0, 2.02, 1.99, 2.01)
FASTER = (3.0, 3.02, 2.99, 3.01)


def run(*words: object, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, [str(word) for word in words])


def refused(*words: object) -> str:
    result = run(*words)
    lines = result.stderr.splitlines()
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert [line for line in lines if line.lower().startswith("error: ")] == lines[-1:], result.stderr
    return lines[-1]


def figure(
    name: str, values: Sequence[float], *, unit: str = "GB/s", limit: float | None = 4.0, point: Point | None = None
) -> Figure:
    line = Line(name=name, title=f"title of {name}", unit=unit, limit="memcpy" if limit else "", point=point)
    return Figure(line, [Sample(value, limit) for value in values])


def written(path: Path, *results: Figure, machine: object = None, **changes: object) -> Path:
    content = to_json(list(results), {"transport": "shm"}, 0.0)
    content["machine"] = machine or {"cpu": "one", "cores": 2}
    path.write_text(json.dumps(content | changes))
    return path


# --- the table ---


@pytest.mark.parametrize("width", [60, 80, 100, 123, 124, 200])
def test_names_and_figures_are_whole_in_the_table_however_narrow_it_is(width: int) -> None:
    figures = [figure("post-recorded-writes", (141.9, 142.7)), figure("py-await", (338_766, 338_768), unit="k/s")]
    shown = io.StringIO()

    Console(width=width, file=shown, color_system=None).print(report.make_table(figures, width))

    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= width
    titles = [f"title of {one.measure.name}" if width >= 124 else one.measure.name for one in figures]
    for words in (*titles, *(report.figure(one.value) for one in figures), "k/s"):
        assert words in text
    assert ("95 %" in text) == (width > 80)


# --- files ---


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    curve = figure("write-4k-w1", STEADY, point=Point("write", 4096, 1))
    spread = figure("latency-8b", STEADY, unit="us", limit=None, point=Point("latency", 8, 0))
    spread.ecdf = [(0.0, 1.0), (1.0, 2.0)]
    broken = figure("broke", ())
    broken.error = "gone"

    saved = read_json(written(tmp_path / "a.json", curve, spread, broken))

    assert saved.results == [curve, spread, broken]
    assert saved.machine == {"cpu": "one", "cores": 2}


def test_file_says_the_intervals_and_how_they_were_made(tmp_path: Path) -> None:
    content = json.loads(written(tmp_path / "a.json", figure("a", STEADY), figure("b", range(1, 8))).read_text())

    few, many = content["results"]
    assert content["format"] == FORMAT
    assert few["ratio_interval"]["method"] == "student t of logarithms"
    assert few["ratio_interval"]["low"] < few["ratio"] < few["ratio_interval"]["high"]
    assert (many["value_interval"]["low"], many["value_interval"]["high"]) == (1, 7)
    assert many["value_interval"]["method"] == "order statistics"


def test_file_of_format_1_is_read(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    old: dict[str, Any] = {
        "name": "write-1m-w1", "title": "write", "unit": "GB/s", "limit_is": "memcpy", "value": 2.0, "limit": 4.0,
        "ratio": 0.5, "bar": ">= 0.95x", "verdict": "miss", "note": None, "error": None,
        "samples": [{"value": 2.0, "limit": 4.0}, {"value": 2.1, "limit": None}],
    }  # fmt: skip
    file.write_text(json.dumps({"format": 1, "command": "c", "machine": {"cpu": "one"}, "results": [old]}))

    saved = read_json(file)

    assert [result.measure.name for result in saved.results] == ["write-1m-w1"]
    assert saved.results[0].samples == [Sample(2.0, 4.0), Sample(2.1, None)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "was not written by"),
        ("[" * 100_000, "was not written by"),
        ("\0" * 100, "was not written by"),
        ("[]", "was not written by"),
        ('{"format": 1}', "missing required field `results`"),
        ('{"format": 99, "results": []}', "format 99, and this crossrail reads 1 and 2"),
        ('{"format": "1", "results": []}', "was not written by"),
        ('{"format": 2, "results": [{"name": "a"}]}', "missing required field `title`"),
        ('{"format": 2, "results": [{"name": "a", "title": "b", "unit": "us", "samples": [{"value": "x"}]}]}', "float"),
        ('{"format": 2, "results": [], "machine": 3}', "machine"),
        ('{"format": 2, "results": NaN}', "was not written by"),
    ],
)
def test_file_of_something_else_is_refused_in_one_line(content: str, words: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    good = written(tmp_path / "good.json", figure("a", STEADY))

    assert words in refused("bench", "compare", bad, good)
    assert words in refused("bench", "compare", good, bad)
    assert words in refused("bench", "--quick", "--compare", bad)


# --- comparisons ---


def verdicts(old: Figure, new: Figure) -> list[str]:
    runs = [Saved(name, [result], {}, {}) for name, result in (("old", old), ("new", new))]
    return [change.verdict for change in compare(*runs).changes]


def test_verdict_is_by_the_whole_interval() -> None:
    assert verdicts(figure("a", STEADY), figure("a", FASTER)) == ["faster"]
    assert verdicts(figure("a", FASTER), figure("a", STEADY)) == ["slower"]
    assert verdicts(figure("a", STEADY), figure("a", STEADY)) == ["no difference seen"]
    assert verdicts(figure("a", (2.0, 9.0, 1.0)), figure("a", (1.0, 8.0, 3.0))) == ["no difference seen"]
    assert verdicts(figure("a", STEADY[:1]), figure("a", FASTER)) == ["one run says nothing"]


@pytest.mark.parametrize("unit", ["us", "ns", "ms", "MiB", "s/GB"])
def test_less_is_better_of_times_and_memory(unit: str) -> None:
    assert verdicts(figure("a", STEADY, unit=unit), figure("a", FASTER, unit=unit)) == ["slower"]


def test_ratios_are_compared_where_both_have_the_limit() -> None:
    """The machine was half as fast: the figure fell, its ratio did not."""
    old, new = figure("a", (4.0, 4.04, 3.98), limit=8.0), figure("a", (2.0, 2.02, 1.99), limit=4.0)
    assert verdicts(old, new) == ["no difference seen"]
    assert verdicts(old, figure("a", (2.0, 2.02, 1.99), limit=None)) == ["slower"]


def test_what_is_in_one_run_only_is_told(tmp_path: Path) -> None:
    failed = figure("broke", ())
    failed.error = "gone"
    old = written(tmp_path / "old.json", figure("a", STEADY), figure("b", STEADY), failed, figure("u", STEADY))
    new = written(
        tmp_path / "new.json", figure("a", STEADY), figure("c", STEADY), figure("broke", STEADY),
        figure("u", STEADY, unit="us"),
    )  # fmt: skip

    told = run("bench", "compare", old, new, COLUMNS="200").stdout

    assert f"only in {old}: b" in told and f"only in {new}: c" in told
    assert "broke: the older run has no figure" in told
    assert "u: was in GB/s, is in us" in told


def test_another_machine_is_told_loudly(tmp_path: Path) -> None:
    old = written(tmp_path / "old.json", figure("a", STEADY), machine={"cpu": "one\x1b[31m", "cores": 2})
    new = written(tmp_path / "new.json", figure("a", STEADY), machine={"cpu": "two", "cores": 64})

    first = run("bench", "compare", old, new).stdout.splitlines()[0]

    assert first.startswith("ANOTHER MACHINE: cpu one?[31m -> two; cores 2 -> 64")


@pytest.mark.parametrize("columns", ["60", "200"])
def test_no_word_of_a_file_reaches_the_terminal_raw(columns: str, tmp_path: Path) -> None:
    odd = "a\x1b[31m\x1b]0;title\x07\u202eb\nc"
    line = Line(name=odd, title=odd, unit=odd, limit="")
    results = [
        Figure(line, [Sample(value, None) for value in STEADY]),
        figure(odd + "2", ()),
        figure(odd + "3", STEADY),
    ]
    old = written(tmp_path / "old.json", *results, date=odd, settings={odd: odd})
    new = written(tmp_path / "new.json", *results[:2])

    told = run("bench", "compare", old, new, COLUMNS=columns).stdout

    assert "a?[31m?]0;title??b?c" in "".join(told.split())
    assert all(letter.isprintable() or letter == "\n" for letter in told), ascii(told)


@pytest.mark.parametrize(("allowed", "status"), [("10%", 1), ("0.1", 1), ("40%", 0), ("0", 1)])
def test_exit_status_says_slower(allowed: str, status: int, tmp_path: Path) -> None:
    old = written(tmp_path / "old.json", figure("same", STEADY), figure("slow", FASTER))
    new = written(tmp_path / "new.json", figure("same", STEADY), figure("slow", STEADY))

    result = run("bench", "compare", old, new, "--fail-slower", allowed)

    assert result.exit_code == status
    assert ("slower by more than" in result.stderr and "slow" in result.stderr) == bool(status)
    assert run("bench", "compare", old, new).exit_code == 0


def test_check_that_looks_at_nothing_has_not_passed(tmp_path: Path) -> None:
    old, new = written(tmp_path / "o", figure("a", STEADY)), written(tmp_path / "n", figure("b", STEADY))
    result = run("bench", "compare", old, new, "--fail-slower", "1%")
    assert result.exit_code == 2 and "has no measure of" in result.stderr


@pytest.mark.parametrize("text", ["", "x", "-1%", "100%", "1%%", "1.5", "nan"])
def test_share_that_cannot_be(text: str, tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", figure("a", STEADY))
    assert "is not a share" in refused("bench", "compare", file, file, f"--fail-slower={text}")


def test_fail_slower_needs_something_to_compare_with() -> None:
    assert "--compare OLD.json" in refused("bench", "--quick", "--fail-slower", "10%")


@pytest.mark.parametrize("columns", ["20", "60", "80", "200"])
def test_tables_fit_any_terminal(columns: str, tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", figure("a-measure-of-a-long-name", STEADY))
    result = run("bench", "compare", file, file, COLUMNS=columns, NO_COLOR="1", TERM="dumb")
    assert result.exit_code == 0 and "\x1b[" not in result.output
    assert "1.00x" in result.stdout and (columns == "20" or "difference" in result.stdout)

    console = Console(width=int(columns), record=True, file=io.StringIO())
    console.print(report.make_table([figure("a", STEADY)], int(columns)))
    assert max(len(line.rstrip()) for line in console.export_text().splitlines()) <= int(columns)


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.428, "1.43x"), (0.0035, "0.0035x"), (0.034, "0.034x"), (0.0, "0.00x"), (4711.0, "5e+03x")]
)
def test_ratio_far_from_1_says_something(ratio: float, text: str) -> None:
    assert text in report.one_line(figure("one", [ratio] * 4, limit=1.0)).split()


# --- pictures and pages ---

CURVES = [
    figure(f"write-{nbytes}-w{window}", STEADY, point=Point("write", nbytes, window))
    for nbytes in (1024, 4096, 1 << 20)
    for window in (1, 16)
]


def all_kinds() -> list[Figure]:
    spread = figure("latency-8b", STEADY, unit="us", limit=None, point=Point("latency", 8, 0))
    spread.ecdf = [(share / 100, 1.0 + share) for share in range(101)]
    barred = figure("barred", STEADY)
    bar = Bar("ratio", ">=", 0.95)
    barred.measure = Line(name="barred", title="barred <b>", unit="GB/s", limit="memcpy", bar=bar)
    return [*CURVES, spread, barred, figure("without-runs", ())]


@pytest.fixture(scope="module", autouse=True)
def _drawn_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib keeps the fonts open that it has used."""
    plot.write_plot(tmp_path_factory.mktemp("drawn") / "out.png", all_kinds())


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_picture_is_of_the_kind_that_its_name_says(suffix: str, begins: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"out.{suffix}"
    plot.check_plot(file)
    plot.write_plot(file, all_kinds())
    assert file.read_bytes().startswith(begins)


def test_picture_of_no_known_kind_is_refused_before_the_work(tmp_path: Path) -> None:
    assert "suffix must be one of" in refused("bench", "--quick", "--plot", tmp_path / "out.docx")


def test_picture_of_nothing_is_refused_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "out.png"
    assert "nothing of what is to be measured can be drawn" in refused("bench", "--only=sim", "--plot", file)


def test_picture_of_a_single_size_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "out.svg"
    assert plot.write_plot(file, [figure("write-4k-w1", STEADY, point=Point("write", 4096, 1))])
    assert "4 KiB" in file.read_text()


def test_what_cannot_be_drawn_costs_no_other_output(tmp_path: Path) -> None:
    """Also not the exit status that a check in CI waits for."""
    old, page, picture = (
        written(tmp_path / "old.json", figure("a", FASTER, limit=None)),
        tmp_path / "p",
        tmp_path / "q.png",
    )
    outputs = Outputs(None, picture, page, read_json(old), 0.1)
    results: list[Figure] = []

    with pytest.raises(click.exceptions.Exit), outputs.of(results, {}, 0.0, Console(file=io.StringIO())):
        results.append(figure("a", STEADY, limit=None))

    assert "title of a" in page.read_text() and not picture.exists()


@pytest.mark.parametrize(
    ("error", "why"), [(KeyboardInterrupt(), "it was interrupted"), (CrossrailError("gone <b>"), "gone <b>")]
)
def test_part_that_was_measured_is_kept_and_marked(error: BaseException, why: str, tmp_path: Path) -> None:
    file, page, screen = tmp_path / "part.json", tmp_path / "page", io.StringIO()
    results = [figure("a", STEADY), figure("begun", ())]

    with pytest.raises(type(error)), Outputs(file, None, page, None, None).of(results, {}, 0.0, Console(file=screen)):
        raise error

    part = read_json(file)
    assert ([result.measure.name for result in part.results], part.only_part) == (["a"], why)
    assert f"only a part was measured: {why}" in screen.getvalue()
    assert "Only a part was measured" in page.read_text() and "<b>" not in page.read_text()
    warnings = compare(part, read_json(written(tmp_path / "whole.json", figure("a", STEADY)))).warnings
    assert any(f"ONLY A PART of {file} was measured: {why}" in warning for warning in warnings)


def test_nothing_measured_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    with pytest.raises(KeyboardInterrupt), Outputs(file, None, None, None, None).of([], {}, 0.0, Console()):
        raise KeyboardInterrupt
    assert not file.exists()


@pytest.mark.parametrize("words", [["compare", "FILE", "FILE"], ["run", "host"], ["serve"], ["moe"], ["peers"]])
def test_option_before_a_subcommand_is_refused(words: list[str], tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", figure("a", STEADY))
    given = [str(file) if word == "FILE" else word for word in words]
    for option in (["--json", str(tmp_path / "out")], ["--quick"], ["--runs", "3"]):
        assert f"{option[0]} before `{words[0]}`" in refused("bench", *option, *given)


def test_picture_draws_curves_limits_and_distribution(tmp_path: Path) -> None:
    file = tmp_path / "out.svg"
    plot.write_plot(file, all_kinds())
    words = " ".join(words_of(file))
    for expected in ("write, 16 in flight", "limit: memcpy", "1 KiB", "1 MiB", "share of round trips", "barred <b>"):
        assert expected in words


def wide() -> list[Figure]:
    """Ratios from 0.0002 to 200, and the longest names that limits and measures have."""
    ratios = [figure(f"r{value}", [value] * 4, unit="M/s", limit=1.0) for value in (0.0002, 1.0, 200.0)]
    ratios[0].measure = replace(ratios[0].measure, title="posting alone, 8-byte writes, beside it unrecorded")
    curves = [
        figure(f"{kind}-{nbytes}", STEADY, point=Point(kind, nbytes, window))
        for kind, window in (("private write", 16), ("paged", 2), ("write", 16), ("write", 1))
        for nbytes in (65536, 1 << 20)
    ]
    for curve in curves[2:4]:
        curve.measure = replace(curve.measure, limit="memcpy of the same pages")
    return [*curves, *ratios]


def words_of(picture: Path) -> list[str]:
    return [text.text or "" for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_picture_is_not_cut_off_at_its_sides(tmp_path: Path) -> None:
    """As the names of limits below the curves were."""
    plot.write_plot(tmp_path / "out.png", wide())

    pixels = importlib.import_module("matplotlib.image").imread(tmp_path / "out.png")[..., :3]

    assert (pixels[:, [0, -1]] == 1.0).all()


def test_interval_of_wild_runs_does_not_flatten_the_curves(tmp_path: Path) -> None:
    """Two runs that far apart have an interval up to some thousand GB/s."""
    curves = [figure(f"w{nbytes}", [0.5, 1.5], point=Point("write", nbytes, 1)) for nbytes in (65536, 1 << 20)]
    plot.write_plot(tmp_path / "out.svg", curves)
    words = set(words_of(tmp_path / "out.svg"))
    assert {"2", "4"} <= words and not {"10", "1000"} & words


def test_percentiles_of_table_and_picture_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few round trips, numpy's default lies between two of them, where none was."""
    rounds_ns = [2000 * us for us in (*range(1, 98), 500, 900, 4000)]
    driver = SimpleNamespace(ping_pong=lambda nbytes, count: rounds_ns)
    monkeypatch.setattr(sweep, "count_for", lambda *_: len(rounds_ns))
    result = Figure(Line(name="latency-8b", title="latency", unit="us", limit=""))
    plan = sweep.Plan(("latency",), (), (), (8,), 0.0, 0.0, 1)
    sweep._measure_latency(driver, Point("latency", 8, 0), plan, result, lambda: None)
    assert result.note == "p99 900.0, max 4,000 us"
    assert dict(result.ecdf)[0.99] == 900


def test_latencies_of_milliseconds_are_no_powers_of_ten(tmp_path: Path) -> None:
    slow = figure("slow", STEADY, unit="us", limit=None, point=Point("latency", 8, 0))
    slow.ecdf = [(share / 100, 3820.0 + share) for share in range(101)]
    plot.write_plot(tmp_path / "out.svg", [slow])
    assert "title of slow: p50 3,870 us, p99 3,919 us" in words_of(tmp_path / "out.svg")


def test_numbers_below_ratios_leave_each_other_room(tmp_path: Path) -> None:
    """Over many powers of ten there is none between them."""
    plot.write_plot(tmp_path / "wide.svg", wide())
    plot.write_plot(tmp_path / "narrow.svg", [figure("one", [2.0] * 4, limit=1.0), figure("two", [0.5] * 4, limit=1.0)])

    assert {"0.001", "100"} <= set(words_of(tmp_path / "wide.svg")) and "0.002" not in words_of(tmp_path / "wide.svg")
    assert {"0.5", "2"} <= set(words_of(tmp_path / "narrow.svg"))


class Reader(HTMLParser):
    """What a browser would make of it: tags in balance, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def read_page(file: Path) -> Reader:
    reader = Reader()
    reader.feed(file.read_text())
    reader.close()
    assert reader.open == []
    return reader


def hostile_page(file: Path) -> Reader:
    results = all_kinds()
    results[0].note = results[0].path = results[0].error = HOSTILE
    results[1].measure = Line(name=HOSTILE, title=HOSTILE, unit=HOSTILE, limit=HOSTILE)
    about = {HOSTILE: HOSTILE, "caches": {HOSTILE: HOSTILE}, "list": [HOSTILE]}
    new = Saved(HOSTILE, results, about, about, HOSTILE, HOSTILE, HOSTILE)
    old = Saved(HOSTILE, [*results[:2], figure(HOSTILE + "2", STEADY)], {"cpu": HOSTILE}, {}, HOSTILE, HOSTILE, HOSTILE)
    page.write_page(file, new, compare(old, new))
    return read_page(file)


def test_page_escapes_everything_that_comes_from_outside(tmp_path: Path) -> None:
    reader = hostile_page(tmp_path / "out.html")

    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in reader.tags}
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    assert reader.text.count("<script>alert(1)</script>") > 10


def test_page_fetches_nothing(tmp_path: Path) -> None:
    reader = hostile_page(tmp_path / "out.html")

    for tag, attributes in reader.tags:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert (value or "").startswith("#"), (tag, name, value)
    assert "@import" not in reader.text and not re.search(r"url\((?!#)", (tmp_path / "out.html").read_text())


def test_names_that_are_no_utf8_spoil_neither_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["crossrail", "bench", "--html", os.fsdecode(b"raw\xff.html")])
    results = [figure("a", STEADY)]
    file = written(tmp_path / "out.json", *results)

    page.write_page(tmp_path / "out.html", Saved(os.fsdecode(b"raw\xff"), results, {}, {}), None)

    assert read_json(file).command == "crossrail bench --html raw?.html"
    assert read_page(tmp_path / "out.html").text


def test_page_is_what_it_says_in_any_locale(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    script = (
        "import sys, pathlib\n"
        "from crossrail.cli.bench import page\n"
        "from crossrail.cli.bench.saved import Saved\n"
        "page.write_page(pathlib.Path(sys.argv[1]), Saved('x', [], {'cpu': '5 \\u00b5s'}, {}), None)\n"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    subprocess.run([sys.executable, "-c", script, str(out)], env=os.environ | ascii_only, check=True)

    assert '<meta charset="utf-8">' in out.read_text(encoding="utf-8") and "5 \N{MICRO SIGN}s" in out.read_text("utf-8")


def test_page_has_machine_command_figures_and_pictures(tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    run_taken = Saved(
        "run", all_kinds(), {"cpu": "a good one"}, {"seconds": 0.2}, "crossrail bench --x", "today", "1.0"
    )
    page.write_page(file, run_taken, None)
    reader = read_page(file)

    for expected in ("a good one", "crossrail bench --x", "title of write-1024-w1", "95 %", "order statistics", "ok"):
        assert expected in reader.text
    assert [tag for tag, _ in reader.tags].count("figure") == 3


def test_page_without_matplotlib_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "can_plot", lambda: False)
    file = tmp_path / "out.html"
    page.write_page(file, Saved("run", all_kinds(), {}, {}), None)

    reader = read_page(file)

    assert "matplotlib is not installed" in reader.text
    assert "figure" not in [tag for tag, _ in reader.tags]


def test_plot_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plot, "can_plot", lambda: False)
    assert "crossrail[bench]" in refused("bench", "--quick", "--plot", tmp_path / "out.png")
