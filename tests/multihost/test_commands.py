"""`crossrail serve`, `push`, `explain` and `doctor --peer` as two hosts run them: shells in two namespaces."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import crossrail as xr
from tests.support.certificates import Authority
from tests.support.hosts import Host, Hosts, on_host, why_not
from tests.support.limits import PROGRAM_S, WAIT_S, eventually
from tests.support.process import REPOSITORY
from tests.support.seeds import Seed

NO_SECRET = {key: value for key, value in os.environ.items() if key != "CROSSRAIL_SECRET"}
PLAIN = NO_SECRET | {"COLUMNS": "1000", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class Served:
    """url: as it was printed. secret: the one that was drawn; empty when the user's own is used."""

    server: "subprocess.Popen[str]"
    inbox: Path
    url: str
    secret: str


def start(host: Host, *arguments: object, secret: str = "") -> "subprocess.Popen[str]":
    environment = PLAIN | ({"CROSSRAIL_SECRET": secret} if secret else {})
    return subprocess.Popen(
        [*on_host(host.namespace), sys.executable, "-m", "crossrail", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True, cwd=REPOSITORY, env=environment,
    )  # fmt: skip


def run(host: Host, *arguments: object, secret: str = "", status: int = 0) -> str:
    process = start(host, *arguments, secret=secret)
    out, err = process.communicate(timeout=PROGRAM_S)
    assert process.returncode == status, f"{out}\n{err}"
    assert "Traceback" not in err
    return out + err


@pytest.fixture
def hosts(nothing_leaks: None) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(2) as made:
        yield made


@contextlib.contextmanager
def serving(host: Host, inbox: Path, *arguments: object, secret: str = "") -> Iterator[Served]:
    inbox.mkdir()
    process = start(host, "serve", "--dir", inbox, *arguments, secret=secret)
    try:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if found := re.search(r"(?:CROSSRAIL_SECRET=(\w+) )?crossrail push FILE (tcp://\S+)", line):
                yield Served(process, inbox, found.group(2), found.group(1) or "")
                return
        raise AssertionError(f"{printed} {process.communicate(timeout=PROGRAM_S)}")
    finally:
        process.kill()
        process.communicate(timeout=PROGRAM_S)


@pytest.fixture
def payload(tmp_path: Path, seed: Seed) -> Path:
    file = tmp_path / "payload.bin"
    file.write_bytes(seed.rng().bytes(20_000_017))
    return file


def test_file_goes_from_one_host_to_another(hosts: Hosts, tmp_path: Path, payload: Path) -> None:
    with serving(hosts["b"], tmp_path / "inbox", "--listen", "--once") as served:
        assert served.url == f"tcp://{hosts['b'].addresses[0]}:7312/" and len(served.secret) == 32
        (served.inbox / "sub").mkdir()

        text = run(hosts["a"], "push", payload, f"{served.url}sub/", secret=served.secret)

        assert "SHA-256 ok" in text
        assert served.server.wait(WAIT_S) == 0
    assert (served.inbox / "sub" / payload.name).read_bytes() == payload.read_bytes()


def test_rails_are_chosen_by_name_on_both_sides(hosts: Hosts, tmp_path: Path, payload: Path) -> None:
    rails = ("--rails", "rail1,rail0")
    for rail in (0, 1):
        hosts["a"].limit(rail, 200)  # else one of them might carry it all
    before = [hosts["a"].sent_bytes(rail) for rail in (0, 1)]
    with serving(hosts["b"], tmp_path / "inbox", "--listen", 7400, *rails, secret="of-the-user-0123") as served:
        assert served.url == f"tcp://{hosts['b'].addresses[1]}:7400/" and served.secret == ""

        run(hosts["a"], "push", payload, served.url, *rails, secret="of-the-user-0123")

    assert (served.inbox / payload.name).read_bytes() == payload.read_bytes()
    assert all(hosts["a"].sent_bytes(rail) - before[rail] > 1_000_000 for rail in (0, 1))


def test_explain_shows_the_way(hosts: Hosts, tmp_path: Path) -> None:
    with serving(hosts["b"], tmp_path / "inbox", "--listen") as served:
        text = run(hosts["a"], "explain", served.url, secret=served.secret)

    assert "over tcp: connected" in text and hosts["b"].addresses[0] in text
    assert "; 1.2 GB/s by their interfaces" in text  # of a virtual cable the kernel says 10 Gb/s


def test_doctor_measures_the_way_between_two_hosts(nothing_leaks: None) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(1) as hosts:
        here, there = hosts["a"], hosts["b"]
        addresses = [there.addresses[0], there.addresses6[0]]
        listener = start(there, "doctor", "--listen")
        try:
            assert listener.stdout is not None
            told = [listener.stdout.readline() for _ in range(3)]
            assert all(any(f"doctor --peer {address} " in line for line in told) for address in addresses), told

            measured = json.loads(run(here, "doctor", "--peer", addresses[0], "--seconds", 0.05, "--json"))
            run(there, "doctor", "--peer", here.addresses[0], "--json", status=1)  # nobody listens there
        finally:
            listener.kill()
            listener.communicate(timeout=PROGRAM_S)

    pairs = measured["pairs"]
    assert {(pair["here"]["address"], pair["there"]["address"]) for pair in pairs} == {
        (here.addresses[0], addresses[0]),
        (here.addresses6[0], addresses[1]),
    }
    for pair in pairs:
        assert (pair["state"], pair["mtu"], pair["there"]["interface"]) == ("ok", 1500, "rail0"), pair
        assert pair["rtt_us"] > 0 and pair["out_gb_per_s"] > 0 and pair["in_gb_per_s"] > 0


def test_push_without_the_secret_is_refused_on_both_ways_in(hosts: Hosts, tmp_path: Path, payload: Path) -> None:
    with serving(hosts["b"], tmp_path / "inbox", "--listen") as served:
        assert "CROSSRAIL_SECRET" in run(hosts["a"], "push", payload, served.url, status=2)
        assert "secret" in run(hosts["a"], "push", payload, served.url, secret="wrong", status=2)

        assert served.server.poll() is None
    assert list(served.inbox.iterdir()) == []


def tls_options(tls: xr.TlsConfig) -> list[object]:
    return ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_file_goes_under_tls(hosts: Hosts, tmp_path: Path, payload: Path, authority: Authority) -> None:
    there, here = tls_options(authority.issue("there")), tls_options(authority.issue("here"))
    with serving(hosts["b"], tmp_path / "inbox", "--listen", *there) as served:
        assert "TLS_" in run(hosts["a"], "explain", served.url, *here, secret=served.secret)

        text = run(hosts["a"], "push", payload, served.url, *here, secret=served.secret)

    assert "SHA-256 ok" in text and "warning" not in text
    assert (served.inbox / payload.name).read_bytes() == payload.read_bytes()


def test_push_that_is_not_trusted_ends_in_one_line(
    hosts: Hosts, tmp_path: Path, payload: Path, authority: Authority
) -> None:
    right = authority.issue("there")
    stranger = Authority(tmp_path, "stranger")
    cases = [
        ([], "give tls to both, or to neither"),
        (tls_options(stranger.issue("unknown")), "its certificate is not accepted"),
        (tls_options(stranger.issue("posing", trusts=authority.file)), "the other side says"),
    ]
    with serving(hosts["b"], tmp_path / "inbox", "--listen", *tls_options(right)) as served:
        for options, words in cases:
            text = run(hosts["a"], "push", payload, served.url, *options, secret=served.secret, status=1)
            errors = [line for line in text.splitlines() if line.strip()]
            assert len(errors) == 1 and errors[0].startswith("error: ") and words in errors[0], text

        run(hosts["a"], "push", payload, served.url, *tls_options(right), secret=served.secret)
    assert [file.name for file in served.inbox.iterdir()] == [payload.name]


def test_engine_that_cannot_be_reached_is_named_with_its_port(hosts: Hosts, tmp_path: Path, payload: Path) -> None:
    """A firewall may let the question for the address pass and not what follows."""
    there = hosts["b"]
    with serving(there, tmp_path / "inbox", "--listen", "--rails", "rail1") as served:
        there.down(1)
        url = f"tcp://{there.addresses[0]}:7312/"
        commands: list[tuple[object, ...]] = [("push", payload, url), ("explain", url)]
        for command in commands:
            text = run(hosts["a"], *command, secret=served.secret, status=1)
            assert f"{there.addresses[1]}:7313" in text, text


def test_slow_network_is_not_taken_for_silence(hosts: Hosts, tmp_path: Path, seed: Seed) -> None:
    """Of a segment that takes longer than either side waits for a sign of life, the pages are signs."""
    file = tmp_path / "slow.bin"
    file.write_bytes(seed.rng().bytes(8 << 20))
    hosts["a"].limit(0, 10)  # seven seconds for the file, which is one segment
    patience_s = 3
    patient = (
        f"import crossrail.cli.files.pusher as pusher; pusher._ANSWER_TIMEOUT_S = {patience_s}; "
        "from crossrail.cli.main import main; main()"
    )
    with serving(hosts["b"], tmp_path / "inbox", "--listen", "--idle-timeout-s", patience_s) as served:
        pushing = subprocess.run(
            [*on_host(hosts["a"].namespace), sys.executable, "-c", patient, "push", str(file), served.url],
            capture_output=True, text=True, timeout=PROGRAM_S, cwd=REPOSITORY,
            env=PLAIN | {"CROSSRAIL_SECRET": served.secret},
        )  # fmt: skip

    assert pushing.returncode == 0, f"{pushing.stdout}\n{pushing.stderr}"
    assert (served.inbox / file.name).read_bytes() == file.read_bytes()


def test_distance_does_not_keep_bench_from_measuring(nothing_leaks: None) -> None:
    """A pass over 16 MiB, one write of 1 KiB after the other, would take three minutes."""
    if reason := why_not():
        pytest.skip(reason)
    secret = "0123456789abcdef"
    quick = ("--seconds", "0.01", "--warmup", "0", "--runs", "2", "--memory", "16M", "--timeout-s", WAIT_S)
    with Hosts(1, delay_ms=5) as hosts:
        place = f"{hosts['b'].addresses[0]}:7320"
        serve = start(hosts["b"], "bench", "serve", "--bind", place, "--rails", "rail0", secret=secret)
        try:
            assert serve.stdout is not None and serve.stdout.readline().startswith("ready to measure")
            what = ("--only", "write", "--sizes", "1K", "--windows", "1", "--rails", "rail0")
            text = run(hosts["a"], "bench", "run", place, *what, *quick, secret=secret)
        finally:
            serve.terminate()
            serve.communicate(timeout=PROGRAM_S)

    assert "write 1 KiB, window 1" in text, text


def test_serve_that_is_killed_is_noticed_and_leaves_nothing(hosts: Hosts, tmp_path: Path, payload: Path) -> None:
    hosts["a"].limit(0, 40)  # four seconds for the file
    with serving(hosts["b"], tmp_path / "inbox", "--listen") as served:
        pusher = start(hosts["a"], "push", payload, served.url, secret=served.secret)
        eventually(lambda: hosts["a"].sent_bytes(0) > 2_000_000, "the file on its way")
        served.server.kill()
        out, err = pusher.communicate(timeout=PROGRAM_S)

    assert pusher.returncode == 1 and "Traceback" not in err and "error:" in err, f"{out}\n{err}"
    assert list(served.inbox.iterdir()) == []
