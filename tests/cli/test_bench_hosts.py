"""`bench serve` and `bench run`, as two shells: what they measure, and what if the other side fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.cli.bench.hosts import wire
from crossrail.cli.bench.hosts.driver import count_for
from crossrail.cli.bench.hosts.places import BENCH, bind_place, target_place
from crossrail.cli.bench.hosts.sweep import path_used, span_bytes
from crossrail.cli.bench.hosts.worker import paged_work
from crossrail.cli.main import main
from crossrail.cli.meeting import ask
from crossrail.peers import Explanation, PathExplanation
from tests.support.certificates import Authority
from tests.support.limits import WAIT_S
from tests.support.ports import free_port

SECRET = "0123456789abcdef"
COMMAND = [sys.executable, "-m", "crossrail", "bench"]
LONG_S = 4 * WAIT_S
QUICK = ("--runs", "2", "--seconds", "0.005", "--warmup", "0", "--memory", "2M", "--sizes", "4K,256K", "--windows", "4")


def environment(**changes: str) -> dict[str, str]:
    return (
        os.environ | {"COLUMNS": "160", "NO_COLOR": "1", "CROSSRAIL_SECRET": SECRET, "PYTHONUNBUFFERED": "1"} | changes
    )


class Serve:
    """A `bench serve` of this test, and what it has said."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self.target = f"127.0.0.1:{port}"
        self.lines: list[str] = []
        self._more = threading.Condition()
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(process.stdout,))
        self._reader.start()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            with self._more:
                self.lines.append(line)
                self._more.notify_all()

    def wait_for(self, words: str, seen: int = 0) -> str:
        """The first line with these words, after so many that were seen before."""

        def found() -> str:
            return next((line for line in self.lines[seen:] if words in line), "")

        with self._more:
            assert self._more.wait_for(found, LONG_S), f"no {words!r} in {self.lines}"
            return found()

    def join(self) -> None:
        self._reader.join(WAIT_S)


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Serve]:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--bind", "127.0.0.1:0", *options],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("ready to measure")
        command = process.stdout.readline()
        assert SECRET not in command  # it is the user's own
        found = re.search(r"crossrail bench run 127\.0\.0\.1:(\d+)$", command)
        assert found, command
        serve = Serve(process, int(found[1]))
        yield serve
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(WAIT_S)
        serve.join()
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """One for all tests that leave it well: that it serves the next one is part of each."""
    with serving() as serve:
        yield serve
        assert serve.process.poll() is None


def start(target: str, *options: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "run", target, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment(**changes), start_new_session=True,
    )  # fmt: skip


def until_connected(process: subprocess.Popen[str]) -> None:
    """Both sides have their workers, and measuring begins."""
    assert process.stdout is not None
    assert any("connected" in line for line in process.stdout)


def run(target: str, *options: str, **changes: str) -> tuple[int, str, str]:
    with start(target, *options, **changes) as process:
        out, err = process.communicate(timeout=LONG_S)
    assert "Traceback" not in err and "leaked" not in err, err
    return process.returncode, out, err


def refused(target: str, *options: str, **changes: str) -> tuple[int, str]:
    """Before anything is started, so without a process of its own: the status and the one line that says why."""
    result = CliRunner(env=environment(**changes)).invoke(main, ["bench", "run", target, *options])
    lines = [line for line in result.stderr.splitlines() if line.lower().startswith("error: ")]
    assert len(lines) == 1 and not result.stdout, result.output
    return result.exit_code, lines[0]


def measured(file: Path) -> dict[str, dict[str, object]]:
    return {result["name"]: result for result in json.loads(file.read_text())["results"]}


# --- measuring ---


@pytest.mark.no_sanitizer
def test_run_measures_every_kind_beside_memcpy(serve: Serve, tmp_path: Path) -> None:
    file, html = tmp_path / "out.json", tmp_path / "out.html"

    status, out, err = run(serve.target, *QUICK, "--json", str(file), "--html", str(html))

    assert status == 0, err
    assert "over shm: connected" in out and "bytes went by shm" in out
    results = measured(file)
    rates = ["write-4k-w4", "write-256k-w4", "read-4k-w4", "read-256k-w4", "paged-4k", "paged-256k"]
    assert list(results) == [*rates, "latency-8b", "latency-4k"]
    for name in rates:
        assert results[name]["value"] and results[name]["ratio"] and results[name]["ratio_interval"]
        assert str(results[name]["limit_is"]).startswith("memcpy") and str(results[name]["path"]).startswith("shm")
    ecdf = results["latency-8b"]["ecdf"]
    assert isinstance(ecdf, list) and ecdf == sorted(ecdf) and ecdf[-1][0] == 1.0
    settings = json.loads(file.read_text())["settings"]
    assert settings["there"]["kernel"] and settings["sizes"] == [4096, 262144] and SECRET not in file.read_text()
    assert "write 256 KiB, window 4" in html.read_text()


@pytest.mark.no_sanitizer
def test_run_measures_over_tcp_with_several_processes_beside_bare_sockets(serve: Serve, tmp_path: Path) -> None:
    file, seen = tmp_path / "out.json", len(serve.lines)

    options = (*QUICK, "--sizes", "64K", "--latency-sizes", "8", "--processes", "2", "--transport", "tcp")
    status, out, err = run(serve.target, *options, "--json", str(file))

    assert status == 0, err
    assert "over tcp: connected" in out
    results = measured(file)
    assert str(results["write-64k-w4"]["limit_is"]).startswith("bare sockets") and results["write-64k-w4"]["limit"]
    assert results["read-64k-w4"]["limit"] is None and results["read-64k-w4"]["value"]
    assert "2 workers" in serve.wait_for("run bench-run", seen)
    serve.wait_for("done bench-run", seen)


@pytest.mark.no_sanitizer
def test_run_moves_bytes_under_the_tls_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = Authority(tmp_path).issue()
    for name in ("cert", "key", "ca"):
        monkeypatch.setenv(f"CROSSRAIL_TLS_{name.upper()}", str(getattr(tls, name)))
    with serving("--transport", "tcp") as serve:
        some = (*QUICK, "--only", "write", "--sizes", "64K", "--transport", "tcp")
        status, out, err = run(serve.target, *some)
        assert status == 0, err
        assert "TLS_" in out  # of a worker, which is what moves the bytes

        status, _, err = run(serve.target, *some, CROSSRAIL_TLS_CERT="", CROSSRAIL_TLS_KEY="", CROSSRAIL_TLS_CA="")
        assert status == 1 and "give tls to both, or to neither" in err


@pytest.mark.no_sanitizer
def test_run_is_compared_with_an_older_one(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    old = {"name": "write-4k-w4", "title": "", "unit": "GB/s", "samples": [{"value": 1e30}] * 3}
    file.write_text(json.dumps({"format": 1, "results": [old]}))

    some = (*QUICK, "--runs", "4", "--only", "write", "--sizes", "4K")  # enough for any machine's spread
    status, out, err = run(serve.target, *some, "--compare", str(file), "--fail-slower", "10%")

    assert status == 1 and "slower by more than 10%: write-4k-w4" in err
    assert "slower" in out and "ANOTHER MACHINE" in out


# --- the other side fails ---


def test_serve_survives_a_run_that_is_killed_in_the_middle(serve: Serve) -> None:
    seen = len(serve.lines)
    with start(serve.target, "--seconds", "5", "--memory", "2M") as process:
        until_connected(process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=WAIT_S)

    serve.wait_for("dropped bench-run", seen)
    status, _, err = run(serve.target, *QUICK, "--only", "latency", "--latency-sizes", "8")
    assert status == 0, err


def test_serve_goes_on_when_nobody_reads_what_it_says() -> None:
    """As after `crossrail bench serve | head -2`, which shows the command for the other side."""
    with subprocess.Popen(
        [*COMMAND, "serve", "--bind", "127.0.0.1:0"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None and process.stderr is not None
            target = [process.stdout.readline() for _ in range(2)][1].split()[-1]
            process.stdout.close()
            for _ in range(2):
                status, _, err = run(target, *QUICK, "--only", "latency", "--latency-sizes", "8")
                assert status == 0, err
            assert process.poll() is None
            process.terminate()
            with process.stderr:
                assert "Traceback" not in process.stderr.read()
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_serve_survives_ctrl_c_in_a_run(serve: Serve) -> None:
    seen = len(serve.lines)
    with start(serve.target, "--seconds", "5", "--memory", "2M") as process:
        until_connected(process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=LONG_S)

    assert process.returncode == 130 and err.split() == ["interrupted"]
    serve.wait_for("bench-run", seen + 1)  # it was told, or found out


def test_run_says_that_the_serve_was_killed_and_keeps_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    options = ("--seconds", "0.5", "--memory", "2M", "--only", "write", "--runs", "2", "--json", str(file))
    with serving() as serve, start(serve.target, *options) as process:
        until_connected(process)
        assert process.stdout is not None and any(line.startswith("write-1k-w1 ") for line in process.stdout)
        os.killpg(serve.process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=LONG_S)

    assert process.returncode == 1 and len(err.splitlines()) == 1, err
    assert "only a part was measured: " in out and "write-1k-w1" in measured(file)
    assert json.loads(file.read_text())["only_part"]
    assert re.search(r"ended|lost|did not (answer|connect)|cannot be reached", err)


def test_run_with_another_secret_is_refused(serve: Serve) -> None:
    status, line = refused(serve.target, CROSSRAIL_SECRET="another")
    assert status == 2 and "you do not have its secret" in line

    status, line = refused(serve.target, CROSSRAIL_SECRET="")
    assert status == 2 and "set CROSSRAIL_SECRET" in line


def test_garbage_at_the_port_is_passed_over(serve: Serve) -> None:
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000):
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", serve.port), WAIT_S) as connection,
        ):
            connection.sendall(garbage)
    assert ask("127.0.0.1", serve.port, SECRET.encode(), BENCH).name == "bench-serve"


@contextlib.contextmanager
def talking(serve: Serve) -> Iterator[tuple[xr.Engine, xr.ReceivePool, xr.Address]]:
    """An engine that knows the secret and talks with the serve as it likes."""
    with (
        xr.Engine("stranger", transport="shm", secret=SECRET) as engine,
        engine.submit_recvs(16, wire.MESSAGE_BYTES_MAX) as pool,
    ):
        peer = ask("127.0.0.1", serve.port, SECRET.encode(), BENCH)
        engine.connect(peer)
        yield engine, pool, peer


def test_run_of_another_version_is_told_both(serve: Serve) -> None:
    with talking(serve) as (engine, pool, peer):
        hello = msgspec.msgpack.encode({"kind": "hello", "version": 99, "more": "things"})
        engine.submit_send(peer, hello).wait(WAIT_S)
        answer = wire.decode(pool.recv(WAIT_S).data)

    assert isinstance(answer, wire.Refusal)
    assert f"version {wire.VERSION}" in answer.reason and "you 99" in answer.reason


def test_serve_of_another_version_is_told_both() -> None:
    with pytest.raises(wire.OtherVersion, match=rf"version 99 .* this one {wire.VERSION}"):
        wire.decode(msgspec.msgpack.encode({"kind": "welcome", "version": 99}))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"processes": 17}, "at most 16"), ({"span_bytes": 1 << 33}, "--memory-max")],
    ids=["processes", "memory"],
)
def test_run_that_wants_too_much_is_refused(serve: Serve, change: dict[str, int], words: str) -> None:
    with talking(serve) as (engine, pool, peer):
        wanted = {"run": 1, "processes": 1, "span_bytes": 1 << 20, "polling": "adaptive"} | change
        engine.submit_send(peer, wire.encode(wire.Hello(**wanted))).wait(WAIT_S)  # type: ignore[arg-type]
        answer = wire.decode(pool.recv(WAIT_S).data)

    assert isinstance(answer, wire.Refusal) and words in answer.reason


def test_messages_out_of_turn_end_the_run_and_not_the_serve(serve: Serve) -> None:
    with talking(serve) as (engine, pool, peer):
        for data in (b"", b"{}", b"\xc1" * 1000, wire.encode(wire.Bye(run=3))):
            engine.submit_send(peer, data).wait(WAIT_S)
        hello = wire.Hello(run=7, processes=1, span_bytes=1 << 20, polling="adaptive")
        engine.submit_send(peer, wire.encode(hello)).wait(WAIT_S)
        assert isinstance(wire.decode(pool.recv(LONG_S).data), wire.Welcome)
        with talking(serve) as (second, its_pool, _):
            second.submit_send(peer, wire.encode(hello)).wait(WAIT_S)
            busy = wire.decode(its_pool.recv(WAIT_S).data)
        engine.submit_send(peer, wire.encode(wire.Step(run=7, what="receive"))).wait(WAIT_S)
        failed = wire.decode(pool.recv(WAIT_S).data)

    assert isinstance(busy, wire.Refusal) and "another run is under way" in busy.reason
    assert isinstance(failed, wire.Failed) and "out of turn" in failed.reason


def test_run_that_ends_early_is_said_to_have_given_up(serve: Serve) -> None:
    seen = len(serve.lines)
    with talking(serve) as (engine, pool, peer):
        hello = wire.Hello(run=7, processes=1, span_bytes=1 << 20, polling="adaptive")
        engine.submit_send(peer, wire.encode(hello)).wait(WAIT_S)
        assert isinstance(wire.decode(pool.recv(LONG_S).data), wire.Welcome)
        engine.submit_send(peer, wire.encode(wire.Bye(run=7))).wait(WAIT_S)

        assert "dropped" in serve.wait_for("gave up", seen)


def test_nobody_is_there() -> None:
    status, line = refused(f"127.0.0.1:{free_port()}")
    assert status == 1 and "bench serve --bind" in line


def test_bench_of_a_host_names_the_command_that_measures_it() -> None:
    done = CliRunner().invoke(main, ["bench", "node7"])

    assert done.exit_code == 2 and "crossrail bench run HOST:PORT" in done.output


def test_another_kind_of_serve_is_told_from_ours() -> None:
    """crossrail serve's magic."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"XRMT\x01\x00" + bytes(16))

        thread = threading.Thread(target=answer)
        thread.start()
        status, line = refused(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join(WAIT_S)
    assert status == 1 and "is not a crossrail bench serve: wrong port?" in line


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_serve_ends_as_other_commands_do(number: signal.Signals, status: int) -> None:
    with serving() as serve:
        os.killpg(serve.process.pid, number)
        serve.process.wait(WAIT_S)
        assert serve.process.stderr is not None
        said = [line for line in serve.process.stderr.read().splitlines() if line not in ("", "Ctrl-C ends it.")]
    assert serve.process.returncode == status
    assert said == (["interrupted"] if status else [])


def test_once_ends_after_one_run_whose_secret_is_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    by_file = ("--secret-file", str(tmp_path / "secret"))
    with serving("--once") as serve:
        some = (*QUICK, "--only", "latency", "--latency-sizes", "8")
        assert run(serve.target, *some, *by_file, CROSSRAIL_SECRET="another")[0] == 0
        assert serve.process.wait(WAIT_S) == 0


# --- parts ---


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(wire.ProtocolError):
        wire.decode(data)


@given(
    st.dictionaries(
        st.sampled_from(["kind", "version", "run", "what", "count", "nbytes", "parts", "processes", "reason"]),
        st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=10) | st.just(wire.VERSION),
    )
)
def test_any_fields_decode_or_are_refused(content: dict[str, object]) -> None:
    content.setdefault("version", wire.VERSION)
    with contextlib.suppress(wire.ProtocolError):
        wire.decode(msgspec.msgpack.encode(content))


@pytest.mark.parametrize(
    "step",
    [
        {"what": "run"},
        {"what": "receive", "count": 0},
        {"what": "receive", "count": 1 << 41},
        {"what": "receive", "timeout_s": 1e9},
        {"what": "digest", "nbytes": -1},
        {"what": "stream", "window": 5000},
        {"what": "digest", "more": 1},
    ],
    ids=str,
)
def test_step_out_of_bounds_is_refused(step: dict[str, object]) -> None:
    message = {"kind": "step", "version": wire.VERSION, "run": 1} | step
    with pytest.raises(wire.ProtocolError):
        wire.decode(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("host", ("host", 7320)),
        ("host:80", ("host", 80)),
        ("[::1]:80", ("::1", 80)),
        ("tcp://10.0.0.1:9/", ("10.0.0.1", 9)),
    ],
)
def test_places_are_taken_apart(text: str, found: tuple[str, int]) -> None:
    assert target_place(text) == bind_place(text) == found


@pytest.mark.parametrize(
    "text", ["", ":0", ":80", "a:b", "host:99999", "[::1", "user@host:80", "host:80/path", "a b", "80"]
)
def test_places_that_are_none_are_refused(text: str) -> None:
    status, line = refused(text)
    assert status == 2 and "HOST:PORT" in line


def test_count_fits_the_time_whatever_the_first_passes_took() -> None:
    """A microsecond an operation; the first pass lost its core for a second."""
    taken: list[int] = []

    def work(count: int) -> float:
        taken.append(count)
        return count * 1e-6 + (1.0 if len(taken) == 1 else 0.0)

    assert count_for(0.1, 0.0, 16, work) == pytest.approx(100_000, rel=0.01)
    assert max(taken) <= 100_000 and sum(taken) < 200_000


def test_count_is_never_less_than_a_window() -> None:
    assert count_for(0.1, 0.0, 16, lambda count: 10.0 * count) == 16


@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_pages_are_whole_rounds_of_what_there_is(count: int, pages_max: int) -> None:
    pages, rounds = paged_work(count, pages_max)
    assert 1 <= pages <= pages_max and rounds >= 1
    assert pages * rounds <= count < pages * rounds + pages_max


@given(st.integers(1 << 20, 1 << 34), st.integers(1, 32), st.integers(8, 1 << 25))
def test_each_worker_has_room_for_two_of_the_largest(memory_bytes: int, processes: int, largest: int) -> None:
    span = span_bytes(memory_bytes, processes, [8, largest])
    assert span >= 2 * largest and span >= wire.SPAN_BYTES_MIN


def test_path_is_the_one_that_most_bytes_took() -> None:
    def told(mapped: int, staged: int) -> Explanation:
        paths = (PathExplanation("a", "mapped", "", 0.0, mapped), PathExplanation("b", "staged", "", 0.0, staged))
        return Explanation("peer", "shm", "", "connected", "", ((0, 0),), (), 0.0, paths)

    assert path_used(told(1000, 0), told(1001, 500)) == "shm: staged"
    assert path_used(told(0, 0), told(0, 0)) == "shm"
