"""What a router says when nobody can take a request: what has happened to those that could."""

import asyncio
import logging
from dataclasses import replace

import pytest

from crossrail.kv import messages as m
from crossrail.kv.errors import Unavailable
from crossrail.kv.messages import Role
from crossrail.kv.nodes.decoder import Decoder
from crossrail.kv.router import absence
from crossrail.kv.router.absence import Absence
from crossrail.kv.router.membership import Roster
from tests.kv.conftest import start, until
from tests.support.kv_cluster import ROUTER, Cluster, node_record, prompt_of
from tests.support.limits import WAIT_S


class Story:
    """Of a router's members, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.roster = Roster(lease_s=2.0)
        self.absence = Absence("router", self.roster)
        self.roster.on_gone(self.absence.note)

    def joins(self, name: str, role: Role = "decoder", model: str = "model", load: m.Load | None = None) -> None:
        record = replace_model(node_record(name, role), model)
        self.roster.join(record, load or m.Load(), self.now_s)

    def dies(self, name: str) -> None:
        self.roster.sweep(self.now_s, lambda address: address == name.encode())


def replace_model(record: m.NodeRecord, model: str) -> m.NodeRecord:
    return m.NodeRecord(record.node, record.address, record.layout, role=record.role, model=model)


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    made = Story()
    monkeypatch.setattr(absence, "loop_time_s", lambda: made.now_s)
    return made


def test_none_ever_joined(story: Story) -> None:
    assert story.absence.of_decoders(None) == "no decoder has joined router 'router'"
    assert story.absence.of_prefillers("model", 7) == "no prefiller for model 'model' has joined router 'router'"


@pytest.mark.parametrize("role", ["decoder", "prefiller"])
def test_the_only_one_died(story: Story, role: Role) -> None:
    story.joins("n0", role)
    story.dies("n0")
    story.now_s += 3.2

    is_decoder = role == "decoder"
    said = story.absence.of_decoders(None) if is_decoder else story.absence.of_prefillers("model", 7)

    of = "" if is_decoder else " for model 'model'"
    gone = f"no {role}{of} is left at router 'router': node 'n0' died or closed, 3.2 s ago; it was the only one"
    assert said == gone


def test_the_last_of_several_left(story: Story) -> None:
    for name in ("d0", "d1", "d2"):
        story.joins(name)
    story.dies("d2")
    story.dies("d0")
    story.joins("d2")  # it was started anew
    story.now_s += 5.0
    story.roster.sweep(story.now_s, lambda _: False)  # d1 was not heard from; nor d2, since
    story.joins("d2")
    story.roster.leave("d2", b"d2")

    said = story.absence.of_decoders("model")

    gone = "no decoder for model 'model' is left at router 'router': node 'd2' left, 0.0 s ago; it was the last of 3"
    assert said == gone


def test_those_of_other_models_and_roles_are_no_matter(story: Story) -> None:
    story.joins("d0", model="another")
    story.joins("p0", "prefiller")
    story.dies("p0")

    assert story.absence.of_decoders("model") == (
        "no decoder for model 'model' has joined router 'router'; there are some for 'another'"
    )
    story.dies("d0")
    assert story.absence.of_decoders("model") == "no decoder for model 'model' has joined router 'router'"
    assert "node 'd0' died or closed" in story.absence.of_decoders(None)


def test_who_is_there_and_drains_has_not_gone(story: Story) -> None:
    story.joins("d0", load=m.Load(draining=True))
    story.joins("d1", load=m.Load(draining=True))

    assert story.absence.of_decoders(None) == "no decoder takes requests now, also not node 'd0' and 1 more"


def test_prefiller_that_drains_has_joined_and_one_that_is_too_small_is_no_help(story: Story) -> None:
    story.joins("p0", "prefiller")
    (small,) = story.roster.members("prefiller")
    tokens = small.tokens_max + 1

    joined = f"no prefiller for model 'model' with pages for {tokens} tokens has joined router 'router'"
    assert story.absence.of_prefillers("model", tokens) == joined
    story.joins("p0", "prefiller", load=m.Load(draining=True))
    story.joins("p1", "prefiller", load=m.Load(draining=True))

    takes = "no prefiller for model 'model' with pages for 7 tokens takes requests now, also not node 'p0' and 1 more"
    assert story.absence.of_prefillers("model", 7) == takes


async def test_request_after_the_only_decoder_died_is_told_so(cluster: Cluster) -> None:
    await start(cluster)
    cluster.router.options = replace(ROUTER, queue_s=0.1)
    await cluster.kill("d0")
    await until(lambda: not cluster.router.roster.members("decoder"), "the decoder is missed")

    with pytest.raises(Unavailable, match=r"is left at router 'router': node 'd0' died or closed, \d+\.\d s ago"):
        await cluster.complete(prompt_of(40), m.Sampling(4))


async def test_router_logs_whom_it_has_lost_and_who_is_back(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """As warnings, which are shown by default. Who comes first, or leaves in order, is told with --log-level info."""
    caplog.set_level(logging.INFO, "crossrail.kv")
    await start(cluster)
    await cluster.kill("d0")
    await until(lambda: not cluster.router.roster.members("decoder"), "the decoder is missed")
    for _ in range(2):
        cluster.add(Decoder, "d0")
        await cluster.joined()
        await cluster.nodes["d0"].drain(10.0)
        await cluster.kill("d0")

    told = [(record.levelno, record.getMessage()) for record in caplog.records if "d0' " in record.getMessage()]
    assert [(level, words) for level, words in told if words.startswith("router router: ")] == [
        (logging.INFO, "router router: node 'd0' has joined; decoders now: 1"),
        (logging.WARNING, "router router: node 'd0' died or closed; decoders now: 0"),
        (logging.WARNING, "router router: node 'd0' is back; decoders now: 1"),
        (logging.INFO, "router router: node 'd0' left; decoders now: 0"),
        (logging.INFO, "router router: node 'd0' has joined; decoders now: 1"),
        (logging.INFO, "router router: node 'd0' left; decoders now: 0"),
    ]


async def test_node_that_leaves_before_it_hears_that_it_has_joined_is_not_missed(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a `kv demo` that is interrupted when its router names the last node."""
    router, known, goes_on = cluster.router, asyncio.Event(), asyncio.Event()

    async def join_answered_late(sender: bytes, join: m.Join) -> m.Message:
        answer = await router._on_join(sender, join)
        known.set()
        await goes_on.wait()
        return answer

    router.mailbox.handle(m.Join, join_answered_late)
    node = cluster.add(Decoder, "d0")
    await asyncio.wait_for(known.wait(), WAIT_S)
    leaving = asyncio.ensure_future(node.drain(0.0))
    await asyncio.sleep(0)
    goes_on.set()
    await leaving
    await cluster.kill("d0")

    await until(lambda: not router.roster.members("decoder"), "the decoder is gone")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
