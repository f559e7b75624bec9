"""NIXL: registered memory, descriptor lists prepared once, transfers that are posted and polled, notifications.

Written from its Python API (nixl 1.5, nixl._api) and its documentation of backends.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crossrail.cli.bench.peers.base import Pages, Role, Side, private_memory

PACKAGES = ("nixl_cu12", "nixl_cu13")  # one is enough; `nixl` itself installs both
_INITIATOR = "NIXL_INIT_AGENT"
_NOTIFICATION = b"crossrail"


class Nixl(Side):
    """One agent a process and one backend. Nothing progresses but in calls: a progress thread that spins would share
    the one core that the caller has."""

    def __init__(
        self, role: Role, pool_bytes: int, backend: str, parameters: Mapping[str, str], prepared: bool = True
    ) -> None:
        """prepared: transfers are made once and posted again; otherwise each is made from the prepared lists."""
        super().__init__(role, pool_bytes)
        self._backend = backend
        self._parameters = dict(parameters)
        self._prepared = prepared
        # By place: handles that are not in flight. One in flight cannot be posted again.
        self._handles: dict[tuple[int, int], list[Any]] = {}
        self._messages: dict[int, Any] = {}  # by length
        self._lists: dict[int, tuple[Any, Any]] = {}  # of the whole pool, by length
        self._arrived = 0

    def open(self) -> bytes:
        """An agent, its backend, and the memory registered with it."""
        name = next(name for name in PACKAGES if importlib.util.find_spec(name))
        api = importlib.import_module(f"{name}._api")
        self._agent = api.nixl_agent(self.role, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend(self._backend, self._parameters)
        self.memory = private_memory(self.memory_bytes)
        self._base = self.memory.ctypes.data
        self._registered = self._agent.register_memory([(self._base, self.memory_bytes, 0, "")], "DRAM")
        metadata = self._agent.get_agent_metadata()
        return json.dumps({"base": self._base, "metadata": metadata.hex()}).encode()

    def meet(self, theirs: bytes) -> None:
        """The other agent."""
        there = json.loads(theirs)
        self._base_there = there["base"]
        name = self._agent.add_remote_agent(bytes.fromhex(there["metadata"]))
        self._there = name.decode() if isinstance(name, bytes) else name
        self._agent.make_connection(self._there)

    def _list(self, nbytes: int) -> tuple[Any, Any]:
        """The pool in blocks of that length, here and there."""
        if nbytes not in self._lists:
            offsets = np.arange(self.pool_bytes // nbytes, dtype=np.uint64) * np.uint64(nbytes)
            self._lists[nbytes] = (
                self._blocks(_INITIATOR, self._base, offsets, nbytes),
                self._blocks(self._there, self._base_there, offsets, nbytes),
            )
        return self._lists[nbytes]

    def _blocks(self, agent: str, base: int, offsets: Any, nbytes: int) -> Any:
        table = np.zeros((len(offsets), 3), np.uint64)  # address, length, device
        table[:, 0] = offsets + np.uint64(base)
        table[:, 1] = nbytes
        return self._agent.prep_xfer_dlist(agent, table, "DRAM")

    def _make(self, here: Any, src: Any, there: Any, dst: Any, notification: bytes = b"") -> Any:
        return self._agent.make_prepped_xfer("WRITE", here, src, there, dst, notification)

    def prepare(self, places: Sequence[tuple[int, int]], nbytes: int) -> None:
        """A transfer for each place."""
        here, there = self._list(nbytes)
        self._handles = {}
        if self._prepared:
            for src, dst in places:
                self._handles[src, dst] = [self._make(here, [src // nbytes], there, [dst // nbytes])]

    def post(self, src_offset: int, dst_offset: int, nbytes: int) -> Any:
        """Post the one for this place, or one more if it is under way: a pool may have fewer places than a window."""
        free = self._handles.get((src_offset, dst_offset))
        if free:
            handle = free.pop()
        else:
            here, there = self._lists[nbytes]
            handle = self._make(here, [src_offset // nbytes], there, [dst_offset // nbytes])
        return handle, self._agent.transfer(handle), free

    def finish(self, handle: Any) -> None:
        """Poll until done."""
        transfer, state, free = handle
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended with state {state!r}")
        if free is not None:
            free.append(transfer)

    def prepare_pages(self, page_bytes: int, src: Pages, dst: Pages) -> None:
        """The lists; which pages of them is each transfer's own."""
        self._list(page_bytes)

    def send_pages(self, page_bytes: int, src: Pages, dst: Pages) -> None:
        """Sends all in one transfer, made from indices as a program with a KV cache does."""
        here, there = self._lists[page_bytes]
        transfer = self._make(here, src.astype(np.int32), there, dst.astype(np.int32))
        self.finish((transfer, self._agent.transfer(transfer), None))
        transfer.release()

    def message(self, nbytes: int) -> None:
        """A write with a notification."""
        if nbytes not in self._messages:
            here = self._blocks(_INITIATOR, self._base + self.outgoing, np.zeros(1, np.uint64), nbytes)
            there = self._blocks(self._there, self._base_there + self.incoming, np.zeros(1, np.uint64), nbytes)
            self._messages[nbytes] = self._make(here, [0], there, [0], _NOTIFICATION), here, there
        transfer = self._messages[nbytes][0]
        self.finish((transfer, self._agent.transfer(transfer, _NOTIFICATION), None))

    def take(self, nbytes: int) -> None:
        """The next notification."""
        while not self._arrived:
            self._arrived += sum(len(each) for each in self._agent.get_new_notifs().values())
        self._arrived -= 1

    def close(self) -> None:
        """Transfers, lists, memory, the other agent, and ours."""
        for transfers in self._handles.values():
            for transfer in transfers:
                transfer.release()
        for transfer, *lists in self._messages.values():
            transfer.release()
            for each in lists:
                each.release()
        for both in self._lists.values():
            for each in both:
                each.release()
        self._handles, self._messages, self._lists = {}, {}, {}
        self._agent.remove_remote_agent(self._there)
        self._agent.deregister_memory(self._registered)
        del self._agent
