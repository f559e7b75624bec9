"""How nodes find their router."""

import socket

import pytest
from aiohttp import web

from crossrail.kv.errors import RouterNotFound
from crossrail.kv.http.rendezvous import find_by_http
from tests.kv.asking import answer_of
from tests.support.kv_cluster import SECRET, Cluster


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
