"""The bootstrap server and what goes through it: bounded, sealed, and nothing for who does not know the secret."""

import asyncio
import os
import socket
from types import SimpleNamespace
from typing import Any

import aiohttp
import aiohttp.web
import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.integrations.instance import Worker
from crossrail.integrations.sglang import bootstrap
from crossrail.integrations.sglang.messages import LANGUAGE, Aux, Destination, Envelope, Wanted
from crossrail.integrations.sglang.recompute import OwnServer
from crossrail.kv import KvLayout
from tests.sglang.side import model_config
from tests.support.limits import WAIT_S
from tests.support.ports import free_port

SECRET = b"of the tests"
LAYOUT = KvLayout(
    layers=4, pages=8, page_tokens=4, kv_heads=2, head_dim=6, dtype="uint8", kind="PLANES", order="NHD", tp=2
)


def line(
    rank: int = 0,
    tp: int = 2,
    secret: bytes = SECRET,
    lease_s: float = 10.0,
    address: bytes = b"a",
    dp_rank: int = 0,
    dp: int = 1,
) -> str:
    worker = Worker(address, LAYOUT.to_wire(), {"form": "f"})
    return bootstrap.RankLine(worker, rank, tp, lease_s, dp_rank, dp).to_line(secret)


def test_a_table_is_whole_or_nothing_and_forgets() -> None:
    table = bootstrap.RankTable(SECRET)
    table.put(line(1), 0.0)
    assert table.lines(0.0) is None
    table.put(line(0, lease_s=5.0), 0.0)
    assert table.lines(1.0) == [line(0, lease_s=5.0), line(1)]
    assert table.lines(6.0) is None, "rank 0 was not heard any more"
    table.put(line(0, tp=1), 6.0)
    assert table.lines(6.0) == [line(0, tp=1)], "a prefiller of another TP is another one"


def test_a_table_of_copies_has_their_ranks_one_after_the_other() -> None:
    table = bootstrap.RankTable(SECRET)
    places = [(1, 0), (0, 1), (1, 1), (0, 0)]
    for dp_rank, rank in places:
        assert table.lines(0.0) is None
        table.put(line(rank, dp_rank=dp_rank, dp=2), 0.0)
    assert table.lines(0.0) == [line(rank, dp_rank=dp_rank, dp=2) for dp_rank, rank in sorted(places)]
    table.put(line(0), 0.0)
    assert table.lines(0.0) is None, "one of another DP is another prefiller's"


@pytest.mark.parametrize("wrong", [line(secret=b"another"), "", "%%%", line()[:-8], line()[8:], "é"])
def test_a_line_of_nobody_we_know_is_refused(wrong: str) -> None:
    with pytest.raises(xr.UsageError):
        bootstrap.RankTable(SECRET).put(wrong, 0.0)


def test_a_rank_beyond_its_tp_is_refused() -> None:
    with pytest.raises(xr.UsageError, match="rank=2 of TP 2"):
        bootstrap.RankLine.from_line(line(2), SECRET)
    with pytest.raises(xr.UsageError, match="dp_rank=1 of DP 1"):
        bootstrap.RankLine.from_line(line(dp_rank=1), SECRET)


async def test_over_http(server: Any, address: str) -> None:
    async def status(method: str, path: str = "/route", **options: Any) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"http://{address}{path}", **options) as got,
        ):
            return got.status

    token = {"Authorization": f"Bearer {bootstrap.token(SECRET)}"}
    assert await status("GET", "/health") == 200
    assert await status("GET") == 401
    assert await status("GET", headers={"Authorization": "Bearer é"}) == 401
    assert await status("GET", headers=token) == 503
    assert await status("PUT", data=line(secret=b"another")) == 403
    assert await status("PUT", data=os.urandom(100)) in (400, 403)
    assert await status("PUT", data="x" * (bootstrap.LINE_BYTES_MAX + 1)) == 413
    for rank in range(2):
        assert await bootstrap.register(address, line(rank), SECRET, 5.0) == []
    assert await status("GET", headers=token) == 200
    [instance] = await bootstrap.find_instances(address, SECRET, 5.0)
    assert len(instance.workers) == 2 and instance.layout == LAYOUT
    with pytest.raises(bootstrap.NoInstance, match=r"401: .* set the same CROSSRAIL_SECRET"):
        await bootstrap.find_instances(address, b"another", 5.0)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /route HTTP/1.1\r\nHost: x\r\nAuthorization: \xff\r\n\r\n", b"401"),
        (b"PUT /route HTTP/1.1\r\nHost: x\r\nExpect: \xff\r\nContent-Length: 1\r\n\r\nx", b"417"),
        (b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 8\r\n\r\nno gzip.", b"415"),
        (b"\x16\x03\x01\r\n\r\n", b"400"),
    ],
)
async def test_what_is_no_text_or_no_http_is_refused_and_not_logged(
    server: Any, address: str, caplog: pytest.LogCaptureFixture, sent: bytes, status: bytes
) -> None:
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(300), WAIT_S)
    writer.close()
    assert answer.split(b" ")[1] == status
    assert not caplog.records


async def test_a_server_of_another_backend(address: str) -> None:
    """It answers something, for SGLang's own have the same path."""
    app = aiohttp.web.Application()
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    host, _, port = address.partition(":")
    await aiohttp.web.TCPSite(runner, host, int(port)).start()
    try:
        with pytest.raises(bootstrap.NoInstance, match=r"answered 404: .* is not crossrail's bootstrap server"):
            await bootstrap.find_instances(address, SECRET, 5.0)
    finally:
        await runner.cleanup()


async def test_nobody_there() -> None:
    with pytest.raises(bootstrap.NoInstance, match=r"127\.0\.0\.1:1"):
        await bootstrap.find_instances("127.0.0.1:1", SECRET, 5.0)
    with pytest.raises(bootstrap.NoInstance):
        await asyncio.wait_for(bootstrap.find_instances("no port here:x", SECRET, 5.0), 10.0)


def test_a_port_that_is_taken_is_said_at_once(server: Any, address: str) -> None:
    from crossrail.integrations.sglang import CrossrailKVBootstrapServer

    with pytest.raises(OSError, match="address already in use"):
        CrossrailKVBootstrapServer("127.0.0.1", int(address.partition(":")[2]))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        LANGUAGE.decode(data)
    except xr.UsageError:
        return
    assert isinstance(LANGUAGE.decode(data), Envelope)


@pytest.mark.parametrize(
    "body",
    [
        Aux("1@0/1", 1, [b"x"] * 65),
        Wanted("", 1),
        Wanted("1@0/1", 0),
        Destination("", 1, {}, 1.0),
        Destination("1@0/1", 0, {}, 1.0),
        Destination("1@0/1", 1, {}, -1.0),
    ],
)
def test_fields_out_of_bounds_are_refused(body: Any) -> None:
    import msgspec

    with pytest.raises(xr.UsageError):
        LANGUAGE.decode(msgspec.msgpack.encode(Envelope(body)))


def test_client_that_asks_nothing_is_cut_off() -> None:
    port = free_port()
    server = bootstrap.BootstrapServer("127.0.0.1", port, SECRET, OwnServer("http://127.0.0.1:1"), patience_s=0.3)
    try:
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as client:
            assert client.recv(1) == b""
    finally:
        server.close()


@pytest.mark.parametrize(
    ("host", "dist_init_addr", "where"),
    [
        ("10.0.0.1", None, "10.0.0.1:8998"),
        ("0.0.0.0", None, "127.0.0.1:8998"),
        ("::", None, "[::1]:8998"),
        ("fd00::2", None, "[fd00::2]:8998"),
        ("0.0.0.0", "node-0:5000", "node-0:8998"),
        ("0.0.0.0", "[fd00::2]:5000", "[fd00::2]:8998"),
    ],
)
def test_where_ranks_register(
    monkeypatch: pytest.MonkeyPatch, host: str, dist_init_addr: str | None, where: str
) -> None:
    """By what is said with --host and --dist-init-addr."""
    from crossrail.integrations.sglang import conn

    sizes = dict.fromkeys([*conn._PARALLELISM, "dp_size", "attn_dp_size"], 1)
    parallel = SimpleNamespace(dist_init_addr=dist_init_addr, attn_tp_rank=0, attn_tp_size=1, **sizes)
    disagg = SimpleNamespace(disaggregation_bootstrap_port=8998, disaggregation_decode_allocation_policy="early")
    monkeypatch.setattr(conn, "get_parallel", lambda: parallel)
    monkeypatch.setattr(conn, "get_serving", lambda: SimpleNamespace(host=host, port=30000))
    monkeypatch.setattr(conn, "get_disagg", lambda: disagg)
    monkeypatch.setattr(conn, "process_model_config", lambda: model_config({}, "torch.float32"))
    assert conn.place_of("prefill").bootstrap == where
