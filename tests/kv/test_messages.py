"""Control messages: what is sound is understood, what is not is counted and dropped."""

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.cli.option_types import seconds
from crossrail.control import mailbox as mailbox_module
from crossrail.control import seal
from crossrail.control.deadlines import in_time
from crossrail.control.mailbox import NoAnswer
from crossrail.control.seal import OVERHEAD_BYTES, VERSION, Rejected, Sealer
from crossrail.control.wire import EngineWire, Unreachable
from crossrail.kv import messages as m
from tests.conftest import EngineFactory
from tests.fuzz.targets import mutations
from tests.support.kv_net import MemoryWire, Net
from tests.support.limits import WAIT_S
from tests.support.seeds import Seed

HERE, THERE, ELSEWHERE = (bytes([n]) * 16 for n in (1, 2, 3))
PROBE = m.Envelope(m.Probe("r1", 1), ask=7)


def encoded(envelope: m.Envelope) -> bytes:
    return m.LANGUAGE.encode(envelope.body, envelope.ask, envelope.answers)


def sealers(packet_bytes_max: int = 4096) -> tuple[Sealer, Sealer]:
    return Sealer(b"s3cret", HERE, packet_bytes_max, b"tests"), Sealer(b"s3cret", THERE, packet_bytes_max, b"tests")


# --- sealing ---


@given(st.binary(max_size=3000), st.integers(OVERHEAD_BYTES + 50, 4096), st.randoms())
def test_message_in_parts_in_any_order_arrives_whole(data: bytes, packet_bytes_max: int, order: random.Random) -> None:
    here, there = sealers(packet_bytes_max)
    packets = here.seal(data, THERE)
    assert all(len(packet) <= packet_bytes_max for packet in packets)
    order.shuffle(packets)
    opened = [there.open(packet, HERE) for packet in packets]
    assert [got for got in opened if got is not None] == [data]
    assert opened[-1] == data


def rejected(sealer: Sealer, packet: bytes, sender: bytes = HERE) -> str:
    with pytest.raises(Rejected) as caught:
        sealer.open(packet, sender)
    assert sum(sealer.rejected.values()) >= 1
    return caught.value.kind


def test_packet_taken_once() -> None:
    here, there = sealers()
    (packet,) = here.seal(b"once", THERE)
    assert there.open(packet, HERE) == b"once"
    assert rejected(there, packet) == "replay"


def test_packets_that_overtake_are_taken_and_those_older_than_the_window_are_not() -> None:
    here, there = sealers()
    packets = [here.seal(bytes([n % 256]), THERE)[0] for n in range(5000)]
    assert there.open(packets[4500], HERE) is not None
    assert there.open(packets[4500 - 4095], HERE) is not None
    assert rejected(there, packets[4500 - 4096]) == "replay"


def test_packet_for_another_engine_is_refused() -> None:
    here, _ = sealers()
    (packet,) = here.seal(b"for elsewhere", ELSEWHERE)
    assert rejected(Sealer(b"s3cret", THERE, 4096, b"tests"), packet) == "secret"


def test_wrong_secret_is_refused() -> None:
    here, _ = sealers()
    assert rejected(Sealer(b"another", THERE, 4096, b"tests"), here.seal(b"x", THERE)[0]) == "secret"


def test_packet_of_another_service_with_the_same_secret_is_refused() -> None:
    here, _ = sealers()
    assert rejected(Sealer(b"s3cret", THERE, 4096, b"other tests"), here.seal(b"x", THERE)[0]) == "secret"


def test_packet_of_one_sender_through_another_is_refused() -> None:
    here, there = sealers()
    assert rejected(there, here.seal(b"x", THERE)[0], sender=ELSEWHERE) == "sender"


def test_other_version_is_named() -> None:
    here, there = sealers()
    packet = bytearray(here.seal(b"x", THERE)[0])
    packet[4] = 99
    with pytest.raises(Rejected, match=f"version 99, this side version {VERSION} of"):
        there.open(bytes(packet), HERE)


@pytest.mark.parametrize("secret", [b"", b"x" * 1025])
def test_secret_out_of_bounds_is_refused(secret: bytes) -> None:
    with pytest.raises(xr.UsageError, match=r"must have 1\.\.1024"):
        Sealer(secret, HERE, 4096, b"tests")


@given(st.data())
def test_changed_packet_is_never_taken(data: st.DataObject) -> None:
    here, there = sealers()
    (packet,) = here.seal(encoded(PROBE), THERE)
    changed = data.draw(mutations(packet))
    if changed != packet:
        rejected(there, changed)
    assert there.open(packet, HERE) == encoded(PROBE)


def test_missing_parts_are_bounded() -> None:
    here, there = sealers(OVERHEAD_BYTES + 10)
    for _ in range(3000):
        there.open(here.seal(b"x" * 25, THERE)[0], HERE)
        there.open(here.seal(b"x" * 25, THERE)[1], HERE)
    assert sum(len(message.pieces) for message in there._senders[HERE].partial.values()) <= 1024


def test_senders_that_come_and_go_are_taken_and_none_of_their_packets_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of nodes that are started again and again, each time as another engine."""
    monkeypatch.setattr(seal, "_SENDERS_MAX", 2)
    monkeypatch.setattr(seal, "_NUMBERS_MAX", 3)
    there = Sealer(b"s3cret", THERE, 4096, b"tests")
    engines = [bytes([n]) * 16 for n in range(10, 16)]
    sealers = [Sealer(b"s3cret", engine, 4096, b"tests") for engine in engines]
    early, late = sealers[0].seal(b"overtaken", THERE)[0], sealers[0].seal(b"x", THERE)[0]
    assert there.open(late, engines[0]) == b"x"
    for sealer, engine in zip(sealers[1:5], engines[1:5], strict=True):
        assert there.open(sealer.seal(b"x", THERE)[0], engine) == b"x"

    with pytest.raises(Rejected, match="more than 5 senders since this engine opened: restart it"):
        there.open(sealers[5].seal(b"x", THERE)[0], engines[5])
    for packet in (early, late):
        assert rejected(there, packet, engines[0]) == "replay"
    again = sealers[0].seal(b"again", THERE)[0]
    assert there.open(again, engines[0]) == b"again"
    assert rejected(there, again, engines[0]) == "replay"
    assert there.open(sealers[4].seal(b"more", THERE)[0], engines[4]) == b"more"


def test_parts_that_do_not_agree_on_how_many_they_are_are_refused() -> None:
    here, there = sealers(OVERHEAD_BYTES + 10)
    here._next = 100
    two = here.seal(b"x" * 15, THERE)
    here._next = 100
    seven = here.seal(b"x" * 65, THERE)
    assert there.open(seven[5], HERE) is None

    assert rejected(there, two[0]) == "malformed"

    assert there.open(here.seal(b"next", THERE)[0], HERE) == b"next"


def test_parts_of_many_messages_in_turn_arrive_whole() -> None:
    here, there = sealers(OVERHEAD_BYTES + 10)
    messages = [b"%019d" % number for number in range(500)]
    firsts, seconds = zip(*(here.seal(message, THERE) for message in messages), strict=True)
    opened = [there.open(packet, HERE) for packet in (*firsts, *seconds)]
    assert [got for got in opened if got is not None] == messages


# --- encoding ---


@given(st.data())
def test_bytes_near_a_message_are_decoded_or_refused(data: st.DataObject) -> None:
    raw = data.draw(mutations(encoded(PROBE)))
    try:
        envelope = m.LANGUAGE.decode(raw)
    except xr.UsageError as error:
        assert str(error).startswith("not a valid message:")
        return
    assert m.LANGUAGE.decode(encoded(envelope)) == envelope


def test_field_out_of_bounds_is_refused_at_both_ends() -> None:
    too_long = m.Envelope(m.Probe("r" * 129, 1), ask=1)
    with pytest.raises(xr.UsageError, match="Probe cannot be sent"):
        encoded(too_long)
    with pytest.raises(xr.UsageError, match="length <= 128"):
        m.LANGUAGE.decode(msgspec.msgpack.encode(too_long))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=100))
def test_tokens_arrive_as_they_were(tokens: list[int]) -> None:
    assert m.unpack_tokens(m.pack_tokens(np.array(tokens, np.int64))).tolist() == tokens


@pytest.mark.parametrize("tokens", [[-1], [2**31], [0.5], [[1, 2]]])
def test_what_is_no_token_is_refused(tokens: object) -> None:
    with pytest.raises(xr.UsageError):
        m.pack_tokens(np.array(tokens))


def test_whatever_time_a_command_takes_can_be_sent() -> None:
    month_s = seconds().max
    start = m.Start("r1", b"", m.Sampling(), month_s)
    assert m.LANGUAGE.decode(encoded(m.Envelope(start, ask=1))).body == start
    joined = m.Joined("router", month_s, month_s)
    assert m.LANGUAGE.decode(encoded(m.Envelope(joined, answers=1))).body == joined


# --- asking ---


def _longer_than_a_message() -> m.Join:
    record = m.NodeRecord("d0", b"d0", {}, role="decoder", model="model")
    return m.Join(record, m.Load(), [f"{n:0128}" for n in range(100_000)])


class Desk:
    """Two mailboxes; `there` answers Probe with Progress, and counts how often each was asked."""

    def __init__(self, here: object, there: object, secrets: tuple[bytes, bytes] = (b"s3cret", b"s3cret")) -> None:
        self.here = m.mailbox(here, secrets[0], resend_s=0.02)
        self.there = m.mailbox(there, secrets[1], resend_s=0.02)
        self.asked: list[str] = []
        self.there.handle(m.Probe, self.answer)
        self.here.start()
        self.there.start()

    async def answer(self, sender: bytes, probe: m.Probe) -> m.Message:
        assert sender == self.here.address
        self.asked.append(probe.request)
        await asyncio.sleep(0)
        if probe.request == "bad":
            raise RuntimeError("broken model")
        return m.Progress(probe.request, probe.attempt, "running")

    async def probe(self, request: str, timeout_s: float = WAIT_S) -> m.Progress:
        return await self.here.ask(self.there.address, m.Probe(request, 1), m.Progress, timeout_s)

    async def close(self) -> None:
        await self.here.close()
        await self.there.close()


@pytest.fixture
async def desk(seed: Seed) -> AsyncIterator[Desk]:
    net = Net(random.Random(seed.number()))
    made = Desk(net.wire("here"), net.wire("there"))
    yield made
    await made.close()


def net_of(desk: Desk) -> Net:
    assert isinstance(desk.here.wire, MemoryWire)
    return desk.here.wire._net


async def test_question_is_answered(desk: Desk) -> None:
    assert (await desk.probe("r1")).request == "r1"


async def test_bad_net_question_runs_once_and_is_answered(desk: Desk) -> None:
    net = net_of(desk)
    net.loss, net.repeat, net.late_s = 0.4, 0.4, 0.05
    answers = await asyncio.gather(*(desk.probe(f"r{n}") for n in range(50)))
    assert [answer.request for answer in answers] == [f"r{n}" for n in range(50)]
    assert sorted(desk.asked) == sorted(f"r{n}" for n in range(50))


async def test_question_whose_answer_is_kept_no_longer_is_not_run_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of somebody who was cut off while others asked a lot: better no answer than to be carried out twice."""

    async def lose(to: bytes, packet: bytes) -> None:
        pass

    monkeypatch.setattr(mailbox_module, "_ANSWERS_KEPT", 2)
    monkeypatch.setattr(desk.there.wire, "send", lose)
    asking = [asyncio.create_task(desk.probe(f"r{n}")) for n in range(4)]  # again and again
    while desk.there.dropped["old"] < 8:
        await asyncio.sleep(0.01)
    assert desk.asked == [f"r{n}" for n in range(4)]
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_many_long_questions_at_once_are_all_heard(desk: Desk) -> None:
    async def started(_: bytes, start: m.Start) -> m.Message:
        return m.Started(start.request)

    desk.there.handle(m.Start, started)
    desk.here._resend_s = 2 * WAIT_S
    # Of five packets each: packet by packet in turn they would be more than is kept of messages that are not whole.
    questions = [m.Start(f"r{number}", bytes(16_000), m.Sampling(), 1.0) for number in range(400)]
    answers = await asyncio.gather(
        *(desk.here.ask(desk.there.address, question, m.Started, WAIT_S) for question in questions)
    )
    assert [answer.request for answer in answers] == [question.request for question in questions]


async def test_no_answer_says_how_long_it_waited(desk: Desk) -> None:
    net_of(desk).loss = 1.0
    with pytest.raises(NoAnswer, match=r"no answer to Probe within 0\.1 s"):
        await desk.probe("r1", timeout_s=0.1)


async def test_node_that_is_gone_is_known_at_once(desk: Desk) -> None:
    assert isinstance(desk.there.wire, MemoryWire)
    desk.there.wire.kill()
    with pytest.raises(Unreachable):
        await desk.probe("r1")


async def test_handler_that_raises_answers_so_and_the_node_goes_on(desk: Desk) -> None:
    with pytest.raises(NoAnswer, match="RuntimeError: broken model"):
        await desk.probe("bad")
    assert (await desk.probe("r1")).request == "r1"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (m.Progress("r1", 1, "failed", detail="x" * 2001), r"Progress cannot be sent.*length <= 2000"),
        (m.Tokens("r1", 0, b"", m.End("error", "\udcff")), "UnicodeEncodeError"),
        (_longer_than_a_message(), r"message has \d+ bytes, at most 8388608 are sent"),
    ],
    ids=["field-too-long", "no-text", "message-too-long"],
)
async def test_answer_that_cannot_be_sent_is_said_to_whoever_asked(desk: Desk, answer: m.Message, why: str) -> None:
    async def handler(_sender: bytes, _probe: m.Probe) -> m.Message:
        return answer

    desk.there.handle(m.Probe, handler)
    with pytest.raises(NoAnswer, match=why):
        await desk.probe("r1")


async def test_question_that_is_answered_at_once_is_run_once_and_may_fail(desk: Desk) -> None:
    """Lost, repeated and late as the network is."""
    asked: list[str] = []

    def handler(_sender: bytes, probe: m.Probe) -> m.Message:
        asked.append(probe.request)
        if probe.request == "bad":
            raise RuntimeError("broken")
        return m.Progress(probe.request, 1, "queued")

    net = net_of(desk)
    net.loss, net.repeat = 0.3, 0.3
    desk.there.handle_at_once(m.Probe, handler)
    answers = await asyncio.gather(*(desk.probe(f"r{n}") for n in range(20)))
    assert [answer.state for answer in answers] == ["queued"] * 20
    with pytest.raises(NoAnswer, match="RuntimeError: broken"):
        await desk.probe("bad")
    assert sorted(asked) == sorted([f"r{n}" for n in range(20)] + ["bad"])


async def test_answers_under_way_end_with_the_mailbox(desk: Desk) -> None:
    wire = desk.there.wire
    under_way: list[asyncio.Future[None]] = []

    def held_back(_to: bytes, _packet: bytes) -> asyncio.Future[None]:
        under_way.append(asyncio.get_running_loop().create_future())
        return under_way[-1]

    wire.post = held_back  # type: ignore[method-assign]
    desk.there.handle_at_once(m.Probe, lambda _sender, probe: m.Progress(probe.request, 1, "queued"))
    asking = asyncio.ensure_future(desk.probe("r1"))
    while not under_way:
        await asyncio.sleep(0)
    await desk.there.close()
    assert all(reply.cancelled() for reply in under_way)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def test_words_of_an_error_can_be_sent_whatever_they_are() -> None:
    words = m.clipped(xr.UsageError("there is no model at model-\udcff"))
    assert m.LANGUAGE.decode(encoded(m.Envelope(m.Failed(words)))).body == m.Failed(words)
    assert "model-?" in words
    assert len(m.clipped("\udcff" * 2000)) == 2000


async def test_wrong_secret_is_dropped_and_counted(seed: Seed) -> None:
    net = Net(random.Random(seed.number()))
    desk = Desk(net.wire("here"), net.wire("there"), (b"s3cret", b"guess"))
    with pytest.raises(NoAnswer):
        await desk.probe("r1", timeout_s=0.1)
    assert desk.there.dropped["secret"] >= 1 and desk.asked == []
    await desk.close()


async def test_rubbish_is_dropped_and_counted(desk: Desk, seed: Seed) -> None:
    draw = random.Random(seed.number())
    for _ in range(200):
        desk.there.wire.inject(desk.here.address, draw.randbytes(draw.randrange(200)))
    assert (await desk.probe("r1")).request == "r1"
    assert desk.there.dropped["malformed"] == 200


async def test_flood_of_rubbish_is_told_once_in_a_while(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(200):
        desk.there.wire.inject(desk.here.address, b"rubbish")
    await desk.probe("r1")
    assert [record.getMessage() for record in caplog.records] == [
        f"dropped a message: 7 bytes, a packet has at least {OVERHEAD_BYTES}"
    ]
    monkeypatch.setattr(mailbox_module, "_TELL_AGAIN_S", 0.0)
    desk.there.wire.inject(desk.here.address, b"rubbish")
    await desk.probe("r2")
    assert caplog.records[-1].getMessage().endswith("and 199 more of this kind since the last line")


async def test_mistake_of_ours_costs_one_message(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(packet: bytes, sender: bytes) -> bytes:
        monkeypatch.undo()
        raise KeyError("a mistake")

    monkeypatch.setattr(desk.there._sealer, "open", fail)
    assert (await desk.probe("r1")).request == "r1"  # asked again
    assert desk.there.dropped["error"] == 1
    assert caplog.records[-1].getMessage() == "dropped a message: KeyError: 'a mistake'"
    assert caplog.records[-1].exc_info


async def test_recorded_packets_do_nothing(desk: Desk) -> None:
    await desk.probe("r1")
    carried = list(
        net_of(desk).carried
    )  # more than a question and an answer where a slow machine made the mailbox ask again
    for sender, to, packet in carried:
        net_of(desk).wires[to].inject(sender, packet)
    await desk.probe("r2")
    assert desk.asked == ["r1", "r2"]
    for mailbox in (desk.there, desk.here):
        assert mailbox.dropped["replay"] == sum(to == mailbox.address for _, to, _ in carried) > 0


async def test_answers_of_others_are_not_taken(desk: Desk) -> None:
    stranger = m.mailbox(net_of(desk).wire("stranger"), b"s3cret")
    net_of(desk).wires[desk.there.address].freeze()
    question = asyncio.ensure_future(desk.probe("r1"))
    await asyncio.sleep(0.01)
    stranger._reply(desk.here.address, encoded(m.Envelope(m.Progress("r1", 1, "failed"), answers=1)))
    await asyncio.sleep(0.05)
    net_of(desk).wires[desk.there.address].thaw()
    assert (await question).state == "running"
    assert desk.here.dropped["unasked"] >= 1


async def test_what_is_under_way_ends_in_the_order_in_which_it_began(desk: Desk) -> None:
    ended = []

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    for number in range(12):
        desk.here.spawn(work(number), "work")
    await asyncio.sleep(0)
    await desk.here.close()

    assert ended == list(range(12))


async def test_over_engines(open_engine: EngineFactory) -> None:
    wires = [EngineWire(open_engine(name)) for name in ("here", "there")]
    desk = Desk(*wires)
    assert (await desk.probe("r1")).request == "r1"
    long = m.Dispatch("r2", 1, m.pack_tokens(np.arange(200_000)), {}, 1.0)
    seen: list[m.Dispatch] = []

    async def take(_: bytes, dispatch: m.Dispatch) -> m.Message:
        seen.append(dispatch)
        return m.Dispatched(dispatch.request, dispatch.attempt)

    desk.there.handle(m.Dispatch, take)
    await desk.here.ask(desk.there.address, long, m.Dispatched, WAIT_S)
    assert seen == [long]
    await desk.close()
    for wire in wires:
        wire.close()


async def test_peers_that_came_and_went_are_dropped(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossrail.control.wire._ADDRESSES_MAX", 2)
    wire = EngineWire(open_engine("here", transport="shm"))
    for _ in range(4):
        with xr.Engine("there", transport="shm") as there:
            address = there.address.to_bytes()
            assert not wire.is_lost(address)
            assert wire.identity(address).hex() == there.address.incarnation
    assert wire._resolved.cache_info().currsize == 2
    wire.close()


async def test_who_is_gone_is_told_without_what_an_engines_user_would_do_next(open_engine: EngineFactory) -> None:
    """No descriptors to be got anew, and no address: services see to that, and log this while they do."""
    with EngineWire(open_engine("here", transport="shm")) as wire:
        with xr.Engine("there", transport="shm") as there:
            address = there.address.to_bytes()
        with pytest.raises(Unreachable, match=r"'there' .* failed: ") as found:
            await wire.send(address, b"packet")
    assert "Next:" not in str(found.value)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_end_of_a_peer_is_told_and_not_looked_for(
    open_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    rails: list[str] | int = ["127.0.0.1"] if transport == "tcp" else 1
    engine = open_engine("here", transport=transport, rails=rails)
    wire, looks = EngineWire(engine), 0
    is_lost = wire.is_lost

    def look(address: bytes) -> bool:
        nonlocal looks
        looks += 1
        return is_lost(address)

    monkeypatch.setattr(wire, "is_lost", look)
    with xr.Engine("there", transport=transport, rails=rails) as there, EngineWire(there) as their_wire:
        await wire.send(their_wire.address, b"packet")
        waiting = [asyncio.ensure_future(wire.until_lost(their_wire.address)) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert looks <= 2 * len(waiting)  # and once more for the event that it is connected
    await in_time(asyncio.gather(*waiting), WAIT_S)
    await in_time(wire.until_lost(their_wire.address), WAIT_S)
    wire.close()
