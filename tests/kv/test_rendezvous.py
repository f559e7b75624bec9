"""How nodes find their router."""

import asyncio
import socket

import pytest
from aiohttp import web

import crossrail as xr
from crossrail.kv.errors import RouterNotFound
from crossrail.kv.http.rendezvous import check_url, find_by_http
from crossrail.kv.nodes.decoder import Decoder
from tests.kv.asking import answer_of
from tests.support.kv_cluster import SECRET, Cluster
from tests.support.limits import WAIT_S


async def test_page_of_whoever_is_no_router_is_told_by_its_first_line() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(status=404, text="<!DOCTYPE HTML>\n<html>\n  <h1>Error response</h1>\n</html>\n")

    app = web.Application()
    app.router.add_get("/{any:.*}", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    with pytest.raises(RouterNotFound, match=r"answered 404: <!DOCTYPE HTML>$"):
        await find_by_http(f"http://127.0.0.1:{runner.addresses[0][1]}", SECRET)()
    await runner.cleanup()


async def test_router_that_says_nothing_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossrail.kv.http.rendezvous._TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RouterNotFound, match=f"{url}: no answer in time$"):
            await find_by_http(url, SECRET)()


async def test_nodes_find_the_router_with_the_secret_alone(cluster: Cluster, url: str) -> None:
    assert await find_by_http(url, SECRET)() == cluster.router.mailbox.address
    with pytest.raises(RouterNotFound, match="403"):
        await find_by_http(url, b"guessed")()
    with pytest.raises(RouterNotFound, match=r"127\.0\.0\.1:1: cannot connect: Connection refused$"):
        await find_by_http("http://127.0.0.1:1", SECRET)()


async def test_secret_that_is_no_text_is_another_one(url: str) -> None:
    asked = b"GET /kv/router HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer \xff\r\n\r\n"
    assert (await answer_of(url, asked)).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a", "http://", "http://a:99999", "http://a/?b", "http://a/#b"])
def test_what_is_no_url_of_a_router_is_refused(url: str) -> None:
    with pytest.raises(xr.UsageError, match="must be a URL as http://HOST:8000"):
        check_url(url)


def test_url_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(xr.UsageError, match="has a user's name, which it does not take") as refused:
        check_url("http://me:hidden@127.0.0.1:8000")
    assert "hidden" not in str(refused.value)


async def test_node_whose_finder_raises_anything_says_so_and_asks_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = cluster.where
    asked = 0

    async def find() -> bytes:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise LookupError("the registry has no router")
        return await found()

    monkeypatch.setattr(cluster, "where", find)
    cluster.add(Decoder, "d0")
    await asyncio.wait_for(cluster.joined(), WAIT_S)
    assert caplog.text.count("node d0 has not joined its router, and keeps trying: LookupError: the registry has") == 1
    assert caplog.text.count("Traceback") == 1
