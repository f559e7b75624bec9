"""A rank of a prefill or decode server without a model: pools of known content, our classes as SGLang calls them."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from tests.support.fake_gpu import FakeGpu
from tests.support.limits import WAIT_S, eventually

SECRET = "of the tests"
PAGE = 4
LAYERS = 2
HEADS = 2
ROW = 6  # bytes of a head of a token
PAGES = 16
AUX = (64, 24)  # bytes of a row of each buffer
AUX_ROWS = 8
EMPTY = 0xAB
PATIENT: dict[str, Any] = {
    "transport": "shm",
    "bootstrap_s": WAIT_S,
    "load_s": WAIT_S,
    "prefiller_timeout_s": WAIT_S,
    "probe_s": 0.1,
    "register_s": 0.1,
    "quiesce_s": 3 * WAIT_S,
}
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
MINE, THEIRS = [3, 7, 1, 12], [0, 9, 4, 2]  # pages of a request at the prefiller and at the decoder


def content(what: object) -> npt.NDArray[np.uint8]:
    """Of a page of a head, or a row of aux."""
    seed = zlib.crc32(repr(what).encode())
    return np.random.default_rng(seed).integers(0, 256, PAGE * ROW * LAYERS * 2 * 64, np.uint8)


class Side:
    """rank of tp. mla: one latent, the same on all ranks. gpu: where its KV is. server_args: SGLang's. http_port: where
    its server takes requests. model: of its config. dtype: of the model. model_path: its
    checkpoint. changes: to its KVArgs.
    """

    def __init__(
        self,
        mode: str,
        address: str,
        *,
        rank: int = 0,
        tp: int = 1,
        mla: bool = False,
        gpu: FakeGpu | None = None,
        parallel: dict[str, Any] | None = None,
        server_args: dict[str, Any] | None = None,
        http_port: int = 1,
        model: dict[str, Any] | None = None,
        dtype: str = "torch.float32",
        model_path: str = "/",
        **changes: Any,
    ) -> None:
        from crossrail.integrations.sglang import conn

        self.mode, self.address, self.rank, self.tp, self.mla = mode, address, rank, tp, mla
        self.heads = 1 if mla else max(HEADS // tp, 1)
        self.first_head = 0 if mla else rank * HEADS // tp
        self.planes: list[npt.NDArray[np.uint8]] = []  # as the model sees them
        self.addresses: list[int] = []
        for _ in range(LAYERS if mla else 2 * LAYERS):
            plane = np.full((PAGES, PAGE, self.heads, ROW), EMPTY, np.uint8)
            on_gpu = gpu.array(plane) if gpu is not None else None
            self.planes.append(plane if on_gpu is None else on_gpu.bytes.reshape(plane.shape))
            self.addresses.append(plane.ctypes.data if on_gpu is None else on_gpu.address)
        self.aux = [np.full((AUX_ROWS, nbytes), EMPTY, np.uint8) for nbytes in AUX]
        where: dict[str, Any] = {
            "attn_tp_rank": rank,
            "attn_tp_size": tp,
            "pp_size": 1,
            "attn_cp_size": 1,
            "attn_dcp_size": 1,
            "attn_dp_size": 1,
            "attn_dp_rank": 0,
            "dp_size": 1,
            "dp_rank": None,
            "load_balance_method": "follow_bootstrap_room",
            "dist_init_addr": None,
        } | (parallel or {})
        host, _, port = address.partition(":")
        disagg = {"disaggregation_bootstrap_port": int(port), "disaggregation_decode_allocation_policy": "early"}
        with (
            mock.patch.object(conn, "get_parallel", return_value=SimpleNamespace(**where)),
            mock.patch.object(conn, "get_serving", return_value=SimpleNamespace(host=host, port=http_port)),
            mock.patch.object(conn, "get_disagg", return_value=SimpleNamespace(**disagg)),
            mock.patch.object(conn, "process_model_config", return_value=model_config(model or {}, dtype, model_path)),
        ):
            self.manager = conn.CrossrailKVManager(
                self.kv_args(changes), SimpleNamespace(value=mode), SimpleNamespace(**(server_args or {})), mla
            )
        self.conn = conn

    def kv_args(self, changes: dict[str, Any]) -> Any:
        from sglang.srt.disaggregation.base.conn import KVArgs

        args: Any = KVArgs()
        args.kv_data_ptrs = self.addresses
        args.kv_data_lens = [plane.nbytes for plane in self.planes]
        args.kv_item_lens = [plane[0].nbytes for plane in self.planes]
        args.kv_layer_ids = list(range(LAYERS))
        args.kv_cache_dtype_str = "auto"
        args.aux_data_ptrs = [rows.ctypes.data for rows in self.aux]
        args.aux_data_lens = [rows.nbytes for rows in self.aux]
        args.aux_item_lens = list(AUX)
        args.state_types = []
        args.page_size = PAGE
        args.engine_rank = self.rank
        args.ib_device = None
        if self.mode == "prefill" and not self.mla:  # SGLang's decoder does not say
            args.kv_head_num, args.total_kv_head_num = self.heads, HEADS
        for name, value in changes.items():
            setattr(args, name, value)
        return args

    def close(self) -> None:
        self.manager.close()

    # ---- a request, as SGLang's scheduler sees it

    def sender(self, room: int, *, is_sent_here: bool = False) -> Any:
        return self.conn.CrossrailKVSender(self.manager, self.address, room, is_sent_here)

    def receiver(self, room: int, dp_rank: int = 0, prompt: Any = None) -> Any:
        eventually(lambda: self.manager.try_ensure_parallel_info(self.address), "the prefiller is known")
        receiver = self.conn.CrossrailKVReceiver(self.manager, self.address, room)
        receiver.prompt = prompt
        receiver.init(dp_rank)
        return receiver

    def compute(self, text: str, pages: list[int], aux_index: int) -> None:
        """What a model would: `text` names the prompt."""
        for plane, memory in enumerate(self.planes):
            for i, page in enumerate(pages):
                for head in range(self.heads):
                    memory[page, :, head] = _piece(text, plane, i, self.first_head + head)
        for number, rows in enumerate(self.aux):
            rows[aux_index] = content((text, "aux", number))[: rows.shape[1]]

    def assert_holds(self, text: str, pages: list[int], aux_index: int) -> None:
        for plane, memory in enumerate(self.planes):
            for i, page in enumerate(pages):
                for head in range(self.heads):
                    np.testing.assert_array_equal(
                        memory[page, :, head],
                        _piece(text, plane, i, self.first_head + head),
                        f"{plane=} {page=} {head=}",
                    )
        for number, rows in enumerate(self.aux):
            np.testing.assert_array_equal(rows[aux_index], content((text, "aux", number))[: rows.shape[1]])

    def assert_untouched(self, but: list[int], aux_but: list[int]) -> None:
        """All other pages and rows are as they were at the start."""
        for memory in self.planes:
            others = [page for page in range(PAGES) if page not in but]
            assert (memory[others] == EMPTY).all()
        for rows in self.aux:
            assert (rows[[row for row in range(AUX_ROWS) if row not in aux_but]] == EMPTY).all()


def until(poll: int, *pollers: Any) -> None:
    """SGLang's poll of each."""
    for poller in pollers:
        eventually(lambda poller=poller: poller.poll() == poll, f"poll of {poller} is {poll}, not {poller.poll()}")


def send(side: Side, sender: Any, text: str, pages: list[int], aux_index: int, chunk: int = 2) -> None:
    """Prefill, and what is sent of it, in chunks."""
    sender.init(len(pages), aux_index)
    side.compute(text, pages, aux_index)
    for first in range(0, max(len(pages), 1), chunk):
        some = pages[first : first + chunk]
        assert sender.should_send_kv_chunk(len(some), first + chunk >= len(pages))
        sender.send(np.array(some, np.int32), None, num_kv_tokens=len(some) * PAGE)


def ask(receiver: Any) -> None:
    """The decoder has pages for the request."""
    receiver.send_metadata(np.array(THEIRS, np.int32), 0)


def send_half(side: Side, sender: Any) -> None:
    sender.init(len(MINE), 0)
    side.compute("half", MINE, 0)
    sender.send(np.array(MINE[:2], np.int32))


def finish(p: Side, d: Side, sender: Any, receiver: Any, text: str) -> None:
    """The rest of a request whose decoder has asked: computed, sent, and all of it compared."""
    until(WAITING, sender)
    send(p, sender, text, MINE, 0)
    until(SUCCESS, sender, receiver)
    d.assert_holds(text, THEIRS, 0)


def hand_over(p: Side, d: Side, text: str, room: int = 1) -> None:
    """A request from its beginning to its end."""
    sender, receiver = p.sender(room), d.receiver(room)
    ask(receiver)
    finish(p, d, sender, receiver, text)


def failure(one: Any) -> Any:
    """What SGLang is told of it."""
    try:
        one.failure_exception()
    except Exception as error:
        return error
    raise AssertionError("failure_exception raised nothing")


def model_config(entries: dict[str, Any], dtype: str, path: str = "/") -> Any:
    config = SimpleNamespace(to_dict=lambda: entries)
    return SimpleNamespace(hf_text_config=config, hf_config=config, dtype=dtype, model_path=path, revision=None)


def _piece(text: str, plane: int, page: int, head: int) -> npt.NDArray[np.uint8]:
    return content((text, plane, page, head))[: PAGE * ROW].reshape(PAGE, ROW)
