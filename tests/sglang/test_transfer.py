"""KV and aux that a prefill server computes, in the decode server's pages: byte for byte, and nowhere else."""

import logging
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossrail as xr
from crossrail.integrations.log_lines import LOGGERS, say_who
from crossrail.integrations.sglang.plugin import register
from tests.sglang.conftest import Open, stand_in
from tests.sglang.side import FAILED, PAGES, SUCCESS, TRANSFERRING, WAITING, Side, failure, send, until

MINE, THEIRS = [3, 7, 1, 12, 5], [0, 9, 4, 2, 11]
PACKAGE = Path(xr.__file__).parent


@pytest.mark.parametrize("mla", [False, True], ids=["MHA", "MLA"])
@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_a_prompt_in_chunks_arrives_byte_for_byte(open_side: Open, p_tp: int, d_tp: int, mla: bool) -> None:
    """Also between ranks of different tensor parallelism, and more ranks than heads."""
    prefill = [open_side("prefill", rank=rank, tp=p_tp, mla=mla) for rank in range(p_tp)]
    decode = [open_side("decode", rank=rank, tp=d_tp, mla=mla) for rank in range(d_tp)]
    senders = [side.sender(70) for side in prefill]
    receivers = [side.receiver(70) for side in decode]
    until(WAITING, *receivers)
    for receiver in receivers:
        receiver.send_metadata(np.array(THEIRS, np.int32), 3, None, decode_prefix_len=0)
    until(WAITING, *senders)
    for side, sender in zip(prefill, senders, strict=True):
        send(side, sender, "hello", MINE, 6)
    until(SUCCESS, *receivers, *senders)

    for side, receiver in zip(decode, receivers, strict=True):
        side.assert_holds("hello", THEIRS, 3)
        side.assert_untouched(THEIRS, [3])
        receiver.clear()
    metric = senders[0].get_transfer_metric()
    assert metric.transfer_total_bytes == len(MINE) * sum(plane[0].nbytes for plane in prefill[0].planes)
    assert metric.transfer_latency_s > 0


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "mla", "verifying"),
    [(1, 1, False, [0]), (2, 2, False, [0]), (2, 1, False, []), (1, 2, False, []), (2, 2, True, [0, 1])],
)
def test_checksums_are_compared_only_where_rank_0_has_the_same_heads(
    open_side: Open, p_tp: int, d_tp: int, mla: bool, verifying: list[int]
) -> None:
    """They travel with aux, which rank 0 of the prefiller sends to all."""
    for rank in range(p_tp):
        open_side("prefill", rank=rank, tp=p_tp, mla=mla)
    decode = [open_side("decode", rank=rank, tp=d_tp, mla=mla) for rank in range(d_tp)]
    assert not decode[0].manager.should_verify_kv_checksum("of somebody:1")
    for side in decode:
        until(WAITING, side.receiver(70))
    assert verifying == [side.rank for side in decode if side.manager.should_verify_kv_checksum(side.address)]


def test_a_decoder_may_ask_before_the_prefiller_has_heard_of_it(open_side: Open) -> None:
    p, d = open_side("prefill"), open_side("decode")
    receiver = d.receiver(1)
    receiver.send_metadata(np.array(THEIRS, np.int32), 0)
    until(TRANSFERRING, receiver)
    sender = p.sender(1)
    until(WAITING, sender)
    send(p, sender, "early", MINE, 0, chunk=5)
    until(SUCCESS, receiver, sender)
    d.assert_holds("early", THEIRS, 0)


def test_what_the_decoder_has_of_a_prompt_is_not_sent(open_side: Open) -> None:
    """It says how many tokens; SGLang's prefiller sends what is behind them."""
    p, d = open_side("prefill"), open_side("decode")
    sender, receiver = p.sender(1), d.receiver(1)
    receiver.send_metadata(np.array(THEIRS[3:], np.int32), 0, None, decode_prefix_len=12)
    until(WAITING, sender)
    assert sender.pop_decode_prefix_len() == 12
    send(p, sender, "tail", MINE[3:], 0)
    until(SUCCESS, receiver, sender)
    d.assert_holds("tail", THEIRS[3:], 0)
    d.assert_untouched(THEIRS[3:], [0])


def test_a_prompt_that_the_decoder_has_already_brings_its_aux(open_side: Open) -> None:
    p, d = open_side("prefill"), open_side("decode")
    sender, receiver = p.sender(1), d.receiver(1)
    receiver.send_metadata(np.zeros(0, np.int32), 2, None, decode_prefix_len=20)
    until(WAITING, sender)
    send(p, sender, "known", [], 1)
    until(SUCCESS, receiver, sender)
    d.assert_holds("known", [], 2)
    d.assert_untouched([], [2])


def test_many_rooms_side_by_side(open_side: Open) -> None:
    p, d = open_side("prefill"), open_side("decode")
    rooms = range(100, 100 + PAGES)
    receivers = {room: d.receiver(room) for room in rooms}
    senders = {room: p.sender(room) for room in reversed(rooms)}
    for i, room in enumerate(rooms):
        receivers[room].send_metadata(np.array([PAGES - 1 - i], np.int32), i % 8)
    until(WAITING, *senders.values())
    for i, room in enumerate(rooms[:8]):
        send(p, senders[room], f"room {room}", [i], i)
    until(SUCCESS, *[receivers[room] for room in rooms[:8]])
    for i, room in enumerate(rooms[:8]):
        d.assert_holds(f"room {room}", [PAGES - 1 - i], i)
    for room in rooms[8:]:
        senders[room].abort()
    until(0, *[receivers[room] for room in rooms[8:]])


def test_a_chunk_goes_when_its_event_has_come(open_side: Open) -> None:
    """What SGLang's overlapped scheduler sets: KV that is still being computed when it is sent."""
    p, d = open_side("prefill"), open_side("decode")
    sender, receiver = p.sender(1), d.receiver(1)
    receiver.send_metadata(np.array(THEIRS[:2], np.int32), 0)
    until(WAITING, sender)

    class Event:
        def synchronize(self) -> None:
            p.compute("late", MINE[:2], 0)

    p.compute("late", [], 0)
    sender.init(2, 0)
    sender._early_send_wait_event = Event()
    sender.send(np.array(MINE[:1], np.int32))
    assert sender._early_send_wait_event is None
    sender.send(np.array(MINE[1:2], np.int32))
    until(SUCCESS, receiver, sender)
    d.assert_holds("late", THEIRS[:2], 0)


@pytest.mark.parametrize("first", ["success", "abort"])
def test_a_room_may_be_used_again(open_side: Open, first: str) -> None:
    p, d = open_side("prefill"), open_side("decode")
    for text, theirs in (("one", THEIRS[:2]), ("two", THEIRS[2:4])):
        sender, receiver = p.sender(9), d.receiver(9)
        receiver.send_metadata(np.array(theirs, np.int32), 0)
        until(WAITING, sender)
        if text == "one" and first == "abort":
            sender.abort()
            until(0, receiver)
            receiver.clear()
            continue
        send(p, sender, text, MINE[:2], 0)
        until(SUCCESS, receiver, sender)
        sender.clear()
        receiver.clear()
    d.assert_holds("two", THEIRS[2:4], 0)


def test_a_second_sender_of_a_room_fails_and_the_first_goes_on(open_side: Open) -> None:
    p, d = open_side("prefill"), open_side("decode")
    sender, second, receiver = p.sender(9), p.sender(9), d.receiver(9)
    assert second.poll() == 0 and "under way already" in failure(second).failure_reason
    receiver.send_metadata(np.array(THEIRS, np.int32), 0)
    until(WAITING, sender)
    send(p, sender, "first", MINE, 0)
    until(SUCCESS, receiver, sender)
    d.assert_holds("first", THEIRS, 0)


@pytest.fixture
def quiet_filters() -> Iterator[None]:
    """What the plugin does to our loggers is for processes of SGLang's: other tests read logs too."""
    yield
    for name in LOGGERS:
        logging.getLogger(name).removeFilter(say_who)


def test_all_loggers_beside_a_scheduler_say_who_they_are() -> None:
    folders = [path for name in ("control", "kv", "integrations/sglang") for path in (PACKAGE / name).rglob("*.py")]
    names = {
        name
        for path in (*folders, *(PACKAGE / "integrations").glob("*.py"), *PACKAGE.glob("*.py"))
        for name in re.findall(r'getLogger\("(crossrail[^"]*)"\)', path.read_text())
    }
    assert names and names <= set(LOGGERS)


def test_the_backend_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch, quiet_filters: None) -> None:
    """By SGLang's own registry of hooks, where it is; the utils are the stand-in's, for SGLang's want more packages."""
    utils = stand_in("disaggregation/utils")
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.utils", utils)
    monkeypatch.setattr("sglang.srt.disaggregation.utils", utils, raising=False)
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry

    from crossrail.integrations import sglang

    register()
    register()
    record = logging.makeLogRecord({"msg": "room %d", "args": (7,)})
    assert logging.getLogger("crossrail.sglang").filter(record) and record.getMessage() == "crossrail: room 7"
    HookRegistry.apply_hooks()

    assert choices.DISAGG_TRANSFER_BACKEND_CHOICES.count("crossrail") == 1
    backend: Any = utils.TransferBackend("crossrail")
    assert backend is utils.TransferBackend("crossrail") and backend not in list(utils.TransferBackend)
    kinds = utils.KVClassType
    assert utils.get_kv_class(backend, kinds.MANAGER) is sglang.CrossrailKVManager
    assert utils.get_kv_class(backend, kinds.SENDER) is sglang.CrossrailKVSender
    assert utils.get_kv_class(backend, kinds.RECEIVER) is sglang.CrossrailKVReceiver
    assert utils.get_kv_class(backend, kinds.BOOTSTRAP_SERVER) is sglang.CrossrailKVBootstrapServer
    assert "crossrail" not in str(utils.get_kv_class(utils.TransferBackend.FAKE, kinds.SENDER)).lower()
    with pytest.raises(ValueError, match="nothing of that name"):
        utils.TransferBackend("nothing of that name")


def test_a_host_with_a_long_name_has_a_server(open_side: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "p" * 63)
    engine = open_side("decode", http_port=65535).manager.core.node.engine
    assert engine.name == f"sglang-decode-0-65535.{'p' * 63}"[:64]


def test_what_ends_says_in_the_log_which_room_with_whom_and_how_much(
    p: Side, d: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """Of many servers: their names have host and port."""
    caplog.set_level(logging.DEBUG, "crossrail.sglang")
    sender, receiver = p.sender(1), d.receiver(1)
    receiver.send_metadata(np.array(THEIRS, np.int32), 0)
    until(WAITING, sender)
    send(p, sender, "told", MINE, 0)
    until(SUCCESS, sender, receiver)
    sent = sender.get_transfer_metric().transfer_total_bytes
    decoder = re.escape(f"sglang-decode-0-1.{socket.gethostname()}"[:64])
    assert re.search(rf"room 1 to {decoder}: {sent} bytes in \d+\.\d+ s", caplog.text)
    assert re.search(rf"room 1 from {d.address}, {len(MINE)} pages, \d+\.\d+ s: it is here", caplog.text)

    sender, receiver = p.sender(2), d.receiver(2)
    receiver.send_metadata(np.array(THEIRS, np.int32), 0)
    until(WAITING, sender)
    sender.init(len(MINE), 0)
    sender.abort()
    until(FAILED, receiver)
    assert re.search(rf"room 2 to {decoder}: aborted at the prefiller \(0 of {len(MINE)} pages sent\)", caplog.text)
    assert re.search(rf"room 2 from {d.address}, {len(MINE)} pages, .* s: its KV did not come: ", caplog.text)
