"""Which transports an engine opens, and by which of them a peer is reached."""

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support import sealing
from tests.support.limits import WAIT_S


def elsewhere(address: xr.Address, *, host: bytes | None = None, transports: int | None = None) -> xr.Address:
    """The same engine's address as it were on another host or with other transports."""
    data = address.to_bytes()
    if transports is not None:
        data = sealing.with_transports(data, transports)
    if host is not None:
        host_at = sealing.NAME_AT + 1 + data[sealing.NAME_AT] + 1
        data = sealing.with_bytes(data, host_at, host)
    return xr.Address.from_bytes(data)


@pytest.mark.parametrize("transport", ["shm", "null"])
def test_engine_has_the_transport_it_was_asked_for(open_engine: EngineFactory, transport: str) -> None:
    engine = open_engine(transport=transport, rails=3)

    assert engine.address.transports == (transport,)
    assert engine.address.endpoints == ()
    assert engine.rails == engine.address.rails == 3


def test_submit_that_is_refused_leaves_nothing_for_the_next_one(open_engine: EngineFactory) -> None:
    one, two = open_engine(transport="null"), open_engine(transport="null")
    src, dst = one.alloc(100), two.alloc(100)
    with pytest.raises(xr.UsageError, match="verify needs a transport that moves bytes"):
        one.submit_write(src, dst.descriptor, verify=True)
    src.close()

    one.submit_send(two.address, b"x").wait(WAIT_S)


def test_null_moves_nothing_and_says_so(open_engine: EngineFactory) -> None:
    one, two = open_engine(transport="null"), open_engine(transport="null")
    src, dst = one.alloc(100), two.alloc(100)
    src.array()[:] = 7

    one.submit_write(src, dst.descriptor).wait(WAIT_S)

    assert (dst.array() == 0).all()
    explanation = one.explain(two.address)
    assert (explanation.transport, explanation.reason) == ("null", "requested by transport='null'")


def test_refusal_says_what_both_sides_have(open_engine: EngineFactory) -> None:
    engine, other = open_engine("engine", transport="shm"), open_engine("other", transport="shm")
    near = elsewhere(other.address, transports=sealing.NULL)
    far = elsewhere(other.address, host=b"another-host")

    with pytest.raises(xr.UsageError, match=r"this engine has transport shm, the peer null.*Open both with the same"):
        engine.connect(near)
    with pytest.raises(xr.UsageError, match=r"on another host, where shm does not reach.*'tcp' or 'auto'"):
        engine.connect(far)


def test_secret_comes_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSRAIL_SECRET", "x" * 1025)

    with pytest.raises(xr.UsageError, match=r"secret .*1025") as failure:
        xr.Engine()
    assert "xxx" not in str(failure.value)
    for secret in ("", "word", b"\0\xff", "ü" * 512):
        xr.Engine(secret=secret).close()
