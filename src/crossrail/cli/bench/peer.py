"""The second process of `crossrail bench`: the receiving side of every measure, driven by calls from its parent."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from typing import Any

import crossrail as xr
from crossrail import _core
from crossrail.cli.bench import api_loops
from crossrail.cli.bench.bare_rdma import BareRdmaPeer
from crossrail.cli.bench.kv_sides import KvDecoder, to_text
from crossrail.cli.bench.sockets import SocketPeer
from crossrail.cli.child import answer_calls
from crossrail.kv import KvLayout

_LET_GO_S = 0.001


class Peer:
    """State between calls. Rigs and engines are known by the keys that the parent gave them."""

    def __init__(self) -> None:
        self._sockets = SocketPeer()
        self._bare_rdma = BareRdmaPeer()
        self._rigs: dict[str, _core.bench.Rig] = {}
        self._manual: set[str] = set()  # keys of rigs that nobody drives between calls
        self._engines: list[xr.Engine] = []
        self._side: api_loops.Side | None = None
        self._decoder: KvDecoder | None = None

    # --- native rigs ---

    def open_rig(self, key: str, **options: Any) -> str:
        """Returns its address."""
        self._rigs[key] = _core.bench.Rig(key, **options)
        if options.get("polling") == "manual":
            self._manual.add(key)
        return self._rigs[key].address.hex()

    def close_rig(self, key: str) -> None:
        """Close it and forget the key."""
        self._manual.discard(key)
        self._rigs.pop(key).close()

    def close_everything(self) -> None:
        """After a failure: closes rigs, side and engines; the bare connection closes with the parent's end."""
        for rig in self._rigs.values():
            rig.close()
        self._rigs, self._manual = {}, set()
        if self._side is not None:
            self.close_side()
        if self._decoder is not None:
            self.close_decoder()
        self.close_engines()

    def add_memory(self, key: str, nbytes: int, private: bool) -> list[Any]:
        """Returns [index, descriptor]."""
        rig = self._rigs[key]
        index = rig.map_private(nbytes) if private else rig.alloc(nbytes)
        return [index, rig.descriptor(index).hex()]

    def add_remote(self, key: str, descriptor: str) -> int:
        """Returns its index."""
        return self._rigs[key].remote(bytes.fromhex(descriptor))

    def clear(self, key: str, region: int) -> None:
        """Zero a region."""
        self._rigs[key].view(region)[:] = 0

    def digest(self, key: str, region: int) -> str:
        """SHA-256 of a region."""
        return hashlib.sha256(self._rigs[key].view(region).data).hexdigest()

    def receive(self, keys: list[str], **arguments: Any) -> int:
        """Count arrivals at each rig, then answer from the first one."""
        took_ns = _core.bench.run_receivers([self._rigs[key] for key in keys], **arguments)
        self._let_go(keys)
        return took_ns

    def _let_go(self, keys: list[str]) -> None:
        """Drives manual rigs a little longer, so that the parent gets its last acknowledgements."""
        for key in keys:
            if key in self._manual:
                self._rigs[key].drive(_LET_GO_S)

    def ping_pong(self, key: str, src: int, dst: int, landing: int, **arguments: Any) -> int:
        """The second side of the ping-pong."""
        took_ns = _core.bench.run_ping_pong(self._rigs[key], src, dst, landing, first=False, **arguments)
        self._let_go([key])
        return took_ns

    def messages(self, key: str, peer: str, **arguments: Any) -> int:
        """The receiver of messages."""
        took_ns = _core.bench.run_messages(self._rigs[key], bytes.fromhex(peer), sender=False, **arguments)
        self._let_go([key])
        return took_ns

    def message_ping_pong(self, key: str, peer: str, **arguments: Any) -> int:
        """The second side of the ping-pong of messages."""
        took_ns = _core.bench.run_message_ping_pong(self._rigs[key], bytes.fromhex(peer), first=False, **arguments)
        self._let_go([key])
        return took_ns

    def cpu_ns(self) -> int:
        """CPU time that this process used so far."""
        return time.process_time_ns()

    # --- the machine's limits ---

    def socket_connect(self, port: int) -> None:
        """Connect the bare sockets."""
        self._sockets.connect(port)

    def socket_stream(self, key: str, region: int, **arguments: Any) -> int:
        """The receiver of the bare stream."""
        return self._sockets.stream(self._rigs[key].view(region), **arguments)

    def socket_pages(self, key: str, region: int, **arguments: Any) -> int:
        """The receiver of the bare pages."""
        return self._sockets.pages(self._rigs[key].view(region), **arguments)

    def socket_ping_pong(self, **arguments: Any) -> int:
        """The second side of the bare ping-pong."""
        return self._sockets.ping_pong(**arguments)

    def socket_messages(self, **arguments: Any) -> int:
        """The receiver of the bare messages."""
        return self._sockets.messages(**arguments)

    def socket_listen(self) -> int:
        """Listen for connections that nobody serves. Returns the port."""
        return self._sockets.listen()

    def socket_accept(self, count: int) -> None:
        """Take so many of them, and close them."""
        self._sockets.accept(count)

    def bare_open(self, key: str, region: int, **arguments: Any) -> list[str | int]:
        """The bare loop of a NIC's library, over a region. Returns [name, base, key]."""
        return self._bare_rdma.open(memory=self._rigs[key].view(region), **arguments)

    def bare_receive(self, **arguments: Any) -> None:
        """The receiver's side of a bare loop."""
        self._bare_rdma.receive(**arguments)

    def bare_ping_pong(self, **arguments: Any) -> None:
        """The second side of its ping-pong."""
        self._bare_rdma.ping_pong(**arguments)

    def flag_ping_pong(self, fd: int, start: int, rounds: int) -> int:
        """The second side of the bare flag."""
        return _core.bench.flag_ping_pong(fd, first=False, start=start, rounds=rounds)

    def slot_stream(self, fd: int, start: int, count: int) -> int:
        """The consumer of the bare ring."""
        return _core.bench.slot_stream(fd, producer=False, start=start, count=count)

    # --- KV cache ---

    def open_decoder(self, layout: dict[str, Any], transport: str) -> None:
        """A decoder of this layout."""
        self._decoder = KvDecoder(KvLayout.from_wire(layout), transport)

    def decoder(self) -> KvDecoder:
        """The one opened."""
        assert self._decoder is not None
        return self._decoder

    def expect_request(self) -> str:
        """The target of a request that takes all pages."""
        return to_text(self.decoder().expect())

    def take_request(self) -> None:
        """Wait until it is there."""
        self.decoder().take()

    def digest_decoder(self) -> str:
        """SHA-256 of its memory."""
        return self.decoder().digest()

    def close_decoder(self) -> None:
        """Close it."""
        self.decoder().close()
        self._decoder = None

    # --- the Python API ---

    def open_side(self, **options: Any) -> list[str]:
        """An engine with a landing place and a receive pool. Returns [address, descriptor]."""
        self._side = api_loops.Side("bench-peer", **options)
        return [self._side.engine.address.to_bytes().hex(), self._side.region.descriptor.to_bytes().hex()]

    def side(self) -> api_loops.Side:
        """The one opened."""
        assert self._side is not None
        return self._side

    def meet(self, descriptor: str) -> None:
        """Tells the side who its partner is."""
        self.side().meet(bytes.fromhex(descriptor))

    def api_ping_pong(self, rounds: int, blocking: bool) -> None:
        """The second side, through the Python API."""
        if blocking:
            api_loops.answer_blocking(self.side(), rounds)
        else:
            asyncio.run(api_loops.answer_awaiting(self.side(), rounds))

    def api_verified_ping_pong(self, rounds: int, blocking: bool) -> None:
        """The second side, which looks at each word."""
        asyncio.run(api_loops.answer_verified(self.side(), rounds, blocking=blocking))

    def clear_side(self) -> None:
        """Zero its region."""
        self.side().clear()

    def digest_side(self) -> str:
        """SHA-256 of its region."""
        return self.side().digest()

    def stream_ping_pong(self, address: str, port: int | None, rounds: int) -> None:
        """The second side of asyncio's own streams. port: of TCP; None: address is a name of Unix sockets."""
        bare = api_loops.connect_bare(address if port is None else (address, port))
        api_loops.ping_streams(bare, rounds, first=False)

    def take_messages(self, count: int) -> None:
        """Receive so many, then say so."""
        api_loops.take_messages(self.side(), count)

    def take_verified_messages(self, count: int) -> None:
        """Receive so many, look at each, then say so."""
        api_loops.take_verified(self.side(), count)

    def echo_messages(self, count: int) -> None:
        """Send each back."""
        api_loops.echo_messages(self.side(), count)

    def close_side(self) -> None:
        """Close it."""
        self.side().close()
        self._side = None

    def open_engines(self, count: int) -> list[str]:
        """Idle engines for others to connect to. Returns their addresses."""
        self._engines = [xr.Engine(f"bench-idle-{index}") for index in range(count)]
        return [engine.address.to_bytes().hex() for engine in self._engines]

    def close_engines(self) -> None:
        """Close them all."""
        for engine in self._engines:
            engine.close()
        self._engines = []


def main() -> None:
    """Answer the parent's calls: every public method of Peer that takes and gives JSON."""
    peer = Peer()
    names = (name for name in dir(Peer) if not name.startswith("_") and name not in ("side", "decoder"))
    with contextlib.suppress(KeyboardInterrupt):
        answer_calls({name: getattr(peer, name) for name in names})


if __name__ == "__main__":
    main()
