"""The half of the connector inside vLLM's scheduler: it knows requests and blocks, and touches no memory.

vLLM asks it about each request in a fixed order, and hands what it answers to the workers as this step's Orders.

Life of a request at a producer:   offered (arrived) -> finished, or dropped -> reported by the workers.
Life of a request at a consumer:   wanted (arrived) -> loading (has blocks) -> loaded, by itself or reported; or
                                   released, when it ends before it has blocks. One that wants what another request
                                   fetches waits for that one before it is any of these (fetches.py).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from crossrail._latest import Latest
from crossrail.errors import UsageError
from crossrail.integrations.instance import Instance
from crossrail.integrations.vllm.adapters import Adapters
from crossrail.integrations.vllm.caches import Window
from crossrail.integrations.vllm.fetches import Fetches
from crossrail.integrations.vllm.handoff import Parameters, reply, transfer_id_of
from crossrail.integrations.vllm.orders import Chunk, Load, Offer, Orders, Wanted
from crossrail.integrations.vllm.prompts import prompt_of
from crossrail.integrations.vllm.replicas import Replicas, is_replica

log = logging.getLogger("crossrail.vllm")

# Statuses of requests that generated what they were to: vLLM ended them, and has all that it computed.
COMPLETE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
_CHOICE = re.compile(r"(\d+)_(.+)", re.DOTALL)  # how vLLM names what it makes of a request with n > 1
_REMEMBERED = 4096  # requests with n > 1
_CHOICES = 64  # of those, the latest that replicas hear of that were not known


class Request(Protocol):
    """The parts of vLLM's Request that are used."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    arrival_time: float
    max_tokens: int
    lora_request: Any
    status: Any


@dataclass
class _Offered:
    """choices: of a request of which other replicas may have choices, all with this transfer_id.

    blocks: that the workers know. said: tokens that they take for computed.
    """

    transfer_id: str
    tokens: int
    choices: bool = False
    blocks: int = 0
    said: int = 0


@dataclass
class _Wanted:
    """wanted None: it cannot be fetched. computed_tokens: found here when vLLM asked last."""

    wanted: Wanted | None
    why: str = ""
    computed_tokens: int = 0
    is_loading: bool = False


class SchedulerSide:
    """Threads: the scheduler's, one.

    produces, consumes: what kv_role allows. Nothing that a client sends raises: what cannot be fetched fails as a load,
    and vLLM's kv_load_failure_policy decides what that means.
    window: of the model; None: it has none. hasher: as of prompts.hasher_of().
    wait_s: how long requests wait for blocks while nothing else is done here; then one of them is given up.
    """

    def __init__(
        self,
        *,
        produces: bool,
        consumes: bool,
        engine_id: str,
        secret: bytes,
        window: Window | None = None,
        hasher: bytes = b"",
        wait_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._produces = produces
        self._consumes = consumes
        self._engine_id = engine_id
        self._secret = secret
        self._window = window
        self._hasher = hasher
        self._adapters = Adapters()
        self._wait_s = wait_s
        self._clock = clock
        self._still_since_s: float | None = None
        self._has_asked = False  # vLLM, in this step, about a request that waits: it would start one
        self._line = ""
        self._tp = 0
        self._loads_in_steps = False
        self._orders = Orders()
        self._was_reset = False  # the cache, since the last step
        self._offered: dict[str, _Offered] = {}
        self._first_choices: Latest[tuple[str, float], _Offered] = Latest(_REMEMBERED)
        self._other_choices: dict[str, _Offered] = {}  # by request, what the first of its kind has offered
        self._held: set[str] = set()  # finished or dropped, not reported yet
        self._wanted: dict[str, _Wanted] = {}
        self._fetches = Fetches()
        self._replicas = Replicas()
        self._fetched_choices: Latest[str, Wanted] = Latest(_CHOICES)  # by transfer, from one of several replicas

    def instance_known(self, instance: Instance) -> str:
        """The workers are up. Returns the line that describes them to others."""
        self._line, self._tp = instance.to_line(self._secret), instance.layout.tp
        return self._line

    # ---- a request comes

    def new_request(self, request: Request) -> None:
        """Before anything else of it."""
        try:
            parameters = Parameters.of(request.kv_transfer_params)
        except UsageError as error:
            self._refuse(request, str(error))
            return
        if parameters.do_remote_decode:
            self._offer(request, parameters)
        if not parameters.do_remote_prefill:
            return
        assert parameters.transfer_id is not None
        assert parameters.crossrail_instance is not None
        tokens = parameters.remote_num_tokens
        try:
            if not self._consumes:
                raise UsageError("this instance has kv_role kv_producer: it fetches nothing")
            if tokens is not None and tokens != request.num_prompt_tokens and not _was_rejected(request):
                raise UsageError(f"{tokens} tokens were prefilled there, the prompt has {request.num_prompt_tokens}")
            instance = Instance.from_line(parameters.crossrail_instance, self._secret)
        except UsageError as error:
            self._refuse(request, str(error))
            return
        wanted = Wanted(request.request_id, parameters.transfer_id, instance)
        if self._replicas.see(instance):
            self._let_go_at(wanted)
        if self._fetches.begin(wanted, self._prompt_of(request), self._may_fetch(request.request_id)):
            self._want(wanted)
            if parameters.crossrail_choices:
                self._fetched_choices[wanted.transfer_id] = wanted
                for replica in self._replicas.others(instance):
                    self._let_go(wanted, replica)

    def _prompt_of(self, request: Request) -> bytes:
        return prompt_of(request, self._hasher, self._adapters.digest_of(request.lora_request))

    def _may_fetch(self, request: str) -> bool:
        """Not if it is one of several choices, and vLLM has given the first one, which fetches, to another replica."""
        choice = _CHOICE.fullmatch(request)
        return choice is None or choice[1] == "0" or not is_replica(self._engine_id)

    def _want(self, wanted: Wanted) -> None:
        self._wanted[wanted.request] = _Wanted(wanted)
        self._orders.wanted.append(wanted)

    def _let_go(self, wanted: Wanted, replica: Instance) -> None:
        """A producer's other replicas hold the same prompt, for choices of its own, and learn from nobody else that it
        is fetched here.
        """
        name = f"{wanted.request} at {replica.name}"
        self._orders.wanted.append(Wanted(name, wanted.transfer_id, replica))
        self._orders.releases.append(name)

    def _let_go_at(self, first: Wanted) -> None:
        """A replica is first heard of: it still holds, until its lease ends, what was fetched from others before."""
        for wanted in self._fetched_choices.values():
            others = {replica.name for replica in self._replicas.others(wanted.instance)}
            if first.instance.name in others and wanted.transfer_id != first.transfer_id:
                self._let_go(wanted, first.instance)

    def _offer(self, request: Request, parameters: Parameters) -> None:
        if not self._produces:
            self._refuse(request, "this instance has kv_role kv_consumer, and keeps no KV for others")
            return
        choice_of = _CHOICE.fullmatch(request.request_id)
        # vLLM answers for all choices at once, and so with one transfer: the others' KV would be held for nobody.
        choices = (choice_of[2], request.arrival_time) if choice_of else None
        if choices is not None and choices in self._first_choices:
            self._other_choices[request.request_id] = self._first_choices[choices]
            return
        is_dealt = choice_of is not None and is_replica(self._engine_id)
        own_name = choice_of[2] if choice_of and is_dealt else request.request_id
        transfer_id = parameters.transfer_id or transfer_id_of(own_name)
        tokens = request.num_prompt_tokens
        if self._window is not None and request.max_tokens > 1 and tokens + request.max_tokens > self._window.tokens:
            # While it generates, vLLM gives blocks that its window has left to others: the decoder still needs them.
            self._refuse(
                request,
                f"the model has a sliding window of {self._window.tokens} tokens, and max_tokens is "
                f"{request.max_tokens}: what is prefilled for others must have max_tokens 1",
            )
            return
        offered = self._offered[request.request_id] = _Offered(transfer_id, tokens, is_dealt)
        if choices is not None:
            self._first_choices[choices] = offered
        self._orders.offers.append(Offer(request.request_id, transfer_id, tokens, self._prompt_of(request)))

    def _refuse(self, request: Request, why: str) -> None:
        if _was_rejected(request):
            return
        log.error("request %s cannot be handed over: %s", request.request_id, why)
        # A request to be prefilled for others is prefilled, but nobody is told where.
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self._wanted[request.request_id] = _Wanted(None, why)

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind those can be fetched, and whether that takes time. None: vLLM is to ask later."""
        self._has_asked = True
        if self._fetches.waits(request.request_id):
            return None, False
        if self._fetches.is_other(request.request_id):
            self._go_on(request.request_id)
        wanted = self._wanted.get(request.request_id)
        missing = request.num_prompt_tokens - computed_tokens
        if wanted is None or wanted.is_loading or missing <= 0:
            return 0, False
        if wanted.wanted is not None and not self._has_window_of(request.num_prompt_tokens):
            return 0, False
        wanted.computed_tokens = computed_tokens
        return missing, True

    def _has_window_of(self, tokens: int) -> bool:
        """Whether all that a prompt's last token looks at can be fetched.

        vLLM computes it again after a load, and both sides have given away by then what the token behind it does not
        look at: a block too many, where their windows begin in different blocks.
        """
        return self._window is None or self._window.has_left(tokens) == self._window.has_left(tokens - 1)

    def _go_on(self, request: str) -> None:
        if wanted := self._fetches.go_on(request):
            self._want(wanted)
        else:
            log.info("request %s: its KV was fetched for another request; what the cache lacks is computed", request)

    def allocated(self, request: Request, blocks: Collection[int], external_tokens: int) -> None:
        """It has blocks for external_tokens that it fetches; 0: it fetches nothing, now or later."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.is_loading:
            return
        if not external_tokens:
            # A window's decision, or vLLM's: for example, it reads no prefix for requests with logprobs of the prompt.
            log.info("request %s is computed here, and its KV not fetched", request.request_id)
            self._release(request.request_id)
            return
        wanted.is_loading = True
        self._orders.loads.append(
            Load(
                request=request.request_id,
                wanted=wanted.wanted,
                why=wanted.why,
                tokens=wanted.computed_tokens + external_tokens,
                prefix_tokens=wanted.computed_tokens,
                blocks=tuple(blocks),
                prompt=self._prompt_of(request),
            )
        )

    # ---- a step

    def reset_cache(self) -> None:
        """What was computed so far may be of other weights. Prompts that have been preempted are begun anew."""
        self._was_reset = True

    def step(self, scheduled: Any) -> Orders:
        """This step's orders, from vLLM's SchedulerOutput."""
        orders, self._orders = self._orders, Orders()
        orders.idle = not scheduled.total_num_scheduled_tokens
        if scheduled.has_sync_kv_loads and not self._loads_in_steps:
            log.info("another connector loads KV within steps: prompts are sent when they are finished, not before")
            self._loads_in_steps = True
        for request in scheduled.preempted_req_ids or ():
            if request in self._offered:
                self._offered[request].blocks = self._offered[request].said = 0
            if request in self._offered or request in self._held:  # it may have been aborted right after
                orders.preempted.append(request)
        if self._was_reset:
            orders.stale = [request for request, offered in self._offered.items() if not offered.blocks]
            self._was_reset = False
        for new in scheduled.scheduled_new_reqs:
            self._chunk(scheduled, new.req_id, new.num_computed_tokens, new.block_ids, True, orders)
        cached = scheduled.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            whole = request in cached.resumed_req_ids
            self._chunk(scheduled, request, cached.num_computed_tokens[i], cached.new_block_ids[i], whole, orders)
        self._break_deadlock(orders)
        return orders

    def _break_deadlock(self, orders: Orders) -> None:
        """Two instances that prefill for each other may hold all their blocks for requests that wait for blocks at the
        other one: a deadlock, since both say that they are still going to come. Giving one up lets the other instance
        continue.
        """
        waiting = [name for name, wanted in self._wanted.items() if wanted.wanted is not None and not wanted.is_loading]
        loads = any(wanted.is_loading for wanted in self._wanted.values())
        has_asked, self._has_asked = self._has_asked, False  # it does not while it is paused, whatever is free
        if not (orders.idle and has_asked and waiting and self._held) or loads:
            self._still_since_s = None
            return
        now_s = self._clock()
        since_s = now_s if self._still_since_s is None else self._still_since_s
        if now_s - since_s < self._wait_s:
            self._still_since_s = since_s
            return
        self._still_since_s = now_s
        why = f"for {self._wait_s:g} s no blocks were free here: they are held for prompts that others are to fetch"
        log.error("request %s is given up: %s", waiting[-1], why)
        orders.releases.append(waiting[-1])
        self._wanted[waiting[-1]] = _Wanted(None, why)

    def _chunk(
        self,
        scheduled: Any,
        request: str,
        computed: int,
        groups: tuple[list[int], ...] | None,
        whole: bool,
        orders: Orders,
    ) -> None:
        offered = self._offered.get(request)
        if offered is None:
            return
        if whole:
            offered.blocks = 0
        blocks = tuple(groups[0]) if groups else ()
        if not self._loads_in_steps:  # otherwise vLLM may find afterwards that what the step reads had not come
            offered.said = min(computed + scheduled.num_scheduled_tokens[request], offered.tokens)
        if blocks or computed < offered.tokens:
            orders.chunks.append(Chunk(request, offered.said, offered.blocks, blocks))
        offered.blocks += len(blocks)

    # ---- a request goes

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks must be kept until a worker reports it, and the parameters for the client."""
        request_id = request.request_id
        self._fetches.end(request_id)
        wanted = self._wanted.pop(request_id, None)
        if wanted is not None and wanted.is_loading:
            self._orders.cancels.append(request_id)  # does nothing when it was loaded
        elif wanted is not None and wanted.wanted is not None:
            self._orders.releases.append(request_id)
        own, others = self._offered.pop(request_id, None), self._other_choices.pop(request_id, None)
        offered = own or others
        if offered is None:
            return False, None
        is_complete = request.status.name in COMPLETE and request.num_computed_tokens >= offered.tokens
        if own is not None:
            self._held.add(request_id)
            if is_complete and own.said < own.tokens:
                self._orders.chunks.append(Chunk(request_id, own.tokens, own.blocks, ()))
            (self._orders.finished if is_complete else self._orders.dropped).append(request_id)
        if not is_complete:
            return own is not None, None
        told = reply(offered.transfer_id, self._line, self._engine_id, request_id, offered.tokens, self._tp)
        return own is not None, told | ({"crossrail_choices": True} if offered.choices else {})

    def reported(self, sent: Collection[str], received: Collection[str], failed: Collection[str] = ()) -> None:
        """Handles the workers' reports. failed: those of the received whose KV is not all here."""
        self._held.difference_update(sent)
        for request in received:
            ended = self._wanted.pop(request, None)
            self._fetches.end(request, fetched=ended is not None and request not in failed)

    @property
    def has_pending_work(self) -> bool:
        """True while workers must still be called although nothing is scheduled."""
        orders = self._orders
        return bool(self._held or orders.releases or orders.cancels or orders.finished or orders.dropped)

    def _release(self, request: str) -> None:
        wanted = self._wanted.pop(request)
        self._fetches.end(request)
        if wanted.wanted is not None:
            self._orders.releases.append(request)


def _was_rejected(request: Request) -> bool:
    """Before vLLM's engine had it. It comes, with a token that vLLM made up, so that its producer may hear of it."""
    return bool(getattr(request, "abort_immediately", False))  # vLLM 0.32 has it; versions without send no such
