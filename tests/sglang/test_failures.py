"""What SGLang is told when a transfer fails, and that its pages are its own by then."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import crossrail as xr
from crossrail.integrations.sglang.node import PagesNotQuiet
from crossrail.kv.transfer import receiver as receiver_module
from tests.sglang.conftest import Open
from tests.sglang.side import (
    FAILED,
    MINE,
    SUCCESS,
    THEIRS,
    WAITING,
    Side,
    ask,
    failure,
    finish,
    hand_over,
    send,
    send_half,
    until,
)
from tests.support.kv_copies import Held
from tests.support.kv_doubts import give_up, lose_writes, note_fences
from tests.support.limits import WAIT_S, eventually, never
from tests.support.ports import free_port

# --- somebody gives up ---


@pytest.mark.parametrize("when", ["before its pages", "after its pages", "in the middle"])
def test_the_decoder_gives_up(p: Side, d: Side, when: str) -> None:
    sender, receiver = p.sender(1), d.receiver(1)
    if when != "before its pages":
        ask(receiver)
        until(WAITING, sender)
    if when == "in the middle":
        send_half(p, sender)
    receiver.abort()
    until(FAILED, receiver, sender)
    for memory in d.planes:  # whoever gets the pages now
        memory[THEIRS] = 1
    assert failure(receiver).failure_reason == "aborted at the decoder"
    assert failure(sender).failure_reason == "the decoder gave it up: aborted at the decoder"
    never(lambda: any((memory[THEIRS] != 1).any() for memory in d.planes), "something landed after Failed was said")


def test_a_room_that_the_prefiller_gave_up_fails_before_there_are_pages(p: Side, d: Side) -> None:
    """They may be long in coming, and would be taken from others."""
    p.sender(1).abort()
    receiver = d.receiver(1)
    until(FAILED, receiver)
    assert failure(receiver).failure_reason == "the prefiller refuses: aborted at the prefiller"


def test_a_prefiller_that_is_being_shut_out_is_named(p: Side, d: Side) -> None:
    receivers = [d.receiver(1), d.receiver(2)]
    ask(receivers[0])
    until(WAITING, p.sender(1))
    [ours] = d.manager.core.decoder._receivers.values()
    ours._accesses[receivers[1]._pull.instance.writer].is_closing = True  # as while it is frozen in a copy
    ask(receivers[1])
    until(FAILED, receivers[1])
    assert "writer 'sglang-prefill-0-1." in failure(receivers[1]).failure_reason
    ours._accesses[receivers[1]._pull.instance.writer].is_closing = False


@pytest.mark.parametrize("when", ["before it is asked", "before it is computed", "in the middle"])
def test_the_prefiller_gives_up(p: Side, d: Side, when: str) -> None:
    sender, receiver = p.sender(1), d.receiver(1)
    if when != "before it is asked":
        ask(receiver)
        until(WAITING, sender)
    if when == "in the middle":
        send_half(p, sender)
    sender.abort()
    assert sender.poll() == FAILED, "when abort returns, SGLang gives the pages to others"
    if when == "before it is asked":
        ask(receiver)
    until(FAILED, receiver)
    error = failure(receiver)
    assert "aborted at the prefiller" in error.failure_reason and not error.is_from_another_rank
    assert error.bootstrap_room == 1


def test_who_gave_up_before_the_prefiller_heard_of_it_fails_there(p: Side, d: Side) -> None:
    receiver = d.receiver(5)
    ask(receiver)
    receiver.abort()
    until(FAILED, receiver)
    sender = p.sender(5)
    until(FAILED, sender)
    sender.clear()
    # And the room is good for another request.
    hand_over(p, d, "again", 5)


@pytest.mark.parametrize("when", ["before it was found", "afterwards"])
def test_prefiller_that_was_given_up_and_came_back_is_asked(
    p: Side, d: Side, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    sender = p.sender(1)
    receiver = d.receiver(1) if when == "afterwards" else None
    given_up = give_up(monkeypatch, d.manager.core.node.wire, p.manager.core.node.wire.address)
    receiver = receiver or d.receiver(1)
    ask(receiver)
    finish(p, d, sender, receiver, "again")
    assert not given_up


def test_prefiller_that_did_not_answer_is_not_believed_in_before_it_does(
    p: Side, d: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked, it does not count as gone for a while: our engine tries to reach it."""
    core = d.manager.core
    gone, answers = iter([True]), iter([False, False, True])

    async def answered(*_: object) -> bool:
        return next(answers)

    monkeypatch.setattr(core, "_is_gone", lambda _: next(gone))
    monkeypatch.setattr(core.decoder, "answers", answered)
    eventually(lambda: core.find(p.address), "it is found")
    assert not [*gone, *answers]


def test_prefiller_that_had_given_its_decoder_up_is_fenced_off(
    p: Side, d: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the decoder's kernel had taken before may still land."""
    lose_writes(monkeypatch, "1@0/1")
    fenced = note_fences(monkeypatch)
    sender, receiver = p.sender(1), d.receiver(1)
    ask(receiver)
    until(WAITING, sender)
    send(p, sender, "in vain", MINE, 0)
    until(FAILED, sender, receiver)
    assert len(fenced) == 1


@pytest.mark.parametrize("sent", ["half", "all"])
def test_an_abort_waits_only_where_sglang_would_reuse_the_pages(
    p: Side, d: Side, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has sent all, SGLang polls until it reads Failed. Before, it gives the pages away when abort returns."""
    sender, receiver = p.sender(1), d.receiver(1)
    ask(receiver)
    until(WAITING, sender)
    node = p.manager.core.node
    with monkeypatch.context() as frozen:
        frozen.setattr(node, "soon", lambda *_: None)
        frozen.setattr(node, "options", msgspec.structs.replace(node.options, quiesce_s=0.2))
        send_half(p, sender)
        if sent == "all":
            sender.send(np.array(MINE[2:], np.int32))
            sender.abort()
        else:
            with pytest.raises(PagesNotQuiet):
                sender.abort()
        assert sender.poll() == WAITING
    sender.abort()
    until(FAILED, sender, receiver)


def test_clear_of_a_sender_in_the_middle_stops_it(p: Side, d: Side) -> None:
    sender, receiver = p.sender(1), d.receiver(1)
    ask(receiver)
    until(WAITING, sender)
    send_half(p, sender)
    sender.clear()
    assert sender.poll() == FAILED
    until(FAILED, receiver)


def test_another_rank_failed_so_this_one_takes_its_pages_back(open_side: Open, p: Side) -> None:
    """SGLang calls failure_exception on all ranks when one of them polls Failed."""
    d = [open_side("decode", rank=rank, tp=2) for rank in range(2)]
    sender = p.sender(1)
    receivers = [side.receiver(1) for side in d]
    for receiver in receivers:
        ask(receiver)
    until(WAITING, sender)

    error = failure(receivers[1])

    assert error.is_from_another_rank and receivers[1].poll() == FAILED
    until(FAILED, receivers[0], sender)
    assert "gave it up" in failure(receivers[0]).failure_reason


def test_pages_that_a_peer_may_touch_end_the_scheduler(open_side: Open, p: Side) -> None:
    """SGLang swallows each Exception where it takes pages back; it must not give these to anybody."""
    d = open_side("decode")
    node = d.manager.core.node
    node.options = msgspec.structs.replace(node.options, quiesce_s=0.2)
    receiver = d.receiver(1)
    ask(receiver)
    never(lambda: receiver.poll() == FAILED, "failed", for_s=0.05)
    receiver._progress.quiet = SimpleNamespace(
        wait=lambda timeout_s: threading.Event().wait(timeout_s), set=lambda: None
    )
    with pytest.raises(PagesNotQuiet, match=r"room 1: a peer may still touch its pages after 0\.2 s"):
        receiver.failure_exception()
    assert not issubclass(PagesNotQuiet, Exception)


# --- what does not fit ---


def test_other_numbers_of_pages_fail_on_both_sides(p: Side, d: Side) -> None:
    sender, receiver = p.sender(1), d.receiver(1)
    ask(receiver)
    until(WAITING, sender)
    sender.init(3, 0)
    until(FAILED, sender, receiver)
    assert "the decoder has 4 pages for it, 3 are to be sent" in failure(receiver).failure_reason


def test_more_pages_than_announced_fail(p: Side, d: Side) -> None:
    sender, receiver = p.sender(1), d.receiver(1)
    ask(receiver)
    until(WAITING, sender)
    sender.init(4, 0)
    sender.send(np.array([1, 2, 3], np.int32))
    sender.send(np.array([4, 5], np.int32))
    until(FAILED, sender, receiver)
    assert "5 pages are sent, init announced 4" in failure(sender).failure_reason


def test_state_indices_are_refused(p: Side, d: Side) -> None:
    sender, receiver = p.sender(1), d.receiver(1)
    ask(receiver)
    until(WAITING, sender)
    sender.init(4, 0)
    sender.send(np.array(MINE, np.int32), [np.array([1])])
    until(FAILED, sender, receiver)
    assert "state_indices" in failure(sender).failure_reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state_types": [SimpleNamespace(value="swa"), "mamba"]}, "state_types=swa, mamba"),
        ({"parallel": {"pp_size": 2}}, "--pp-size=2: crossrail's backend supports only tensor and data"),
        ({"parallel": {"dp_size": 4, "load_balance_method": "round_robin"}}, "--load-balance-method=round_robin must"),
        ({"server_args": {"disable_overlap_schedule": False}}, "--disable-overlap-schedule is missing"),
        (
            {"server_args": {"disable_overlap_schedule": True, "disaggregation_enable_kv_checksum": True}},
            "--disaggregation-enable-kv-checksum must not be set",
        ),
        ({"server_args": {"tokenizer_worker_num": 2}}, "--tokenizer-worker-num=2 must be 1"),
        ({"ib_device": "mlx5_0"}, "--disaggregation-ib-device=mlx5_0"),
        ({"kv_data_ptrs": [4096] * 4}, r"kv_data_ptrs\[0\]=0x1000 is not memory of the host"),
        ({"kv_item_lens": [48, 48, 48, 96]}, "layers, and K and V, must have pages of one size"),
        ({"kv_head_num": 3, "total_kv_head_num": 2}, "kv_head_num=3 of 2 heads"),
        ({"aux_item_lens": [5 << 20, 24]}, "aux_item_lens: 2 rows of"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(open_side: Open, options: dict[str, Any], words: str) -> None:
    with pytest.raises(xr.UsageError, match=words):
        open_side("prefill", **options)


def test_no_secret_no_start(open_side: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CROSSRAIL_SECRET")
    with pytest.raises(xr.UsageError, match=r"secret of 1\.\.1024 bytes .* set CROSSRAIL_SECRET"):
        open_side("decode")


def test_an_unknown_option_is_named(open_side: Open) -> None:
    with pytest.raises(xr.UsageError, match=r"CROSSRAIL_SGLANG_OPTIONS.*`lod_s`"):
        open_side("decode", options={"lod_s": 1})


def test_a_scheduler_waits_for_as_long_as_it_takes_to_shut_a_prefiller_out(open_side: Open) -> None:
    """Else it ends its server where a request would have failed."""
    with pytest.raises(xr.UsageError, match=r"quiesce_s \(30\) must be at least 3 times prefiller_timeout_s \(11\)"):
        open_side("decode", options={"prefiller_timeout_s": 11, "quiesce_s": 30})


# --- time ---


LATE = {
    "nothing": "has not got the request",
    "the request": "has not begun with the request",
    "the first chunk": "has computed 2 of 4 pages",
}


@pytest.mark.parametrize("has", LATE)
def test_a_decoder_waits_so_long_for_its_kv_and_says_how_far_it_came(open_side: Open, p: Side, has: str) -> None:
    d = open_side("decode", options={"load_s": 1.0, "probe_s": WAIT_S})  # so long it waits for the answer
    receiver = d.receiver(1)
    ask(receiver)
    sender = p.sender(1) if has != "nothing" else None
    if sender and has == "the first chunk":
        until(WAITING, sender)
        send_half(p, sender)
    until(FAILED, receiver)
    late = f"not all of it came within load_s=1: the prefill server {LATE[has]}"
    assert failure(receiver).failure_reason == late
    sender = sender or p.sender(1)
    until(FAILED, sender)
    assert late in failure(sender).failure_reason


def test_a_prefiller_waits_so_long_for_its_decoder(open_side: Open) -> None:
    p = open_side("prefill", options={"bootstrap_s": 0.3})
    sender = p.sender(1)
    until(FAILED, sender)
    assert "no decode server has asked for room 1 within 0.3 s (bootstrap_s): has" in failure(sender).failure_reason


def test_a_prefiller_waits_so_long_for_its_decoders_pages(open_side: Open, d: Side) -> None:
    p = open_side("prefill", options={"bootstrap_s": 1.0})
    receiver = d.receiver(1)
    eventually(lambda: p.manager.core.prefiller._awaited, "it is announced")
    sender = p.sender(1)
    until(FAILED, sender)
    until(FAILED, receiver)  # though it has no pages yet, and asks nothing
    why = "no decoder had pages for room 1 within 1 s"
    assert failure(sender).failure_reason == why and failure(receiver).failure_reason == f"the prefiller refuses: {why}"


def test_a_decoder_hears_of_what_was_aborted_at_the_prefiller_while_it_waits_for_pages(p: Side, d: Side) -> None:
    sender, receiver, other = p.sender(1), d.receiver(1), d.receiver(2)
    eventually(lambda: len(p.manager.core.prefiller._awaited) == 2, "they are announced")
    sender.abort()
    until(FAILED, sender, receiver)
    assert failure(receiver).failure_reason == "the prefiller refuses: aborted at the prefiller"
    ask(other)
    until(WAITING, again := p.sender(2))
    send(p, again, "another", MINE, 0)
    until(SUCCESS, again, other)


# --- the bootstrap server ---


def test_a_prefiller_nobody_knows_is_not_waited_for(open_side: Open) -> None:
    d = open_side("decode")
    assert not d.manager.try_ensure_parallel_info(d.address)
    receiver = d.conn.CrossrailKVReceiver(d.manager, d.address, 1)
    receiver.init(0)
    assert receiver.poll() == FAILED and "no prefiller is known" in failure(receiver).failure_reason


def test_a_prefiller_that_sglang_gives_up_to_look_for(
    open_side: Open, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It aborts; whose request it was reads why, and the log has it once."""
    d = open_side("decode")
    elsewhere = f"127.0.0.1:{free_port()}"
    receiver = d.conn.CrossrailKVReceiver(d.manager, elsewhere, 1)
    assert not d.manager.try_ensure_parallel_info(elsewhere)
    eventually(lambda: _why_missing(d, elsewhere).startswith("nobody listens"), "it is known why")
    for _ in range(3):
        assert not d.manager.try_ensure_parallel_info(elsewhere)
    receiver.abort()
    assert receiver.poll() == FAILED
    why = failure(receiver).failure_reason
    assert f"nobody listens at {elsewhere}" in why and "--disaggregation-bootstrap-port" in why
    assert caplog.text.count(f"no prefiller at {elsewhere}") == 1


def test_nothing_waits_for_a_bootstrap_server_that_does_not_answer(open_side: Open) -> None:
    """It may be frozen, or its host dead; who waits is SGLang's scheduler, and with it all that is decoded."""
    d = open_side("decode")
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        assert not d.manager.try_ensure_parallel_info(address)
        assert not d.manager.try_ensure_parallel_info(address)
        frozen.settimeout(WAIT_S)
        asked, _ = frozen.accept()
        with asked:  # it is the first call that is answered now
            asked.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 7\r\n\r\nthawed\n")
            eventually(lambda: _why_missing(d, address).endswith("thawed"), "its answer is known")


def _why_missing(d: Side, address: str) -> str:
    """As of now: SGLang asks again every second."""
    assert not d.manager.try_ensure_parallel_info(address)
    return str(d.manager.core.why_missing(address))


def test_a_decoder_whose_prefiller_is_frozen_in_a_copy_is_not_said_to_be_closed(
    p: Side, d: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "_SHUT_S", 0.3)
    hand_over(p, d, "before")
    core = d.manager.core
    (kv_receiver,) = core.decoder._receivers.values()
    (access,) = kv_receiver._accesses.values()
    regions = list(access._regions)
    held = Held(access)

    for _ in range(2):
        with pytest.raises(xr.WaitTimeout, match="in the middle of a copy"):
            d.close()
        assert core.node.engine.closed
    held.end()
    d.close()
    d.close()
    assert all(region.closed for region in regions)


def test_a_bootstrap_server_that_was_restarted_hears_of_all_ranks_again(
    open_side: Open, p: Side, server: Any, address: str
) -> None:
    from crossrail.integrations.sglang import CrossrailKVBootstrapServer

    eventually(lambda: open_side_knows(open_side, address), "the prefiller is known")
    server.close()
    d = open_side("decode")
    assert not d.manager.try_ensure_parallel_info(address)
    again = CrossrailKVBootstrapServer("127.0.0.1", int(address.partition(":")[2]))
    try:
        hand_over(p, d, "restarted")
    finally:
        p.close()
        d.close()
        again.close()


def test_a_prefiller_that_is_gone_is_looked_up_again(open_side: Open, p: Side, d: Side, address: str) -> None:
    receiver = d.receiver(1)
    ask(receiver)
    p.close()
    until(FAILED, receiver)
    assert address not in d.manager.prefill_info_table
    second = open_side("prefill")
    eventually(lambda: _reaches(second, d), "the new prefiller is the one that is known")


def test_a_prefiller_that_went_while_nothing_was_asked_of_it_costs_no_request(
    open_side: Open, p: Side, d: Side, address: str
) -> None:
    hand_over(p, d, "before")
    gone = d.manager.prefill_info_table[address].instances[0]
    p.close()
    eventually(lambda: not d.manager.try_ensure_parallel_info(address), "it is known that it is gone")

    again = open_side("prefill")

    eventually(lambda: d.manager.try_ensure_parallel_info(address), "the new prefiller is known")
    assert d.manager.prefill_info_table[address].instances[0] != gone
    hand_over(again, d, "after", 2)


def test_a_prefiller_that_goes_while_sglang_looks_for_it_is_there_until_it_looks_again(
    p: Side, d: Side, address: str
) -> None:
    """SGLang asks for its ranks of data parallelism, which we do not know, where the second look finds nobody."""
    sender, receiver = p.sender(1), d.receiver(1)
    ask(receiver)
    until(WAITING, sender)
    core = d.manager.core
    p.close()
    eventually(lambda: core._is_gone(core.info[address].instances[0]), "the engine knows that it is gone")
    assert address in d.manager.prefill_info_table
    d.conn.CrossrailKVReceiver(d.manager, address, 2)
    assert address not in d.manager.prefill_info_table


def _reaches(p: Side, d: Side) -> bool:
    sender, receiver = p.sender(2), d.receiver(2)
    ask(receiver)
    eventually(lambda: receiver.poll() == FAILED or sender.poll() == WAITING, "asked, or failed")
    reached = bool(sender.poll() == WAITING)
    sender.abort()
    until(FAILED, receiver)
    return reached


def open_side_knows(open_side: Open, address: str) -> bool:
    return bool(open_side("decode").manager.try_ensure_parallel_info(address))
