"""checkpoint-engine's ParameterServer with weights that travel over crossrail; its own code registers checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import crossrail as xr
from crossrail._extras import needs
from crossrail.errors import UsageError
from crossrail.integrations.checkpoint_engine.delivery import Delivery, bucket_bytes_max, in_turns
from crossrail.integrations.checkpoint_engine.meeting import Done, Hello, Meeting, announce
from crossrail.integrations.checkpoint_engine.store import P2PStore
from crossrail.integrations.checkpoint_engine.versions import check_parts, check_version
from crossrail.integrations.checkpoint_engine.worker import Worker

with needs(__name__, "'crossrail[checkpoint-engine]'"):
    import checkpoint_engine.distributed as dist
    import checkpoint_engine.ps as theirs
    import torch
    from checkpoint_engine.data_types import DataToGather, MemoryBufferMetaList, MemoryBufferMetas
    from checkpoint_engine.device_utils import get_ip

_PARTS = {
    theirs.ParameterServer.__init__: "self rank world_size auto_pg gpu_count mem_fraction master_addr master_port",
    theirs.ParameterServer.register_checkpoint: (
        "self checkpoint_name files named_tensors use_shared_memory_pool use_inplace_pin_memory"
    ),
    theirs.ParameterServer.unregister_checkpoint: "self checkpoint_name force",
    theirs.ParameterServer.gather_metas: "self checkpoint_name",
    theirs.ParameterServer.load_metas: "self metas",
    theirs.ParameterServer.update: "self checkpoint_name req_func timeout ranks",
    theirs.ParameterServer._get_memory_pool: "self checkpoint_name",
    theirs.ParameterServer._register_parameters_to_p2p_store: "self checkpoint_name",
    theirs.ParameterServer._unregister_parameters_from_p2p_store: "self checkpoint_name",
    theirs.ParameterServer._bind_zmq_socket: "self",
    theirs._gen_h2d_buckets: "global_metas bucket_size local_topo remote_topo ranks",
    theirs._to_named_tensor: "metas offset",
}
_construction = threading.Lock()  # theirs finds its P2PStore in its module


class ParameterServer(theirs.ParameterServer):  # type: ignore[misc, unused-ignore]
    """Replaces checkpoint_engine.ps.ParameterServer, with the same calls and the same worker side.

    Every rank that is to be updated reads all buckets from the memory in which their owners registered them, one-sided,
    while its worker loads the bucket before. No process group is used, and ranks outside of `ranks` only wait. Device
    memory: two buckets. Threads: one at a time, as theirs. What fails raises CheckpointUpdateFailed on all ranks.
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        auto_pg: bool = True,
        gpu_count: int | None = None,
        mem_fraction: float | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        transport: str = "auto",
        rails: int | Sequence[str] = 1,
        port: int = 0,
        secret_file: str | None = None,
    ) -> None:
        """The first seven are theirs. transport, rails, port: of this rank's crossrail.Engine. secret_file: with what
        all ranks share; None: the value of CROSSRAIL_SECRET. UsageError when there is no secret, and for a
        checkpoint-engine with which this was not tested.
        """
        check_version()
        check_parts(_PARTS)
        self._meetings = 0
        self._last: Meeting | None = None
        # The checkpoint that these metas belong to; None: another group's metas, or none.
        self._metas_name: str | None = None
        # The part of the checkpoint here, in the form that others read; empty: there is none.
        self._gathered: list[bytes] = []

        def open_store(device_manager: Any) -> P2PStore:
            self._opened = P2PStore(
                device_manager, rank=self._rank, transport=transport, rails=rails, port=port, secret_file=secret_file
            )
            return self._opened

        with _construction, _replaced(theirs, "P2PStore", open_store):
            try:
                super().__init__(
                    rank=rank, world_size=world_size, auto_pg=auto_pg, gpu_count=gpu_count, mem_fraction=mem_fraction,
                    master_addr=master_addr, master_port=master_port,
                )  # fmt: skip
            except BaseException:
                if hasattr(self, "_opened"):
                    self._opened.close()
                raise
        announce(self._store, self._rank, self._opened.engine)

    def register_checkpoint(
        self,
        checkpoint_name: str,
        *,
        files: list[str] | None = None,
        named_tensors: dict[str, torch.Tensor] | None = None,
        use_shared_memory_pool: bool = False,
        use_inplace_pin_memory: bool = True,
    ) -> None:
        """Like theirs. Each user of the shared pool is read by keys of its own. UsageError names a tensor that cannot
        be copied byte by byte, or says that there is nothing to read in any of them.
        """
        _check_tensors(checkpoint_name, named_tensors or {}, has_files=bool(files))
        super().register_checkpoint(
            checkpoint_name,
            files=files,
            named_tensors=named_tensors,
            use_shared_memory_pool=use_shared_memory_pool,
            use_inplace_pin_memory=use_inplace_pin_memory,
        )
        if use_shared_memory_pool and not all(self._descriptors(checkpoint_name)):
            try:
                self._register_parameters_to_p2p_store(checkpoint_name)
            except BaseException:
                self.unregister_checkpoint(checkpoint_name)
                raise

    def unregister_checkpoint(self, checkpoint_name: str, force: bool = False) -> None:
        """Like theirs: the shared pool is kept unless forced. Returns when nobody reads the checkpoint any more.

        WaitTimeout: somebody still reads it; it is closed to others: call it again.
        """
        if checkpoint_name == self._current_shared_memory_pool_user and self._pool(checkpoint_name) and not force:
            self._unregister_parameters_from_p2p_store(checkpoint_name)
        super().unregister_checkpoint(checkpoint_name, force)

    def _unregister_parameters_from_p2p_store(self, checkpoint_name: str) -> int:
        """Theirs calls it after a register_checkpoint that has failed, too: an error here would hide that one's."""
        return super()._unregister_parameters_from_p2p_store(checkpoint_name) if self._pool(checkpoint_name) else 0

    def gather_metas(self, checkpoint_name: str, *, timeout: timedelta = timedelta(minutes=10)) -> None:
        """What all ranks have registered under this name, as theirs. All ranks call it. Raises CheckpointUpdateFailed.

        timeout: how long to wait for a rank.
        """
        with self._meet(f"gather_metas({checkpoint_name!r})", timeout) as meeting:
            said = self._agree(meeting, metas=self._own_metas(checkpoint_name).model_dump_json())
            of_ranks = {rank: DataToGather.model_validate_json(each.metas) for rank, each in enumerate(said)}
            self._current_global_parameter_metas = {
                rank: MemoryBufferMetaList(
                    memory_buffer_metas_list=metas.memory_buffer_metas_list,
                    p2p_store_addr=metas.p2p_store_addr,
                    rdma_device=metas.rdma_device,
                )
                for rank, metas in of_ranks.items()
                if metas.memory_buffer_metas_list
            }
            self._metas_name = checkpoint_name
            self._gathered = self._descriptors(checkpoint_name)

    def load_metas(self, metas: dict[int, Any]) -> None:
        """Takes get_metas() of another group of ranks, like theirs: update() then reads their weights.

        Raises UsageError for metas of ranks that were not crossrail's, or had another secret.
        """
        for rank, of_rank in metas.items():
            try:
                self._opened.ranges_of(of_rank.p2p_store_addr or "")
            except UsageError as error:
                raise UsageError(f"metas of rank {rank}: {error}") from None
        super().load_metas(metas)
        self._metas_name = None

    def update(
        self,
        checkpoint_name: str,
        req_func: Callable[[list[tuple[str, str]]], None],
        *,
        timeout: timedelta = timedelta(minutes=10),
        ranks: list[int] | None = None,
    ) -> None:
        """Brings the weights to the workers of these ranks, of all when there are none, as theirs. All ranks call it.

        req_func: called on these ranks with (device uuid, socket) of every rank, in a thread; it makes the engine's
        workers call update_weights_from_ipc, and may return before they have. timeout: how long any step may take: a
        bucket on its way, the worker with a bucket, another rank without a sign. Returns on every rank when all have
        succeeded; otherwise raises CheckpointUpdateFailed, which says what failed on which rank, on every one that
        still lives. Workers that have begun then get an exception in place of the next bucket.
        """
        chosen = sorted(set(ranks or []))
        try:
            call = f"update({checkpoint_name!r}{f', ranks={chosen}' if chosen else ''})"
            with self._meet(call, timeout) as meeting:
                said = self._agree(meeting, refusal=self._refusal(checkpoint_name, chosen))
                self._zmq_addr_counter = max(each.sockets for each in said)
                self._global_device_uuids = [each.device_uuid for each in said]
                if not chosen or self._rank in chosen:
                    self._deliver(req_func, meeting)
                else:
                    meeting.exchange("loaded", Done())
                meeting.exchange("end", Done())
        finally:
            if self._auto_pg and dist.is_initialized():  # of the user's init_process_group()
                dist.destroy_process_group()
            self.device_manager.device_module.empty_cache()

    def close(self) -> None:
        """Returns when nobody reads this rank's weights any more. Idempotent. Theirs has no such call."""
        self._opened.close()
        self._zmq_ctx.term()

    def _deliver(self, req_func: Callable[[list[tuple[str, str]]], None], meeting: Meeting) -> None:
        metas = self._current_global_parameter_metas
        free_bytes = self.device_manager.device_module.mem_get_info()[0]
        buckets = in_turns(metas, bucket_bytes_max(metas, free_bytes, self._mem_fraction), self._rank)
        delivery = Delivery(self._opened, self.device_manager, metas, buckets)
        try:
            meeting.sign()  # making the buffer took its time, and the worker may take timeout_s from here on
            socket, paths = self._bind_zmq_socket()
            with Worker(socket, partial(req_func, paths), meeting) as worker:
                delivery.run(worker, meeting)
        finally:
            delivery.close()

    def _refusal(self, checkpoint_name: str, ranks: list[int]) -> str:
        """Why this rank cannot take part in an update. Empty: it can."""
        if not any(of.metas for each in self.get_metas().values() for of in each.memory_buffer_metas_list):
            return f"no rank has a checkpoint {checkpoint_name!r}: register_checkpoint, then gather_metas or load_metas"
        if self._metas_name not in (None, checkpoint_name):
            return f"its metas are those of {self._metas_name!r}: gather_metas({checkpoint_name!r}) first"
        if self._metas_name and self._gathered != self._descriptors(checkpoint_name):
            done = "unregistered, or replaced," if self._gathered else "registered"
            return (
                f"it has {done} its part of {checkpoint_name!r} since gather_metas: "
                f"gather_metas({checkpoint_name!r}) first"
            )
        if ranks and not 0 <= ranks[0] <= ranks[-1] < self._world_size:
            return f"ranks={ranks} must be in 0..{self._world_size - 1}"
        return ""

    def _pool(self, checkpoint_name: str) -> list[Any]:
        """The checkpoint's buffers on this rank, which may have no part of it."""
        try:
            return list(self._get_memory_pool(checkpoint_name))
        except (RuntimeError, AssertionError):  # the latter: of a shared pool
            return []

    def _descriptors(self, checkpoint_name: str) -> list[bytes]:
        return self._opened.descriptors_of([each.buffer for each in self._pool(checkpoint_name)])

    def _own_metas(self, checkpoint_name: str) -> Any:
        pool = self._pool(checkpoint_name)
        buffers = [MemoryBufferMetas(metas=each.metas, ptr=each.buffer.data_ptr(), size=each.size) for each in pool]
        return DataToGather(
            memory_buffer_metas_list=buffers,
            p2p_store_addr=self._opened.addr,
            host_ip=get_ip(),
            device_uuid=self._device_uuid,
            rdma_device=self._rdma_device,
        )

    def _agree(self, meeting: Meeting, **options: str) -> list[Hello]:
        engine = self._opened.engine
        hello = Hello(meeting.call, self._device_uuid, bytes(engine.address), self._zmq_addr_counter, **options)
        said = meeting.agree(hello, engine)
        if self._last is not None:
            self._last.forget()
        meeting.watch(engine, [xr.Address.from_bytes(each.engine) for each in said])
        return said

    @contextmanager
    def _meet(self, call: str, timeout: timedelta) -> Iterator[Meeting]:
        self._meetings += 1
        meeting = Meeting(self._store, self._rank, self._world_size, self._meetings, call, timeout.total_seconds())
        try:
            with meeting:
                yield meeting
                meeting.leave()
        finally:
            self._last = meeting


def _check_tensors(checkpoint_name: str, named_tensors: dict[str, torch.Tensor], *, has_files: bool) -> None:
    """UsageError for what theirs would refuse without naming the tensor."""
    for name, tensor in named_tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name!r:.200}: a {type(tensor).__name__} is no torch tensor")
        if tensor.is_meta:
            raise UsageError(f"{name!r:.200}: the tensor is on the device meta, and has no values")
        try:
            tensor.view(-1).view(torch.uint8)  # as theirs copies it
        except RuntimeError as error:
            raise UsageError(
                f"{name!r:.200}: its bytes cannot be copied as they lie, shape {tuple(tensor.shape)}: {error}. Next: "
                "register a dense copy, such as tensor.contiguous(), or tensor.resolve_neg()"
            ) from None
    if named_tensors and not has_files and not any(tensor.numel() for tensor in named_tensors.values()):
        raise UsageError(f"no tensor of checkpoint {checkpoint_name!r} has any elements here. Next: leave them out")


@contextmanager
def _replaced(module: Any, name: str, by: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, before)
