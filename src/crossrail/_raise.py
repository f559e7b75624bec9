"""Messages of errors that the native module raises: it calls these with plain values and raises what they return."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol, cast

from crossrail import errors

if TYPE_CHECKING:
    from crossrail import _core

# How a transfer ends, by the native code's name for it: class, cause, detail if the native code gives none, remedy.
_ENDINGS: dict[str, tuple[type[errors.TransferError], str, str, str]] = {
    "cancelled": (errors.TransferCancelled, "cancelled", "", ""),
    "peer-lost": (
        errors.PeerLost,
        "peer lost",
        "",
        "if the peer was restarted, get its new address and descriptors; the old ones are invalid. If it still runs, "
        "forget_peer() it: what you submit then connects again",
    ),
    "region-closed": (
        errors.RemoteRegionClosed,
        "the peer closed the region, or never had it",
        "",
        "get the descriptor of an open region",
    ),
    "region-revoked": (
        errors.RemoteRegionRevoked,
        "the peer revoked the region",
        "",
        "if the peer still expects your writes, get the descriptor that its renew() returned; otherwise stop "
        "writing there",
    ),
    "out-of-bounds": (
        errors.RemoteAccessError,
        "refused by the peer",
        "past the end of its region",
        "check offset and length against descriptor.nbytes",
    ),
    "access-denied": (
        errors.RemoteAccessError,
        "refused by the peer",
        "the region is not open to this operation",
        "register it there with access='write' (or 'read' for reads)",
    ),
    "checksum-mismatch": (
        errors.ChecksumMismatch,
        "the peer's memory is not what was sent, or read",
        "",
        "make sure that nothing changes the source or writes to the target meanwhile; otherwise suspect memory "
        "or network",
    ),
    "message-too-long": (
        errors.MessageTooLong,
        "the message is longer than the buffers of the peer's receive pool",
        "",
        "pass a larger nbytes to submit_recvs there",
    ),
}

# Remedies for when a live peer refuses us, by words in the native code's note. Empty: the note itself says it.
_REFUSALS: dict[str, str] = {
    "give tls to both, or to neither": "",
    "set the same `secret`": "",
    "sees no /proc": "",
    "use the same crossrail release": "",
    "TLS handshake": (
        "check that each side's certificate is signed by the CA that the other trusts (tls.ca), and has not expired"
    ),
    "(ulimit -": "try again once there is room",
    "tls.verify": "give it a certificate for the name of its engine, or accept all of the CA: tls.verify = 'chain'",
}


def inherited(thing: object) -> str:
    """An object's repr in a forked child, where it cannot be queried. A repr must not raise: logs contain them."""
    return f"<{type(thing).__name__} of the parent process>"


class _LogsEvents(Protocol):
    def _log_events(self) -> None: ...


def _log_events(engine: _core.Engine) -> None:
    """Logs pending events first: what happened outside of any transfer may explain the error that follows."""
    cast(_LogsEvents, engine)._log_events()


_ANSWERING = ("connected", "unknown", "lost")
_SILENT_SHOWN = 4
_SEVERAL = re.compile(r"\d+ peers?")  # stands for the peer's name while a scatter or barrier is under way


def _peer(engine: _core.Engine, name: str) -> str:
    """The peer as messages name it: by name, with its pid if unambiguous; "8 peers" for a scatter or barrier."""
    if _SEVERAL.fullmatch(name):
        return name
    pids = [] if engine.closed else [address.pid for address in engine.peers() if address.name == name]
    return f"'{name}' (pid {pids[0]})" if len(pids) == 1 else f"'{name}'"


def _state(engine: _core.Engine, name: str) -> str:
    """The state of the peer of that name; empty if ambiguous: two peers share the name, or it stands for several."""
    addresses = [] if engine.closed else [address for address in engine.peers() if address.name == name]
    return engine.peer_state(addresses[0]) if len(addresses) == 1 else ""


def _silent_peers(engine: _core.Engine) -> str:
    """Peers a scatter or barrier may be waiting for: it does not record its targets, but silent peers are few."""
    if engine.closed:
        return ""
    states = {address: engine.peer_state(address) for address in engine.peers()}
    found = [f"'{address.name}' is {state}" for address, state in states.items() if state not in _ANSWERING]
    if not found:
        return ""
    more = f" and {len(found) - _SILENT_SHOWN} more" if len(found) > _SILENT_SHOWN else ""
    return f"; of this engine's peers {', '.join(sorted(found)[:_SILENT_SHOWN])}{more}"


def _operation(engine: _core.Engine, op: str, peer: str, nbytes: int, imm: int | None) -> str:
    with_imm = "" if imm is None else f" with immediate {imm}"
    return f"{op} of {nbytes} bytes{with_imm} {'from' if op == 'read' else 'to'} {_peer(engine, peer)}"


def _within(timeout_s: float | None) -> str:
    """The timeout as the user gave it, even if only the rest of it was waited for: 0.099998 is shown as 0.1."""
    if timeout_s is None:
        return ""
    return f" within {timeout_s:{'.4g' if timeout_s < 1000 else 'g'}} s"


def _next(remedy: str, note: str) -> str:
    """The end of a message: the remedy. A refusal's own remedy takes precedence."""
    remedy = next((better for words, better in _REFUSALS.items() if words in note), remedy)
    return f". Next: {remedy}" if remedy else ""


def transfer_failed(
    engine: _core.Engine,
    op: str,
    status: str,
    peer: str,
    nbytes: int,
    nbytes_retired: int,
    imm: int | None,
    region: int | None,
    offset: int,
    sums: tuple[int, int],
    detail: str,
) -> errors.CrossrailError:
    what = _operation(engine, op, peer, nbytes, imm)
    if region is not None:
        what += f" (its region {region}, offset {offset})"
    if status == "engine-closed":
        return errors.EngineClosed(f"{what} was not finished: engine '{engine.name}' was closed first")
    _log_events(engine)
    kind, cause, otherwise, remedy = _ENDINGS.get(
        status, (errors.TransferError, status, "", "see engine.explain(peer)")
    )
    because = f": {detail or otherwise}" if detail or otherwise else ""
    error = kind(
        f"{what} failed: {cause}{because}; {nbytes_retired} bytes had moved{_next(remedy, detail)}",
        op=op,
        peer=peer,
        nbytes=nbytes,
        nbytes_retired=nbytes_retired,
        imm=imm,
        status=status,
        detail=detail,
        region=region,
        offset=None if region is None else offset,
    )
    if isinstance(error, errors.ChecksumMismatch):
        error.sum_sent, error.sum_found = sums
    return error


def transfer_timeout(
    engine: _core.Engine,
    op: str,
    peer: str,
    nbytes: int,
    nbytes_retired: int,
    imm: int | None,
    timeout_s: float | None,
    waits_for_trigger: bool,
) -> errors.WaitTimeout:
    _log_events(engine)
    what = _operation(engine, op, peer, nbytes, imm)
    if waits_for_trigger:
        return errors.WaitTimeout(
            f"{what} has not begun{_within(timeout_s)}: its watched word has not reached the trigger's value. It still "
            "waits. Next: see that the word goes up, wait again, or cancel() it"
        )
    state = _state(engine, peer)
    is_now = f" and the peer is {state}" if state else _silent_peers(engine) if _SEVERAL.fullmatch(peer) else ""
    look = "; see engine.explain(peer)"
    if op == "send" and state == "connected":
        look = ". A message waits until the peer has a receive buffer free: submit_recvs there"
    return errors.WaitTimeout(
        f"{what} is not complete{_within(timeout_s)}: {nbytes_retired} bytes have moved{is_now}. The transfer "
        f"continues. Next: wait again, or cancel() it{look}"
    )


def counter_timeout(
    engine: _core.Engine, imm: int, arrived: int, expected: int, timeout_s: float | None
) -> errors.WaitTimeout:
    _log_events(engine)
    # Enough counts arrived, but not for this wait.
    why = ": a wait that began earlier takes first, or they came as the time was over" if arrived >= expected else ""
    if not arrived:
        why = f". Next: see whether the writers' transfers are done, and have imm={imm} and a region of this engine"
    return errors.WaitTimeout(
        f"immediate {imm}: {arrived} of {expected} arrived{_within(timeout_s)}; none was taken{why}", arrived, expected
    )


def flag_timeout(engine: _core.Engine, imm: int, arrived: int, expected: int) -> errors.WaitTimeout:
    """The error of a kernel's wait: `arrived` is the count at this moment."""
    _log_events(engine)
    return errors.WaitTimeout(
        f"immediate {imm}: a kernel waited for {expected} counts and took none within its time; {arrived} are there by "
        "now. What followed it in its stream has run without. Next: repeat that, or give wait_on() a longer timeout_s",
        arrived,
        expected,
    )


def counter_closed(engine: _core.Engine, imm: int, arrived: int, expected: int) -> errors.EngineClosed:
    if engine.closed:
        what, next_step = f"engine '{engine.name}' was closed", ""
    else:
        what, next_step = "its number was released", f". Next: get a new counter, engine.imm_counter({imm})"
    return errors.EngineClosed(f"immediate {imm}: {what}; {arrived} of {expected} had arrived{next_step}")


def region_in_use(
    engine: _core.Engine, call: str, nbytes: int, inflight: int, users: list[str], timeout_s: float | None
) -> errors.WaitTimeout:
    peers = "as far as is known by " + " and ".join(f"peer {name!r}" for name in users) if users else "perhaps by peers"
    ours = "" if call == "revoke" or not inflight else f"by {inflight} transfers of our own, "
    refuses = "It refuses peers" if call == "revoke" else "It refuses new use"
    return errors.WaitTimeout(
        f"region of {nbytes} bytes of engine '{engine.name}' is still in use{_within(timeout_s)}, {ours}{peers}. "
        f"{refuses}; its memory must stay as it is. Next: {call}() it again"
    )


def recv_timeout(engine: _core.Engine, timeout_s: float | None) -> errors.WaitTimeout:
    _log_events(engine)
    return errors.WaitTimeout(f"engine '{engine.name}' received no message{_within(timeout_s)}")


def pool_closed(engine: _core.Engine) -> errors.CrossrailError:
    if engine.closed:
        return errors.EngineClosed(f"engine '{engine.name}' was closed: no more messages will come")
    return errors.UsageError("the receive pool was closed and holds no more messages")


def connect_timeout(engine: _core.Engine, peer: str, pid: int, timeout_s: float | None) -> errors.WaitTimeout:
    _log_events(engine)
    return errors.WaitTimeout(
        f"no connection to '{peer}' (pid {pid}){_within(timeout_s)}. Next: check that the process is running; "
        "engine.explain(peer) says how far it got"
    )


def connect_failed(engine: _core.Engine, peer: str, pid: int, note: str) -> errors.CrossrailError:
    if engine.closed:
        return errors.EngineClosed(f"engine '{engine.name}' was closed while it connected to '{peer}' (pid {pid})")
    _log_events(engine)
    _, cause, _, remedy = _ENDINGS["peer-lost"]
    because = f": {note}" if note else ""
    return errors.PeerLost(
        f"connect to '{peer}' (pid {pid}) failed: {cause}{because}{_next(remedy, note)}",
        op="connect",
        peer=peer,
        status="peer-lost",
        detail=note,
    )


def map_failed(
    engine: _core.Engine, status: str, peer: str, nbytes: int, region: int, note: str
) -> errors.CrossrailError:
    what = f"map of {nbytes} bytes of {_peer(engine, peer)} (its region {region})"
    if status == "engine-closed":
        return errors.EngineClosed(f"{what} was not finished: engine '{engine.name}' was closed first")
    if status == "access-denied":
        return errors.UsageError(
            f"{what}: this process cannot map that memory. It must come from the peer's engine.alloc(), on this host, "
            "and be reached by shm: engine.explain(peer) says what is used"
        )
    _log_events(engine)
    kind, cause, _, remedy = _ENDINGS.get(status, (errors.TransferError, status, "", "see engine.explain(peer)"))
    because = f": {note}" if note else ""
    return kind(
        f"{what} failed: {cause}{because}{_next(remedy, note)}",
        op="map",
        peer=peer,
        nbytes=nbytes,
        status=status,
        detail=note,
        region=region,
    )


def gpu_map_failed(
    engine: _core.Engine, status: str, peer: str, nbytes: int, region: int, note: str
) -> errors.CrossrailError:
    what = f"map of {nbytes} bytes of a GPU of {_peer(engine, peer)} (its region {region})"
    because = f" ({note})" if note else ""
    if status == "access-denied":
        return errors.UsageError(
            f"{what}: this process cannot map that memory{because}. It must come from the peer's "
            "engine.alloc(device=...), on this host, and be reached by shm: engine.explain(peer) says what is used"
        )
    if status == "transport-failed":
        return errors.TransportError("map", 0, f"{what} failed{because}", "see engine.explain(peer)")
    return map_failed(engine, status, peer, nbytes, region, note)


def no_loop(engine: _core.Engine) -> errors.UsageError:
    return errors.UsageError(
        f"engine '{engine.name}' is awaited where no asyncio event loop is running. Next: await it on one "
        "(asyncio.run, uvloop, anyio with backend='asyncio'; not trio), or block in wait() or recv() in a thread"
    )


def another_clock(engine: _core.Engine, loop: object) -> errors.UsageError:
    return errors.UsageError(
        f"engine '{engine.name}' cannot be awaited on {loop!r}: they use different clocks. Next: await engines of a "
        "simulated world in crossrail.sim.run() or on its world.event_loop(), and others outside of these"
    )


def no_thread(cause: RuntimeError) -> errors.TransportError:
    return errors.TransportError(
        "pthread_create",
        0,
        f"cannot start the thread of the engine's callbacks: {cause}",
        "raise the limit on processes (ulimit -u, the container's pids limit) or on address space (ulimit -v)",
    )


def check_callable(fn: object, argument: str) -> None:
    if not callable(fn):
        raise errors.UsageError(f"{argument} must be callable, not {type(fn).__name__}")


def describe_array(given: object, argument: str | None = None) -> str:
    """Describes what was given in place of an array of whole numbers: the properties that matter, none of its contents.

    argument: set where lists are refused whatever they contain.
    """
    facts = []
    for name in ("shape", "strides", "dtype", "format", "device"):
        try:
            value = getattr(given, name, None)
        except Exception:  # a foreign object's property, or a view that was released
            continue
        if value is not None and not callable(value):
            facts.append(f"{name} {tuple(value) if name == 'shape' else value}")
    kind = type(given).__name__
    if isinstance(given, (list, tuple)):
        advice = f" (numpy.asarray({argument}, dtype=numpy.int64) makes an array)" if argument else ""
        return f"{kind} of length {len(given)}{advice}"
    return f"{kind} with {', '.join(facts)}" if facts else kind
