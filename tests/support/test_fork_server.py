"""A peer that is forked is, for tests, as one that is started: how it ends, stops and complains; and what it sees."""

import os
import select
import signal
from collections.abc import Iterator

import pytest

from tests.conftest import PeerFactory
from tests.support import fork_server
from tests.support.fork_server import ForkedProcess
from tests.support.limits import WAIT_S
from tests.support.node import CommandError
from tests.support.process import PeerProcess


@pytest.fixture(params=["forked", "fresh"])
def child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerProcess]:
    if request.param == "fresh":
        monkeypatch.setattr(fork_server, "suitable", lambda: None)
    child = PeerProcess()
    assert isinstance(child._process, ForkedProcess) == (request.param == "forked")
    yield child
    child.close()


def test_peer_that_is_asked_to_ends_well_and_silently(child: PeerProcess) -> None:
    child.open()

    assert child.finish() == ""
    assert not child.alive


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_signal_that_ends_a_peer_is_its_status(child: PeerProcess, number: signal.Signals) -> None:
    child.open()

    os.kill(child.pid, number)

    assert child.wait_dead() == -number
    assert child.wait_dead() == -number
    with pytest.raises(ProcessLookupError):  # reaped: no zombie is left
        os.kill(child.pid, 0)


def test_exit_status_is_the_peers(child: PeerProcess) -> None:
    child.start("exit_now")

    assert child.wait_dead() == 1


def test_stopped_peer_stands_still_and_goes_on(child: PeerProcess) -> None:
    child.call("leaks")

    child.stop()

    assert child.alive
    child.start("leaks")
    child.resume()
    assert child.answer()["threads"] == []


def test_error_of_a_peer_is_told_and_written_to_its_own_standard_error(child: PeerProcess) -> None:
    with pytest.raises(CommandError, match="AttributeError"):
        child.call("no_such_command")

    assert "no_such_command" in child.errors()


def test_ctrl_c_is_an_exception_in_a_peer(child: PeerProcess) -> None:
    child.call("leaks")

    os.kill(child.pid, signal.SIGINT)

    assert child.wait_dead() != 0
    assert "KeyboardInterrupt" in child.errors()


def test_peer_has_no_descriptor_of_the_tests_or_of_another_peer(child: PeerProcess, spawn_peer: PeerFactory) -> None:
    other = spawn_peer()

    for peer in (child, other):
        peer.call("leaks")
        # The three standard ones, and the copy of standard output through which it answers.
        assert sorted(map(int, os.listdir(f"/proc/{peer.pid}/fd"))) == [0, 1, 2, 3]


def test_peers_that_are_forked_draw_other_random_numbers(spawn_peer: PeerFactory) -> None:
    one, two = spawn_peer(), spawn_peer()

    assert one.open(name="same").address != two.open(name="same").address


@pytest.mark.parametrize("change", ["environment", "network"])
def test_peer_in_other_surroundings_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, spawn_peer: PeerFactory, change: str
) -> None:
    assert fork_server.suitable() is not None
    if change == "environment":
        monkeypatch.setenv("CROSSRAIL_SECRET", "of this test")
    else:
        monkeypatch.setattr(os, "readlink", lambda path: f"{path} of another host")

    assert not isinstance(spawn_peer()._process, ForkedProcess)


def test_forked_peers_end_with_their_server() -> None:
    server = fork_server.ForkServer()
    with open(os.devnull, "w") as errors:
        child = server.fork("tests.support.peer", errors.fileno())

    server.close()

    # Do not check that its pid is gone: whoever reaps orphans may take a while.
    assert select.select([child._pidfd], [], [], WAIT_S)[0], "it has not ended"
    child.stdin.close()
    child.stdout.close()
    os.close(child._pidfd)
