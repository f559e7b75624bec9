"""Turns the figures measured between two machines into findings."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from ipaddress import ip_address

from crossrail._text import rate_text
from crossrail.doctor.finding import Finding, Fix, error, note, ok, warning
from crossrail.doctor.reach.measure import STREAM_PAIRS_MAX, UNKNOWN, Attempt, Matrix, Pair
from crossrail.doctor.reach.wire import PORT
from crossrail.doctor.remedies import listing

_LOST = ("timeout", "refused", "unreachable", "broken", "busy", "version")
_RTT_HIGH_US = 1000
_UNEVEN = 0.5
_ONE_STREAM_GB_PER_S = 3.0  # what a stream from Python reaches on any machine of today
_SHARE_LOW = 0.6
_LOOPBACK_MTU = 65535
_MTU_EVERYWHERE = 1280  # RFC 8200: every link that carries IPv6 passes packets of this length
_HEADERS_BYTES = 120  # IP, TCP and their options


def judge(matrix: Matrix, version: str) -> list[Finding]:
    """Worst first."""
    found = [*_contact(matrix), *_versions(matrix, version)]
    if not matrix.pairs and any(attempt.state == "ok" for attempt in matrix.attempts):
        found.append(_no_pairs(matrix))
    if matrix.pairs:
        found += [
            *_reachability(matrix),
            *_translated(matrix),
            *_other_port(matrix),
            *_mtus(matrix.pairs),
            *_rates(matrix.pairs),
            *_round_trips(matrix.pairs),
        ]
    return sorted(found, key=lambda finding: finding.severity.rank)


def _contact(matrix: Matrix) -> Iterator[Finding]:
    if matrix.error:
        yield error(
            "reach.name",
            matrix.error,
            f"getaddrinfo({matrix.target})",
            "no connection can be made",
            Fix(f"getent hosts {matrix.target}", "what this machine knows about the name"),
            Fix("crossrail doctor --peer ADDRESS", "by its address instead; `--listen` prints them"),
        )
        return
    good = [attempt.address for attempt in matrix.attempts if attempt.state == "ok"]
    bad = [attempt for attempt in matrix.attempts if attempt.state != "ok"]
    if good:
        yield ok("reach.connect", f"{matrix.target} answers at {listing(good)}, port {matrix.port}")
    if bad and not good:
        # The first has the say: the others are the same host's.
        yield _failed(matrix, bad)
    elif bad:
        yield warning(
            "reach.some-addresses",
            f"{matrix.target} also stands for {listing([attempt.address for attempt in bad])}, which do not answer",
            "; ".join(f"{attempt.address}: {attempt.detail}" for attempt in bad),
            "who tries these first waits for a time-out before the good one",
            Fix(f"getent ahosts {matrix.target}", "where the name leads; correct /etc/hosts or DNS"),
        )


def _no_pairs(matrix: Matrix) -> Finding:
    return error(
        "reach.pairs",
        "it answers, but there is no pair of addresses that engines could use",
        f"there: {listing([str(rail) for rail in matrix.rails_there]) or 'none'}; link-local ones and those of bridges "
        "of containers left out, on both sides",
        "no transfer between these hosts",
        Fix("ip address", "on both hosts: do they have addresses of one family?"),
    )


def _failed(matrix: Matrix, bad: list[Attempt]) -> Finding:
    port = matrix.port
    seen = "; ".join(f"{attempt.address}: {attempt.detail}" for attempt in bad)
    states = {attempt.state for attempt in bad}
    listen = Fix(f"crossrail doctor --listen {port}", "on the other host")
    if "version" in states:
        return error(
            "reach.protocol",
            "the other side speaks another protocol",
            seen,
            "nothing can be measured",
            *_same_version(),
        )
    if "busy" in states or "broken" in states:
        return error(
            "reach.connect",
            "the connection works, but what answers is not a doctor that serves us",
            seen,
            "nothing can be measured",
            listen,
        )
    if "timeout" in states:
        return error(
            "reach.connect",
            f"no answer from port {port}: a firewall drops the packets, or the address leads nowhere",
            seen,
            "no transfer over TCP between these hosts; connecting with EFA or RoCE would fail in the same way",
            *_firewall(port),
            Fix(f"ping {bad[0].address}", "does the host answer at all?"),
        )
    if all(ip_address(attempt.address.partition("%")[0]).is_loopback for attempt in bad) and matrix.target not in seen:
        return error(
            "reach.connect",
            f"{matrix.target} leads to this very machine, and nothing listens on port {matrix.port} here",
            seen,
            "nothing can be measured; Debian's /etc/hosts gives a host's own name the address 127.0.1.1",
            Fix(f"getent ahosts {matrix.target}", "where the name leads; correct /etc/hosts"),
            Fix("crossrail doctor --peer ADDRESS", "by its address instead; `--listen` prints them"),
        )
    if "refused" in states:
        return error(
            "reach.connect",
            f"refused: the host is up, but nothing listens on port {port} (or a firewall rejects)",
            seen,
            "nothing can be measured",
            listen,
            *_firewall(port),
        )
    return error(
        "reach.connect",
        "no route to that address",
        seen,
        "no transfer between these hosts",
        Fix(f"ip route get {bad[0].address}", "which way this host would take"),
        # "No route to host" is also what a firewall says that rejects politely.
        *(_firewall(port) if any(os.strerror(errno.EHOSTUNREACH) in attempt.detail for attempt in bad) else ()),
    )


def _firewall(port: int) -> tuple[Fix, ...]:
    return (
        Fix(f"sudo firewall-cmd --add-port={port}/tcp", "on the other host, with firewalld"),
        Fix(f"sudo ufw allow {port}/tcp", "with ufw"),
        Fix(f"sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT", "with iptables alone"),
        Fix(
            f"aws ec2 authorize-security-group-ingress --group-id SG --protocol tcp --port {port} --source-group SG",
            "on AWS; EFA itself needs --protocol -1, in and out",
        ),
    )


def _same_version() -> tuple[Fix, ...]:
    return (Fix("git pull && pip install .", "in the source folder, on the older side"),)


def _versions(matrix: Matrix, version: str) -> Iterator[Finding]:
    if matrix.peer_version and matrix.peer_version != version:
        yield warning(
            "reach.version",
            f"this side runs crossrail {version}, the other {matrix.peer_version}",
            "what both said",
            "engines of different versions may refuse each other",
            *_same_version(),
        )
    elif matrix.peer_version:
        yield ok("reach.version", f"both sides run crossrail {version}")


def _reachability(matrix: Matrix) -> Iterator[Finding]:
    pairs = matrix.pairs
    lost = [pair for pair in pairs if pair.state in _LOST]
    stalled = [pair for pair in pairs if pair.state == "stalled"]
    if stalled:
        mtu = min(pair.here.mtu for pair in stalled)
        shorter = 1500 if mtu > 1500 else _MTU_EVERYWHERE
        yield error(
            "reach.stalled",
            f"small messages pass, data does not: {listing([pair.name for pair in stalled], 3)}",
            "; ".join(f"{pair.name}: {pair.detail}" for pair in stalled[:3]),
            "engines connect, stall for seconds, and go on by short packets, slowly: something on the way drops "
            "packets as large as this MTU allows, or the link loses most packets",
            Fix(f"ping -M do -s {max(mtu - 28, 0)} {stalled[0].there.address}", "no answer: it is the MTU"),
            Fix(f"sudo ip link set {stalled[0].here.interface} mtu {shorter}", "on both sides, or raise it on the way"),
        )
    ended = [pair for pair in pairs if pair.state == "ended"]
    if ended:
        yield error(
            "reach.ended",
            "the other side stopped listening in the middle",
            _details(ended),
            "the rest was not measured",
            Fix("crossrail doctor --listen --minutes 60", "on the other host"),
        )
    if lost and len(lost) == len(pairs):
        yield error(
            "reach.pairs",
            f"none of {len(pairs)} pairs of addresses connects",
            _details(lost),
            "no transfer over TCP",
            *_routes(lost),
        )
    elif lost:
        yield warning(
            "reach.pairs",
            f"{len(lost)} of {len(pairs)} pairs of addresses do not connect: "
            f"{listing([pair.name for pair in lost], 3)}",
            _details(lost),
            "fine if each rail is a separate network; otherwise transfers between these rails fail, and such "
            "failures look random",
            *_routes(lost),
        )
    elif not stalled and not ended:
        yield ok("reach.pairs", f"all {len(pairs)} pair(s) of addresses connect")
    if sum(pair.state == "ok" for pair in pairs) > STREAM_PAIRS_MAX:
        yield note(
            "reach.sample",
            f"rates of {STREAM_PAIRS_MAX} pairs only",
            f"{len(pairs)} pairs; each address was taken at least once where that was possible",
            "the others were connected and timed, not filled",
        )


def _translated(matrix: Matrix) -> Iterator[Finding]:
    """Engines tell each other the addresses that they see themselves."""
    check = "reach.translated"
    cost = "engines name the addresses that they see themselves, which lead nowhere from"
    private = Fix(
        "xr.Engine(..., rails=[...])", "with addresses that both sides reach: a VPN, an overlay, host networking"
    )
    outside = next((pair.there.address for pair in matrix.pairs if pair.there.interface == UNKNOWN), None)
    if outside is not None:
        reached = [pair for pair in matrix.pairs if pair.there.interface != UNKNOWN and pair.state == "ok"]
        # A host with several addresses may name just some of them, as where one moves between hosts.
        yield (note if reached else error)(
            check,
            f"the other host does not have the address {outside} itself: something on the way translates it",
            f"it has {listing([str(rail) for rail in matrix.rails_there]) or 'none'}",
            f"{cost} here: no engine there is reached by that address",
            Fix("docker run --network=host ...", "where it is a published port of a container"),
            private,
        )
    if matrix.seen_as is not None:
        here, there = matrix.seen_as
        yield warning(
            check,
            f"the other side sees this host as {there}, not {here}: something on the way translates it",
            "the source address of our connection, here and there",
            f"{cost} there: engines here connect to engines there, and not the other way round. Translation "
            "also forgets idle connections",
            private,
        )


def _other_port(matrix: Matrix) -> Iterator[Finding]:
    check, other = "reach.other-port", matrix.other
    if other is None:
        return
    title = f"port {matrix.port} is reached, and port {matrix.other_port}, which the kernel chose there"
    if other.state == "ok":
        yield ok(check, f"{title}, as well")
        return
    # A user who named a port wants to know about that one.
    make = warning if matrix.port == PORT else note
    yield make(
        check,
        f"{title}, is not: a firewall passes certain ports",
        f"{other.name}, port {matrix.other_port}: {other.state}, {other.detail}",
        "engines there listen at such a port unless they are given one: connecting to them ends in a time-out",
        Fix(
            "xr.Engine(..., port=7300)",
            f"and open that port, one for each rail that shares an address, as {matrix.port}",
        ),
        Fix("crossrail doctor --listen 7300", "on the other host, and --peer HOST:7300 here: tries that port"),
    )


def _details(pairs: list[Pair]) -> str:
    return "; ".join(f"{pair.name}: {pair.state}, {pair.detail}" for pair in pairs[:4])


def _routes(lost: list[Pair]) -> tuple[Fix, ...]:
    pair = lost[0]
    return (
        Fix(f"ip route get {pair.there.address} from {pair.here.address}", "which way packets take"),
        Fix("crossrail doctor --only network", "on both hosts: several rails in one subnet?"),
    )


def _mtus(pairs: list[Pair]) -> Iterator[Finding]:
    # Loopback traffic is segmented as the kernel likes.
    pairs = [pair for pair in pairs if not pair.here.is_loopback and (pair.mtu or 0) < _LOOPBACK_MTU]
    for pair in pairs:
        if pair.here.mtu and pair.there.mtu and pair.here.mtu != pair.there.mtu:
            is_here = pair.here.mtu < pair.there.mtu
            rail, larger = (pair.here, pair.there.mtu) if is_here else (pair.there, pair.here.mtu)
            yield warning(
                "reach.mtu",
                f"different MTUs: {pair.here} {pair.here.mtu}, {pair.there} {pair.there.mtu}",
                "MTU of the interfaces",
                "TCP agrees on the smaller one; RoCE and UDP do not, and lose longer packets",
                Fix(
                    f"sudo ip link set {rail.interface} mtu {larger}",
                    f"on {'this' if is_here else 'the other'} host, if the switches allow it",
                ),
            )
            return
    short = [pair for pair in pairs if pair.mtu and pair.there.mtu and pair.mtu < min(pair.here.mtu, pair.there.mtu)]
    if short:
        pair = short[0]
        yield warning(
            "reach.path-mtu",
            f"the path of {pair.name} carries {pair.mtu} bytes, the interfaces {pair.here.mtu}",
            "IP_MTU of the connected socket",
            "a router or tunnel on the way has a smaller MTU; RoCE fails there",
            Fix(f"tracepath -n {pair.there.address}", "where it is"),
        )
    small = [pair for pair in pairs if pair.mss and pair.mtu and pair.mss < pair.mtu - _HEADERS_BYTES]
    if small and not short:
        pair = small[0]
        yield note(
            "reach.mss",
            f"{pair.name} sends segments of {pair.mss} bytes on an MTU of {pair.mtu}",
            "TCP_INFO of the connected socket",
            "something on the way lowers the segment size (a tunnel, a firewall that clamps it): more packets "
            "than needed",
        )


def _rates(pairs: list[Pair]) -> Iterator[Finding]:
    measured = [pair for pair in pairs if pair.out_gb_per_s and pair.in_gb_per_s]
    if not measured:
        return
    lows = {pair.name: min(pair.out_gb_per_s or 0, pair.in_gb_per_s or 0) for pair in measured}
    best = max(lows.values())
    slow = [pair for pair in measured if lows[pair.name] < _UNEVEN * best and not _explained(pair, measured)]
    if slow:
        yield warning(
            "reach.uneven",
            f"{len(slow)} of {len(measured)} pairs run at less than half the rate of the best",
            "; ".join(f"{pair.name}: {rate_text(lows[pair.name])}" for pair in slow[:4]) + f"; best {rate_text(best)}",
            "a write split evenly over the rails ends with the slowest",
            Fix(f"ethtool {slow[0].here.interface}", "speed that was negotiated, on both sides"),
            Fix("crossrail doctor --only network --only tcp", "on both hosts"),
        )
    for pair in measured:
        link = min((rail.mbit_per_s for rail in (pair.here, pair.there) if rail.mbit_per_s), default=0) / 8000
        if link and lows[pair.name] < _SHARE_LOW * min(link, _ONE_STREAM_GB_PER_S):
            yield warning(
                "reach.below-link",
                f"{pair.name}: {rate_text(lows[pair.name])} on a link of {rate_text(link)}",
                f"one stream, {pair.retransmits or 0} segments sent again",
                "less than one stream should reach: loss, small buffers, or other traffic",
                Fix("crossrail doctor --only tcp", "on both hosts"),
            )
            break
    again = [pair for pair in measured if (pair.retransmits or 0) > 100]
    if again:
        yield note(
            "reach.retransmits",
            f"{again[0].name}: {again[0].retransmits:,} segments had to be sent again",
            "TCP_INFO of the sending socket",
            "packets are lost on the way: congestion, a bad cable, or a full backlog at the receiver",
            Fix("crossrail doctor --only network.drops", "on the other host"),
        )
    if not slow:
        every = [rate for pair in measured for rate in (pair.out_gb_per_s or 0, pair.in_gb_per_s or 0)]
        yield ok("reach.rates", f"one stream moves {_span(rate_text(min(every)), rate_text(max(every)))}")


def _explained(pair: Pair, others: list[Pair]) -> bool:
    """Whether its link's own speed explains why it is that much slower than the others."""
    speed = min((rail.mbit_per_s for rail in (pair.here, pair.there) if rail.mbit_per_s), default=0)
    return bool(speed) and any((other.here.mbit_per_s or 0) * _UNEVEN > speed for other in others)


def _round_trips(pairs: list[Pair]) -> Iterator[Finding]:
    times = [pair.rtt_us for pair in pairs if pair.rtt_us is not None]
    if not times:
        return
    worst = max(times)
    if worst > _RTT_HIGH_US:
        yield note(
            "reach.round-trip",
            f"a round trip takes up to {worst / 1000:.1f} ms",
            "median of 20 on each pair, or of fewer that take long, from Python",
            "these hosts are not in one rack or zone, or are busy; each wait for an answer costs that much",
        )
    else:
        title = f"a round trip takes {_span(f'{min(times):.0f}', f'{worst:.0f}')} us"
        yield ok("reach.round-trip", title, "median of 20 on each pair, from Python")


def _span(low: str, high: str) -> str:
    """ "22", "22 to 29"."""
    return " to ".join(dict.fromkeys((low, high)))
