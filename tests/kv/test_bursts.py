"""Requests that come at once are shared out among nodes as if they had come one after another."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from msgspec import structs

from crossrail.kv import messages as m
from crossrail.kv.errors import Overloaded
from crossrail.kv.router.router import Router
from tests.kv.conftest import until
from tests.kv.scripts import OPTIONS, Script, Town, prefiller_of
from tests.support.kv_net import Net
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed


@pytest.fixture
async def town(seed: Seed) -> AsyncIterator[Town]:
    net = Net(random.Random(seed.number()))
    options = replace(OPTIONS, queue_s=WAIT_S, answer_timeout_s=WAIT_S)
    made = Town(net, Router("router", m.mailbox(net.wire("router"), b"s3cret", resend_s=0.05), options))
    made.router.start()
    made.patient()
    for name in ("p1", "p2", "p3", "p4"):
        made.router.roster.join(prefiller_of(made, name), m.Load(), asyncio.get_running_loop().time())
    yield made
    for script in made.scripts.values():
        await script.mailbox.close()
    await made.router.close()


async def test_requests_that_come_at_once_are_shared_out_before_any_answer_came(town: Town) -> None:
    scripts = [await town.add(name) for name in ("a", "b")]
    all_offered = asyncio.Event()

    def answer_together(script: Script) -> None:
        async def start(router: bytes, start: m.Start) -> m.Message:
            answer = await script.on_start(router, start)
            if sum(len(script.started) for script in scripts) == 8:
                all_offered.set()
            await all_offered.wait()
            return answer

        script.mailbox.handle(m.Start, start)
        script.answer = "pause"  # before its tokens

    for script in scripts:
        answer_together(script)
    clients = [asyncio.ensure_future(town.complete(seed, count=100)) for seed in range(8)]
    await all_offered.wait()
    for script in scripts:
        script.go_on.set()
    assert await asyncio.gather(*clients) == [[1, 2, 3]] * 8
    assert [len(script.started) for script in scripts] == [4, 4]
    asked = Counter(name for script in scripts for name in script.prefillers)
    assert asked == {"p1": 2, "p2": 2, "p3": 2, "p4": 2}
    assert not any(town.router._placement._sent.values())


async def test_what_a_decoder_refused_is_no_work_of_it_and_of_the_prefiller(town: Town) -> None:
    refuses, sent = await town.add("a", "busy"), town.router._placement._sent
    client = asyncio.ensure_future(town.complete(count=100))
    await until(lambda: refuses.started, "it was offered")
    await until(lambda: not any(sent.values()), "its refusal came")
    refuses.answer = "serve"
    assert await client == [1, 2, 3]
    assert not any(sent.values())


@pytest.mark.parametrize("role", ["prefiller", "decoder"])
async def test_node_that_is_back_before_it_has_answered_has_only_what_it_was_given_since(
    town: Town, role: m.Role
) -> None:
    script = await town.add("a")
    asked, goes_on = script.answer_when_told()
    client = asyncio.ensure_future(town.complete(count=100))
    await asked.wait()
    gone = town.router.roster.members(role)[0]
    assert town.router._placement._sent[gone.address] >= 100
    town.router.roster.remove(gone, "it was not heard from for a lease")
    town.router.roster.join(gone.record, m.Load(), asyncio.get_running_loop().time())
    goes_on.set()
    assert await client == [1, 2, 3]
    assert not any(town.router._placement._sent.values())


async def test_node_that_loses_one_of_two_names_has_what_it_was_offered_by_the_other(town: Town) -> None:
    roster, placement = town.router.roster, town.router._placement
    kept = roster.members("prefiller")[0]
    roster.join(structs.replace(kept.record, node="p0"), m.Load(), asyncio.get_running_loop().time())
    gone = roster.members("prefiller")[0]
    assert gone is not kept and gone.address == kept.address

    with placement.offered(kept, 100):
        roster.remove(gone, "it was not heard from for a lease")
        assert placement._sent[kept.address] == 100
    assert placement._sent[kept.address] == 0
    roster.remove(kept, "it was not heard from for a lease")
    assert kept.address not in placement._sent


async def asks_for_another_prefiller(town: Town, script: Script, start: m.Start) -> m.NodeRef:
    """Before it has answered."""
    first = start.prefiller
    assert first is not None
    why = m.PrefillerLost(start.request, start.placement, first.node, first.address, "it is gone", start.placement)
    answer = await script.mailbox.ask(town.router.mailbox.address, why, m.Reassigned, WAIT_S)
    assert answer.prefiller is not None and answer.prefiller.node != first.node
    return answer.prefiller


async def test_prefiller_that_a_decoder_asks_instead_before_it_has_answered_has_the_work(town: Town) -> None:
    script, others = await town.add("a"), []

    async def on_start(router: bytes, start: m.Start) -> m.Message:
        others.append(await asks_for_another_prefiller(town, script, start))
        return await script.on_start(router, start)

    script.answer = "pause"
    script.mailbox.handle(m.Start, on_start)
    client = asyncio.ensure_future(town.complete(count=100))
    await until(lambda: [one for one in town.router._running.values() if one.is_charged], "it has taken the request")
    counted = {address for address, tokens in town.router._placement._sent.items() if tokens}
    assert counted == {script.mailbox.address, others[0].address}
    script.go_on.set()
    assert await client == [1, 2, 3]
    assert not any(town.router._placement._sent.values())


async def test_prefiller_of_a_decoder_that_never_answers_has_nothing_to_do_for_it(town: Town) -> None:
    town.router.options = replace(OPTIONS, queue_s=0.0)
    script = await town.add("a")

    async def never(router: bytes, start: m.Start) -> m.Message:
        await asks_for_another_prefiller(town, script, start)
        return await asyncio.get_running_loop().create_future()

    script.mailbox.handle(m.Start, never)
    with pytest.raises(Overloaded):
        await town.complete(count=100)
    assert not any(town.router._placement._sent.values())
