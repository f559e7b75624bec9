"""`crossrail kv`, as an operator runs it: processes of their own, killed and stopped in the middle."""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from crossrail import Engine, UsageError
from crossrail.cli import memory
from crossrail.cli.kv import common, nodes
from crossrail.cli.main import main
from tests.support.kv_processes import (
    SECRET,
    Asking,
    Services,
    all_pages_free,
    busy_prefiller,
    killed_prefiller_costs_time_and_nothing_else,
    model_options,
    monolithic,
)
from tests.support.limits import PROGRAM_S, WAIT_S, eventually


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path / "stderr")
    try:
        made.add_router()
        yield made
    finally:
        made.close()
    complaints = (tmp_path / "stderr").read_text()
    assert "Traceback" not in complaints and "leaked" not in complaints, complaints


def status_of(services: Services, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://{services.place}{path}", timeout=WAIT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


async def test_killed_prefiller_costs_time_and_nothing_else(services: Services) -> None:
    for role, name in (("prefiller", "p0"), ("prefiller", "p1"), ("decoder", "d0")):
        services.add(role, name)
    services.joined("p0", "p1", "d0")
    await killed_prefiller_costs_time_and_nothing_else(services)


async def test_stopped_prefiller_is_passed_over_and_harmless_when_it_goes_on(services: Services) -> None:
    for role, name in (("prefiller", "p0"), ("prefiller", "p1"), ("decoder", "d0")):
        services.add(role, name)
    services.joined("p0", "p1", "d0")
    asking = Asking(services)
    stopped = busy_prefiller(services)
    services.signal(stopped, signal.SIGSTOP)
    assert asking.result() == await monolithic()
    services.signal(stopped, signal.SIGCONT)
    services.joined("p0", "p1")
    eventually(lambda: all_pages_free(services, "p0", "p1", "d0"), "all pages are free", pause_s=0.05)
    assert Asking(services).result() == await monolithic()


def test_node_serves_its_metrics_where_it_is_told(services: Services) -> None:
    router = f"http://{services.place}"
    node = services.start("decoder", "d0", "--router", router, "--metrics-port", "0")
    assert node.stdout is not None
    assert node.stdout.readline().startswith(b"decoder d0: toy")
    said = re.fullmatch(
        r"decoder d0: metrics at (http://127\.0\.0\.1:(\d+)/metrics)\n", node.stdout.readline().decode()
    )
    assert said
    with urllib.request.urlopen(said[1], timeout=WAIT_S) as answer:
        assert b"crossrail_engine_open{" in answer.read()

    refused = services.start("decoder", "d1", "--router", router, "--metrics-port", said[2])

    assert refused.wait(WAIT_S) == 1
    assert f"cannot serve metrics at 127.0.0.1:{said[2]}" in services.complaints()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_router_at_an_ipv6_address_says_its_url(services: Services) -> None:
    services.place = "[::1]:0"
    services.kill("router")
    services.add_router()
    assert re.fullmatch(r"\[::1\]:\d+", services.place)
    assert status_of(services, "/health") == 503  # it has no nodes


async def test_terminated_node_finishes_what_it_has_and_leaves(services: Services) -> None:
    prefiller = services.add("prefiller", "p0")
    decoder = services.add("decoder", "d0")
    services.joined("p0", "d0")
    asking = Asking(services)
    busy_prefiller(services)
    services.signal("d0", signal.SIGTERM)
    assert asking.result() == await monolithic()
    services.signal("p0", signal.SIGTERM)
    assert (decoder.wait(WAIT_S), prefiller.wait(WAIT_S)) == (0, 0)
    assert services.nodes() == {}


async def test_router_that_may_drain_finishes_what_it_has(services: Services) -> None:
    services.kill("router")
    services.add_router("--drain-s", str(WAIT_S))
    services.add("prefiller", "p0")
    services.add("decoder", "d0")
    services.joined("p0", "d0")
    asking = Asking(services)
    busy_prefiller(services)
    services.signal("router", signal.SIGTERM)
    eventually(lambda: status_of(services, "/health") == 503, "it says that it ends")
    assert asking.result() == await monolithic()
    assert services.wait("router") == 0


def test_second_signal_ends_a_router_that_drains(services: Services) -> None:
    services.kill("router")
    services.add_router("--drain-s", str(WAIT_S))
    services.add("prefiller", "p0")
    services.add("decoder", "d0", token_us="1000000")
    services.joined("p0", "d0")
    asking = Asking(services)
    busy_prefiller(services)
    services.signal("router", signal.SIGTERM)
    eventually(lambda: status_of(services, "/health") == 503, "it drains")
    services.signal("router", signal.SIGTERM)
    assert services.wait("router") == 0
    asking.join(WAIT_S)
    assert "the router is closing" in asking.trouble
    assert "router router: ended when told to, before all was finished" in services.complaints()


async def test_terminated_node_whose_output_nobody_reads_finishes_what_it_has(services: Services) -> None:
    services.add("prefiller", "p0")
    decoder = services.add("decoder", "d0")
    services.joined("p0", "d0")
    assert decoder.stdout is not None
    decoder.stdout.close()
    asking = Asking(services)
    busy_prefiller(services)
    services.signal("d0", signal.SIGTERM)
    assert asking.result() == await monolithic()
    assert decoder.wait(WAIT_S) == 0


def test_node_whose_output_cannot_be_written_says_so_and_goes_on(services: Services) -> None:
    with open("/dev/full", "wb") as full:
        node = services.start("decoder", "d0", "--router", f"http://{services.place}", *model_options(), stdout=full)
    services.joined("d0")
    services.signal("d0", signal.SIGTERM)
    assert node.wait(WAIT_S) == 0
    # The router may tell in the same file whom it has missed, and who is back.
    (said,) = (line for line in services.complaints().splitlines() if not line.startswith("router "))
    why = "stdout cannot be written (No space left on device), it goes on without"
    assert said.startswith(f"warning: {why}; it was to say: decoder d0: toy-")


def test_second_signal_ends_a_node_at_once(services: Services) -> None:
    services.add("prefiller", "p0")
    decoder = services.add("decoder", "d0", token_us="1000000")
    services.joined("p0", "d0")
    asking = Asking(services)
    busy_prefiller(services)
    services.signal("d0", signal.SIGINT)
    eventually(lambda: services.nodes()["d0"]["draining"], "it drains")
    services.signal("d0", signal.SIGINT)
    assert decoder.wait(WAIT_S) == 0
    assert "d0: ended when told to, before all was finished" in services.complaints()
    asking.join(2 * WAIT_S)
    assert asking.trouble or asking.error


def hanging_node(services: Services, role: str, name: str, model_timeout_s: float) -> subprocess.Popen[bytes]:
    """With a request, whose pages its model keeps for ever."""
    hanging = ["--model", "tests.support.hanging_model:make", "--model-timeout-s", str(model_timeout_s)]
    services.add("decoder" if role == "prefiller" else "prefiller", "other")
    router = ["--router", f"http://{services.place}", "--drain-s", "0.1"]
    node = services.start(role, name, *router, *hanging, *model_options())
    services.joined(name, "other")
    Asking(services)
    eventually(lambda: "a call of the model hangs" in services.complaints(), "its model hangs", pause_s=0.05)
    return node


@pytest.mark.parametrize(("role", "name"), [("prefiller", "p0"), ("decoder", "d0")])
def test_one_signal_ends_a_node_whose_model_hangs(services: Services, role: str, name: str) -> None:
    """However long the model keeps its pages."""
    node = hanging_node(services, role, name, model_timeout_s=0.3)
    eventually(lambda: services.nodes()[name]["hangs"], "its model hangs", pause_s=0.05)
    services.signal(name, signal.SIGTERM)
    assert node.wait(WAIT_S) == 1
    assert f"{role} {name}: ended after 1 s more, before it was closed: its model hangs" in services.complaints()


@pytest.mark.parametrize(("role", "name"), [("prefiller", "p0"), ("decoder", "d0")])
def test_second_signal_ends_a_node_whose_model_does_not_let_go(services: Services, role: str, name: str) -> None:
    node = hanging_node(services, role, name, model_timeout_s=WAIT_S)  # it is not known to hang: this takes 10 s
    services.signal(name, signal.SIGTERM)
    eventually(lambda: name not in services.nodes(), "it has left", pause_s=0.05)
    services.signal(name, signal.SIGTERM)
    assert node.wait(WAIT_S) == 1
    assert f"{role} {name}: ended when told to, before it was closed: its model or a peer" in services.complaints()


def test_nodes_end_with_whoever_started_them_whatever_is_under_way(tmp_path: Path) -> None:
    services = Services(
        tmp_path / "stderr", prefiller_timeout_s=2 * WAIT_S
    )  # nothing that takes so long is to be waited for
    try:
        services.add_router()
        for role, name in (("prefiller", "p0"), ("decoder", "d0")):
            services.add(role, name)
        services.joined("p0", "d0")
        Asking(services)
        busy_prefiller(services)
        services.kill("router")  # it has the request's end from nobody
        assert [process.wait(WAIT_S) for process in map(services.desert, ("d0", "p0"))] == [0, 0]
    finally:
        services.close()


def test_node_that_does_not_fit_says_why_and_ends(services: Services, tmp_path: Path) -> None:
    services.add("prefiller", "p0")
    services.joined("p0")
    odd = services.add("decoder", "d0", dtype="float32")
    assert odd.wait(WAIT_S) == 1
    words = (tmp_path / "stderr").read_text()
    assert re.search(r"dtype: ours float32, theirs float16", words), words


def test_node_without_a_router_says_why_once_and_when_it_has_one(services: Services) -> None:
    """It looks twice a second, maybe for days; in silence its operator would look for days, too."""
    node = services.start("decoder", "d0", "--router", f"http://{services.place}", secret="another")
    eventually(lambda: "d0 has not joined its router" in services.complaints(), "it says so", pause_s=0.05)
    assert "its secret is not this router's" in services.complaints()
    node.kill()

    services.kill("router")
    services.add("decoder", "d1")
    eventually(lambda: "d1 has not joined its router" in services.complaints(), "it says so", pause_s=0.05)
    assert services.place in services.complaints()
    services.add_router()
    services.joined("d1")
    eventually(lambda: "d1 has joined router 'router'" in services.complaints(), "it says so", pause_s=0.05)
    assert services.complaints().count("d0 has not joined its router") == 1


def test_top_in_a_pipe_shows_the_nodes_and_ends(services: Services) -> None:
    services.add("decoder", "d0")
    services.joined("d0")
    command = [sys.executable, "-m", "crossrail", "kv", "top", services.place]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, env=environment)
    assert run.returncode == 0 and "d0" in run.stdout and "256 of 256" in run.stdout, run.stdout + run.stderr


@contextmanager
def top_in_a_terminal(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "crossrail", "kv", "top", "--every-s", "0.1", *arguments]
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "30"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as top:
        try:
            yield top
        finally:
            top.kill()


def shown_until(top: subprocess.Popen[bytes], wanted: bytes, unwanted: bytes = b"\0") -> None:
    """Reads until a picture has the one and not the other."""
    assert top.stdout is not None
    deadline = time.monotonic() + WAIT_S
    pictures = [b""]
    while not any(wanted in picture and unwanted not in picture for picture in pictures[:-1]):
        ready, _, _ = select.select([top.stdout], [], [], max(deadline - time.monotonic(), 0.0))
        assert ready, pictures
        more = os.read(top.stdout.fileno(), 1 << 16)
        assert more, "top has ended"
        pictures = (pictures[-1] + more).split(b"\x1b[H")


def test_top_goes_on_through_a_restart_of_its_router(services: Services) -> None:
    with top_in_a_terminal(services.place) as top:
        shown_until(top, b"router router", b"as it was")
        services.kill("router")
        shown_until(top, b"s ago: no router answers at")
        services.add_router()
        shown_until(top, b"router router", b"as it was")


def test_top_gives_a_router_up_that_stays_away(services: Services) -> None:
    with top_in_a_terminal(services.place, "--patience-s", "0.3") as top:
        shown_until(top, b"router router")
        services.kill("router")
        _, said = top.communicate(timeout=PROGRAM_S)
        assert top.returncode == 1 and said.startswith(b"error: no router answers at"), said


@pytest.mark.parametrize("body", [b"[]", b"{}", b"SSH-2.0", b"[" * 100_000], ids=["list", "object", "text", "deep"])
def test_top_of_something_else_is_refused_in_words(body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        result = CliRunner().invoke(main, ["kv", "top", f"127.0.0.1:{server.server_port}"])
        thread.join(WAIT_S)
    assert result.exit_code == 1 and result.stderr.startswith("error: no router answers at"), result.output


def test_demo_shows_equal_tokens(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "crossrail", "kv", "demo", "--kill", "--prompt-tokens", "700", "--out", "made"]
    environment = os.environ | {"COLUMNS": "140"}
    run = subprocess.run(
        [*command, "--token-us", "150"],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=tmp_path,
        env=environment,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ok: 48 tokens, equal to those of one node alone" in run.stdout
    assert "killed prefiller-" in run.stdout
    assert "prompt: The quick brown fox" in run.stdout and "... (700 tokens)" in run.stdout
    drawn = {
        row[1].strip().split(" x ")[0]: row[2].strip()
        for line in run.stdout.splitlines()
        if len(row := line.split("│")) == 6
    }
    assert set(drawn["request"]) == {"█"} and len(drawn["request"]) == 72
    for kind in ("queue", "prefiller: prefill", "prefiller: layer", "prefiller: tail", "another prefiller", "decode"):
        assert set(drawn[kind]) == {"█", "·"}, run.stdout
    assert "another prefiller" in (tmp_path / "made" / "timeline.svg").read_text()
    assert json.loads((tmp_path / "made" / "timeline.json").read_text())["traceEvents"]


def test_demo_that_finds_nothing_to_kill_says_so_at_once(tmp_path: Path) -> None:
    """A prompt of one token has nothing to prefill."""
    command = [sys.executable, "-m", "crossrail", "kv", "demo", "--kill", "--prompt-tokens", "1", "--token-us", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, cwd=tmp_path, env=os.environ)
    assert run.returncode == 1 and "error: --kill: no prefiller was seen at work" in run.stderr, run.stdout + run.stderr


@pytest.mark.parametrize(("prompt", "words"), [("", "--prompt is empty"), ("a\udcff", "--prompt is not UTF-8")])
def test_demo_with_a_prompt_that_is_no_text_starts_nothing(prompt: str, words: str) -> None:
    """Bytes that are no UTF-8 come from the shell as surrogates."""
    result = CliRunner().invoke(main, ["kv", "demo", "--prompt", prompt])
    assert result.exit_code == 2 and words in result.stderr and not result.stdout


def test_service_without_a_secret_is_refused(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "CROSSRAIL_SECRET"}
    command = [sys.executable, "-m", "crossrail", "kv", "router"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, cwd=tmp_path, env=environment)
    assert run.returncode == 2 and "a secret that all nodes share is needed" in run.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["decoder", "--router=nonsense"],
        ["decoder", "--router=ftp://h:1"],
        ["decoder", "--router=http://h:99999"],
        ["prefiller", "--router=http://h:1", "--chunk-tokens=0"],
        ["prefiller", "--router=http://h:1", "--prefiller-timeout-s=0"],
        ["prefiller", "--router=http://h:1", "--drain-s=-1"],
        ["prefiller", "--router=http://h:1", "--port=-1"],
        ["router", "--listen=127.0.0.1:99999"],
        ["router", "--listen=127.0.0.1:\N{SUPERSCRIPT TWO}"],
        ["router", "--heartbeat-s=-1"],
        ["router", "--name="],
        ["router", "--heartbeat-s=2", "--lease-s=1"],
        ["decoder", "--router=http://h:1", "--name=" + 129 * "n"],
    ],
    ids=" ".join,
)
def test_what_no_service_could_work_with_is_refused(words: list[str]) -> None:
    """Before it starts: it would look for ever, or do nothing but look."""
    result = CliRunner(env={"CROSSRAIL_SECRET": SECRET}).invoke(main, ["kv", *words])
    assert result.exit_code == 2 and "mistake in crossrail" not in result.output, result.output


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def make(**_): return 3", "returned an object of type int, not a crossrail.kv.model."),
        (
            "def make(**_): raise RuntimeError('no luck')",
            "raised RuntimeError: no luck; `crossrail --debug kv ...` shows",
        ),
        ("1 / 0", "raised ZeroDivisionError: division by zero; `crossrail --debug kv ...` shows where"),
        ("", "has no attribute 'make'"),
    ],
    ids=["type", "call", "import", "name"],
)
def test_mistake_in_a_function_of_the_users_is_his(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(source)
    for command in (["router", "--tokenizer"], ["decoder", "--router=http://h:1", "--model"]):
        result = CliRunner(env={"CROSSRAIL_SECRET": SECRET}).invoke(main, ["kv", *command, f"{name}:make"])
        assert result.exit_code == 2 and f"'{name}:make'" in result.stderr and words in result.stderr, result.output
        debug = CliRunner().invoke(main, ["--debug", "kv", *command, f"{name}:make"])
        assert words.startswith("returned") or f"{name}.py" in debug.output or "attribute" in debug.output


def test_place_that_is_none_of_this_host_is_named() -> None:
    result = CliRunner(env={"CROSSRAIL_SECRET": SECRET}).invoke(main, ["kv", "router", "--listen=192.0.2.77:1"])
    assert result.exit_code == 1 and result.stderr.startswith("error: --listen 192.0.2.77:1: "), result.output


@pytest.mark.parametrize("role", ["prefiller", "decoder"])
def test_node_whose_pages_take_more_memory_than_there_is_is_refused_before_it_takes_any(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alloc(*_: object) -> None:
        raise UsageError("far enough")

    monkeypatch.setattr(nodes.RankMemory, "alloc", alloc)
    monkeypatch.setattr(memory, "free_bytes", lambda: 2 << 30)
    runner, node = CliRunner(env={"CROSSRAIL_SECRET": SECRET}), ["kv", role, "--router=http://h:1", "--name=n"]
    said = [runner.invoke(main, [*node, f"--model-option=pages={pages}"]) for pages in (2_000_000_000, 100_000)]
    assert [result.exit_code for result in said] == [2, 2]
    words = f"{role} n, with 2000000000 pages of KV, would use 30.0 TiB of memory and 2.0 GiB are free; use fewer"
    assert words in said[0].stderr and "far enough" in said[1].stderr, said[0].stderr + said[1].stderr


@pytest.mark.parametrize("host", ["n", "llama-3-70b-instruct-prefiller-deployment-7c9d8b6f5d-x2x4q", 64 * "h"])
def test_node_starts_whatever_the_name_of_its_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def engine(name: str, **_: object) -> None:
        opened.append(name)
        raise UsageError("far enough")

    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(common.xr, "Engine", engine)
    CliRunner(env={"CROSSRAIL_SECRET": SECRET}).invoke(main, ["kv", "prefiller", "--router=http://h:1"])
    (name,) = opened
    with Engine(name, transport="null"):
        pass
    assert name.startswith("prefiller-") and name.endswith(f"{host[-30:]}-{os.getpid()}")


def test_name_of_an_engine_is_cut_in_its_middle_and_between_characters() -> None:
    assert common.engine_name("router") == "router" and common.engine_name(64 * "x") == 64 * "x"
    for name in (65 * "x", 100 * "é", 40 * "€", 128 * "\N{SLOTH}"):
        cut = common.engine_name(name)
        assert 56 < len(cut.encode()) <= 64 and set(cut) == {name[0], "."}


def test_package_alone_imports_none_of_it() -> None:
    source = (
        "import sys, crossrail; print([n for n in ('msgspec', 'aiohttp', 'prometheus_client') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=PROGRAM_S)
    assert run.stdout == "[]\n", run.stdout + run.stderr


def test_service_whose_reader_is_gone_keeps_no_descriptor_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(common.click, "echo", gone)
    stdout = os.dup(1)
    try:
        before = set(os.listdir("/proc/self/fd"))
        common.tell("one")
        common.tell("two")
        assert set(os.listdir("/proc/self/fd")) == before
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
