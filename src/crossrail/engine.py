"""The engine: memory, peers, operations, counting."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import crossrail.transfers  # noqa: F401  # now: the first await may happen when no file descriptor is left to load it
from crossrail import _core, _libfabric, _open_engines, _options, _raise, _simulation
from crossrail._buffers import memory_of
from crossrail._core import Address, GpuMapping, Message, RegionDescriptor
from crossrail._devices import gpu_of
from crossrail._events import EventSink
from crossrail._notify import Callbacks, CallbackThread, log, weakly
from crossrail._ordered import OrderedWeakSet
from crossrail.counters import ImmCounter
from crossrail.default_rails import auto_worker_cpu, check_worker_cpu, default_rails, log_rails
from crossrail.errors import EngineClosed, TransportError, UsageError
from crossrail.messages import ReceivePool
from crossrail.peers import EngineEvent, Explanation, Heartbeat, PathExplanation
from crossrail.rdma import RdmaOptions
from crossrail.regions import Region
from crossrail.tls import TlsConfig, tls_of
from crossrail.watchers import Watcher

if TYPE_CHECKING:
    from crossrail.policy import Clause

_libfabric.announce()

DEFAULT_TRANSPORT = "auto"

_CALLBACK_PATIENCE_S = 5.0  # how long close() waits for a running callback


class Engine(_core.Engine):
    """Moves bytes between the memory of this process and that of its peers. Threads may share one engine.

    Transfers are reliable and unordered: no operation is ordered after another, and a receiver synchronises by counting
    immediates. Every accepted submit completes exactly once, even if the engine closes or a peer dies.

    Open an engine with `with Engine("name") as engine`. close() completes every transfer and wakes every waiting
    thread. An engine that is garbage-collected while open is closed with a ResourceWarning; engines that are still
    open when the interpreter exits are closed. A forked child cannot use it; the parent can continue to.

    name: for people to read, 1..64 bytes of UTF-8. None: "<program>-<pid>", in a simulation "engine1"
        and so on.
    transport: "auto" uses shm, tcp, and verbs or ofi if there is such a device: shm for a peer on this host, and for
        others the first of verbs, ofi, tcp that both sides have. Or one of "shm" (processes of one host), "tcp",
        "verbs" (ConnectX and other RC-capable NICs), "ofi" (AWS EFA), "ofi:tcp" (ofi over that libfabric provider),
        or a combination such as "shm+verbs". "null" moves nothing, for measuring; "sim" is for simulated worlds
        (crossrail.sim). explain(peer) shows what was chosen, and why.
    rails: a number, 1..16, or a list of IP addresses or interface names; for verbs and ofi also devices and ports
        ("mlx5_0", "mlx5_0:1"). Next to a network transport, shm has one rail.
    device: the GPU whose memory the engine moves ("cuda:0", a torch.device): where NICs have RDMA, a number of rails
        means those nearest to it (docs/topology.md). None: the host's memory, and the same NICs in each process.
    port: where tcp listens; 0: any port. Rails that share an address take port, port + 1, ...
    secret: shared secret that peers on other hosts must know too, up to 1024 bytes. None: the value of
        CROSSRAIL_SECRET, if it is set. "": no secret, even if that is set.
    tls: certificates for tcp. None: those named by CROSSRAIL_TLS_CERT, _KEY and _CA, if set. An engine with tls reaches
        other hosts only by tcp, because RDMA traffic is not encrypted (docs/two-hosts.md).
    peer_timeout_s: a peer on another host that is silent for so long is lost.
    polling: "adaptive" (spin for spin_us, for longer while sleeps end at once, then sleep), "spin" (for a dedicated
        core) or "manual" (your threads drive the engine in submits, waits and progress()).
    worker_cpu: core to pin the worker thread to, of those that this process may use. "auto": the first of them on the
        NUMA node of the rails; not pinned if that node is unknown, which is logged.
    submit_queue_depth: a power of two, 16..65536. A submit blocks while the queue is full.
    imm_counters_max: most distinct immediates in use.
    message_bytes_max: longest message, up to 256 KiB.
    watcher_poll_us: interval at which words are read whose address somebody has. 5 take a fifth of a core meanwhile.
    connect_timeout_s: a peer that does not answer the first connection for so long is lost.
    private_path: for memory that the peer cannot map: "staged", "cma" (cross-memory attach), or "auto" (the faster one,
        by measurement).
    heartbeat_s: interval of probes to connected peers, also idle ones. A peer that does not answer within one
        interval is "slow", within three "frozen" (peer_state, events, explain). None: no probes.
    rdma: options of verbs and ofi.
    recorder_entries: size of each ring of the flight recorder (one per rail, one for the rest), a power of two,
        64..2**20; 0: no recorder.
    watchdog_s: an operation without progress for so long causes an event, "stalled", once per stall, and the recorder
        is written to a file: at most once a minute and 16 times in all. None: no watchdog.
    dump_dir: existing directory for the files of the watchdog, dump_on_signal and failed assertions. None: the value of
        CROSSRAIL_DUMP_DIR, of TMPDIR, or /tmp.
    counts_traffic: count traffic per peer and rail for crossrail.observe; costs next to nothing (docs/metrics.md).
    require: clauses that must hold once the engine is open, such as "shm, rails>=4". If one does not, the engine is
        closed and TransportError says which and why. Clauses: shm, tcp, verbs, ofi, rdma (verbs or ofi), gpudirect,
        rails>=N (or =, >; rails that share an interface count once), speed>=X (Gb/s, the sum of the rails' interfaces
        whose speed is known). The method require() checks the path to one peer.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        transport: str = DEFAULT_TRANSPORT,
        rails: int | Sequence[str] = 1,
        port: int = 0,
        secret: str | bytes | None = None,
        tls: TlsConfig | None = None,
        peer_timeout_s: float = 10.0,
        polling: str = "adaptive",
        spin_us: float = 50.0,
        worker_cpu: int | Literal["auto"] | None = None,
        submit_queue_depth: int = 4096,
        imm_counters_max: int = 65536,
        message_bytes_max: int = 65536,
        watcher_poll_us: float = 5.0,
        connect_timeout_s: float = 5.0,
        private_path: str = "auto",
        heartbeat_s: float | None = None,
        rdma: RdmaOptions | None = None,
        recorder_entries: int = 1024,
        watchdog_s: float | None = None,
        dump_dir: str | os.PathLike[str] | None = None,
        counts_traffic: bool = True,
        require: str | None = None,
        device: object = None,
    ) -> None:
        clauses = None if require is None else _parse_policy(require)
        _options.check_texts(
            name="" if name is None else name, transport=transport, polling=polling, private_path=private_path
        )
        _options.check_numbers(
            peer_timeout_s=peer_timeout_s, spin_us=spin_us, watcher_poll_us=watcher_poll_us,
            connect_timeout_s=connect_timeout_s, heartbeat_s=0.0 if heartbeat_s is None else heartbeat_s,
            watchdog_s=0.0 if watchdog_s is None else watchdog_s,
        )  # fmt: skip
        if heartbeat_s == 0:
            raise UsageError("heartbeat_s is 0, must be 0.001..1000000, or None: no probes")
        _options.check_given(
            rails=rails, port=port, submit_queue_depth=submit_queue_depth, imm_counters_max=imm_counters_max,
            message_bytes_max=message_bytes_max, recorder_entries=recorder_entries,
        )  # fmt: skip
        for rail in rails if isinstance(rails, (list, tuple)) else ():
            if isinstance(rail, str):  # other types are refused in C++
                _options.encoded(rail, "rails")
        rdma = RdmaOptions() if rdma is None else rdma
        _options.check_kind(rdma, "rdma", RdmaOptions, "RdmaOptions or None")
        _options.check_kind(counts_traffic, "counts_traffic", bool, "True or False")
        dump_dir = _options.dump_directory() if dump_dir is None else _options.directory(dump_dir, "dump_dir")
        place = _simulation.place(transport, rails)
        if name is None:
            name = _default_name() if place is None else place.default_name()
        rails = default_rails(transport, rails, device)
        if worker_cpu is not None:
            worker_cpu = _worker_cpu(worker_cpu, transport, rails)
        self._world = None if place is None else place.simulation  # kept as long as the engine
        super().__init__(
            name, transport, rails, port, _secret_bytes(secret), tls_of(tls, transport), peer_timeout_s, polling,
            spin_us, worker_cpu, submit_queue_depth, imm_counters_max, message_bytes_max, watcher_poll_us,
            connect_timeout_s, private_path, heartbeat_s or 0.0, rdma.as_tuple(),
            (recorder_entries, watchdog_s, dump_dir, counts_traffic),
            place and place.world, place and place.host,
        )  # fmt: skip
        self._events = EventSink(name)
        self._watchers: OrderedWeakSet[Watcher] = OrderedWeakSet()
        self._callbacks: Callbacks = CallbackThread(name) if place is None else place.callbacks(name)
        self._event_cookie = self._callbacks.register(weakly(self._handle_events), once=False)
        self._set_event_notifier(self._callbacks.notifier, self._event_cookie)
        self._is_open = True
        _open_engines.add(self)
        if place is not None:
            place.opened(self)
        if clauses is not None:
            self._check_opened(transport, clauses)
        log_rails(self.name, transport, rails, self._rail_devices, self.address.endpoints)

    def close(self, timeout_s: float | None = 0.5) -> None:
        """Closes the engine. Any thread; closing it again has no effect.

        Waits up to timeout_s seconds for transfers to complete; the rest complete with EngineClosed. Regions, pools,
        counters and watchers are closed too; callbacks that are due still run. Ctrl-C ends the wait: KeyboardInterrupt
        comes once the engine is closed. Callbacks are released. Does nothing in a forked child.
        """
        if self._inherited:
            return
        try:
            self._close(timeout_s)
        finally:
            if self.closed:  # otherwise the timeout was refused
                self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            _open_engines.discard(self)
            self._log_events()
            if self._events.fn is not None or len(self._watchers) > 0:
                self._let_go_last()
        self._callbacks.close(_CALLBACK_PATIENCE_S)

    def _let_go_last(self) -> None:
        """Releases the user's callbacks once all calls that are due have been made.

        A callback may refer to an array over a region, and the array to this engine. The garbage collector cannot see
        through arrays, so the cycle has to be broken here.
        """
        self._callbacks.notifier.post(self._callbacks.register(weakly(self._let_go)))

    def _let_go(self) -> None:
        self._events.fn = None
        for watcher in self._watchers:
            watcher._let_go()

    def __enter__(self) -> Engine:
        if self.closed:
            raise EngineClosed(f"engine {self.name!r} is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # close() waits for transfers, which may need the loop to complete, so it runs on a thread. Not on one of the
        # loop's default executor: all of those may be in waits that only close() ends.
        import asyncio  # slow to import; whoever runs a loop has imported it already
        from concurrent.futures import ThreadPoolExecutor

        executor = ThreadPoolExecutor(1, "crossrail-close")
        try:
            await asyncio.get_running_loop().run_in_executor(executor, self.close)
        finally:
            executor.shutdown(wait=False)

    def __del__(self) -> None:
        if not getattr(self, "_is_open", False) or self._inherited:
            return
        warnings.warn(f"engine {self.name!r} was not closed", ResourceWarning, source=self, stacklevel=2)
        self.close(0.0)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine can be neither pickled nor copied: send peers its address, which can be pickled")

    def __repr__(self) -> str:
        if not hasattr(self, "_is_open"):
            return "<Engine that did not open>"
        rails = f"{self.rails} rail{'' if self.rails == 1 else 's'}"
        return f"<Engine {self.name!r}, {rails}{', closed' if self.closed else ''}>"

    # ---- memory

    def register(self, buffer: Any, *, access: str | None = None) -> Region:
        """Makes existing memory usable as a source of transfers, and by peers. Does not copy it. Any thread.

        buffer: a numpy array, a torch tensor, anything with the buffer protocol, DLPack or `__cuda_array_interface__`,
        or (address, nbytes). It must be C-contiguous and not empty. The region keeps it alive until it is closed,
        unless it is a bare address. It cannot keep what resizes or replaces the storage of a torch tensor from freeing
        its memory: FSDP's storage.resize_(), or share_memory_(), which torch.multiprocessing calls for what it sends.
        access: what peers may do: "local" (nothing), "read" or "write" (both). None: "write", or "read" if the buffer
        is read-only; of a tensor and a bare address, the first and the last byte are tried. The same memory may be
        registered several times; the regions are independent. With RDMA a "local" region within another open region
        costs nothing (docs/verbs.md). Memory of NVIDIA GPUs: RDMA NICs (transport "verbs", or "ofi" on EFA) access it
        directly, as a dma-buf or by peermem (see `region.gpudirect`); within a host GPUs copy to each other, over tcp
        the driver copies it through the host. Kernels that write a source must have ended before the transfer is
        submitted (torch.cuda.synchronize(), an event).
        """
        memory = memory_of(buffer)
        if access is None:
            access = "write" if memory.writable else "read"
        _options.check_texts(access=access)
        if access == "write" and not memory.writable:
            raise UsageError("access is 'write' and the buffer is read-only: register it with 'read' or 'local'")
        if memory.nbytes == 0:
            raise UsageError("buffer has 0 bytes, at least 1 is needed")
        region = Region(self, memory.address, memory.nbytes, access, memory.writable, memory.owner, memory.is_cuda)
        if memory.is_cuda and region.gpudirect != "dma-buf":
            log.info("memory of %s, gpudirect: %s", region.device, region.gpudirect)
        return region

    def register_phantom(self, nbytes: int) -> Region:
        """A region of any length without memory, for transport "sim": transfers from and to it take simulated time and
        are counted, but no bytes move. Any thread.
        """
        return Region(self, nbytes)

    def alloc(self, nbytes: int, *, populate: bool = False, device: object = None) -> Region:
        """Allocates zeroed, page-aligned memory that peers on this host map: the fastest source and target.

        populate: fault the pages in now. device: a GPU of this process, as "cuda:0" or a torch.device; None: host
        memory. Any thread.
        With shm each allocation in host memory has an open file: many small pages belong into one region, not into one
        each. The memory lives as long as the region or a view of it; on a GPU, as the region or a tensor of it:
        `torch.as_tensor(region, device=region.device)` copies nothing. It is given back once kernels that may use it
        have ended; nobody waits for these meanwhile. GPU memory is allocated in units of 2 MiB, by CUDA's virtual
        memory management. Raises UsageError if there is no such GPU; TransportError without NVIDIA's driver, or if
        it cannot share such memory: register memory of torch then.
        """
        return Region(self, nbytes, populate, gpu_of(device))

    def _alloc_for_mapping(self, nbytes: int) -> Region:
        """Like alloc() in host memory, but only for mapping: transfers cannot use it, and no NIC pins its pages."""
        return Region(self, nbytes, True)

    if TYPE_CHECKING:  # typing keeps overloads, and through them this module, alive past the interpreter's exit

        @overload
        def map(
            self, descriptor: RegionDescriptor, timeout_s: float | None = 5.0, *, device: None = None
        ) -> memoryview: ...
        @overload
        def map(self, descriptor: RegionDescriptor, timeout_s: float | None = 5.0, *, device: object) -> GpuMapping: ...

    def map(
        self, descriptor: RegionDescriptor, timeout_s: float | None = 5.0, *, device: object = None
    ) -> memoryview | GpuMapping:
        """Maps memory that a peer on this host allocated with engine.alloc: a writable memoryview of format "B".

        GPU memory is mapped as a GpuMapping, for kernels of `device`, a GPU of this process that reaches the owner's:
        `torch.from_dlpack(mapping)` is a tensor over it. It must come from engine.alloc(device=...), or be other memory
        that CUDA's virtual memory management can share; memory of cudaMalloc is refused, since its owner may free it.
        Within a process the mapping is at the owner's own address, if the engine allocated it.

        Whoever uses the mapping must agree with the peer who writes what and when: accesses through it are outside the
        engine's contract. They make no counts, and neither close() nor revoke() of the region stops them. The memory
        lives as long as the mapping (or a view of it, a tensor, or kernels that use that), even after the peer closed
        the region or died: the bytes then stay as they were left. Connects to the peer at first use. Blocks, GIL
        released; any thread.
        Raises UsageError for memory that this process cannot map (another host, memory that was registered instead of
        allocated, a device for host memory or none for a GPU's), TransportError where the driver refuses (a GPU that
        `device` does not reach), RemoteRegionClosed, PeerLost, WaitTimeout, EngineClosed.
        """
        mapped: memoryview | GpuMapping = self._map(descriptor, timeout_s, gpu_of(device))
        return mapped

    # ---- messages and counting

    def submit_recvs(
        self, count: int, nbytes: int, on_message: Callable[[Message], object] | None = None
    ) -> ReceivePool:
        """Opens a pool of count buffers of nbytes for messages to this engine. Only one pool may be open at a time.

        on_message: called with each message on the engine's callback thread; an exception in it is logged.
        """
        return ReceivePool(self, count, nbytes, on_message)

    def imm_counter(self, imm: int) -> ImmCounter:
        """The counter of immediate imm, 0..2**28-1. All counter objects of one number share its counts. Any thread."""
        if imm is None:
            raise UsageError("imm must be a whole number, not None: alloc_imm() picks one that nobody uses")
        return ImmCounter(self, imm)

    def alloc_imm(self) -> ImmCounter:
        """A counter for an unused immediate, from the upper half of the range; its release() returns the number."""
        return ImmCounter(self, None)

    def alloc_watcher(self, on_change: Callable[[int, int], object]) -> Watcher:
        """A 64-bit word in memory; on_change(old, new) is called on the callback thread after it has changed."""
        watcher = Watcher(self, on_change)
        self._watchers.add(watcher)
        return watcher

    # ---- what happens

    def on_event(self, fn: Callable[[EngineEvent], object] | None) -> None:
        """Calls fn with each EngineEvent on the engine's callback thread, instead of logging it. One fn at a time.

        An exception in fn is logged, and does not stop later events. None: events are logged again.
        Without fn events go to logging.getLogger("crossrail"): at once if the engine has callbacks of any kind,
        otherwise when a wait fails and at close.
        """
        if fn is None:
            self._events.fn = None
            return
        _raise.check_callable(fn, "fn")
        before, self._events.fn = self._events.fn, fn  # before the thread starts and takes the events that are waiting
        try:
            self._callbacks.start()
        except BaseException:
            self._events.fn = before
            raise
        self._callbacks.notifier.post(self._event_cookie)  # for events from before this call
        if not self._is_open:
            self._let_go_last()
        self._callbacks.start()  # again: that of a closed engine may have ended before the two posts

    def _call_after_events(self, fn: Callable[[], None]) -> None:
        """Runs fn after events were delivered, on any thread, until close(). fn must not raise, nor keep the engine
        alive.
        """
        self._events.call_after(fn)
        self._callbacks.start()

    def explain(self, peer: Address | bytes) -> Explanation:
        """Which path bytes take to this peer, and why. Print the result. Any thread."""
        name, transport, reason, state, note, rails, endpoints, gb_per_s, paths, beat = self._explain(peer)
        shown = tuple(PathExplanation(*path) for path in paths)
        heartbeat = None if beat is None else Heartbeat(*beat)
        return Explanation(
            name, transport, reason, state, note, tuple(rails), tuple(endpoints), gb_per_s, shown, heartbeat
        )

    def require(self, peer: Address | bytes, clauses: str) -> None:
        """Raises TransportError unless all clauses hold for the path to this connected peer, as explain() shows it.

        clauses: as in the engine's option of that name, for example "tcp, rails>=2". The transport must be the one used
        for this peer; the number of rails is the smaller of both sides', and those that share an interface of ours or
        an address of the peer's count once; speed>=X requires that the speed of all rails is known. It checks the
        present state only. A lost peer meets no clause. Any thread. UsageError for a malformed clause, and for a peer
        that is not connected: call connect() first.
        """
        parsed = _parse_policy(clauses)
        from crossrail import policy

        explanation = self.explain(peer)
        if explanation.state not in ("connected", "slow", "frozen", "lost"):
            raise UsageError(f"peer '{explanation.peer}' is {explanation.state}, must be connected: connect() first")
        policy.check(parsed, policy.of_path(self, explanation, parsed))

    def dump(self, path: str | os.PathLike[str] | None = None, *, reason: str = "asked for") -> str | None:
        """The contents of the flight recorder, and which operation waits for which peer: as text, or written to a file.

        path: the file, for `crossrail trace` and crossrail.flight.read_dump: a new one that only this user can read,
        which replaces what was there once it is whole. None: returns the text. reason: recorded in the file. Works on a
        closed engine too. Any thread, even while another hangs in this engine. Raises TransportError if the file cannot
        be written.
        """
        _options.check_texts(reason=reason)
        if path is not None:
            self._dump_to(_options.path(path, "path"), reason)
            return None
        with _loading():
            from crossrail.flight import parse_dump
        return parse_dump(self._dump(reason), f"engine {self.name!r}").text()

    def _check_opened(self, transport: str, clauses: tuple[Clause, ...]) -> None:
        from crossrail import policy

        try:
            policy.check(clauses, policy.of_engine(self, transport, clauses))
        except BaseException:
            self.close(0.0)
            raise

    def _log_events(self) -> None:
        # With a user's handler, the callback thread delivers events.
        if self._events.fn is None:
            self._handle_events()

    def _handle_events(self) -> None:
        self._events.deliver(self._take_events())


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Wraps a late import: by then the process may have no file descriptor left to read the module with."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        what = f"cannot load a module of crossrail: {error.strerror}"
        raise TransportError("open", errno.EMFILE, what, "raise the limit on open files (ulimit -n)") from None


def _parse_policy(text: str) -> tuple[Clause, ...]:
    with _loading():
        from crossrail import policy  # few engines need it
    return policy.parse(text)


def _default_name() -> str:
    program = sys.argv[0].rpartition("/")[2] if sys.argv else ""
    return f"{program.encode(errors='replace')[:48].decode(errors='ignore') or 'python'}-{os.getpid()}"


def _worker_cpu(given: int | str, transport: str, rails: int | Sequence[str]) -> int | None:
    if isinstance(given, str):
        if given == "auto":
            return auto_worker_cpu(transport, rails)
        raise UsageError(f"worker_cpu is {given!r}, must be the number of a core, 'auto' or None")
    check_worker_cpu(given)
    return given


def _secret_bytes(secret: str | bytes | None) -> bytes:
    if secret is None:
        return os.environb.get(_options.SECRET_VARIABLE.encode(), b"")
    if isinstance(secret, str):
        return _options.encoded(secret, "secret")
    if not isinstance(secret, bytes):
        raise UsageError(f"secret must be text, bytes or None, not {type(secret).__name__}")
    return secret
