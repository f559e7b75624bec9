"""The scheduler's half, asked in the order in which vLLM asks."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crossrail.integrations.instance import Instance, Worker
from crossrail.integrations.vllm.caches import Window
from crossrail.integrations.vllm.orders import Chunk, Orders
from crossrail.integrations.vllm.scheduler import COMPLETE, SchedulerSide
from crossrail.kv import KvLayout

SECRET = b"secret"
LAYOUT = KvLayout(layers=2, pages=8, page_tokens=32, kv_heads=4, head_dim=64, dtype="float32", kind="PACKED")
INSTANCE = Instance("p", [Worker(b"address", LAYOUT.to_wire(), {})])
DECODE = {"do_remote_decode": True}
PREFILL = {"do_remote_prefill": True, "transfer_id": "t", "crossrail_instance": INSTANCE.to_line(SECRET)}


@dataclass
class Request:
    request_id: str
    kv_transfer_params: dict[str, Any] | None = None
    prompt_token_ids: list[int] = field(default_factory=lambda: list(range(100)))
    num_computed_tokens: int = 0
    max_tokens: int = 1
    arrival_time: float = 1.0
    status: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))
    abort_immediately: bool = False
    lora_request: Any = None
    mm_features: Any = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def ends(self, status: str, computed: int) -> "Request":
        self.status, self.num_computed_tokens = SimpleNamespace(name=status), computed
        return self


def scheduled(
    new: dict[str, tuple[int, int, list[int]]] | None = None,
    cached: dict[str, tuple[int, int, list[int] | None]] | None = None,
    resumed: set[str] | None = None,
    preempted: set[str] | None = None,
    has_sync_kv_loads: bool = False,
) -> Any:
    """Of each request: tokens computed before, tokens of this step, blocks that are new."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(n for _, n, _ in [*new.values(), *cached.values()]),
        num_scheduled_tokens={request: n for request, (_, n, _) in [*new.items(), *cached.items()]},
        preempted_req_ids=preempted,
        has_sync_kv_loads=has_sync_kv_loads,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request, num_computed_tokens=computed, block_ids=(blocks,))
            for request, (computed, _, blocks) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=resumed or set(),
            num_computed_tokens=[computed for computed, _, _ in cached.values()],
            new_block_ids=[None if blocks is None else (blocks,) for _, _, blocks in cached.values()],
        ),
    )


def side(produces: bool = True, consumes: bool = True, engine_id: str = "engine", **options: Any) -> SchedulerSide:
    made = SchedulerSide(produces=produces, consumes=consumes, engine_id=engine_id, secret=SECRET, **options)
    made.instance_known(INSTANCE)
    return made


# --- a producer ---


def test_a_prompt_in_chunks_is_offered_and_held() -> None:
    s = side()
    request = Request("r", DECODE)
    s.new_request(request)
    assert s.matched_tokens(request, 0) == (0, False)
    s.allocated(request, [5, 6], 0)

    first = s.step(scheduled(new={"r": (0, 64, [5, 6])}))
    second = s.step(scheduled(cached={"r": (64, 36, [9, 2])}))
    third = s.step(scheduled(cached={"r": (100, 1, None)}))
    delayed, told = s.finished(request.ends("FINISHED_LENGTH_CAPPED", 101))

    (offer,) = first.offers
    assert (offer.request, offer.transfer_id, offer.tokens) == ("r", "r", 100)
    assert np.frombuffer(offer.prompt, "<i4").tolist() == list(range(100))
    assert first.chunks == [Chunk("r", 64, 0, (5, 6))] and second.chunks == [Chunk("r", 100, 2, (9, 2))]
    assert not third.chunks and not third.offers
    assert delayed and told is not None and told["do_remote_prefill"] and told["remote_num_tokens"] == 100
    assert Instance.from_line(told["crossrail_instance"], SECRET) == INSTANCE
    assert s.has_pending_work
    assert s.step(scheduled()).finished == ["r"] and s.has_pending_work
    s.reported({"r"}, set())
    assert not s.has_pending_work


def test_what_another_connector_loads_within_a_step_is_not_sent_before_vllm_knows_that_it_came() -> None:
    """In a MultiConnector. If it has not come, vLLM computes the request again from there."""
    s = side()
    request, other = Request("r", DECODE), Request("other", DECODE)
    s.new_request(request)
    s.new_request(other)

    loaded = s.step(scheduled(new={"r": (64, 36, [5, 6, 9, 2])}, has_sync_kv_loads=True))
    again = s.step(scheduled(cached={"r": (32, 68, None)}, new={"other": (64, 36, [5, 6, 1, 3])}))
    delayed, told = s.finished(request.ends("FINISHED_LENGTH_CAPPED", 100))
    last = s.step(scheduled())

    assert loaded.chunks == [Chunk("r", 0, 0, (5, 6, 9, 2))]
    assert again.chunks == [Chunk("other", 0, 0, (5, 6, 1, 3)), Chunk("r", 0, 4, ())]
    assert delayed and told is not None
    assert (last.chunks, last.finished) == ([Chunk("r", 100, 4, ())], ["r"])


@pytest.mark.parametrize("status", COMPLETE)
def test_a_prompt_is_held_whatever_ended_what_was_generated(status: str) -> None:
    s = side()
    request = Request("r", DECODE, max_tokens=30)
    s.new_request(request)
    s.step(scheduled(new={"r": (0, 100, [5, 6, 7, 8])}))

    delayed, told = s.finished(request.ends(status, 110))

    assert delayed and told is not None and told["transfer_id"] == "r"
    assert s.step(scheduled()).finished == ["r"]


def test_preempted_and_resumed_it_has_other_blocks() -> None:
    s = side()
    s.new_request(Request("r", DECODE))
    s.step(scheduled(new={"r": (0, 64, [5, 6])}))

    taken = s.step(scheduled(preempted={"r", "of another"}))
    resumed = s.step(scheduled(cached={"r": (32, 68, [5, 7, 1, 0])}, resumed={"r"}))

    assert taken.preempted == ["r"]
    assert resumed.chunks == [Chunk("r", 100, 0, (5, 7, 1, 0))]


@pytest.mark.parametrize(("status", "computed"), [("FINISHED_ABORTED", 64), ("FINISHED_STOPPED", 64)])
def test_a_prompt_that_was_not_computed_is_dropped_and_its_blocks_are_kept_until_quiet(
    status: str, computed: int
) -> None:
    s = side()
    request = Request("r", DECODE)
    s.new_request(request)
    s.step(scheduled(new={"r": (0, 64, [5, 6])}))

    assert s.finished(request.ends(status, computed)) == (True, None)
    assert s.step(scheduled()).dropped == ["r"]


def test_preempted_and_aborted_before_the_next_step_its_blocks_are_taken_back_in_order() -> None:
    """As by reset_prefix_cache(reset_running_requests=True): its blocks are others' from this step on."""
    s = side()
    s.new_request(Request("r", DECODE))
    s.step(scheduled(new={"r": (0, 50, [1, 2])}))

    s.finished(Request("r").ends("FINISHED_ABORTED", 0))
    orders = s.step(scheduled(preempted={"r"}))

    assert (orders.preempted, orders.dropped) == (["r"], ["r"])


@pytest.mark.parametrize("transfer_id", [None, "xyz"])
def test_choices_of_one_request_are_one_transfer(transfer_id: str | None) -> None:
    """vLLM makes a request of each, and answers with the parameters of one: the others would be held for nobody."""
    s, params = side(), DECODE | {"transfer_id": transfer_id}
    names = ["0_r", "1_r", "2_r", "10_r"]
    requests = [Request(name, params) for name in names]
    for request in requests:
        s.new_request(request)
    orders = s.step(scheduled(new={name: (0, 100, [4 * i + j for j in range(4)]) for i, name in enumerate(names)}))
    ended = [s.finished(request.ends("FINISHED_LENGTH_CAPPED", 100)) for request in requests[:3]]
    aborted = s.finished(requests[3].ends("FINISHED_ABORTED", 40))

    assert [offer.request for offer in orders.offers] == ["0_r"] == [chunk.request for chunk in orders.chunks]
    assert [is_held for is_held, _ in ended] == [True, False, False] and aborted == (False, None)
    assert {told["transfer_id"] for _, told in ended if told} == {transfer_id or "0_r"}
    assert s.step(scheduled()).finished == ["0_r"]


def test_requests_that_are_only_named_alike_are_transfers_of_their_own() -> None:
    s = side()
    for name, arrival_time in (("0_r", 1.0), ("1_r", 2.0), ("1_q", 1.0), ("r", 1.0), ("x0_r", 1.0), ("0_", 1.0)):
        s.new_request(Request(name, DECODE, arrival_time=arrival_time))

    assert len(s.step(scheduled()).offers) == 6


def test_a_router_may_name_the_transfer() -> None:
    s = side()
    s.new_request(Request("r", DECODE | {"transfer_id": "of the router's"}))

    assert s.step(scheduled()).offers[0].transfer_id == "of the router's"


@pytest.mark.parametrize(("window", "max_tokens", "is_offered"), [(64, 1, True), (64, 2, False), (102, 2, True)])
def test_a_window_that_would_slide_past_what_is_offered(
    window: int, max_tokens: int, is_offered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    s = side(window=Window(window, 32))

    s.new_request(Request("r", DECODE, max_tokens=max_tokens))

    assert [offer.request for offer in s.step(scheduled()).offers] == ["r"] * is_offered
    assert is_offered or "sliding window of 64 tokens, and max_tokens is 2" in caplog.text


# --- a consumer ---


def wanting(s: SchedulerSide, **changes: Any) -> Request:
    request = Request("r", PREFILL | changes)
    s.new_request(request)
    return request


def test_a_prompt_is_fetched_behind_what_is_known() -> None:
    s = side()
    request = wanting(s)
    announced = s.step(scheduled())
    assert s.matched_tokens(request, 32) == (68, True)
    s.allocated(request, [4, 3, 2, 1], 68)
    assert s.matched_tokens(request, 32) == (0, False)
    s.allocated(request, [4, 3, 2, 1, 0], 0)  # vLLM's second call, for what it computes itself

    orders = s.step(scheduled())
    s.reported(set(), {"r"})

    assert [wanted.transfer_id for wanted in announced.wanted] == ["t"]
    (load,) = orders.loads
    assert (load.tokens, load.prefix_tokens, load.blocks) == (100, 32, (4, 3, 2, 1))
    assert load.wanted is not None and load.wanted.instance == INSTANCE
    assert not orders.releases
    assert s.matched_tokens(request, 0) == (0, False), "preempted later, it is computed here"
    assert s.finished(request.ends("FINISHED_STOPPED", 120)) == (False, None)
    assert s.step(scheduled()) == Orders(idle=True)


@pytest.mark.parametrize(("tokens", "is_fetched"), [(94, True), (95, False), (96, True), (126, True), (127, False)])
def test_a_prompt_whose_last_token_looks_at_a_block_that_is_given_away_is_computed(
    tokens: int, is_fetched: bool
) -> None:
    """vLLM computes the last token again, when the blocks that it looks at may be others' at both sides."""
    s = side(window=Window(64, 32))
    request = Request("r", PREFILL, list(range(tokens)))
    s.new_request(request)

    assert s.matched_tokens(request, 0) == ((tokens, True) if is_fetched else (0, False))

    s.allocated(request, [0, 4, 3, 2], tokens if is_fetched else 0)
    assert s.step(scheduled()).releases == ([] if is_fetched else ["r"])


def test_aborted_before_it_has_blocks_it_is_released_at_the_producer() -> None:
    s = side()
    request = wanting(s)
    s.step(scheduled())
    s.matched_tokens(request, 0)

    assert s.finished(request.ends("FINISHED_ABORTED", 0)) == (False, None)
    assert s.has_pending_work
    assert s.step(scheduled()).releases == ["r"]


@pytest.mark.parametrize("known", [{"remote_num_tokens": 100}, {}])
def test_refused_before_it_came_it_is_released_at_the_producer(known: dict[str, Any]) -> None:
    """vLLM then sends one token that it made up, and aborts it: the producer need not wait for its lease."""
    s = side()
    request = Request("r", PREFILL | known, [0], abort_immediately=True)
    s.new_request(request)
    assert s.finished(request.ends("FINISHED_ABORTED", 0)) == (False, None)
    assert s.has_pending_work
    orders = s.step(scheduled())
    assert [one.request for one in orders.wanted] == ["r"] and orders.releases == ["r"]


def test_refused_before_it_came_and_malformed_it_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    s = side()
    request = Request("r", {"do_remote_prefill": True}, [0], abort_immediately=True)
    s.new_request(request)
    assert s.finished(request.ends("FINISHED_ABORTED", 0)) == (False, None)
    assert not s.has_pending_work and not caplog.text


def test_aborted_while_it_is_fetched_it_is_cancelled() -> None:
    s = side()
    request = wanting(s)
    s.matched_tokens(request, 0)
    s.allocated(request, [4, 3, 2, 1], 100)
    s.step(scheduled())

    assert s.finished(request.ends("FINISHED_ABORTED", 0)) == (False, None)
    orders = s.step(scheduled())
    assert orders.cancels == ["r"] and not orders.releases


def test_what_vllm_computes_itself_after_all_is_released() -> None:
    s = side()
    request = wanting(s)
    s.matched_tokens(request, 0)
    s.allocated(request, [4, 3, 2, 1], 0)

    assert s.step(scheduled()).releases == ["r"]
    assert s.matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize("asked", [Request("first", PREFILL), Request("to be offered", DECODE), Request("plain")])
def test_who_holds_all_for_others_and_can_go_on_with_nothing_gives_one_request_up(asked: Request) -> None:
    """Else two instances that prefill for each other wait for each other's blocks for good."""
    now = [0.0]
    s = side(wait_s=10.0, clock=lambda: now[0])
    s.new_request(Request("held", DECODE))
    s.step(scheduled(new={"held": (0, 100, [1, 2, 3, 4])}))
    s.finished(Request("held").ends("FINISHED_LENGTH_CAPPED", 100))
    first, last = (Request(name, PREFILL | {"transfer_id": name}) for name in ("first", "last"))
    s.new_request(first)
    s.new_request(last)
    s.step(scheduled())
    s.step(scheduled(new={"another": (0, 1, [5])}))  # goes on: the time counts from its end

    given_up = []
    for now[0] in (9.0, 12.0, 18.9, 19.0, 28.9, 29.0):
        s.matched_tokens(asked, 0)  # vLLM has no blocks for it, and asks for none behind it
        given_up += [(now[0], name) for name in s.step(scheduled()).releases]

    assert given_up == [(19.0, "last"), (29.0, "first")]
    assert s.matched_tokens(last, 0) == (100, True)
    s.allocated(last, [9, 8, 7, 6], 100)
    (load,) = s.step(scheduled()).loads
    assert load.wanted is None and "no blocks were free here" in load.why
    assert s.finished(last.ends("FINISHED_ERROR", 0)) == (False, None)


def test_who_holds_nothing_or_loads_waits_on() -> None:
    now = [0.0]
    s = side(wait_s=10.0, clock=lambda: now[0])
    for name in ("loads", "waits"):
        s.new_request(Request(name, PREFILL | {"transfer_id": name}))
    orders = [s.step(scheduled())]
    now[0] = 100.0
    orders.append(s.step(scheduled()))  # nothing is held
    s.new_request(Request("held", DECODE))
    s.finished(Request("held").ends("FINISHED_ABORTED", 0))
    s.allocated(Request("loads"), [1, 2, 3, 4], 100)
    orders.append(s.step(scheduled()))
    now[0] = 200.0
    orders.append(s.step(scheduled()))

    assert [step.releases for step in orders] == [[]] * 4


def test_a_pause_is_no_deadlock() -> None:
    """Paused, as for an update of its weights, vLLM goes on with steps, but starts nothing: blocks may be free."""
    now = [0.0]
    s = side(wait_s=10.0, clock=lambda: now[0])
    s.new_request(Request("held", DECODE))
    s.finished(Request("held").ends("FINISHED_ABORTED", 0))
    waits = Request("waits", PREFILL)
    s.new_request(waits)
    s.matched_tokens(waits, 0)
    s.step(scheduled())

    for now[0] in (9.0, 19.0, 99.0):
        assert s.step(scheduled()).releases == []
    s.matched_tokens(waits, 0)
    assert s.step(scheduled()).releases == []  # from here on it waits for blocks


# --- several requests for one transfer: the choices of one with n > 1, or a router that tries again ---


def loads(s: SchedulerSide, request: Request, blocks: list[int]) -> Orders:
    """Its KV is being fetched into these."""
    count, _ = s.matched_tokens(request, 0)
    s.allocated(request, blocks, count or 0)
    return s.step(scheduled())


def test_one_choice_fetches_and_the_others_wait_for_it() -> None:
    s = side()
    choices = [Request(f"{i}_r", PREFILL) for i in range(3)]
    for choice in choices:
        s.new_request(choice)
    first, second, _ = choices
    assert [s.matched_tokens(choice, 0) for choice in choices[1:]] == [(None, False)] * 2
    orders = loads(s, first, [4, 3, 2, 1])
    assert s.matched_tokens(second, 0) == (None, False)

    s.reported(set(), {"0_r"})

    assert [one.request for one in orders.wanted] == ["0_r"] == [load.request for load in orders.loads]
    assert [s.matched_tokens(choice, 96) for choice in choices] == [(0, False)] * 3
    for choice in choices:
        s.allocated(choice, [4, 3, 2, 5], 0)
        assert s.finished(choice.ends("FINISHED_STOPPED", 120)) == (False, None)
    assert s.step(scheduled()) == Orders(idle=True)


def test_choices_of_a_prompt_of_embeddings_are_one_fetch_too() -> None:
    s = side()
    for name in ("0_d", "1_d"):
        s.new_request(Request(name, PREFILL, []))

    assert [wanted.request for wanted in s.step(scheduled()).wanted] == ["0_d"]
    assert s.matched_tokens(Request("1_d", PREFILL, []), 0) == (None, False)


def test_who_comes_when_it_was_fetched_takes_what_is_here() -> None:
    s = side()
    loads(s, wanting(s), [4, 3, 2, 1])
    s.reported(set(), {"r"})
    late = Request("late", PREFILL)
    s.new_request(late)

    assert s.matched_tokens(late, 64) == (0, False)
    assert s.step(scheduled()) == Orders(idle=True)


def test_one_whose_fetch_failed_leaves_it_to_the_next() -> None:
    s = side()
    first, second = Request("first", PREFILL), Request("second", PREFILL)
    s.new_request(first)
    s.new_request(second)
    loads(s, first, [4, 3, 2, 1])
    assert s.matched_tokens(second, 0) == (None, False)
    s.reported(set(), {"first"}, {"first"})

    orders = loads(s, second, [5, 6, 7, 8])

    assert [one.request for one in orders.wanted] == ["second"] == [load.request for load in orders.loads]


@pytest.mark.parametrize("is_loading", [False, True])
def test_one_that_is_aborted_leaves_it_to_the_next(is_loading: bool) -> None:
    s = side()
    first, second = Request("first", PREFILL), Request("second", PREFILL)
    s.new_request(first)
    s.new_request(second)
    if is_loading:
        loads(s, first, [4, 3, 2, 1])
    s.finished(first.ends("FINISHED_ABORTED", 0))

    assert s.matched_tokens(second, 0) == (100, True)
    s.reported(set(), {"first"})  # as every load is, also a cancelled one
    assert s.matched_tokens(second, 0) == (100, True)


def test_one_of_the_others_that_is_aborted_concerns_nobody() -> None:
    s = side()
    first, second = Request("first", PREFILL), Request("second", PREFILL)
    s.new_request(first)
    s.new_request(second)
    s.step(scheduled())

    assert s.finished(second.ends("FINISHED_ABORTED", 0)) == (False, None)

    assert s.step(scheduled()) == Orders(idle=True)
    assert s.matched_tokens(first, 0) == (100, True)


def test_other_prompts_and_other_producers_are_other_fetches() -> None:
    s = side()
    restarted = Instance("p", [Worker(b"another", LAYOUT.to_wire(), {})]).to_line(SECRET)
    requests = [
        Request("r", PREFILL),
        Request("of another prompt", PREFILL, list(range(1, 101))),
        Request("of another producer", PREFILL | {"crossrail_instance": restarted}),
        Request("of embeddings", PREFILL, []),
    ]
    for request in requests:
        s.new_request(request)

    assert [one.request for one in s.step(scheduled()).wanted] == [request.request_id for request in requests]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"crossrail_instance": INSTANCE.to_line(b"another")}, "not sealed with our secret"),
        ({"crossrail_instance": None}, "needs transfer_id and crossrail_instance"),
        ({"transfer_id": 7}, "transfer_id"),
        ({"remote_num_tokens": 99}, "99 tokens were prefilled there, the prompt has 100"),
    ],
)
def test_what_cannot_be_fetched_fails_as_a_load(changes: dict[str, Any], why: str) -> None:
    """So vLLM's policy decides whether it fails or is computed here; nothing that clients send raises."""
    s = side()
    request = wanting(s, **changes)

    assert s.matched_tokens(request, 0) == (100, True)
    s.allocated(request, [4, 3, 2, 1], 100)
    orders = s.step(scheduled())
    assert orders.loads[0].wanted is None and why in orders.loads[0].why
    assert not orders.wanted
    assert s.finished(request.ends("FINISHED_ERROR", 0)) == (False, None)


def test_roles_are_kept() -> None:
    consumer, producer = side(produces=False), side(consumes=False)
    consumer.new_request(Request("r", DECODE))
    request = wanting(producer)

    assert consumer.finished(Request("r", DECODE).ends("FINISHED_LENGTH_CAPPED", 100)) == (False, None)
    assert consumer.step(scheduled(new={"r": (0, 100, [1])})) == Orders()
    assert producer.matched_tokens(request, 0) == (100, True)
    producer.allocated(request, [1], 100)
    assert "kv_producer" in producer.step(scheduled()).loads[0].why


def test_prompts_of_another_adapter_are_other_prompts() -> None:
    s = side()
    for adapter in (None, "one", "two"):
        lora = None if adapter is None else SimpleNamespace(lora_name=adapter, lora_int_id=1, lora_path="a hub's")
        if lora is not None:
            lora.load_inplace = False
        s.new_request(Request(f"p {adapter}", DECODE, lora_request=lora))
        fetches = Request(f"d {adapter}", PREFILL, lora_request=lora)
        s.new_request(fetches)
        s.allocated(fetches, [1, 2, 3, 4], s.matched_tokens(fetches, 0)[0])

    orders = s.step(scheduled())

    prompts = [offer.prompt for offer in orders.offers]
    assert len(set(prompts)) == 3 and prompts == [load.prompt for load in orders.loads]


def test_the_same_words_with_other_images_are_other_prompts() -> None:
    s = side(hasher=b"h" * 16)
    for name in ("cat", "dog"):
        place = SimpleNamespace(offset=3, length=16)
        images = [SimpleNamespace(mm_hash=name, identifier=name, mm_position=place)]
        s.new_request(Request(f"p {name}", DECODE, mm_features=images))
        fetches = Request(f"d {name}", PREFILL, mm_features=images)
        s.new_request(fetches)
        s.allocated(fetches, [1, 2, 3, 4], s.matched_tokens(fetches, 0)[0])

    orders = s.step(scheduled())

    prompts = [offer.prompt for offer in orders.offers]
    assert len(set(prompts)) == 2 and prompts == [load.prompt for load in orders.loads]


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": "?"}, {"remote_block_ids": [[1]]}])
def test_other_requests_are_nobody_elses_business(params: dict[str, Any] | None) -> None:
    s = side()
    request = Request("r", params)
    s.new_request(request)

    assert s.matched_tokens(request, 0) == (0, False)
    s.allocated(request, [1, 2], 0)
    assert s.step(scheduled(new={"r": (0, 100, [1, 2])})) == Orders()
    assert s.finished(request.ends("FINISHED_STOPPED", 110)) == (False, None)
    assert not s.has_pending_work
