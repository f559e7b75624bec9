"""`crossrail doctor` as a user runs it: in processes of its own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import crossrail as xr
from crossrail.cli.doctor import command
from crossrail.errors import UsageError
from tests.support.limits import PROGRAM_S

PACKAGE = Path(xr.__file__).parent


def doctor(*arguments: str, program: list[str] | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(program or [sys.executable, "-m", "crossrail", "doctor"]), *arguments],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env=os.environ | {"COLUMNS": "100"} | environment,
        stdin=subprocess.DEVNULL,
    )


def test_whole_report_of_this_machine() -> None:
    run = doctor("--json")

    content = json.loads(run.stdout)
    assert run.returncode == content["exit_status"]
    assert "Traceback" not in run.stderr
    by_check = {finding["check"]: finding for finding in content["findings"]}
    assert by_check["crossrail.shm"]["severity"] in ("ok", "warning"), by_check["crossrail.shm"]
    assert not any("this check itself failed" in finding["title"] for finding in content["findings"])


def test_topics_can_be_chosen_and_text_is_plain_in_a_pipe() -> None:
    run = doctor("--only", "cpu,limits", "--only", "container.kind")

    assert run.returncode == 0, run.stdout
    assert re.findall(r"^[a-z]+$", run.stdout, re.MULTILINE) == ["limits", "container", "cpu"]
    assert "\x1b" not in run.stdout and run.stderr == ""
    assert re.search(r"^0 errors(, .*)? \d+ ok$", run.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("word", "meant"), [("node7", "crossrail doctor --peer node7"), ("network", "crossrail doctor --only network")]
)
def test_word_without_an_option_is_told_which_one_it_needs(word: str, meant: str) -> None:
    run = doctor(word)

    assert (run.returncode, run.stdout) == (2, "")
    assert meant in run.stderr


@pytest.mark.no_sanitizer  # loads only with its LD_PRELOAD, of which the doctor warns
def test_strict_makes_warnings_fail() -> None:
    environment = {"LD_PRELOAD": "", "FI_EFA_USE_DEVICE_RDMA": "0"}

    assert doctor("--only", "environment", **environment).returncode == 0
    assert doctor("--only", "environment", "--strict", **environment).returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "nonsense"],
        ["--only", "cpu,limits.memlok", "--strict"],
        ["--no-such-option"],
        ["--peer", "host:notaport"],
        ["--peer", ""],
        ["--listen", "http"],
        ["--listen", "70000"],
        ["--listen", "--json"],
        ["--peer", "localhost", "--listen"],
        ["--peer", "localhost", "--only", "cpu"],
        ["--peer", "localhost", "--seconds", "100"],
    ],
)
def test_wrong_usage_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(command, arguments)

    # The command group turns our errors into the same exit code; the next test goes through it.
    assert isinstance(result.exception, UsageError) or result.exit_code == 2, result


def test_wrong_usage_is_exit_code_2() -> None:
    run = doctor("--only", "nonsense")

    assert run.returncode == 2
    assert "there are crossrail, libraries" in run.stderr and "Traceback" not in run.stderr


def test_peer_that_is_no_place_is_refused_by_the_name_of_its_option() -> None:
    run = doctor("--peer", "[::1")

    assert run.returncode == 2
    assert run.stderr.startswith("error: --peer '[::1' is not HOST, HOST:PORT or [IPV6]:PORT")


def test_listen_and_peer_of_two_processes() -> None:
    listener = subprocess.Popen(
        [sys.executable, "-m", "crossrail", "doctor", "--listen", "0", "--minutes", "0.5"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert listener.stdout is not None
        match = re.search(r"listening on port (\d+)", listener.stdout.readline())
        assert match is not None
        assert "crossrail doctor --peer" in listener.stdout.readline()

        shown = doctor("--peer", f"127.0.0.1:{match[1]}", "--seconds", "0.05")
        as_json = doctor("--peer", f"127.0.0.1:{match[1]}", "--seconds", "0.05", "--json")
    finally:
        listener.send_signal(signal.SIGINT)
        output, _ = listener.communicate(timeout=PROGRAM_S)

    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "RTT us" in shown.stdout and "lo 127.0.0.1" in shown.stdout
    assert json.loads(as_json.stdout)["pairs"][0]["state"] == "ok"
    assert "127.0.0.1 (crossrail" in output and "received" in output
    assert listener.returncode == 130


def test_listener_answers_whoever_reads_what_it_says() -> None:
    """`crossrail doctor --listen | head -2` is what one types to see the command for the other side."""
    listener = subprocess.Popen(
        [sys.executable, "-m", "crossrail", "doctor", "--listen", "0", "--minutes", "0.5"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert listener.stdout is not None
        match = re.search(r"listening on port (\d+)", listener.stdout.readline())
        assert match is not None
        listener.stdout.close()
        for _ in range(2):
            run = doctor("--peer", f"127.0.0.1:{match[1]}", "--seconds", "0.05", "--json")
            assert json.loads(run.stdout)["pairs"], run.stdout
        assert listener.poll() is None
        listener.send_signal(signal.SIGINT)
        assert listener.stderr is not None
        with listener.stderr:
            errors = listener.stderr.read()
    finally:
        listener.kill()
        listener.wait(PROGRAM_S)
    assert "Traceback" not in errors and "warning: standard output: Broken pipe" in errors


def test_peer_that_nobody_listens_for_is_exit_code_1() -> None:
    run = doctor("--peer", "127.0.0.1:1")

    assert run.returncode == 1
    assert "crossrail doctor --listen 1" in run.stdout and "Traceback" not in run.stderr


# --- without a native module ---


@pytest.fixture
def broken_package(tmp_path: Path) -> Path:
    """A copy of the package whose native module is no library."""
    copy = tmp_path / "site" / "crossrail"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_core", "bench"))
    (copy / "_core.abi3.so").write_text("no library at all")
    return copy


def test_doctor_works_where_crossrail_does_not(broken_package: Path) -> None:
    program = [sys.executable, str(broken_package / "doctor")]
    run = doctor("--only", "crossrail,cpu", "--json", program=program, PYTHONPATH=str(broken_package.parent))

    content = json.loads(run.stdout)
    by_check = {finding["check"]: finding for finding in content["findings"]}
    assert run.returncode == 1
    assert by_check["crossrail.native"]["severity"] == "error"
    assert "_core.abi3.so" in by_check["crossrail.native"]["seen"]
    assert by_check["cpu.count"]["topic"] == "cpu"


def test_doctor_alone_runs_on_the_good_package_too() -> None:
    run = doctor("--only", "cpu", program=[sys.executable, str(PACKAGE / "doctor")])

    assert run.returncode == 0, run.stderr
    assert "cpu" in run.stdout
