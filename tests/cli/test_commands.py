"""The command line, as a user runs it: in processes of its own."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contract.setups import why_not
from tests.support.limits import PROGRAM_S, WAIT_S, eventually
from tests.support.process import REPOSITORY, assert_clean, run_script
from tests.support.seeds import Seed

COMMAND = [sys.executable, "-m", "crossrail"]


def crossrail(*arguments: object, timeout_s: float = PROGRAM_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=REPOSITORY,
        env=os.environ | {"COLUMNS": "160", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
    )


def succeeded(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 0, f"status {run.returncode}\n{run.stdout}\n{run.stderr}"
    assert "leaked" not in run.stderr and "Traceback" not in run.stderr, run.stderr
    return run.stdout


def failed(run: subprocess.CompletedProcess[str]) -> str:
    """A refusal in words: no traceback."""
    assert run.returncode != 0, run.stdout
    assert "Traceback" not in run.stderr, run.stderr
    return run.stderr


@pytest.fixture(autouse=True)
def nobody_elses_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` and `push` of this test find each other, and no others."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def payload(tmp_path: Path, seed: Seed) -> Path:
    """A file whose length nothing divides."""
    file = tmp_path / "payload.bin"
    file.write_bytes(seed.rng().bytes(3_000_017))
    return file


def test_help_does_not_wait_for_numpy() -> None:
    """Of any command, but for what is below `bench`, which are nothing without what they measure."""
    program = """
        import contextlib, io, sys
        from crossrail.cli.main import main

        def ask(words):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                main([*words, "--help"], standalone_mode=False)
            assert "Usage: " in out.getvalue(), words
            assert "numpy" not in sys.modules, words
            return out.getvalue().partition("Commands:")[2].splitlines()

        asked = 0
        for line in ask([]):
            if line[:2] == "  " and line[2:3].strip():
                below = ask(line.split()[:1]) if line.split()[0] != "bench" else ask(["bench"])[:0]
                names = [[line.split()[0], each.split()[0]] for each in below if each[2:3].strip()]
                asked += 1 + len([ask(words) for words in names])
        assert asked > 25, asked
        """
    assert_clean(run_script(program))


def test_help_names_every_command() -> None:
    text = succeeded(crossrail("--help"))

    for command in ("demo", "serve", "push", "bench"):
        assert command in text


@pytest.mark.parametrize("command", ["demo", "serve", "push", "bench"])
def test_each_command_has_help(command: str) -> None:
    assert "--help" in succeeded(crossrail(command, "--help"))


def test_version_is_shown() -> None:
    assert re.search(r"\d+\.\d+", succeeded(crossrail("--version")))


def test_unknown_command_is_refused_in_words() -> None:
    assert "fly" in failed(crossrail("fly"))


# --- demo ---


def test_demo_moves_a_file_and_verifies_it() -> None:
    text = succeeded(crossrail("demo"))

    for word in ("SHA-256", "rails", "pages", "GB/s", "memcpy"):
        assert word.lower() in text.lower(), f"no {word} in:\n{text}"
    assert text.splitlines()[0].strip() == "crossrail demo", "a bar, where output is no terminal"


@pytest.mark.parametrize(("rails", "page_bytes"), [(1, 4096), (4, 65_536), (7, 1000), (16, 65_537)])
def test_demo_with_a_file_rails_and_pages_of_ones_own(payload: Path, rails: int, page_bytes: int) -> None:
    text = succeeded(crossrail("demo", payload, "--rails", rails, "--page-bytes", page_bytes))

    assert hashlib.sha256(payload.read_bytes()).hexdigest()[:8] in text


@pytest.mark.parametrize("nbytes", [0, 1])
def test_demo_with_a_tiny_file_works_or_says_why_not(tmp_path: Path, nbytes: int) -> None:
    file = tmp_path / "tiny"
    file.write_bytes(bytes(nbytes))

    run = crossrail("demo", file)

    if run.returncode == 0:
        succeeded(run)
    else:
        assert "empty" in failed(run).lower()


@pytest.mark.parametrize(
    "arguments",
    [["/no/such/file"], ["--rails", "0"], ["--rails", "17"], ["--rails", "many"], ["--page-bytes", "0"], ["/"]],
)
def test_demo_refuses_nonsense_in_words(arguments: list[str]) -> None:
    assert failed(crossrail("demo", *arguments)).strip()


# --- serve and push ---


@contextmanager
def serving(*arguments: object, cwd: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """`crossrail serve` in `cwd`; yields the target that it tells to push to."""
    server = subprocess.Popen(
        [*COMMAND, "serve", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "1000", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
    )
    try:
        yield target_of(server), server
    finally:
        server.kill()
        server.communicate(timeout=PROGRAM_S)


def target_of(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if match := re.search(r"crossrail push \S+ (\S+)", line):
            return match.group(1).strip("'\"`")
    raise AssertionError(f"serve never said where to push to: {server.communicate(timeout=PROGRAM_S)}")


def test_serve_makes_its_folder_and_says_why_it_cannot(payload: Path, tmp_path: Path) -> None:
    with serving("--dir", "inbox", cwd=tmp_path) as (target, _):
        succeeded(crossrail("push", payload, target))
    assert (tmp_path / "inbox" / payload.name).read_bytes() == payload.read_bytes()
    assert f"--dir {payload} is not a directory" in failed(crossrail("serve", "--dir", payload))
    nowhere = tmp_path / "not" / "there"
    assert f"--dir {nowhere} cannot be made: No such file or directory" in failed(crossrail("serve", "--dir", nowhere))


def test_pushed_file_arrives_whole(payload: Path, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    with serving("--once", cwd=inbox) as (target, server):
        succeeded(crossrail("push", payload, target))
        out, err = server.communicate(timeout=PROGRAM_S)

    assert server.returncode == 0, f"{out}\n{err}"
    files = [file for file in inbox.rglob("*") if file.is_file()]
    assert [file.read_bytes() == payload.read_bytes() for file in files] == [True]


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--once"], 1)])
def test_server_that_is_terminated_fails_only_when_a_push_was_wanted(
    arguments: list[str], status: int, tmp_path: Path
) -> None:
    with serving(*arguments, cwd=tmp_path) as (_, server):
        server.terminate()
        out, err = server.communicate(timeout=PROGRAM_S)

    assert server.returncode == status, f"{out}\n{err}"
    assert "Traceback" not in err


@pytest.mark.parametrize("output", ["closed", "full", "paused"])
def test_file_is_stored_and_so_told_whatever_becomes_of_the_output(output: str, payload: Path, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with (
        open(read_end, "rb", buffering=0) as reader,
        open(write_end, "wb", buffering=0) as writer,
        open("/dev/full", "wb") as full,
        subprocess.Popen(
            [*COMMAND, "serve", "--dir=inbox"],
            stdout=full if output == "full" else writer,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
        ) as server,
    ):
        try:
            eventually((tmp_path / "run/crossrail/inbox.serve").exists, "it serves", PROGRAM_S)
            if output == "closed":
                assert reader.read(1000)  # as `| head` does
                reader.close()
            if output == "paused":
                os.set_blocking(write_end, False)
                while writer.write(b"x") is not None:
                    pass
                os.set_blocking(write_end, True)

            for name in ("one", "two"):
                assert "SHA-256 ok" in succeeded(crossrail("push", payload, f"inbox:{name}"))
            assert server.poll() is None
            server.terminate()
            _, errors = server.communicate(timeout=PROGRAM_S)
        finally:
            server.kill()
    assert server.returncode == 0 and "Traceback" not in errors
    assert ("warning: standard output: " in errors) == (output != "paused")
    assert {file.read_bytes() for file in (tmp_path / "inbox").iterdir()} == {payload.read_bytes()}


def test_server_takes_one_push_after_another(payload: Path, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    second = tmp_path / "second.bin"
    second.write_bytes(b"second")
    with serving(cwd=inbox) as (target, server):
        succeeded(crossrail("push", payload, target))
        succeeded(crossrail("push", second, target))

        assert server.poll() is None

    assert {file.read_bytes() for file in inbox.rglob("*") if file.is_file()} >= {payload.read_bytes(), b"second"}


def test_push_to_a_server_that_is_gone_is_refused_in_words(payload: Path, tmp_path: Path) -> None:
    with serving(cwd=tmp_path) as (target, _):
        pass

    assert failed(crossrail("push", payload, target)).strip()


def test_pusher_killed_in_the_middle_leaves_a_whole_file_or_none(tmp_path: Path, seed: Seed) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    large, small = tmp_path / "large.bin", tmp_path / "small.bin"
    large.write_bytes(seed.rng().bytes(64_000_000))
    small.write_bytes(b"small")
    with serving(cwd=inbox) as (target, server):
        pusher = subprocess.Popen([*COMMAND, "push", str(large), target], stdout=subprocess.DEVNULL)
        time.sleep(float(seed.rng(1).uniform(0.2, 0.5)))
        pusher.kill()
        pusher.wait(WAIT_S)

        succeeded(crossrail("push", small, target))
        assert server.poll() is None

    files = {file.name: file for file in inbox.rglob("*") if file.is_file()}
    assert files.pop("small.bin").read_bytes() == b"small"
    if "large.bin" in files:
        assert files["large.bin"].read_bytes() == large.read_bytes()


def test_refused_push_is_one_line(tmp_path: Path) -> None:
    """No bar that stands at 0, whatever the file's name does to a terminal or to UTF-8."""
    for name in ("taken", os.fsdecode(b"raw\xff\x1b[31m.bin")):
        (tmp_path / name).write_bytes(b"mine")
    with serving(cwd=tmp_path) as (target, _):
        taken = crossrail("push", tmp_path / "taken", target)
        unspeakable = crossrail("push", tmp_path / os.fsdecode(b"raw\xff\x1b[31m.bin"), target)
        renamed = crossrail("push", tmp_path / os.fsdecode(b"raw\xff\x1b[31m.bin"), f"{target}plain")

    assert not taken.stdout and "--force" in failed(taken)
    assert "UTF-8" in failed(unspeakable)
    assert re.fullmatch(r"stored as plain: .*\n", succeeded(renamed))
    assert (tmp_path / "plain").read_bytes() == b"mine"


MEANWHILE = """
import os, sys
from pathlib import Path
from crossrail.cli import main
from crossrail.cli.files import pusher
run = pusher.Pusher.run
def change_and_run(*arguments, **options):
    DO
    return run(*arguments, **options)
pusher.Pusher.run = change_and_run
main.main()
"""


def push_while(what: str, payload: Path, target: str) -> subprocess.CompletedProcess[str]:
    """`what`: Python's, done between the opening of the file, sys.argv[2], and the offer of it."""
    return subprocess.run(
        [sys.executable, "-c", MEANWHILE.replace("DO", what), "push", str(payload), target],
        capture_output=True, text=True, timeout=PROGRAM_S, cwd=REPOSITORY,
    )  # fmt: skip


def test_file_that_grows_is_stored_as_it_was_and_the_pusher_is_told(payload: Path, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    content = payload.read_bytes()
    with serving(cwd=inbox) as (target, _):
        pushed = push_while("with open(sys.argv[2], 'ab') as file: file.write(b'more')", payload, target)

    succeeded(pushed)
    assert "has grown; the 3000017 bytes before are stored" in pushed.stderr
    assert (inbox / payload.name).read_bytes() == content


def test_pusher_of_a_file_that_is_written_to_meanwhile_is_told(payload: Path, tmp_path: Path) -> None:
    os.utime(payload, (1, 1))
    with serving(cwd=tmp_path) as (target, _):
        pushed = push_while("os.utime(sys.argv[2])", payload, target + "as")

    succeeded(pushed)
    assert "was written to meanwhile; what is stored may be a mixture: push it again" in pushed.stderr


def test_file_that_only_says_to_be_empty_is_refused(tmp_path: Path) -> None:
    assert "says that it has none" in failed(crossrail("push", "/proc/self/status", "anywhere"))


def test_serve_ends_with_ctrl_c(tmp_path: Path) -> None:
    with serving(cwd=tmp_path) as (_, server):
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=PROGRAM_S)

    assert server.returncode in (0, 130), f"{out}\n{err}"
    assert "Traceback" not in err and "leaked" not in err


@pytest.mark.parametrize("target", ["nowhere", "", "127.0.0.1:99999", "00" * 40])
def test_push_to_nonsense_is_refused_in_words(payload: Path, target: str) -> None:
    assert failed(crossrail("push", payload, target)).strip()


def test_push_of_a_missing_file_is_refused_in_words(tmp_path: Path) -> None:
    assert "missing" in failed(crossrail("push", tmp_path / "missing", "anywhere"))


# --- bench ---


@pytest.mark.no_sanitizer
@pytest.mark.timeout(5 * PROGRAM_S)  # every measure there is, one after the other
def test_quick_bench_writes_its_numbers(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"

    text = succeeded(crossrail("bench", "--quick", "--runs", 1, "--json", file, timeout_s=4 * PROGRAM_S))

    assert text.strip()
    numbers = json.loads(file.read_text())
    assert numbers
    assert "memcpy" in json.dumps(numbers)


@pytest.mark.no_sanitizer
@pytest.mark.timeout(3 * PROGRAM_S)
def test_quick_bench_of_moe_writes_its_numbers(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    ranks = ["--ranks", 3, "--ranks", 3]  # measured once; the last has fewer of the 256 experts
    options = ["--quick", "--runs", 1, "--shape", "decode", *ranks, "--no-mpi", "--json", file]

    succeeded(crossrail("bench", "moe", *options, timeout_s=2 * PROGRAM_S))

    listed = json.loads(file.read_text())["results"]
    results = {result["name"]: result for result in listed}
    assert len(results) == len(listed)
    for step in ("dispatch", "combine"):
        assert results[f"decode-3-{step}"]["limit_is"] == "memcpy of the same bytes"
        assert results[f"decode-3-{step}"]["ratio"] > 0
    for posted in ("routes", "rows", "results", "first-write", "first-write-thread", "first-write-stream"):
        assert 0 < results[f"posting-{posted}"]["value"] < 1e6
    assert [result["error"] for result in results.values() if result["error"]] == []


@pytest.mark.no_sanitizer
@pytest.mark.timeout(3 * PROGRAM_S)
def test_quick_bench_of_moe_kernels_compares_and_measures_them(tmp_path: Path) -> None:
    file, page, picture = (tmp_path / name for name in ("bench.json", "bench.html", "bench.svg"))
    options = ["--kernels", "--quick", "--runs", 2, "--shape", "decode", "--ranks", 2]

    succeeded(crossrail("bench", "moe", *options, "--json", file, timeout_s=PROGRAM_S))
    again = ["--compare", file, "--html", page, "--plot", picture]
    text = succeeded(crossrail("bench", "moe", *options, *again, timeout_s=PROGRAM_S))

    assert "this run beside" in text
    assert "decode-2-kernel-pack" in page.read_text() and "<svg" in picture.read_text()
    results = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    for kernel in ("pack", "pull", "reduce", "reduce-portable", "quantize"):
        assert results[f"decode-2-kernel-{kernel}"]["ratio"] > 0


@pytest.mark.no_sanitizer
def test_quick_bench_runs_every_limit_of_bare_sockets(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    engines_on_shm = ("--transport", "tcp", "--stand-in", "shm")

    succeeded(crossrail("bench", *engines_on_shm, "--quick", "--runs", 1, "--pool-bytes", "64M", "--json", file))

    results = json.loads(file.read_text())["results"]
    assert all(result["value"] > 0 for result in results if result["name"] != "first-write-trips")
    assert all(result["limit"] > 0 for result in results if result["limit_is"])
    notes = [result["note"] for result in results if result["name"].startswith(("write-", "cpu-"))]
    assert len(notes) == 8 and all(note.startswith("bare: send ") for note in notes)


@pytest.mark.no_sanitizer
@pytest.mark.skipif(bool(why_not("ofi:tcp")), reason=why_not("ofi:tcp") or "-")
def test_quick_bench_over_ofi_runs_beside_bare_libfabric(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    some = ("--only", "write-1m-w16", "--only", "paged-64k")
    options = ("--transport", "ofi:tcp", "--quick", "--runs", 1, "--pool-bytes", "64M", "--json", file)

    succeeded(crossrail("bench", *options, *some))

    results = json.loads(file.read_text())["results"]
    assert [result["limit_is"] for result in results] == ["bare libfabric"] * 2
    assert all(result["value"] > 0 and result["limit"] > 0 for result in results)
