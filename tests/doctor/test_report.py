"""The run as a whole: selection, order, failing checks, JSON, exit status, text."""

import io
import json
import re

import pytest
from rich.console import Console

from crossrail.doctor import topics
from crossrail.doctor.finding import Finding, Fix, Severity, error, note, ok, warning
from crossrail.doctor.report import Report, run_checks, to_json, why_unknown
from crossrail.doctor.show import printable, show_report
from tests.doctor.tree import FakeHost, Tree

E1 = error("rdma.gids", "no GID", "seen there", "cannot connect", Fix("ip addr add", "root"))
W1 = warning("rdma.ports", "one down", "seen", "slow", Fix("", "in the BIOS"))
N1, O1 = note("cpu.load", "busy", "seen"), ok("cpu.count", "8 cores")


def text_of(report: Report, *, width: int = 100, terminal: bool = False) -> str:
    out = io.StringIO()
    show_report(report, Console(file=out, width=width, force_terminal=terminal))
    return out.getvalue()


def test_topics_come_in_order_and_the_worst_first_within(tree: Tree, host: FakeHost) -> None:
    findings = run_checks(host).findings

    order = list(dict.fromkeys(finding.topic for finding in findings))
    assert order == [topic for topic in topics.TOPICS if topic in order]
    for topic in order:
        ranks = [finding.severity.rank for finding in findings if finding.topic == topic]
        assert ranks == sorted(ranks)


def test_checks_bear_the_name_of_their_topic(tree: Tree, host: FakeHost) -> None:
    for topic in topics.TOPICS:
        assert {finding.topic for finding in run_checks(host, [topic]).findings} <= {topic}


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["cpu.count"], {"cpu.count"}),
        (["cpu.count", "tcp.ports"], {"cpu.count", "tcp.ports"}),
        (["cpu.cou"], set()),
        (["limits.huge-pages"], {"limits.huge-pages", "limits.huge-pages-shared"}),
    ],
)
def test_single_checks_can_be_chosen(host: FakeHost, tree: Tree, only: list[str], expected: set[str]) -> None:
    assert {finding.check for finding in run_checks(host, only).findings} == expected


@pytest.mark.parametrize("width", [32, 40, 60, 100])
def test_a_terminal_of_any_width_has_nothing_to_break_but_commands(width: int) -> None:
    """It would, in the middle of words."""
    said = "a host of which so much is to be said " * 4
    command = "sysctl -w net.core.rmem_max=134217728 net.core.wmem_max=134217728  # as root, on both hosts"
    report = Report([warning("network.buffers", said, said, said, Fix(command, ""))])

    lines = text_of(report, width=width).splitlines()

    assert [line for line in lines if len(line) > width] == [line for line in lines if command in line]
    assert "[network.buffers]" in " ".join(lines)


def test_a_check_that_raises_is_a_finding_and_stops_nothing(
    host: FakeHost, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_one(host: object) -> list[Finding]:
        raise ZeroDivisionError("of all things")

    monkeypatch.setitem(topics.TOPICS, "cpu", (broken_one, *topics.TOPICS["cpu"]))

    report = run_checks(host, ["cpu"])

    failed = next(finding for finding in report.findings if finding.check == "cpu.broken-one")
    assert failed.severity is Severity.ERROR and "of all things" in failed.seen
    assert len(report.findings) > 1
    assert report.exit_status(strict=False) == 1, "what nobody looked at must not pass for fine"


def test_that_a_check_failed_is_told_also_where_another_one_of_its_topic_was_chosen(
    host: FakeHost, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_one(host: object) -> list[Finding]:
        raise ZeroDivisionError("of all things")

    monkeypatch.setitem(topics.TOPICS, "cpu", (broken_one,))

    report = run_checks(host, ["cpu.count"])

    assert [finding.check for finding in report.findings] == ["cpu.broken-one"]
    assert report.exit_status(strict=True) == 1


@pytest.mark.parametrize("name", ["cpu", "cpu.count", "limits.huge-pages", "limits.huge-pages-shared"])
def test_names_of_topics_and_checks_are_known(name: str) -> None:
    assert why_unknown(name) == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cpus", "cpus is no topic; there are crossrail, libraries,"),
        ("limits.memlok", "limits.memlok is no check; of limits there are address-space, dev-shm,"),
        ("limits.", "limits. is no check"),
        ("cpu.count.x", "cpu.count.x is no check"),
    ],
)
def test_a_name_that_finds_nothing_anywhere_is_told(name: str, why: str) -> None:
    assert why_unknown(name).startswith(why)


@pytest.mark.parametrize(
    ("findings", "strict", "status"),
    [((O1,), True, 0), ((N1,), True, 0), ((W1,), False, 0), ((W1,), True, 1), ((E1,), False, 1), ((), True, 0)],
)
def test_exit_status(findings: tuple[Finding, ...], strict: bool, status: int) -> None:
    assert Report(findings).exit_status(strict=strict) == status


def test_json_form_is_the_documented_one(tree: Tree, host: FakeHost) -> None:
    content = json.loads(json.dumps(to_json(run_checks(host), strict=False, version="1.2.3")))

    assert content["format"] == "crossrail.doctor" and content["version"] == 1
    assert content.keys() == {
        "format", "version", "crossrail", "time", "host", "summary", "exit_status", "findings",
    }  # fmt: skip
    assert content["summary"].keys() == {"ok", "note", "warning", "error"}
    assert sum(content["summary"].values()) == len(content["findings"])
    for finding in content["findings"]:
        assert finding.keys() == {"check", "topic", "severity", "title", "seen", "cost", "fixes"}
        assert re.fullmatch(r"[a-z]+\.[a-z0-9-]+", finding["check"])
        assert finding["severity"] in content["summary"]
        assert all(fix.keys() == {"for", "command"} for fix in finding["fixes"])


def test_text_groups_and_counts() -> None:
    text = text_of(Report((E1, W1, N1, O1)))

    assert text.index("rdma\n") < text.index("error    no GID") < text.index("warning  one down") < text.index("cpu\n")
    assert "fix  ip addr add  # root" in text and "fix  in the BIOS" in text
    assert text.endswith("1 error, 1 warning, 1 note, 1 ok\n")


def test_text_has_no_colours_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    assert "\x1b" not in text_of(Report((E1, O1)))
    assert "\x1b" in text_of(Report((E1, O1)), terminal=True)


def test_no_color_is_respected_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    assert re.search(r"\x1b\[[0-9;]*3[0-7]", text_of(Report((E1, O1)), terminal=True)) is None


def test_commands_are_never_broken_into_lines() -> None:
    command = "echo " + "x " * 200
    report = Report((error("a.b", "title", "seen", "cost", Fix(command.strip())),))

    assert command.strip() in text_of(report, width=60)


def test_what_a_terminal_would_obey_is_not_passed_on() -> None:
    evil = "\x1b]0;owned\x07 [bold]x[/bold]"
    text = text_of(Report((error("a.b", evil, evil, evil, Fix(evil, evil)),)))

    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]x[/bold]" in text
    assert printable("a\tb\nc\x00") == "a b\nc?"
