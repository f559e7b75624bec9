"""The workers' half: KV that one instance computes arrives in the blocks of another, or it is said that it does not."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sized
from pathlib import Path

import msgspec
import pytest

import crossrail as xr
from crossrail.integrations.vllm.orders import NO_BLOCK, Chunk, Load, Orders
from crossrail.kv.transfer import receiver as receiver_module
from tests.integrations.vllm_workers import IMPATIENT, PATIENT, SECRET, SHORT_LEASE, Open, Side, offer
from tests.support.kv_copies import Held
from tests.support.kv_doubts import give_up, lose_writes, note_fences
from tests.support.limits import PROGRAM_S, WAIT_S

ROOT = Path(__file__).resolve().parents[2]

TOKENS = 30
OVER_TCP = msgspec.structs.replace(PATIENT, transport="tcp", quiesce_s=0.5)
MINE, THEIRS = [3, 7, 1, 12], [14, 9, 4, 2]


@pytest.fixture
def open_side(nothing_leaks: None) -> Iterator[Open]:
    opened: list[Side] = []

    def open_one(*args: object, **options: object) -> Side:
        opened.append(Side(*args, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for side in reversed(opened):
        side.close()


# --- all goes well ---


@pytest.mark.parametrize("prefix_tokens", [0, 16])
def test_what_was_computed_waits_for_who_asks(p: Side, d: Side, prefix_tokens: int) -> None:
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(idle=True, finished=["a"]))
    assert not p.results[0].sent

    d.load("b", p, TOKENS, THEIRS, prefix_tokens=prefix_tokens)
    d.until_received("b")
    p.until_sent("a")

    d.assert_holds("b", THEIRS, as_of="a", first=prefix_tokens // 8)
    assert not d.results[0].failed
    assert [d.untouched(block) for block in THEIRS[:2]] == [prefix_tokens > 0] * 2
    assert d.workers[0].take_stats()["loaded"] == 1 and p.workers[0].take_stats()["sent"] == 1


def test_producer_that_was_given_up_and_came_back_is_asked(p: Side, d: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was frozen, or cut off, for longer than engines wait."""
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(idle=True, finished=["a"]))
    given_up = give_up(monkeypatch, d.workers[0]._wire, p.workers[0].description.address)
    d.load("b", p, TOKENS, THEIRS)
    d.until_received("b")
    d.assert_holds("b", THEIRS, as_of="a")
    assert not d.results[0].failed and not given_up


def test_producer_that_had_given_its_decoder_up_is_fenced_off(
    p: Side, d: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the decoder's kernel had taken before may still land."""
    lose_writes(monkeypatch, "t@0/1")
    fenced = note_fences(monkeypatch)
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(idle=True, finished=["a"]))
    d.load("b", p, TOKENS, THEIRS)
    d.until_received("b")
    assert d.results[0].failed == {"b"} and len(fenced) == 1


def test_worker_whose_producer_is_frozen_in_a_copy_closes_all_else(
    p: Side, d: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "_SHUT_S", 0.3)
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(idle=True, finished=["a"]))
    d.load("b", p, TOKENS, THEIRS)
    d.until_received("b")
    worker = d.workers[0]
    engine, mailbox = worker._engine, worker._mailbox
    (access,) = worker._consumer._receiver._accesses.values()
    regions = list(access._regions)
    held = Held(access)

    with pytest.raises(xr.WaitTimeout, match="in the middle of a copy"):
        worker.close()

    assert engine is not None and engine.closed and not mailbox._tasks
    with pytest.raises(xr.WaitTimeout, match="in the middle of a copy"):
        worker.close()
    held.end()
    worker.close()
    worker.close()
    assert all(region.closed for region in regions)


def test_layer_by_layer_for_who_asked_before(p: Side, d: Side) -> None:
    """In two chunks, whose blocks are allocated one after the other."""
    d.load("b", p, TOKENS, THEIRS)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()
    p.step(
        Orders(chunks=[Chunk("a", 13, 0, tuple(MINE[:2]))]),
        {"a": ([0, 1], MINE[:2])},
        between=lambda: p.workers[0].layer_saved("a layer that reads the cache of another"),
    )
    p.step(Orders(chunks=[Chunk("a", TOKENS, 2, tuple(MINE[2:]))]), {"a": ([1, 2, 3], MINE[1:])})
    d.until_received("b")
    assert not p.results[0].sent, "vLLM has not said that it is finished"
    p.step(Orders(idle=True, finished=["a"]))
    p.until_sent("a")

    d.assert_holds("b", THEIRS, as_of="a")


def test_what_is_said_to_be_computed_when_it_is_finished_is_sent_then(p: Side, d: Side) -> None:
    d.load("b", p, TOKENS, THEIRS)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()
    p.step(Orders(chunks=[Chunk("a", 0, 0, tuple(MINE))]), {"a": (range(4), MINE)})
    assert not d.results[0].received and d.untouched(THEIRS[0])
    p.step(Orders(idle=True, chunks=[Chunk("a", TOKENS, 4, ())], finished=["a"]))
    d.until_received("b")
    p.until_sent("a")

    d.assert_holds("b", THEIRS, as_of="a")


def test_who_asks_in_the_middle_of_a_step_gets_it_after(p: Side, d: Side) -> None:
    d.step(Orders(wanted=[d.want("b", p)]))
    orders = Orders(offers=[offer("a", TOKENS)], chunks=[Chunk("a", TOKENS, 0, tuple(MINE))])

    def ask() -> None:
        d.step(Orders(loads=[Load("b", d.want("b", p), "", TOKENS, 0, tuple(THEIRS), b"prompt")]))
        d.until(p.was_asked, "asked")

    p.step(orders, {"a": (range(4), MINE)}, between=ask)
    d.until_received("b")

    d.assert_holds("b", THEIRS, as_of="a")


def test_decoder_that_names_blocks_it_does_not_have_ends_its_own_transfer_alone(p: Side, d: Side) -> None:
    wrong, good = [5, 6, 7, 99], [8, 10, 11, 13]
    d.load("b", p, TOKENS, wrong)
    d.load("c", p, TOKENS, THEIRS, transfer="u")
    p.step(Orders(offers=[offer("a", TOKENS), offer("e", TOKENS, "u")]))
    p.until(lambda: p.was_asked("t") and p.was_asked("u"), "asked")
    chunks = [Chunk("a", TOKENS, 0, tuple(MINE)), Chunk("e", TOKENS, 0, tuple(good))]
    p.step(Orders(chunks=chunks), {"a": (range(4), MINE), "e": (range(4), good)})
    p.step(Orders(idle=True, finished=["a", "e"]))
    for request in ("b", "c"):
        d.until_received(request)
    for request in ("a", "e"):
        p.until_sent(request)

    d.assert_holds("c", THEIRS, as_of="e")
    assert d.results[0].failed == {"b"}


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2), (4, 2), (8, 2), (2, 8)])
def test_ranks_of_any_number(open_side: Open, p_tp: int, d_tp: int) -> None:
    """Of 4 heads, so that some are replicated with 8 ranks; a rank that has nothing to send says so too."""
    p, d = open_side("p", p_tp), open_side("d", d_tp)
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(idle=True, finished=["a"]))

    d.load("b", p, TOKENS, THEIRS)
    d.until_received("b")
    p.until_sent("a")

    d.assert_holds("b", THEIRS, as_of="a")


def test_preempted_prompts_go_on_from_other_blocks(p: Side, d: Side) -> None:
    d.load("b", p, TOKENS, THEIRS)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()
    p.step(Orders(chunks=[Chunk("a", 16, 0, tuple(MINE[:2]))]), {"a": ([0, 1], MINE[:2])})

    p.step(Orders(preempted=["a"]), {"another": ([0, 1], MINE[:2])})
    p.step(Orders(chunks=[Chunk("a", 10, 0, (8, 9))]), {"a": ([0, 1], [8, 9])})
    p.step(Orders(chunks=[Chunk("a", TOKENS, 2, (10, 11))]), {"a": ([1, 2, 3], [9, 10, 11])})
    d.until_received("b")

    d.assert_holds("b", THEIRS, as_of="a")
    p.step(Orders(finished=["a"]))
    p.until_sent("a")


def test_prompts_computed_with_two_versions_of_weights_reach_nobody(p: Side, d: Side) -> None:
    """Preempted by a reset of the cache. Who has got nothing yet gets all of the second."""
    d.load("b", p, TOKENS, THEIRS)
    d.load("c", p, TOKENS, [5, 6, 8, 10], transfer="u")
    p.step(Orders(offers=[offer("a", TOKENS), offer("n", TOKENS, transfer="u")]))
    p.until_asked()
    p.until(lambda: p.was_asked("u"), "asked")
    p.step(Orders(chunks=[Chunk("a", 16, 0, tuple(MINE[:2]))]), {"a": ([0, 1], MINE[:2])})

    p.step(Orders(preempted=["a"], stale=["a", "n", "new"], offers=[offer("new", TOKENS, transfer="v")]))
    chunks = [Chunk("a", TOKENS, 0, tuple(MINE)), Chunk("n", TOKENS, 0, (8, 9, 10, 11))]
    p.step(Orders(chunks=chunks), {"a": (range(4), MINE), "n": (range(4), [8, 9, 10, 11])})
    d.until_received("b")
    d.until_received("c")

    assert d.results[0].failed == {"b"}
    d.assert_holds("c", [5, 6, 8, 10], as_of="n")
    p.step(Orders(finished=["a", "n"]))
    p.until_sent("a")
    p.until_sent("n")


_DECODER = """
import sys, types
from crossrail.integrations.instance import Instance
from tests.integrations.test_vllm_workers import OVER_TCP, THEIRS, TOKENS
from tests.integrations.vllm_workers import SECRET, Side
d = Side("d", options=OVER_TCP)
d.load("b", types.SimpleNamespace(instance=Instance.from_line(sys.argv[1], SECRET)), TOKENS, THEIRS)
sys.stdin.read()
"""


def test_a_frozen_decoder_does_not_keep_preempted_blocks(open_side: Open) -> None:
    """Nor ends the producer's engine: the writes to it end, and others' go on."""
    p, d = open_side("p", options=OVER_TCP), open_side("other d", options=OVER_TCP)
    frozen = subprocess.Popen(
        [sys.executable, "-c", _DECODER, p.instance.to_line(SECRET)], stdin=subprocess.PIPE, cwd=ROOT
    )
    try:
        p.step(Orders(offers=[offer("a", TOKENS)]))
        p.until_asked()
        frozen.send_signal(signal.SIGSTOP)
        p.step(Orders(chunks=[Chunk("a", 16, 0, tuple(MINE[:2]))]), {"a": ([0, 1], MINE[:2])})

        p.step(Orders(preempted=["a"]), {"another": ([0, 1], MINE[:2])})

        p.until(lambda: p.workers[0].take_stats()["send_failed"] == 1, "told that its decoder has not got it")
        p.prefill("c", TOKENS, [8, 10, 11, 13], transfer="u")
        d.load("e", p, TOKENS, THEIRS, transfer="u")
        d.until_received("e")
        d.assert_holds("e", THEIRS, as_of="c")
    finally:
        frozen.kill()
        frozen.communicate(timeout=PROGRAM_S)


# --- somebody does not want it any more ---


def test_released_before_it_had_blocks(p: Side, d: Side) -> None:
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(finished=["a"]))
    d.step(Orders(wanted=[d.want("b", p)]))

    d.step(Orders(releases=["b"]))

    p.until_sent("a")
    assert not d.results[0].received


def test_released_by_one_request_it_is_still_there_for_the_next(p: Side, d: Side) -> None:
    """As when a client sends its request again, and gives the first one up."""
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(idle=True, finished=["a"]))
    d.step(Orders(wanted=[d.want("b", p)]))
    wanted = d.want("c", p)
    d.step(Orders(wanted=[wanted], releases=["b"]))
    d.step(Orders(loads=[Load("c", wanted, "", TOKENS, 0, tuple(THEIRS), b"prompt")]))
    d.until_received("c")
    p.until_sent("a")

    d.assert_holds("c", THEIRS, as_of="a")


def test_cancelled_while_it_waits(p: Side, d: Side) -> None:
    """Nobody prefills it. It is not called failed: the request is gone."""
    d.load("b", p, TOKENS, THEIRS)

    d.step(Orders(cancels=["b"]))

    d.until_received("b")
    assert not d.results[0].failed
    assert d.workers[0].take_stats()["cancelled"] == 1


def test_what_does_not_come_in_time_fails_with_what_the_producer_says(
    open_side: Open, caplog: pytest.LogCaptureFixture
) -> None:
    # For the producer's words it waits for probe_s.
    p, d = open_side("p"), open_side("d", options=msgspec.structs.replace(PATIENT, load_s=0.5, probe_s=WAIT_S))
    d.load("never prefilled", p, TOKENS, THEIRS)
    d.until_received("never prefilled")
    p.step(
        Orders(offers=[offer("a", TOKENS, "slow")], chunks=[Chunk("a", 16, 0, tuple(MINE))]), {"a": ([0, 1], MINE[:2])}
    )
    d.load("half prefilled", p, TOKENS, THEIRS, transfer="slow")
    d.until_received("half prefilled")

    said = [record.getMessage() for record in caplog.records if "could not be loaded" in record.getMessage()]
    ends = ["no request with transfer_id t has come to the producer", "the producer has computed 16 of 30 tokens"]
    assert [text.endswith(end) for text, end in zip(said, ends, strict=True)] == [True, True], said
    assert "immediate" not in "".join(said)
    assert d.results[0].failed == {"never prefilled", "half prefilled"}


def test_cancelled_in_the_middle_nothing_lands_after(p: Side, d: Side) -> None:
    d.load("b", p, TOKENS, THEIRS)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()
    p.step(Orders(chunks=[Chunk("a", 16, 0, tuple(MINE[:2]))]), {"a": ([0, 1], MINE[:2])})

    d.step(Orders(cancels=["b"]))
    d.until_received("b")
    d.caches[0][:] = 0xAB
    p.step(Orders(chunks=[Chunk("a", TOKENS, 2, tuple(MINE[2:]))]), {"a": ([2, 3], MINE[2:])})
    p.step(Orders(finished=["a"]))
    p.until_sent("a")

    assert all(d.untouched(block) for block in range(16))


def test_dropped_at_the_producer(p: Side, d: Side) -> None:
    d.load("b", p, TOKENS, THEIRS)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()

    p.step(Orders(dropped=["a"]))

    p.until_sent("a")
    d.until_received("b")
    assert d.results[0].failed == {"b"}


def test_failed_forward_pass_ends_its_transfers(p: Side, d: Side) -> None:
    d.load("b", p, TOKENS, THEIRS)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()

    p.step(Orders(chunks=[Chunk("a", TOKENS, 0, tuple(MINE))]), {"a": (range(4), MINE)}, failed=True)

    d.until_received("b")
    assert d.results[0].failed == {"b"}


# --- it cannot be had ---


def test_leases_end_unless_somebody_says_that_he_is_coming(open_side: Open) -> None:
    """Of two prompts, both of which wait longer than a lease for blocks at the decoder."""
    p, d = open_side("p", options=SHORT_LEASE), open_side("d", options=SHORT_LEASE)
    for name, transfer, blocks in (("a", "kept", MINE), ("c", "forgotten", [0, 2, 4, 5])):
        p.prefill(name, TOKENS, blocks, transfer=transfer)
    d.step(Orders(wanted=[d.want("b", p, transfer="kept")]))
    p.step(Orders(finished=["a", "c"]))

    p.until_sent("c")
    assert "a" not in p.results[0].sent
    assert p.workers[0].take_stats()["leases_expired"] == 1
    for request, transfer, blocks in (("b", "kept", THEIRS), ("d", "forgotten", [5, 6, 7, 8])):
        d.load(request, p, TOKENS, blocks, prefix_tokens=8, transfer=transfer)
        d.until_received(request)

    d.assert_holds("b", THEIRS, as_of="a", first=1)
    assert d.results[0].failed == {"d"}


@pytest.mark.parametrize("changes", [{"page_tokens": 16}, {"layers": 3, "head_dim": 12}, {"dtype": "float16"}])
def test_other_layouts_are_refused(
    p: Side, open_side: Open, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    d = open_side("d", **changes)
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(finished=["a"]))

    d.load("b", p, TOKENS, THEIRS)

    d.until_received("b")
    assert d.results[0].failed == {"b"}
    p.until_sent("a")
    assert (d.caches[0] == 0xAB).all()
    (said,) = [record.getMessage() for record in caplog.records if "do not match" in record.getMessage()]
    assert f"producer = [{p.layout.describe()}; " in said and f"decoder = [{d.layout.describe()}; " in said
    assert "?" not in said  # which errors say instead of a new line


@pytest.mark.parametrize(("tokens", "prompt"), [(29, b"prompt"), (TOKENS, b"trompe")])
@pytest.mark.parametrize("asks_first", [False, True])
def test_other_prompts_are_refused_and_both_sides_say_so(
    p: Side, d: Side, tokens: int, prompt: bytes, asks_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if asks_first:
        d.load("b", p, tokens, THEIRS, prompt=prompt)
        d.until(p.was_asked, "asked")
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(finished=["a"]))
    if not asks_first:
        d.load("b", p, tokens, THEIRS, prompt=prompt)

    d.until_received("b")
    assert d.results[0].failed == {"b"}
    assert (d.caches[0] == 0xAB).all()
    words = "is another than" if tokens == TOKENS else "prompt has 29 tokens"
    said = [record for record in caplog.records if words in record.getMessage() and record.levelname != "INFO"]
    assert {record.module for record in said} == {"producer", "consumer"}
    d.load("c", p, TOKENS, [5, 6, 7, 8])  # the prompt is still there for the decoder that it is for
    d.until_received("c")
    p.until_sent("a")
    d.assert_holds("c", [5, 6, 7, 8], as_of="a")


def test_what_the_scheduler_refused_fails_at_once(d: Side) -> None:
    d.step(Orders(loads=[Load("b", None, "no such thing", TOKENS, 8, tuple(THEIRS), b"")]))

    d.until_received("b")
    assert d.results[0].failed == {"b"}


def test_what_a_window_has_left_is_not_fetched(p: Side, d: Side) -> None:
    """All such requests share vLLM's null block."""
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(idle=True, finished=["a"]))
    blocks = [NO_BLOCK, NO_BLOCK, *THEIRS[2:]]

    d.load("b", p, TOKENS, blocks)
    d.until_received("b")

    d.assert_holds("b", blocks, as_of="a", first=2)
    assert d.untouched(NO_BLOCK)


def test_two_prompts_cannot_have_one_transfer(p: Side, d: Side) -> None:
    p.prefill("a", TOKENS, MINE)
    p.prefill("c", TOKENS, [0, 2, 4, 5])
    p.step(Orders(finished=["a", "c"]))
    p.until_sent("c")

    d.load("b", p, TOKENS, THEIRS)
    d.until_received("b")

    d.assert_holds("b", THEIRS, as_of="a")


def test_two_decoders_cannot_have_one_transfer(
    p: Side, d: Side, open_side: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """A router that tries another decoder while the first is at it."""
    other = open_side("other")

    def asks_for_it() -> Sized:
        asks: Sized = p.workers[0]._producer._by_transfer["t"].asks
        return asks

    for asked, decoder in enumerate((d, other), start=1):
        decoder.load("b", p, TOKENS, THEIRS)
        decoder.until(lambda count=asked: p.was_asked() and len(asks_for_it()) == count, "asked")
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(finished=["a"]))
    for decoder in (d, other):
        decoder.until_received("b")

    first, second = sorted((d, other), key=lambda side: len(side.results[0].failed))
    first.assert_holds("b", THEIRS, as_of="a")
    assert second.results[0].failed == {"b"}
    assert "it is on its way to another decoder" in caplog.text and "SendJob" not in caplog.text


def test_a_producer_that_ends_fails_its_loads_and_no_others(open_side: Open, d: Side) -> None:
    gone, p = open_side("gone"), open_side("p")
    d.load("b", gone, TOKENS, THEIRS, transfer="there")
    d.load("c", p, TOKENS, [5, 6, 7, 8], transfer="here")
    gone.close()
    p.prefill("a", TOKENS, MINE, transfer="here")
    p.step(Orders(finished=["a"]))

    d.until_received("b")
    d.until_received("c")

    assert d.results[0].failed == {"b"}
    d.assert_holds("c", [5, 6, 7, 8], as_of="a")


def test_a_decoder_that_ends_frees_the_producers_blocks(open_side: Open) -> None:
    p, gone, d = open_side("p"), open_side("gone"), open_side("d")
    gone.load("b", p, TOKENS, THEIRS)
    p.step(Orders(offers=[offer("a", TOKENS), offer("c", TOKENS, "other")]))
    p.until_asked()
    gone.close()
    for request, blocks in (("a", MINE), ("c", [0, 2, 4, 5])):
        orders = Orders(chunks=[Chunk(request, TOKENS, 0, tuple(blocks))], finished=[])
        p.step(orders, {request: (range(4), blocks)})
    p.step(Orders(finished=["a", "c"]))
    d.load("d", p, TOKENS, THEIRS, transfer="other")

    p.until_sent("a")
    d.until_received("d")

    d.assert_holds("d", THEIRS, as_of="c")


def test_a_frozen_producer_is_shut_out(open_side: Open) -> None:
    """And when it goes on, and writes what it was asked for, nothing of it lands."""
    p, d = open_side("p"), open_side("d", options=IMPATIENT)
    p.prefill("a", TOKENS, MINE)
    thaw = p.freeze()
    d.load("b", p, TOKENS, THEIRS)
    d.until_received("b")
    assert d.results[0].failed == {"b"}

    thaw.set()
    p.step(Orders(finished=["a"]))
    p.until_sent("a")

    assert (d.caches[0] == 0xAB).all()


def test_closed_when_the_interpreter_has_ended_it_returns() -> None:
    """As by an engine in the user's process: vLLM's exit handlers are older than ours, so they come after them."""
    code = (
        "import atexit\n"
        "atexit.register(lambda: [side.close() for side in sides] and print('closed'))\n"
        "from tests.integrations.vllm_workers import Side\n"
        "sides = [Side('p'), Side('d')]\n"
        "sides[1].load('b', sides[0], 30, [1, 2, 3, 4])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PROGRAM_S)
    assert (ended.returncode, ended.stdout) == (0, "closed\n"), ended.stderr


def test_close_while_loads_wait(open_side: Open) -> None:
    p, d = open_side("p"), open_side("d", options=IMPATIENT)
    d.load("b", p, TOKENS, THEIRS)

    d.close()
    d.close()
