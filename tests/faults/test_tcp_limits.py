"""What the system does not give tcp any more, and forks in the middle of connections."""

import socket
from contextlib import closing

import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.process import assert_clean, run_script
from tests.support.tcp_engines import TCP

pytestmark = pytest.mark.timeout(120)


def test_out_of_descriptors_is_survived_and_said() -> None:
    script = run_script(
        """
        import os, resource, socket
        import crossrail as xr
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        tcp = {"transport": "tcp", "rails": ["127.0.0.1"]}
        target, peer = xr.Engine("target", **tcp), xr.Engine("peer", **tcp)
        events = []
        target.on_event(events.append)
        region, mine = target.alloc(100), peer.alloc(100)
        peer.submit_write(mine, region.descriptor, imm=1).wait(10)
        import time
        endpoint = xr.Address.from_bytes(target.address.to_bytes())
        kept = []
        try:
            while True:
                kept.append(os.dup(0))
        except OSError:
            pass
        late = None
        os.close(kept.pop())
        from tests.support.tcp_wire import endpoints_of
        ip, port = endpoints_of(target.address.to_bytes())[0]
        stranger = socket.create_connection((ip, port))
        deadline = time.monotonic() + 10
        while not any("open files" in event.detail for event in events) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert any("open files" in event.detail for event in events), events
        peer.submit_write(mine, region.descriptor, imm=1).wait(10)
        for fd in kept:
            os.close(fd)
        stranger.close()
        with xr.Engine("late", **tcp) as late:
            late.submit_write(late.alloc(100), region.descriptor, imm=1).wait(10)
        target.imm_counter(1).wait(3, 10)
        target.close()
        peer.close()
        """
    )

    assert_clean(script)


def test_who_connects_without_descriptors_is_told_the_limit() -> None:
    script = run_script(
        """
        import os, resource
        import crossrail as xr
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        tcp = {"transport": "tcp", "rails": ["127.0.0.1"]}
        target, peer = xr.Engine("target", **tcp), xr.Engine("peer", connect_timeout_s=0.3, **tcp)
        kept = []
        try:
            while True:
                kept.append(os.dup(0))
        except OSError:
            pass
        try:
            peer.submit_write(peer.alloc(8), target.alloc(8).descriptor).wait(10)
        except xr.PeerLost as error:
            assert "ulimit -n" in str(error), error
        else:
            raise AssertionError("connected without a descriptor")
        for fd in kept:
            os.close(fd)
        target.close()
        peer.close()
        """
    )

    assert_clean(script)


def test_port_taken_is_said_with_the_remedy(open_engine: EngineFactory) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]

        with pytest.raises(xr.TransportError, match=rf"127\.0\.0\.1:{port}.*choose another `port`"):
            open_engine("here", port=port, **TCP)


@pytest.mark.parametrize("rail", ["192.0.2.77", "2001:db8::77", "no-such-netdev", ""])
def test_rail_that_is_none_of_this_host_is_refused(open_engine: EngineFactory, rail: str) -> None:
    with pytest.raises(xr.UsageError, match="rail"):
        open_engine("here", transport="tcp", rails=[rail])


# gcc's AddressSanitizer forks without its allocator's locks: a child may wait for ever for one that a thread had.
@pytest.mark.no_sanitizer
@pytest.mark.no_coverage
def test_fork_while_connections_come_and_go() -> None:
    script = run_script(
        """
        import os, threading, warnings
        import crossrail as xr
        warnings.simplefilter("ignore", DeprecationWarning)
        tcp = {"transport": "tcp", "rails": ["127.0.0.1"]}
        target = xr.Engine("target", **tcp)
        region = target.alloc(100)
        stop = threading.Event()
        def churn():
            while not stop.is_set():
                with xr.Engine("guest", **tcp) as guest:
                    guest.submit_write(guest.alloc(100), region.descriptor, imm=1).wait(10)
        thread = threading.Thread(target=churn)
        thread.start()
        for _ in range(60):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        stop.set()
        thread.join()
        # A child that lives on does not keep the parent's connections open.
        peer = xr.Engine("peer", **tcp)
        peer.connect(target.address, 10)
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
        target.close()
        try:
            peer.submit_send(target.address, b"x").wait(10)
        except xr.PeerLost:
            pass
        else:
            raise AssertionError("sent to a closed engine")
        os.close(write_end)
        os.waitpid(pid, 0)
        peer.close()
        """
    )

    assert_clean(script)
