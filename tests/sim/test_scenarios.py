"""The scenarios themselves: they hold, they replay, and their checkers bite."""

import asyncio

import numpy as np
import pytest

import crossrail as xr
from crossrail.sim.scenarios import SCENARIOS, Run, Scenario, play
from crossrail.sim.scenarios.base import Checks
from tests.support.seeds import Seed

LONG = "weight-fanout"  # a million works: one seed is enough, and a sanitizer makes minutes of it
FIXED = [
    *((name, number) for name in SCENARIOS if name != LONG for number in (1, 2, 3)),
    pytest.param(LONG, 1, marks=pytest.mark.no_sanitizer),
]


@pytest.mark.parametrize(("name", "number"), FIXED)
def test_a_scenario_holds_with_fixed_seeds(name: str, number: int) -> None:
    outcome = play(SCENARIOS[name], number)

    assert outcome.failures == []
    assert outcome.checks > 0
    assert outcome.stats["works"] > 0


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != LONG])
def test_a_scenario_holds_with_a_fresh_seed_and_replays_to_the_byte(name: str, seed: Seed) -> None:
    number = int(seed.rng().integers(1 << 31))

    first, second = play(SCENARIOS[name], number, keep_log=True), play(SCENARIOS[name], number)

    assert first.failures == [], f"crossrail sim --scenario {name} --seed {number}"
    assert first.log
    assert (second.digest, second.virtual_s, second.stats) == (first.digest, first.virtual_s, first.stats)


def test_other_seeds_are_other_runs() -> None:
    assert play(SCENARIOS["pair"], 1).digest != play(SCENARIOS["pair"], 2).digest


# --- the checkers bite ---


@pytest.mark.parametrize(("got", "expected"), [(0, 1), (1, 100), (100, 1), (3, 4)])
def test_bytes_of_unequal_length_are_not_the_same(got: int, expected: int) -> None:
    checks = Checks()
    checks.same_bytes("what arrived", np.zeros(got, np.uint8), np.zeros(expected, np.uint8))

    assert checks.failures == [f"what arrived: an array of shape ({got},), expected ({expected},)"]


def test_late_packets_are_seen_where_memory_is_taken_back_without_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xr.Region, "close", lambda region: None)

    failures = [failure for number in range(5) for failure in play(SCENARIOS["late-packets"], number).failures]

    assert any("memory closed to writer" in failure for failure in failures)


async def touches_what_it_sealed(run: Run) -> None:
    memory = np.zeros(100, np.uint8)
    run.seal("the memory", memory)
    memory[42] = 7


async def counts_one_too_many(run: Run) -> None:
    a, b = (run.host(name).engine(name) for name in "ab")
    counter, source, target = run.counter(b), a.alloc(64), b.alloc(64)
    for _ in range(2):
        await a.submit_write(source, target.descriptor, imm=counter.imm)
    await counter.wait_async(1, timeout_s=1)


async def leaves_a_transfer_open(run: Run) -> None:
    a, b = (run.host(name).engine(name) for name in "ab")
    run.track(a.submit_send(b.address, b"nobody has a pool"), "the message")


async def waits_for_ever(run: Run) -> None:
    await asyncio.Event().wait()


async def raises(run: Run) -> None:
    raise RuntimeError("on purpose")


async def looks_at_nothing(run: Run) -> None:
    await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            touches_what_it_sealed,
            "the memory, after its completion: 1 of 100 bytes differ, the first at 42: 7, expected 0",
        ),
        (counts_one_too_many, "that nobody sent: 1, expected 0"),
        (leaves_a_transfer_open, "completions of the message: 0, expected 1"),
        (waits_for_ever, "SimulationIdle"),
        (raises, "RuntimeError: on purpose"),
        (looks_at_nothing, "nothing was checked"),
    ],
)
def test_a_run_that_breaks_the_contract_is_told(wrong: object, complaint: str) -> None:
    outcome = play(Scenario("wrong", "", wrong), 1)  # type: ignore[arg-type]

    assert not outcome.ok
    assert complaint in "\n".join(outcome.failures)
