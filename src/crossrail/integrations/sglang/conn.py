"""The four classes that SGLang expects of a transfer backend. Written against SGLang 0.5.23.

Of SGLang they have the base classes alone, not its CommonKVManager, whose control messages nobody seals. What SGLang's
schedulers ask beside the base classes' methods is here too.

SGLang takes the smallest poll of all ranks, so a rank may have to take pages back because another one failed. What
takes pages back waits until nothing touches them any more, or ends the scheduler (node.PagesNotQuiet).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVArgs,
    KVPoll,
    KVTransferDestination,
    KVTransferMetric,
)
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving, process_model_config

from crossrail.errors import CrossrailError, UsageError
from crossrail.integrations.instance import cache_scheme, model_digest
from crossrail.integrations.sglang.bootstrap import BootstrapServer
from crossrail.integrations.sglang.decode import Pull
from crossrail.integrations.sglang.front import hook_front
from crossrail.integrations.sglang.hooks import hook_around
from crossrail.integrations.sglang.manager import RELEASED, Manager, Place, PrefillInfo
from crossrail.integrations.sglang.memory import Model, is_gpu_address
from crossrail.integrations.sglang.options import SglangOptions
from crossrail.integrations.sglang.prefill import Room
from crossrail.integrations.sglang.prompts import Adapters, Prompt, watch_queue
from crossrail.integrations.sglang.recompute import OwnServer, refused, why_not
from crossrail.integrations.sglang.state import Poll, Progress, unusable_room

log = logging.getLogger("crossrail.sglang")

# SGLang's names and flags for the kinds of parallelism that crossrail supports only with size 1.
_PARALLELISM = {
    "pp_size": "--pp-size",
    "attn_cp_size": "--attn-cp-size",
    "attn_dcp_size": "--dcp-size",
}
# Entries of a model's config that change its KV and not the KV's shape, which is compared anyway. No others: SGLang
# writes its flags into configs, such as --context-length, and on CPUs heads by TP; and weights that are quantized in
# another way are of the same model.
_KV_DEPENDS_ON = re.compile(
    "model_type|hidden_size|hidden_act|vocab_size|layer_types|rope|rotary|eps$|bias|sliding|window|expert|norm|scal|"
    "multiplier|softcap|lora_rank"
)
_MODELOPT_FILE = "hf_quant_config.json"
_FORCE_QUERY = "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK"
_FOLLOW = "follow_bootstrap_room"
_POLLS = {
    Poll.FAILED: KVPoll.Failed,
    Poll.BOOTSTRAPPING: KVPoll.Bootstrapping,
    Poll.WAITING_FOR_INPUT: KVPoll.WaitingForInput,
    Poll.TRANSFERRING: KVPoll.Transferring,
    Poll.SUCCESS: KVPoll.Success,
}


class CrossrailTransferError(CrossrailError):
    """A request's transfer failed. Its fields have the names that SGLang's schedulers look for."""

    def __init__(self, bootstrap_room: int | None, failure_reason: str, is_from_another_rank: bool) -> None:
        super().__init__(f"room {bootstrap_room}: {failure_reason}")
        self.bootstrap_room = bootstrap_room
        self.failure_reason = failure_reason
        self.is_from_another_rank = is_from_another_rank


def _check_for_cpu(mode: str, server_args: Any) -> None:
    """Raises UsageError for what SGLang does on a GPU alone, so that a server would end at its first request."""
    if mode == "prefill" and not getattr(server_args, "disable_overlap_schedule", True):
        raise UsageError(
            "--disable-overlap-schedule is missing: SGLang's overlapped prefill uses CUDA events, and on a CPU it "
            "would end at the first request"
        )
    if getattr(server_args, "disaggregation_enable_kv_checksum", False):
        raise UsageError(
            "--disaggregation-enable-kv-checksum must not be set: SGLang computes checksums of KV by CUDA, and on a "
            "CPU it would end at the first request"
        )


def payload_of(original: Callable[[Any], dict[str, Any]], request: Any) -> dict[str, Any]:
    """Req.build_rebootstrap_payload, for requests of which it leaves out what their KV depends on, too."""
    why = why_not(request)
    return refused(original(request), why) if why else original(request)


def place_of(mode: str, server_args: Any = None) -> Place:
    """This process's place according to SGLang."""
    parallel = get_parallel()
    bootstrap = ""
    if mode == "prefill":
        host = (parallel.dist_init_addr or "").rpartition(":")[0] or get_serving().host
        bootstrap = f"{_host_to_ask(host)}:{get_disagg().disaggregation_bootstrap_port}"
    dp_rank, dp = _copy_of(mode, parallel)
    if get_disagg().disaggregation_decode_allocation_policy != "early":
        raise UsageError("--disaggregation-decode-allocation-policy must be early: crossrail supports no other")
    return Place(
        parallel.attn_tp_rank,
        parallel.attn_tp_size,
        bootstrap,
        get_serving().port,
        {flag: getattr(parallel, name) or 1 for name, flag in _PARALLELISM.items()},
        _model(server_args),
        dp_rank,
        dp,
    )


def _copy_of(mode: str, parallel: Any) -> tuple[int, int]:
    """Which of how many: replicas, or parts of a DP attention; SGLang has one kind at a time.

    Raises UsageError where a decoder could not know which of them has a room.
    """
    if os.environ.get(_FORCE_QUERY, "").strip().lower() in ("1", "true", "yes", "y"):
        raise UsageError(
            f"{_FORCE_QUERY} must not be set: crossrail finds a room's rank of data parallelism by its number"
        )
    replicas, parts = parallel.dp_size or 1, parallel.attn_dp_size or 1
    if replicas * parts == 1:
        return 0, 1
    if mode == "prefill" and parallel.load_balance_method != _FOLLOW:
        raise UsageError(
            f"--load-balance-method={parallel.load_balance_method} must be {_FOLLOW}, or unset: a decode server knows "
            "by a room's number which rank of data parallelism has it"
        )
    return (parallel.attn_dp_rank, parts) if parts > 1 else (parallel.dp_rank or 0, replicas)


def _host_to_ask(host: str) -> str:
    """Of a server on this host, by where it listens; for a URL."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def own_server() -> OwnServer:
    """SGLang's server in this process, by its flags."""
    serving = get_serving()
    scheme = "https" if serving.ssl_certfile else "http"
    return OwnServer(f"{scheme}://{_host_to_ask(serving.host or '')}:{serving.port}", serving.api_key)


def _model(server_args: Any) -> Model:
    """Raises UsageError for files of scales, and of quantization, that cannot be read."""
    config, scales = process_model_config(), ""
    if path := getattr(server_args, "quantization_param_path", None):
        try:
            scales = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise UsageError(f"--quantization-param-path={path}: {error}") from None
    entries = config.hf_text_config.to_dict()
    digest = model_digest({name: value for name, value in entries.items() if _KV_DEPENDS_ON.search(name)})
    scheme = cache_scheme(_modelopt_config(config), entries, config.hf_config.to_dict())  # the last: not of text alone
    return Model(digest, str(config.dtype).removeprefix("torch."), scales, scheme)


def _modelopt_config(config: Any) -> dict[str, Any]:
    """The file beside config.json that some quantized checkpoints have instead, as if it were there."""
    folder = Path(config.model_path)
    if folder.exists():
        path = folder / _MODELOPT_FILE
        if not path.is_file():
            return {}
    else:  # the name of one at a hub: SGLang has got the file by now, if there is one
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(config.model_path, _MODELOPT_FILE, revision=config.revision)
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    try:
        return {"quantization_config": msgspec.json.decode(path.read_bytes(), type=dict[str, Any])}
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path}: {error}") from None


class CrossrailKVManager(BaseKVManager):
    """One per scheduler. Raises UsageError for what cannot work. close() is for tests: SGLang never takes one down."""

    def __init__(
        self, args: KVArgs, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self.disaggregation_mode = disaggregation_mode
        self.server_args = server_args
        self.is_mla_backend = bool(is_mla_backend)
        mode = disaggregation_mode.value
        if mode not in ("prefill", "decode"):
            raise UsageError(f"disaggregation_mode={mode!r}: a transfer backend is for 'prefill' or 'decode'")
        if not is_gpu_address(next(iter(args.kv_data_ptrs), 0)):
            _check_for_cpu(mode, server_args)
        if (workers := getattr(server_args, "tokenizer_worker_num", 1)) > 1:
            raise UsageError(
                f"--tokenizer-worker-num={workers} must be 1: SGLang loads no plug-ins in tokenizer workers, which end "
                "at a backend that they do not know, again and again"
            )
        self.adapters = Adapters()
        watch_queue(mode)
        if mode == "decode":
            hook_around("sglang.srt.managers.schedule_batch", "Req.build_rebootstrap_payload", payload_of)
        self._place = place_of(mode, server_args)
        self.core = self._make_core()

    def _make_core(self) -> Manager:
        core = Manager(self.kv_args, self.disaggregation_mode.value, self._place, self.is_mla_backend)
        if self.disaggregation_mode.value == "prefill":
            core.register()
        return core

    def register_to_bootstrap(self) -> None:
        self.core.register()

    @property
    def prefill_info_table(self) -> dict[str, PrefillInfo]:
        """Prefillers that were found, by the address of their bootstrap server."""
        return self.core.info

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        return self.core.find(bootstrap_addr)

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """Aux, and with it the checksum, comes from rank 0 of the prefiller: ours is the same if we have its heads."""
        return self.core.has_heads_of_rank_0(bootstrap_addr)

    def submit_prefill_recompute(self, receiver: CrossrailKVReceiver, payload: Any) -> None:
        """SGLang has retracted a request, which has pages again: its prefill server computes the KV again.

        payload: the request to that server. If the server does not do it, the request fails; the scheduler continues.
        """
        self.core.recompute(receiver.bootstrap_addr, payload, receiver.refuse)

    def deregister_buffer_to_engine(self) -> None:
        """SGLang is about to give the pools' memory back (/release_memory_occupation): no peer reaches it any more."""
        self.core.close()

    def register_buffer_to_engine(self) -> None:
        """There is memory again, at the same addresses. Prefillers and decoders find each other as after a restart."""
        self.core = self._make_core()

    def close(self) -> None:
        self.core.close()


class _Failing:
    """What senders and receivers have in common."""

    bootstrap_room: int | None
    kv_mgr: CrossrailKVManager
    prompt: Prompt | None = None  # of the request, told as soon as this was made

    def _hold(self, progress: Progress) -> None:
        self.kv_mgr.core.node.hold_until(progress.quiet, f"room {self.bootstrap_room}")

    def _raise(self, why: str, other: bool) -> None:
        raise CrossrailTransferError(self.bootstrap_room, why, is_from_another_rank=other)


class CrossrailKVSender(_Failing, BaseKVSender):
    """A request at the prefiller. Threads: the scheduler's."""

    _early_send_wait_event: Any = None  # an event that a scheduler sets: completes when the next chunk's KV is there

    def __init__(
        self,
        mgr: CrossrailKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.aux_index: int | None = None
        self._node = mgr.core.node
        self._prefiller = mgr.core.prefiller
        self._room = self._open_room(bootstrap_room, is_sent_here=req_has_disagg_prefill_dp_rank)
        self._pages = self._sent = 0
        self._is_all_sent = False
        self._begun_s: float | None = None
        self._seconds: float | None = None

    def _open_room(self, number: int, *, is_sent_here: bool) -> Room:
        """is_sent_here: its router has told both servers the rank of data parallelism."""
        why = "" if is_sent_here else self.kv_mgr.core.why_elsewhere(number)
        if not self.kv_mgr.core.is_open:
            why = RELEASED
        if not why:
            return self._node.call(self._prefiller.open(number))
        room = Room(number, 0.0)
        room.progress.fail(why)
        room.progress.end()
        return room

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._pages, self.aux_index = num_kv_indices, aux_index
        self._node.soon(self._prefiller.set_pages, self._room, num_kv_indices, self.prompt)

    def send(
        self,
        kv_indices: npt.NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        self._sent += len(kv_indices)
        self._is_all_sent = self._sent == self._pages
        if self._room.progress.is_over or self._room.progress.error:
            return
        if any(indices is not None and len(indices) for indices in state_indices or ()):
            self._node.soon(self._prefiller.abort, self._room, "state_indices came, which crossrail does not move")
            return
        indices = np.array(kv_indices, np.uint32)  # a copy: the caller may reuse the array
        rows = None
        if self._is_all_sent:
            rows = [] if self.aux_index is None else self.kv_mgr.core.aux.read(self.aux_index)
        # On a GPU the pages are there by now. SGLang sends what a batch computed when it has the batch's results: when
        # it overlaps it has waited for an event behind the forward pass (copy_done), else for the tokens, on the one
        # stream there is. What it sends before, a prefix that an earlier batch may still compute, has an event.
        ready, self._early_send_wait_event = self._early_send_wait_event, None
        if self._begun_s is None:
            self._begun_s = time.perf_counter()
        self._node.soon(self._prefiller.send, self._room, indices, rows, ready)

    def mark_prefill_complete(self) -> None:
        """Does nothing: decoders allocate early."""

    def pop_decode_prefix_len(self) -> int:
        return self._room.prefix_tokens

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric(transfer_latency_s=self._seconds, transfer_total_bytes=self._room.bytes_sent)

    def poll(self) -> int:
        progress = self._room.progress
        if progress.poll is Poll.SUCCESS and self._seconds is None and self._begun_s is not None:
            self._seconds = time.perf_counter() - self._begun_s
        return int(_POLLS[progress.poll])

    def poll_pp_consensus(self) -> int:
        return self.poll()

    def failure_exception(self) -> None:
        why = self._room.progress.error
        self._end("another rank failed")
        self._raise(why or "another rank failed", other=not why)

    def clear(self) -> None:
        self._end("SGLang let it go")

    def abort(self) -> None:
        """SGLang may reuse the pages as soon as this returns, unless it has sent everything: then it continues to poll,
        and nothing has to stop until a frozen decoder has been given up.
        """
        self._stop("aborted at the prefiller")
        if not self._is_all_sent:
            self._hold(self._room.progress)

    def _end(self, why: str) -> None:
        if not self._room.progress.is_over:
            self._stop(why)
            self._hold(self._room.progress)

    def _stop(self, why: str) -> None:
        if not self._room.progress.is_over:
            self._node.soon(self._prefiller.abort, self._room, why)


class CrossrailKVReceiver(_Failing, BaseKVReceiver):
    """A request at the decoder. Threads: the scheduler's."""

    require_staging = False

    def __init__(self, mgr: CrossrailKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.abort_notified = False
        self._node = mgr.core.node
        self._decoder = mgr.core.decoder
        mgr.core.forget_if_gone(bootstrap_addr)  # before SGLang looks for it
        self._pull: Pull | None = None
        self._progress = Progress()  # until there is a pull, which has its own

    @property
    def conclude_state(self) -> int | None:
        return self.poll() if self._progress.is_over else None

    def init(self, prefill_dp_rank: int) -> None:
        if self._progress.is_over:
            return
        info = self.kv_mgr.core.info.get(self.bootstrap_addr)
        if info is None or self.bootstrap_room is None:
            self._fail_here(f"no prefiller is known at {self.bootstrap_addr}" if info is None else "it has no room")
            return
        if why := unusable_room(self.bootstrap_room):
            self._fail_here(why)
            return
        if not 0 <= prefill_dp_rank < len(info.instances):
            ranks = f"{len(info.instances)} ranks of data parallelism"
            self._fail_here(f"disagg_prefill_dp_rank={prefill_dp_rank}: the prefill server has {ranks}")
            return
        instance = info.instances[prefill_dp_rank]
        self._pull = self._node.call(self._decoder.open(self.bootstrap_room, instance, self.prompt))
        self._progress = self._pull.progress

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
    ) -> None:
        if self._progress.is_over or self._pull is None:
            return
        if destination != KVTransferDestination.DEVICE:
            raise NotImplementedError("crossrail's backend writes into SGLang's own pages, not into a host pool")
        if any(indices is not None and len(indices) for indices in state_indices or ()):
            self._give_up("state_indices came, which crossrail does not move")
            return
        pages = np.array(kv_indices, np.uint32)
        self._node.soon(self._decoder.begin, self._pull, pages, aux_index, decode_prefix_len or 0)

    def poll(self) -> int:
        if self._progress.poll is Poll.FAILED and self._pull is not None and not self._pull.stop.is_set():
            self.kv_mgr.core.forget(self.bootstrap_addr, self._pull.instance)
        return int(_POLLS[self._progress.poll])

    def failure_exception(self) -> None:
        why = self._progress.error
        self._end("another rank failed")
        self._raise(why or "another rank failed", other=not why)

    def clear(self) -> None:
        self._end("SGLang let it go")

    def abort(self) -> None:
        """Returns at once; poll() says Failed once nothing can land in its pages any more."""
        self._give_up("aborted at the decoder")

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        self.abort()

    def refuse(self, why: str) -> None:
        """Fails the request for this reason, as if SGLang had aborted it."""
        self._give_up(why)

    def _give_up(self, why: str) -> None:
        if self._pull is None:
            missing = self.kv_mgr.core.why_missing(self.bootstrap_addr)  # then SGLang has given up, nobody has aborted
            self._fail_here(f"no prefiller at {self.bootstrap_addr}: {missing}" if missing else why)
        else:
            self._node.soon(self._decoder.abort, self._pull, why)

    def _end(self, why: str) -> None:
        if not self._progress.is_over:
            self._give_up(why)
            self._hold(self._progress)

    def _fail_here(self, why: str) -> None:
        self._progress.fail(why)
        self._progress.end()


class CrossrailKVBootstrapServer(BaseKVBootstrapServer):
    """SGLang makes one in the prefill server's HTTP process."""

    def __init__(self, host: str, port: int) -> None:
        self._server = BootstrapServer(host, port, SglangOptions.from_environment().secret(), own_server())
        if hook_front():
            self._server.watch()

    def come(self, room: int) -> None:
        """SGLang has got a request of this room. Any thread."""
        self._server.come(room)

    def refuse(self, room: int, why: str) -> None:
        """SGLang has refused the request of this room: decoders are told. Any thread."""
        self._server.refuse(room, why)

    def close(self) -> None:
        self._server.close()
