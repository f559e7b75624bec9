"""Workers whose model runs on a GPU: vLLM calls when kernels are launched, and they run later, when the test says so.

Blocks hold 0xAB, or somebody else's KV, until a kernel writes them: what is sent too early, or overwritten by a kernel
that was launched earlier, is found in the bytes.
"""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import crossrail as xr
from crossrail.integrations.vllm import worker as worker_side
from crossrail.integrations.vllm.kernels import Kernels
from crossrail.integrations.vllm.orders import Chunk, Orders
from tests.integrations.vllm_workers import LAYERS, Open, Side, offer
from tests.support.fake_gpu import FakeGpu
from tests.support.gpu_stream import Event, Stream
from tests.support.limits import WAIT_S

TOKENS = 30
MINE, THEIRS = [3, 7, 1, 12], [14, 9, 4, 2]
WHOLE = Chunk("a", TOKENS, 0, tuple(MINE))
FILLED = {"a": (range(4), MINE)}


@pytest.fixture
def open_side(gpu: FakeGpu) -> Iterator[Open]:
    opened: list[Side] = []

    def open_one(name: str, **options: object) -> Side:
        opened.append(Side(name, stream=Stream(gpu), **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for side in reversed(opened):
        assert side.stream is not None
        side.stream.run()
        side.close()


def run(side: Side, kernels: int | None = None) -> None:
    assert side.stream is not None
    side.stream.run(kernels)


def load(d: Side, p: Side, request: str = "b", blocks: list[int] = THEIRS, transfer: str = "t") -> None:
    d.load(request, p, TOKENS, blocks, transfer=transfer)
    run(d)


def layers_counted(side: Side) -> int:
    """That its sender was told of."""
    return side.workers[0]._producer._senders.live._watcher.value


def test_layers_are_sent_when_their_kernels_have_ended(p: Side, d: Side) -> None:
    load(d, p)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()

    p.step(Orders(chunks=[WHOLE]), FILLED)
    p.step(Orders(idle=True, finished=["a"]))
    assert layers_counted(p) == 0
    for layer in range(LAYERS):
        run(p, 1)
        p.until(lambda layer=layer: layers_counted(p) == layer + 1, f"layer {layer} counted")
    d.until_received("b")
    p.until_sent("a")

    d.assert_holds("b", THEIRS, as_of="a")


@pytest.mark.parametrize("ordinal", [0, 1])
def test_each_worker_takes_the_rails_near_its_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, ordinal: int) -> None:
    seen: list[object] = []
    monkeypatch.setattr(xr.engine, "default_rails", lambda transport, rails, device: seen.append(device) or rails)
    allocate = gpu.array
    monkeypatch.setattr(gpu, "array", lambda array: allocate(array, ordinal))
    side = Side("p", stream=Stream(gpu))

    side.close()

    assert seen == [f"cuda:{ordinal}"]


def test_steps_launched_ahead_of_the_gpu(p: Side, d: Side) -> None:
    load(d, p)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()
    p.step(Orders(chunks=[Chunk("a", 13, 0, tuple(MINE[:2]))]), {"a": ([0, 1], MINE[:2])})
    p.step(Orders(chunks=[Chunk("a", TOKENS, 2, tuple(MINE[2:]))]), {"a": ([1, 2, 3], MINE[1:])})
    p.step(Orders(idle=True, finished=["a"]))

    for _ in range(2 * LAYERS):
        assert not p.results[0].sent and not d.results[0].received
        run(p, 1)
    d.until_received("b")
    p.until_sent("a")

    d.assert_holds("b", THEIRS, as_of="a")


def test_who_asks_later_gets_it_after_the_kernels(p: Side, d: Side) -> None:
    """Its last step is launched, and vLLM has ended the request, before the GPU has begun."""
    p.prefill("a", TOKENS, MINE)
    p.step(Orders(idle=True, finished=["a"]))
    load(d, p)
    p.until_asked()
    assert d.untouched(THEIRS[0]) and not p.results[0].sent

    run(p)
    d.until_received("b")
    p.until_sent("a")

    d.assert_holds("b", THEIRS, as_of="a")


def test_blocks_are_written_when_earlier_kernels_have_ended_with_them(p: Side, d: Side) -> None:
    """A request that ended a moment ago has one more step to run, into blocks that are another's by now."""
    p.prefill("a", TOKENS, MINE)
    run(p)
    p.step(Orders(idle=True, finished=["a"]))

    def of_the_last_owner() -> None:
        d.pages(0)[:, THEIRS] = 0x55

    d.launch(of_the_last_owner)
    d.load("b", p, TOKENS, THEIRS)
    for _ in range(20):
        d.step()
    assert not d.results[0].received

    run(d)
    d.until_received("b")
    p.until_sent("a")

    d.assert_holds("b", THEIRS, as_of="a")


def test_a_load_that_waits_for_kernels_can_be_cancelled(p: Side, d: Side) -> None:
    d.launch(lambda: None)
    d.load("b", p, TOKENS, THEIRS)
    d.step(Orders(cancels=["b"]))

    run(d)
    d.until_received("b")

    assert not d.results[0].failed
    assert d.workers[0].take_stats()["cancelled"] == 1


@pytest.mark.parametrize("asked", [True, False])
def test_preemption_waits_for_kernels_that_fill_the_blocks(p: Side, d: Side, asked: bool) -> None:
    if asked:
        load(d, p)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    if asked:
        p.until_asked()
    p.step(Orders(chunks=[Chunk("a", TOKENS - asked, 0, tuple(MINE))]), FILLED)
    preempted = threading.Thread(target=p.step, args=(Orders(preempted=["a"]), {"another": (range(4), MINE)}))
    preempted.start()
    preempted.join(0.1)
    assert preempted.is_alive()
    run(p)
    preempted.join(WAIT_S)
    assert not preempted.is_alive()
    run(p)
    if not asked:
        load(d, p)
        p.until_asked()

    p.step(Orders(chunks=[Chunk("a", TOKENS, 0, (8, 9, 10, 11))]), {"a": (range(4), [8, 9, 10, 11])})
    p.step(Orders(idle=True, finished=["a"]))
    run(p)
    d.until_received("b")
    p.until_sent("a")

    d.assert_holds("b", THEIRS, as_of="a")


def test_a_failed_forward_pass_ends_its_transfers_and_no_others(p: Side, d: Side) -> None:
    """The word of all steps stands right after it: layers of the next are not sent before their kernels."""
    load(d, p)
    load(d, p, "e", [5, 6, 8, 10], "other")
    p.step(Orders(offers=[offer("a", TOKENS), offer("c", TOKENS, "other")]))
    p.until_asked()
    p.until(lambda: p.was_asked("other"), "asked for the other")
    p.step(Orders(chunks=[WHOLE]), FILLED, failed=True)
    p.step(Orders(chunks=[Chunk("c", TOKENS, 0, (0, 2, 4, 5))]), {"c": (range(4), [0, 2, 4, 5])})
    p.step(Orders(idle=True, dropped=["a"], finished=["c"]))

    for _ in range(1 + LAYERS):
        run(p, 1)
    d.until_received("b")
    d.until_received("e")
    p.until_sent("c")

    assert d.results[0].failed == {"b"}
    d.assert_holds("e", [5, 6, 8, 10], as_of="c")


def test_a_layer_that_could_not_be_waited_for_ends_its_step_alone(p: Side, d: Side) -> None:
    """The layers behind it can be, and must not be counted for the next step."""
    load(d, p)
    load(d, p, "e", [5, 6, 8, 10], "other")
    p.step(Orders(offers=[offer("a", TOKENS), offer("c", TOKENS, "other")]))
    p.until_asked()
    p.until(lambda: p.was_asked("other"), "asked for the other")
    stream = p.stream
    assert stream is not None
    stream.error = "out of memory"
    p.step(Orders(chunks=[WHOLE]), FILLED, between=lambda: setattr(stream, "error", ""))
    p.step(Orders(chunks=[Chunk("c", TOKENS, 0, (0, 2, 4, 5))]), {"c": (range(4), [0, 2, 4, 5])})
    p.step(Orders(idle=True, dropped=["a"], finished=["c"]))

    for _ in range(2 * LAYERS):
        stream.run(1)
        p.step()
    d.until_received("b")
    d.until_received("e")

    assert d.results[0].failed == {"b"}
    d.assert_holds("e", [5, 6, 8, 10], as_of="c")


def test_a_gpu_that_fails_ends_what_waits_for_it(p: Side, d: Side, caplog: pytest.LogCaptureFixture) -> None:
    load(d, p)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()
    p.step(Orders(chunks=[WHOLE]), FILLED)
    assert p.stream is not None and d.stream is not None
    p.stream.fail("an illegal memory access was encountered")
    d.until_received("b")
    assert d.results[0].failed == {"b"}
    assert "the step of 1 prompts cannot be sent: the GPU failed: RuntimeError: an illegal memory" in caplog.text

    d.stream.fail("unspecified launch failure")
    d.load("e", p, TOKENS, [5, 6], transfer="other")
    d.until_received("e")
    assert d.results[0].failed == {"b", "e"}
    assert "unspecified launch failure" in caplog.text
    p.step(Orders(dropped=["a"]))
    p.until_sent("a")


def test_close_does_not_wait_for_a_gpu_that_hangs(p: Side, d: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it would have sent is not sent, whenever the kernels end."""
    monkeypatch.setattr(worker_side, "_JOIN_S", 0.2)
    load(d, p)
    p.step(Orders(offers=[offer("a", TOKENS)]))
    p.until_asked()
    p.step(Orders(chunks=[WHOLE]), FILLED)

    p.close()
    run(p)

    d.until_received("b")
    assert d.results[0].failed == {"b"}
    assert (d.caches[0] == 0xAB).all()


# --- the queue by itself ---


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    made = Kernels(Event)
    yield made
    made.close(WAIT_S)


def test_actions_follow_the_order_of_launches_whatever_events_do(kernels: Kernels) -> None:
    events = [Event() for _ in range(4)]
    called: list[tuple[int, str]] = []
    for i, event in enumerate(events):
        kernels.then(lambda why, i=i: called.append((i, why)), event)
    for event in reversed(events[1:]):
        event.done("no reason" if event is events[2] else "")
    with pytest.raises(xr.WaitTimeout, match=r"within 0\.05 s"):
        kernels.drain(0.05)
    assert not called

    events[0].done()
    kernels.drain(WAIT_S)

    assert called == [(0, ""), (1, ""), (2, "the GPU failed: RuntimeError: no reason"), (3, "")]


def test_an_action_that_fails_stops_no_other(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    called = []
    kernels.then(lambda _why: np.zeros(1)[5], None)
    kernels.then(called.append, None)
    kernels.drain(WAIT_S)

    assert called == [""]
    assert "IndexError" in caplog.text
