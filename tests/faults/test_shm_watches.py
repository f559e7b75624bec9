"""A kernel that watches no more descriptors for this user (fs.epoll.max_user_watches)."""

import pytest

from tests.support.process import PeerProcess, run_script

# The limit is the whole user's, so a filter stands in for it: from then on each EPOLL_CTL_ADD of the process fails.
CONNECT = """
    import ctypes, errno, platform, struct, sys
    import crossrail as xr

    PR_SET_NO_NEW_PRIVS, SET_MODE_FILTER, ON_ALL_THREADS = 38, 1, 1
    SECCOMP, EPOLL_CTL = {"x86_64": (317, 233), "aarch64": (277, 21)}[platform.machine()]
    LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
    ALLOW, FAIL, EPOLL_CTL_ADD = 0x7FFF0000, 0x00050000, 1
    NUMBER_AT, SECOND_ARGUMENT_AT = 0, 24
    steps = [
        (LOAD, 0, 0, NUMBER_AT), (IF_EQUAL, 0, 3, EPOLL_CTL),
        (LOAD, 0, 0, SECOND_ARGUMENT_AT), (IF_EQUAL, 0, 1, EPOLL_CTL_ADD),
        (RETURN, 0, 0, FAIL | errno.ENOSPC), (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)

    with xr.Engine("short of watches", transport="shm") as engine:
        peer = xr.Address.from_bytes(bytes.fromhex(sys.argv[1]))
        assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        assert libc.syscall(SECCOMP, SET_MODE_FILTER, ON_ALL_THREADS, program) == 0
        try:
            engine.connect(peer, 15)
        except xr.PeerLost as error:
            print(error)
"""


@pytest.mark.no_sanitizer  # whose runtime has no room for the filter
def test_engine_that_may_watch_no_more_says_so_at_once(child: PeerProcess) -> None:
    there = child.open(transport="shm")

    done = run_script(CONNECT, there.address.to_bytes().hex())

    assert "fs.epoll.max_user_watches" in done.stdout, done.stdout + done.stderr
