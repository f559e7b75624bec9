"""The functions of SGLang's KVManager, without importing SGLang: one rank's node, and the half that its mode needs."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

from crossrail import _ending
from crossrail.errors import CrossrailError, UsageError
from crossrail.integrations.instance import Instance
from crossrail.integrations.sglang import bootstrap, recompute
from crossrail.integrations.sglang.decode import DecodeSide
from crossrail.integrations.sglang.halves import Refused
from crossrail.integrations.sglang.memory import AuxRows, Model, read_pool
from crossrail.integrations.sglang.node import RankNode
from crossrail.integrations.sglang.options import OPTIONS_VARIABLE, SglangOptions
from crossrail.integrations.sglang.prefill import PrefillSide

log = logging.getLogger("crossrail.sglang")

_ASK_S = 5.0  # for a bootstrap server
_ANSWER_S = 1.0
# How long a scheduler waits for a prefiller's bootstrap server, once, and afterwards: nothing is decoded meanwhile.
_FIRST_S, _AGAIN_S = 0.25, 0.02
_FRESH_S = 5.0  # how old an answer of one may be
_MISSING_MAX = 256
_NAME_MAX = 64  # of an engine
RELEASED = "the KV cache's memory was released: POST /resume_memory_occupation to this server first"


class Place(NamedTuple):
    """A rank's place in its server. bootstrap: "host:port" of a prefiller's own, "": a decoder has none.

    rank, tp: of the attention. dp_rank, dp: of copies of it, or of its KV, each with ranks and requests of its own.
    http_port: where the server takes requests. sizes: by SGLang's flags, of the kinds of parallelism that crossrail
    supports only with size 1. model: what it serves.
    """

    rank: int
    tp: int
    bootstrap: str
    http_port: int
    sizes: dict[str, int]
    model: Model
    dp_rank: int = 0
    dp: int = 1

    @property
    def number(self) -> int:
        """Of this rank, of all that the server has."""
        return self.dp_rank * self.tp + self.rank


class PrefillInfo(NamedTuple):
    """What SGLang's scheduler needs to know of a prefiller that a decoder has found, and its identity.

    instances: by dp_rank. follow_bootstrap_room: the room says which one takes it, unless its router does.
    """

    instances: list[Instance]
    attn_tp_size: int
    page_size: int
    dp_size: int
    follow_bootstrap_room: bool = True


class _Search(NamedTuple):
    """Under way, or its answer is not read yet."""

    found: futures.Future[list[Instance]]
    begun_s: float


class Manager:
    """Threads: SGLang's scheduler's. Raises UsageError when it is made, for what cannot work."""

    def __init__(self, args: Any, mode: str, place: Place, is_mla: bool) -> None:
        options = SglangOptions.from_environment()
        secret = options.secret()
        for flag, size in place.sizes.items():
            if size != 1:
                raise UsageError(f"{flag}={size}: crossrail's backend supports only tensor and data parallelism")
        if getattr(args, "ib_device", None):
            raise UsageError(f"--disaggregation-ib-device={args.ib_device}: name rails in {OPTIONS_VARIABLE} instead")
        pool = read_pool(args, is_mla=is_mla, tp=place.tp, model=place.model)
        self.aux = AuxRows(args)
        self._place = place
        self._stopped = threading.Event()
        self._registering: threading.Thread | None = None
        # Which of many it is, in the logs of others; a name of DNS, so that a certificate can be for it.
        name = f"sglang-{mode}-{place.number}-{place.http_port}.{socket.gethostname()}"
        self.node = RankNode(name[:_NAME_MAX], place.rank, place.number, pool, options, secret)
        try:
            if mode == "prefill":
                self.prefiller = PrefillSide(self.node, self.aux)
                self._half: PrefillSide | DecodeSide = self.prefiller
            else:
                self.decoder = DecodeSide(self.node, self.aux)
                self._half = self.decoder
            self.node.call(self._half.start())
        except BaseException:
            self.node.close()
            raise
        self._info: dict[str, PrefillInfo] = {}
        self._missing: dict[str, str] = {}
        self._searches: dict[str, _Search] = {}

    def close(self) -> None:
        """Returns when nothing reads or writes SGLang's memory any more. Idempotent.

        Raises WaitTimeout, with all else closed, while a prefiller is frozen in the middle of a copy to here; so
        does a later call. After the interpreter's end, which closes the engine, it has nothing to do.
        """
        self._stopped.set()
        if _ending.is_over:
            return
        self._info.clear()
        for search in self._searches.values():
            search.found.cancel()
        self._searches.clear()
        if self._registering is not None:
            self._registering.join(_ASK_S + 1.0)
            self._registering = None
        if self.node._is_open:
            try:
                self.node.call(self._half.close())
            finally:
                self.node.close()
        elif isinstance(self._half, DecodeSide):
            self._half.shut_out()

    @property
    def is_open(self) -> bool:
        return self.node._is_open

    # ---- a prefiller

    def why_elsewhere(self, room: int) -> str:
        """Why no decoder asks this rank for that room, unless its router has told it to. Empty: it does."""
        place = self._place
        if room % place.dp == place.dp_rank:
            return ""
        return (
            f"room {room} came to rank {place.dp_rank} of {place.dp} of data parallelism, and its decoder asks rank "
            f"{room % place.dp}: a router that chooses the rank has to say disagg_prefill_dp_rank to both servers"
        )

    def register(self) -> None:
        """Tells the bootstrap server of this rank, again and again: also one that was restarted knows it then."""
        if self._registering is None:
            self._registering = threading.Thread(target=self._register, name="crossrail-register", daemon=True)
            self._registering.start()

    def _register(self) -> None:
        options = self.node.options
        place, lease_s = self._place, bootstrap.LEASE * options.register_s
        rank_line = bootstrap.RankLine(self.prefiller.worker, place.rank, place.tp, lease_s, place.dp_rank, place.dp)
        line = rank_line.to_line(self.node.secret)
        said = ""
        while not self._stopped.is_set():
            try:
                told = self.node.call(self._tell(line), _ASK_S + 1.0)
                self.node.soon(self.prefiller.refuse, told)
                level, now = logging.INFO, f"known to the bootstrap server at {self._place.bootstrap}"
            except CrossrailError as error:
                level, now = logging.WARNING, f"decoders cannot find it yet, retrying: {error}"
            if now != said and not self._stopped.is_set():
                log.log(level, "prefill rank %d: %s", self._place.number, now)
            said = now
            self._stopped.wait(options.register_s)

    async def _tell(self, line: str) -> list[Refused]:
        overdue = self.prefiller.overdue()
        return await bootstrap.register(self._place.bootstrap, line, self.node.secret, _ASK_S, overdue)

    # ---- a decoder

    @property
    def info(self) -> dict[str, PrefillInfo]:
        """Prefillers that were found, by the address of their bootstrap server.

        SGLang looks several times in one pass over its requests, and does not expect one to disappear in between. So
        prefillers that are gone are removed only by forget_if_gone(), before it looks for a request.
        """
        return self._info

    def forget_if_gone(self, address: str) -> None:
        """Forgets the prefiller there if it has ended since it was found: the next look finds its successor."""
        known = self._info.get(address)
        if known is not None and any(self._is_gone(instance) for instance in known.instances):
            del self._info[address]

    def has_heads_of_rank_0(self, address: str) -> bool:
        """Whether this rank keeps the same of a token as rank 0 of the prefiller there; False if that is not known."""
        known = self._info.get(address)
        if known is None:
            return False
        theirs = known.instances[0].layout
        return self.node.pool.layout_beside(theirs).heads_of(self._place.rank) == theirs.heads_of(0)

    def _is_gone(self, instance: Instance) -> bool:
        return any(self.node.wire.is_lost(worker.address) for worker in instance.workers)

    def find(self, address: str) -> bool:
        """True: the prefiller behind this address is known, perhaps since now.

        Its bootstrap server may be on a host that is dead, and nothing is decoded here while the scheduler waits. So it
        waits for a moment only; the search goes on, and SGLang, which asks again every second, has its end then.
        """
        self.forget_if_gone(address)
        if address in self._info:
            return True
        try:
            found = self._search(address)
        except CrossrailError as error:
            if self._missing.get(address) != str(error):  # SGLang asks again every second
                log.warning("no prefiller at %s, retrying: %s", address, error)
            self._missing[address] = str(error)
            if len(self._missing) > _MISSING_MAX:  # addresses come with requests
                self._missing.pop(next(iter(self._missing)))
            return False
        if found is None:
            return False
        self._missing.pop(address, None)
        layout = found[0].layout
        self._info[address] = PrefillInfo(found, layout.tp, layout.page_tokens, len(found))
        return True

    def _search(self, address: str) -> list[Instance] | None:
        """The prefiller there. None: not known yet. Raises CrossrailError if nobody answers."""
        if not self.is_open:
            raise bootstrap.NoInstance(RELEASED)
        now_s = time.monotonic()
        for other, search in list(self._searches.items()):
            if search.found.done() and now_s > search.begun_s + _FRESH_S + _ASK_S:
                del self._searches[other]  # nobody has asked for it since
        if address not in self._searches:
            # Missed before: while our engine tries it again it does not count as gone.
            work = self._ask_who_is_at(address, is_doubtful=address in self._missing)
            self._searches[address] = _Search(self.node.start(work), now_s)
        found = self._searches[address].found
        futures.wait([found], _AGAIN_S if address in self._missing else _FIRST_S)
        if not found.done():
            self._missing.setdefault(address, f"{address} has not answered yet")
            return None
        del self._searches[address]
        return found.result()

    async def _ask_who_is_at(self, address: str, *, is_doubtful: bool) -> list[Instance]:
        instances = await bootstrap.find_instances(address, self.node.secret, _ASK_S)
        doubtful = [instance for instance in instances if is_doubtful or self._is_gone(instance)]
        if not all(await asyncio.gather(*(self.decoder.answers(instance, _ANSWER_S) for instance in doubtful))):
            raise bootstrap.NoInstance("the prefill server that was there has ended, and no other has come yet")
        return instances

    def recompute(self, address: str, request: dict[str, Any], refuse: Callable[[str], None]) -> None:
        """Has the prefill server there compute KV again, by its bootstrap server; returns at once.

        Every rank's pages wait for it; rank 0 asks, once for all. refuse: takes, on the loop, why it was not computed;
        of a request that has its KV it changes nothing.
        """
        if self._place.rank:
            return
        self.node.soon(self.node.mailbox.spawn, self._recompute(address, request, refuse), f"recomputing at {address}")

    async def _recompute(self, address: str, request: dict[str, Any], refuse: Callable[[str], None]) -> None:
        secret = self.node.secret
        token, load_s = bootstrap.token(secret), self.node.options.load_s
        if why := await recompute.asked(address, request, secret, token, load_s):
            refuse(f"its KV was not computed again: {why}")

    def why_missing(self, address: str) -> str:
        """Why the prefiller behind this address was not found when last asked for. Empty: it was, or never was."""
        return self._missing.get(address, "")

    def forget(self, address: str, instance: Instance) -> None:
        """A request to it failed: the next one looks up again who is there."""
        known = self._info.get(address)
        if known is not None and any(one is instance for one in known.instances):
            del self._info[address]
