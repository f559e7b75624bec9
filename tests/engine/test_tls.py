"""Engines whose tcp is under TLS: they do all that others do, and nothing of it can be read or changed on the way."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.certificates import Authority
from tests.support.limits import WAIT_S, eventually
from tests.support.patterns import pattern
from tests.support.proxy import proxied
from tests.support.seeds import Seed

pytestmark = pytest.mark.timeout(120)

TCP = {"transport": "tcp", "rails": ["127.0.0.1"]}
MARK = b"words that nobody else may read. "


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def write_and_check(here: xr.Engine, there: xr.Engine, nbytes: int, seed: int, imm: int = 7) -> None:
    source, target = here.alloc(nbytes), there.alloc(nbytes)
    source.array()[:] = pattern(seed, nbytes)

    here.submit_write(source, target.descriptor, imm=imm).wait(WAIT_S)

    there.imm_counter(imm).wait(1, WAIT_S)
    assert (target.array() == source.array()).all()


@pytest.mark.parametrize("nbytes", [1, 511, 513, (16 << 10) - 1, (16 << 10) + 1, 1 << 20, (9 << 20) + 5])
def test_first_write_arrives_whole(open_engine: EngineFactory, authority: Authority, seed: Seed, nbytes: int) -> None:
    tls = authority.issue()
    here, there = open_engine("here", tls=tls, **TCP), open_engine("there", tls=tls, **TCP)

    write_and_check(here, there, nbytes, seed.number())

    assert "TLS_" in str(here.explain(there.address))


def test_both_ways_at_once_over_rails(open_engine: EngineFactory, authority: Authority, seed: Seed) -> None:
    """Each side has a certificate of its own; reads go against the writes."""
    options = {"transport": "tcp", "rails": ["127.0.0.1", "127.0.0.2"]}
    here = open_engine("here", tls=authority.issue("here"), **options)
    there = open_engine("there", tls=authority.issue("there"), **options)
    nbytes = (3 << 20) + 17
    mine, yours, copy = here.alloc(nbytes), there.alloc(nbytes), here.alloc(nbytes)
    mine.array()[:] = pattern(seed.number(1), nbytes)
    target = there.alloc(nbytes)
    yours.array()[:] = pattern(seed.number(2), nbytes)

    transfers = [here.submit_write(mine, target.descriptor, imm=1), here.submit_read(copy, yours.descriptor)]
    back = here.alloc(nbytes)
    transfers += [there.submit_write(yours, back.descriptor, imm=2)]
    with there.submit_recvs(4, 1000) as pool:
        here.submit_send(there.address, b"small words").wait(WAIT_S)
        assert bytes(pool.recv(WAIT_S).data) == b"small words"
    for transfer in transfers:
        transfer.wait(WAIT_S)

    there.imm_counter(1).wait(1, WAIT_S)
    here.imm_counter(2).wait(1, WAIT_S)
    assert (target.array() == mine.array()).all()
    assert (copy.array() == yours.array()).all()
    assert (back.array() == yours.array()).all()


@pytest.mark.parametrize("secret", ["", "known to both"])
def test_names_are_checked(open_engine: EngineFactory, authority: Authority, seed: Seed, secret: str) -> None:
    here = open_engine("here", tls=authority.issue("a", dns=["here"], verify="name"), secret=secret, **TCP)
    there = open_engine(
        "there.decode.example", tls=authority.issue("b", dns=["*.decode.example"], verify="name"), secret=secret, **TCP
    )

    write_and_check(here, there, 100, seed.number(1))
    write_and_check(there, here, 100, seed.number(2))


def test_environment_names_the_files(
    open_engine: EngineFactory, authority: Authority, seed: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = authority.issue()
    with_argument = open_engine("there", tls=tls, **TCP)
    for name, value in (("CERT", tls.cert), ("KEY", tls.key), ("CA", tls.ca)):
        monkeypatch.setenv(f"CROSSRAIL_TLS_{name}", str(value))

    write_and_check(open_engine("here", **TCP), with_argument, 100, seed.number())

    monkeypatch.setenv("CROSSRAIL_TLS_CA", "")
    open_engine("of one host", transport="shm")
    with pytest.raises(xr.UsageError, match="CROSSRAIL_TLS_CERT is set and CROSSRAIL_TLS_CA is not"):
        open_engine("of several", **TCP)


@pytest.mark.parametrize("under_tls", [True, False])
def test_what_travels_cannot_be_read(open_engine: EngineFactory, authority: Authority, under_tls: bool) -> None:
    """And without TLS it can: the test sees what there is to see."""
    tls = authority.issue() if under_tls else None
    here, there = open_engine("here", tls=tls, **TCP), open_engine("there", tls=tls, **TCP)
    source, target = here.alloc(64 << 10), there.alloc(64 << 10)
    source.array()[: len(MARK)] = list(MARK)
    with proxied(there.address) as way:
        way.proxies[0].tap = tap = bytearray()
        here.connect(way.address, WAIT_S)

        here.submit_write(source, target.descriptor, imm=1).wait(WAIT_S)
        with there.submit_recvs(1, 1000) as pool:
            here.submit_send(way.address, MARK).wait(WAIT_S)
            assert bytes(pool.recv(WAIT_S).data) == MARK

    assert (MARK in tap) is not under_tls
    # The address bytes of who connects, which open an engine without a secret to whoever reads them.
    assert (here.address.to_bytes() in tap) is not under_tls
    assert len(tap) > 64 << 10


def test_what_is_changed_on_the_way_is_noticed_and_sent_again(
    open_engine: EngineFactory, authority: Authority, seed: Seed
) -> None:
    """Every flipped byte ends a connection; nothing wrong is placed, and nothing is counted twice."""
    tls = authority.issue()
    options = {"tls": tls, "peer_timeout_s": 15.0, **TCP}
    here, there = open_engine("here", **options), open_engine("there", **options)
    nbytes = 300_000
    source, target = here.alloc(nbytes), there.alloc(nbytes)
    source.array()[:] = pattern(seed.number(), nbytes)
    with proxied(there.address) as way:
        here.connect(way.address, WAIT_S)
        proxy = way.proxies[0]
        for i in range(12):
            eventually(lambda: proxy.passed_bytes(), "a connection")
            # Within the next write, behind the handshake if that takes a new connection.
            passed = max(ahead for ahead, _ in proxy.passed_bytes())
            proxy.corrupt(forward=True, after_bytes=passed + 10_000 + i * 20_011)
            target.array()[:] = 0
            here.submit_write(source, target.descriptor, imm=1).wait(WAIT_S)
            assert (target.array() == source.array()).all()
        there.imm_counter(1).wait(12, WAIT_S)

    assert proxy.connections_made > 6
    assert there.imm_counter(1).poll() == 0


@pytest.mark.parametrize(("mode", "who"), [(0o640, "its group"), (0o644, "everybody"), (0o602, "everybody")])
def test_key_that_others_may_read_is_told_once_with_the_command(
    open_engine: EngineFactory, authority: Authority, caplog: pytest.LogCaptureFixture, mode: int, who: str
) -> None:
    tls = authority.issue("a name")
    os.chmod(tls.key, mode)

    for name in ("one", "two"):
        open_engine(name, tls=tls, **TCP)

    told = [record for record in caplog.records if "tls.key" in record.getMessage()]
    assert [(record.name, record.levelname) for record in told] == [("crossrail", "WARNING")]
    message = told[0].getMessage()
    assert f"open to {who} (mode {mode:04o})" in message and "\n" not in message
    subprocess.run(message.rpartition("; ")[2], shell=True, check=True)
    assert stat.S_IMODE(os.stat(tls.key).st_mode) == 0o600


def test_key_of_one_owner_is_no_matter(
    open_engine: EngineFactory, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    for mode in (0o600, 0o400):
        tls = authority.issue(str(mode))
        os.chmod(tls.key, mode)
        open_engine(str(mode), tls=tls, **TCP)

    assert "tls.key" not in caplog.text


@pytest.mark.parametrize("path", ["cert", "key", "ca"])
def test_config_wants_paths(path: str) -> None:
    tls = {"cert": "a", "key": "b", "ca": "c"} | {path: 7}

    with pytest.raises(xr.UsageError, match=f"tls.{path} must be the path of a file, not int"):
        xr.Engine("here", tls=xr.TlsConfig(**tls), **TCP)  # type: ignore[arg-type]


def test_config_has_words_for_verify(authority: Authority) -> None:
    with pytest.raises(xr.UsageError, match=r"tls\.verify is 'nobody', must be one of 'chain', 'name'"):
        xr.Engine("here", tls=authority.issue(verify="nobody"), **TCP)


@pytest.mark.parametrize("transport", ["shm", "verbs", "shm+verbs"])
def test_transports_without_tls_are_refused(authority: Authority, transport: str) -> None:
    with pytest.raises(xr.UsageError, match="tls protects only tcp, and the engine has transport"):
        xr.Engine("here", tls=authority.issue(), transport=transport)
