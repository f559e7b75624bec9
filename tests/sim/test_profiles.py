"""NIC profiles against what they were fitted to."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

import crossrail as xr
from crossrail import sim
from crossrail.sim.profiles import NicProfile, from_bench, rails_of

KIB, MIB = 1 << 10, 1 << 20

# Table 2 of arXiv 2510.27656: Gb/s of one write at a time, and of pages, each by bytes.
SINGLE = {
    "2xefa200": {64 * KIB: 16, 256 * KIB: 54, MIB: 145, 32 * MIB: 336},
    "cx7": {64 * KIB: 44, 256 * KIB: 116, MIB: 245, 32 * MIB: 378},
}
PAGED = {
    "2xefa200": {KIB: 17, 8 * KIB: 138, 16 * KIB: 274, 64 * KIB: 364},
    "cx7": {KIB: 91, 8 * KIB: 320, 16 * KIB: 367, 64 * KIB: 370},
}
PAGES = 10_000
REPEATS = 100


class Bench:
    """Two hosts, and the virtual time that operations between them take."""

    def __init__(self, world: sim.World, nic: sim.Rails) -> None:
        self.world = world
        self.sender, self.receiver = (world.host(name, nic=nic).engine(name) for name in ("sender", "receiver"))
        self.source = self.sender.register_phantom(PAGES * 64 * KIB)
        self.target = self.receiver.register_phantom(PAGES * 64 * KIB)
        self.single(64 * KIB)  # connects

    def single(self, nbytes: int) -> float:
        """Bytes per second of writes one after the other."""
        began_s = self.world.now_s
        for _ in range(REPEATS):
            self.sender.submit_write(self.source, self.target.descriptor, nbytes, imm=1).wait(timeout_s=10)
        took_s = self.world.now_s - began_s
        self.receiver.imm_counter(1).wait(REPEATS, timeout_s=10)
        return REPEATS * nbytes / took_s

    def paged(self, page_bytes: int) -> float:
        """Bytes per second of shuffled pages in one call: neighbours would travel together."""
        rng = np.random.default_rng(1)
        began_s = self.world.now_s
        self.sender.submit_paged_writes(
            self.source, rng.permutation(PAGES), self.target.descriptor, rng.permutation(PAGES), page_bytes, imm=1
        ).wait(timeout_s=10)
        self.receiver.imm_counter(1).wait(PAGES, timeout_s=10)
        return PAGES * page_bytes / (self.world.now_s - began_s)

    def one_way(self) -> float:
        """Seconds from the submit of 8 bytes to their count: the median, since some immediates are told late."""
        took_s = []
        for _ in range(REPEATS):
            began_s = self.world.now_s
            self.sender.submit_write(self.source, self.target.descriptor, 8, imm=1)
            self.receiver.imm_counter(1).wait(1, timeout_s=10)
            took_s.append(self.world.now_s - began_s)
        return statistics.median(took_s)


@pytest.mark.parametrize(("nic", "nbytes"), [(nic, nbytes) for nic in SINGLE for nbytes in SINGLE[nic]])
def test_single_writes_are_as_fast_as_the_papers(nic: str, nbytes: int) -> None:
    with sim.World(seed=1) as world:
        gbps = Bench(world, nic).single(nbytes) * 8 / 1e9

    assert gbps == pytest.approx(SINGLE[nic][nbytes], rel=0.1)


@pytest.mark.parametrize(("nic", "nbytes"), [(nic, nbytes) for nic in PAGED for nbytes in PAGED[nic]])
def test_pages_are_as_fast_as_the_papers(nic: str, nbytes: int) -> None:
    with sim.World(seed=1) as world:
        gbps = Bench(world, nic).paged(nbytes) * 8 / 1e9

    assert gbps == pytest.approx(PAGED[nic][nbytes], rel=0.1)


def test_one_rail_of_efa100_has_the_published_rate() -> None:
    with sim.World(seed=1) as world:
        one = Bench(world, "efa100").single(32 * MIB) * 8 / 1e9
    with sim.World(seed=1) as world:
        four = Bench(world, "4xefa100").paged(64 * KIB) * 8 / 1e9

    assert one == pytest.approx(97.4, rel=0.1)
    assert four == pytest.approx(4 * 97.4, rel=0.1)


# --- what bench measured ---

MEASURED = {
    "tcp": {"write-256k-w1": 4.3, "write-1m-w16": 5.4, "write-32m-w16": 5.2, "paged-1k": 2.5, "ping-pong": 4.8},
    "ofi:tcp": {"write-64k-w1": 1.7, "write-1m-w16": 3.6, "write-32m-w16": 3.4, "paged-1k": 0.13, "ping-pong": 13.0},
}


@pytest.mark.parametrize("transport", MEASURED)
def test_a_profile_from_bench_gives_back_what_was_measured(transport: str, tmp_path: Path) -> None:
    measured = MEASURED[transport]
    results = [{"name": name, "value": value} for name, value in measured.items()]
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"format": 1, "results": [*results, {"name": "broke", "value": None}]}))

    with sim.World(seed=1) as world:
        bench = Bench(world, from_bench(file))

        assert bench.single(32 * MIB) / 1e9 == pytest.approx(measured["write-1m-w16"], rel=0.1)
        assert bench.paged(KIB) / KIB / 1e6 == pytest.approx(measured["paged-1k"], rel=0.1)
        assert bench.one_way() * 1e6 == pytest.approx(measured["ping-pong"], rel=0.1)
        short = next(name for name in measured if name.endswith("k-w1"))
        nbytes = int(short.split("-")[1].rstrip("k")) * KIB
        assert bench.single(nbytes) / 1e9 == pytest.approx(measured[short], rel=0.1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("not json", "was not written by"),
        ("[]", "was not written by"),
        ('{"results": [{"name": "paged-1k"}]}', "was not written by"),
        ('{"results": []}', "has no write-32m-w16"),
    ],
)
def test_a_file_without_figures_is_refused_in_words(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text)

    with pytest.raises(xr.UsageError, match=complaint):
        from_bench(file)


# --- names ---


def test_rails_are_named_counted_or_given() -> None:
    own = NicProfile("own", gbps=10)

    assert [nic.name for nic in rails_of("2xefa200")] == ["efa200", "efa200"]
    assert [nic.name for nic in rails_of(["cx7", own, "3 x plain"])] == ["cx7", "own", "plain", "plain", "plain"]
    assert rails_of(own) == [own]


@pytest.mark.parametrize("nic", ["", "cx9", "0xcx7", "17xcx7", [], ["cx7"] * 17, "2x", "cx7x2"])
def test_rails_that_nobody_knows_are_refused(nic: str | list[str]) -> None:
    with pytest.raises(xr.UsageError, match="nic"):
        rails_of(nic)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gbps", 0),
        ("gbps", float("nan")),
        ("ops_per_s", -1),
        ("overhead_ns", -1),
        ("latency_us", float("inf")),
        ("works_max", 0),
        ("work_bytes_max", 1),
    ],
)
def test_a_profile_out_of_bounds_is_refused_by_its_field(field: str, value: float) -> None:
    with pytest.raises(xr.UsageError, match=field):
        NicProfile("x", **({"gbps": 10.0} | {field: value}))


def test_less_than_one_work_a_second_is_still_a_limit() -> None:
    assert NicProfile("slow", gbps=1, ops_per_s=0.4).as_tuple()[2] == 1
    assert NicProfile("fast", gbps=1).as_tuple()[2] == 0
