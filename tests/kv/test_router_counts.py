"""How a router counts requests: each once, by what it came to."""

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import replace

import crossrail as xr
from crossrail.kv import messages as m
from crossrail.kv.router.membership import Roster
from tests.kv.scripts import OPTIONS, SHORT, Town
from tests.support.kv_cluster import prompt_of
from tests.support.limits import WAIT_S


async def test_each_request_is_counted_once_however_it_ends(town: Town) -> None:
    impatient = replace(OPTIONS, queue_s=0.1, restarts_max=0)
    town.router.options = impatient
    told: dict[str, int] = {}

    async def counted(how: str, request: Awaitable[object]) -> None:
        with contextlib.suppress(xr.CrossrailError, asyncio.CancelledError):
            await request
        told[how] = told.get(how, 0) + 1
        assert dict(town.router.counts) == told

    await counted("unavailable", town.complete())
    script = await town.add("a")
    town.patient()
    patient = replace(impatient, queue_s=WAIT_S, answer_timeout_s=WAIT_S)
    await counted("unavailable", town.complete(count=50))  # there is no prefiller
    for answer, how in (
        ("busy", "overloaded"), ("serve", "length"), ("never", "invalid"), ("duplicate", "duplicate")
    ):  # fmt: skip
        script.answer = answer
        town.router.options = impatient if how == "overloaded" else patient
        await counted(how, town.complete())
    town.router.options = impatient
    await counted("invalid", town.complete(count=0))
    asking = town.router.complete(prompt_of(1), SHORT, model="strange")
    town.router._models.start(-1.0)
    await counted("unknown-model", anext(asking))
    script.answer = "pause"
    leaving = asyncio.ensure_future(town.complete())
    await script.paused.wait()
    leaving.cancel()
    await counted("cancelled", leaving)
    script.paused.clear()
    dying = asyncio.ensure_future(town.ends())
    await script.paused.wait()
    (member,) = town.router.roster.members("decoder")
    assert isinstance(town.router.roster, Roster)
    town.router.roster.remove(member, "it died")
    await counted("error", dying)
    script.go_on.set()


async def test_decoder_that_dies_and_leaves_nobody_to_go_on_counts_one_request(town: Town) -> None:
    """Which has waited for another one meanwhile."""
    town.router.options = replace(OPTIONS, queue_s=0.1)
    script = await town.add("a", "pause")
    dying = asyncio.ensure_future(town.ends())
    await script.paused.wait()
    assert isinstance(town.router.roster, Roster)
    town.router.roster.remove(town.router.roster.members("decoder")[0], "it died")
    assert "no other decoder continues it" in await dying
    assert dict(town.router.counts) == {"restarted": 1, "unavailable": 1}
    script.go_on.set()


async def test_request_whose_decoder_is_missed_as_it_takes_it_waits_for_another_one(town: Town) -> None:
    town.router.options = replace(OPTIONS, queue_s=0.1, answer_timeout_s=WAIT_S)
    town.patient()
    script = await town.add("a")
    asked, goes_on = script.answer_when_told()
    waiting = asyncio.ensure_future(town.ends())
    await asyncio.wait_for(asked.wait(), WAIT_S)
    town.router.roster.remove(town.router.roster.members("decoder")[0], "it died")
    goes_on.set()
    assert "left as it took the request; no other decoder continues it" in await asyncio.wait_for(waiting, WAIT_S)
    assert not town.router._waiting._by_name and not town.router._waiting._idle


async def test_request_that_is_stopped_when_all_of_it_is_here_counts_as_stopped(town: Town) -> None:
    await town.add("a")
    async with contextlib.aclosing(town.router.complete(prompt_of(1), SHORT, request="mine")) as chunks:
        async for chunk in chunks:
            if chunk.end is not None:
                assert chunk.end.reason == "length"
                town.router.stop_request("mine", "a stop text came")
    assert town.router.ended("mine") == m.End("stop", "a stop text came")
    assert town.router.counts["stop"] == 1
