"""What processes hold: growth is seen, and what comes and goes is not."""

from dataclasses import replace

from crossrail.campaign.usage import Usage, growth, growth_text, plot

STEADY = [
    Usage(
        fds=50 + number % 5,
        threads=4,
        heap_kib=9000 + number % 70,
        private_kib=20_000 + number % 300,
        shared_kib=0,
        mappings=20,
    )
    for number in range(200)
]


def test_this_process_holds_something() -> None:
    now = Usage.take()

    assert now.fds >= 3
    assert now.threads >= 1
    assert now.private_kib > 1000
    assert now.exceeds(now) == ""
    assert now.exceeds(replace(now, fds=now.fds - 2)) == "2 more fds"


def test_what_comes_and_goes_is_no_growth() -> None:
    assert growth(STEADY) == []


def test_what_is_only_more_after_the_beginning_is_no_growth() -> None:
    assert growth([replace(STEADY[0], private_kib=1000, fds=3)] * 10 + STEADY) == []


def test_a_leak_is_found() -> None:
    leaking = [replace(sample, fds=sample.fds + number // 10) for number, sample in enumerate(STEADY)]
    assert [what.split()[0] for what in growth(leaking)] == ["fds"]

    leaking = [replace(sample, heap_kib=sample.heap_kib + 40 * number) for number, sample in enumerate(STEADY)]
    assert [what.split()[0] for what in growth(leaking)] == ["heap_kib"]

    assert growth([*STEADY[:100], *(replace(sample, threads=5) for sample in STEADY[100:])]) == [
        "threads grew from 4 to 5"
    ]


def test_few_samples_tell_nothing() -> None:
    few = [replace(STEADY[0], fds=number * 100) for number in range(99)]

    assert growth(few) == []
    assert growth_text(few) == "nobody looked whether it grew: of 99 samples in a row, where 100 tell something"


def test_what_grew_is_told_in_words() -> None:
    assert growth_text(STEADY) == "nothing grew"
    leaking = [replace(sample, fds=sample.fds + number // 10) for number, sample in enumerate(STEADY)]
    assert growth_text(leaking) == growth(leaking)[0]


def test_a_plot_is_as_high_as_its_values() -> None:
    assert plot([0, 0, 7, 7]) == "▁▁██"
    assert len(plot(list(range(1000)))) == 60
    assert plot([]) == ""
