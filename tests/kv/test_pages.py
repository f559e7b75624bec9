"""Page leases: no page is reused while anybody may touch it, and every page comes back."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

import crossrail as xr
from crossrail._core import kv as native
from crossrail.kv import DuplicateRequest, NoPages, PageLease, PagePool, PagesInUse, PageState, page_hashes
from crossrail.kv.transfer.prefix import PageNames

S = PageState
WAY_TO = {
    S.RESERVED: (),
    S.FILLING: ("fill",),
    S.IN_USE: ("fill", "use"),
    S.DRAINING: ("fill", "drain"),
    S.QUARANTINED: ("fill", "drain", "quarantine"),
}
ALLOWED = {
    S.RESERVED: {"fill", "release"},
    S.FILLING: {"use", "drain"},
    S.IN_USE: {"drain", "publish", "release"},
    S.DRAINING: {"confirm", "quarantine"},
    S.QUARANTINED: {"confirm"},
}
ENDS = {
    "fill": S.FILLING,
    "use": S.IN_USE,
    "drain": S.DRAINING,
    "quarantine": S.QUARANTINED,
    "confirm": S.RESERVED,
    "release": S.FREE,
    "publish": S.IN_USE,
}
NAMES = page_hashes(range(40), 4)


def lease_in(pool: PagePool, state: PageState, count: int = 3) -> PageLease:
    lease = pool.reserve(count, "request")
    for step in WAY_TO[state]:
        getattr(lease, step)()
    assert lease.state is state
    return lease


def do(lease: PageLease, action: str) -> None:
    if action == "publish":
        lease.publish(NAMES[: len(lease.pages)])
    else:
        getattr(lease, action)()


@pytest.mark.parametrize("action", sorted(ENDS))
@pytest.mark.parametrize("state", list(WAY_TO))
def test_every_step_from_every_state(state: PageState, action: str) -> None:
    pool = PagePool(8, 4)
    lease = lease_in(pool, state)

    if action in ALLOWED[state]:
        do(lease, action)
        assert lease.state is ENDS[action]
    else:
        with pytest.raises(PagesInUse, match=f"request 'request' are {state}"):
            do(lease, action)
        assert lease.state is state
        assert pool.report().pages[state] == 3


@pytest.mark.parametrize("state", [S.FILLING, S.DRAINING, S.QUARANTINED])
def test_pages_that_somebody_may_write_are_nobody_elses(state: PageState) -> None:
    pool = PagePool(8, 4)
    lease = lease_in(pool, state)

    others = pool.reserve(5, "other")

    assert not set(lease.pages) & set(others.pages)
    with pytest.raises(NoPages, match="1 pages are needed beside 0 shared ones, 0 of 8 are free"):
        pool.reserve(1, "third")


@pytest.mark.parametrize("action", sorted(ENDS))
def test_a_released_lease_does_nothing_more(action: str) -> None:
    pool = PagePool(8, 4)
    lease = pool.reserve(2, "request")
    lease.release()

    with pytest.raises(PagesInUse):
        do(lease, action)

    assert pool.available == 8


def test_pages_come_in_order_and_come_back() -> None:
    pool = PagePool(6, 4)

    first = pool.reserve(4, "first")

    assert first.pages.tolist() == [0, 1, 2, 3]  # neighbours travel as one
    first.release()
    assert pool.available == 6 and pool.report().leases == []


def test_an_owner_has_one_lease() -> None:
    pool = PagePool(6, 4)
    pool.reserve(1, "request")

    with pytest.raises(DuplicateRequest, match="'request' has a lease already, reserved"):
        pool.reserve(1, "request")


def test_too_many_pages_take_none() -> None:
    pool = PagePool(6, 4)

    with pytest.raises(NoPages) as caught:
        pool.reserve(7, "request")

    assert (caught.value.wanted, caught.value.available) == (7, 6)
    assert pool.reserve(6, "request").pages.size == 6


def kept(pool: PagePool, owner: str, names: PageNames, more: int = 0) -> list[int]:
    """A request that came and went, and left pages with these names behind."""
    lease = pool.reserve(len(names) + more, owner, names=names)
    lease.fill()
    lease.use()
    lease.publish(names)
    pages = [int(page) for page in lease.pages]
    lease.release()
    return pages


def test_a_known_prefix_is_shared() -> None:
    pool = PagePool(10, 4)
    before = kept(pool, "first", NAMES[:3])
    assert pool.match(NAMES[:5]) == 3 and pool.available == 10

    lease = pool.reserve(6, "second", names=NAMES[:5])

    assert lease.pages[:3].tolist() == before and lease.shared == 3 and lease.prefix_tokens == 12
    assert lease.own.tolist() == lease.pages[3:].tolist()
    assert pool.report().pages[S.IN_USE] == 3 and pool.report().pages[S.RESERVED] == 3


def test_shared_pages_are_not_evicted_while_anybody_holds_them() -> None:
    pool = PagePool(6, 4)
    shared = kept(pool, "first", NAMES[:2])
    second = pool.reserve(2, "second", names=NAMES[:2])
    third = pool.reserve(3, "third", names=NAMES[:2])
    second.release()

    rest = pool.reserve(3, "rest")

    assert not set(shared) & set(rest.pages)
    with pytest.raises(NoPages):
        pool.reserve(1, "more")
    third.release()
    assert pool.reserve(3, "more").pages.size == 3


def test_eviction_takes_the_least_recently_held_and_of_a_prompt_its_end() -> None:
    pool = PagePool(6, 4)
    kept(pool, "old", NAMES[:3])
    other = page_hashes(range(100, 112), 4)
    kept(pool, "new", other)
    pool.reserve(2, "again", names=NAMES[:2]).release()  # of the old ones the first two are now the newest

    pool.reserve(3, "big")

    assert pool.match(NAMES[:3]) == 2 and pool.match(other) == 1


def test_a_name_stays_with_the_page_that_has_it() -> None:
    pool = PagePool(6, 4)
    twins = [pool.reserve(2, owner) for owner in ("a", "b")]  # both computed the same prompt, neither knew of the other
    for lease in twins:
        lease.fill()
        lease.use()
        lease.publish(NAMES[:2])
        lease.release()

    assert pool.reserve(2, "c", names=NAMES[:2]).pages.tolist() == twins[0].pages.tolist()
    assert pool.report().pages[S.FREE] == 4  # the twin's pages are nobody's content


def test_no_names_are_any_empty_sequence() -> None:
    pool = PagePool(4, 4)
    assert pool.match([]) == 0  # type: ignore[arg-type]
    lease = pool.reserve(2, "a", names=())  # type: ignore[arg-type]
    lease.fill()
    with pytest.raises(xr.UsageError):
        lease.publish_computed([b"x"])  # type: ignore[arg-type]
    assert not lease._is_published
    lease.publish_computed([])  # type: ignore[arg-type]
    assert page_hashes(range(8), np.int64(4)).shape == (2, 32)  # type: ignore[arg-type]
    with pytest.raises(xr.UsageError, match=r"must be in 1\.\.4294967295"):
        page_hashes(range(8), 1 << 40)


def test_published_pages_are_not_filled_again() -> None:
    pool = PagePool(6, 4)
    lease = lease_in(pool, S.IN_USE)
    lease.publish(NAMES[:3])
    lease.drain()
    lease.confirm()

    with pytest.raises(PagesInUse, match="published"):
        lease.fill()


def test_what_is_computed_is_shared_while_it_is_still_sent() -> None:
    pool = PagePool(6, 4)
    sending = lease_in(pool, S.FILLING)
    sending.publish_computed(NAMES[:2])

    sharing = pool.reserve(3, "sharing", names=NAMES[:2])
    assert sharing.shared == 2 and sharing.pages[:2].tolist() == sending.pages[:2].tolist()
    sharing.release()
    with pytest.raises(PagesInUse, match="cannot be released"):
        sending.release()
    sending.drain()  # what it was computed for is given up: it is there all the same
    sending.confirm()
    sending.release()
    assert pool.match(NAMES[:2]) == 2 and pool.available == pool.pages


@pytest.mark.parametrize("state", [S.RESERVED, S.DRAINING])
def test_what_nobody_computes_is_not_shared(state: S) -> None:
    pool = PagePool(6, 4)
    with pytest.raises(PagesInUse, match="published as computed"):
        lease_in(pool, state).publish_computed(NAMES[:2])


def test_a_cache_that_is_dropped_is_free_and_forgotten() -> None:
    pool = PagePool(6, 4)
    kept(pool, "gone", NAMES[:2])
    other = page_hashes(range(50, 62), 4)
    holder = pool.reserve(3, "holder")
    holder.fill()
    holder.use()
    holder.publish(other)

    assert pool.drop_cache() == 2

    assert pool.match(NAMES) == pool.match(other) == 0
    holder.release()
    assert pool.report().pages[S.FREE] == 6


def test_report_names_who_holds_what() -> None:
    pool = PagePool(10, 4)
    kept(pool, "first", NAMES[:2])
    pool.reserve(5, "second", names=NAMES[:2]).fill()

    report = pool.report()

    assert report.leases == [("second", S.FILLING, 3, 2)]
    assert str(report) == "10 pages: 5 free, 3 filling, 2 in use\n  'second' holds 3 + 2 shared, filling"


def test_names_cover_all_that_comes_before() -> None:
    prompt = list(range(11))

    names = page_hashes(prompt, 4)

    assert len(names) == 2  # 3 tokens are no page
    assert (page_hashes(np.array(prompt, np.int32), 4) == names).all()
    others = [
        page_hashes([9, *prompt[1:]], 4)[1],
        page_hashes(prompt[4:], 4)[0],
        page_hashes(prompt, 4, salt=b"other model")[1],
        page_hashes(prompt, 8)[0],
    ]
    assert len({name.tobytes() for name in [*names, *others]}) == 6


def test_name_is_the_state_of_sha_256_after_the_page() -> None:
    """So that of a page which is how SHA-256 ends a text is the text's digest."""
    first = b"crossrail-kv".ljust(28, b"\0") + (16).to_bytes(4, "little") + hashlib.sha256(b"salt").digest()
    tokens = np.arange(4000, 4032, dtype=np.uint32)
    end = np.zeros(16, np.uint32)
    end[0], end[-1] = 0x80, int.from_bytes((8 * (64 + 128)).to_bytes(4, "big"), "little")

    names = page_hashes(np.concatenate([tokens, end]), 16, salt=b"salt")

    assert names[2].tobytes() == hashlib.sha256(first + tokens.tobytes()).digest()


def test_small_pages_are_hashed_as_if_filled_up_with_zeros() -> None:
    padded = np.zeros((5, 16), np.uint32)
    padded[:, :3] = np.arange(15).reshape(5, 3)
    first = b"crossrail-kv".ljust(28, b"\0") + (3).to_bytes(4, "little") + hashlib.sha256(b"").digest()

    assert (page_hashes(range(15), 3) == native.page_names(first, padded.reshape(-1), 16)).all()


@pytest.mark.parametrize("tokens", [[[1]], [0.5], np.zeros((2, 2), int), [-1], [1 << 32]])
def test_what_are_no_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(xr.UsageError, match="tokens must be"):
        page_hashes(tokens, 1)


class PoolMachine(RuleBasedStateMachine):
    """Any requests in any order; the model is what holders of leases believe: what is their own, what it contains."""

    leases = Bundle("leases")
    PAGES = 12

    @initialize()
    def begin(self) -> None:
        self.pool = PagePool(self.PAGES, 2)
        self.alive: list[PageLease] = []
        self.content: dict[int, bytes] = {}  # what the pages hold, by name
        self.serial = 0

    @rule(target=leases, count=st.integers(0, 7), prompt=st.integers(0, 2), known=st.integers(0, 7))
    def reserve(self, count: int, prompt: int, known: int) -> Any:
        self.serial += 1
        names = page_hashes(range(prompt, prompt + 14), 2)[: min(known, count)]
        matched, available = self.pool.match(names), self.pool.available
        try:
            lease = self.pool.reserve(count, f"request-{self.serial}", names=names)
        except NoPages:
            assert count > available or matched  # shared ones may be among those available
            return None
        assert lease.shared == matched and len(lease.pages) == count
        for page, name in zip(lease.pages[:matched], names, strict=False):
            assert self.content[int(page)] == name.tobytes(), "shared pages hold what their name says"
        self.alive.append(lease)
        lease.names = names  # type: ignore[attr-defined]
        return lease

    @rule(lease=leases, action=st.sampled_from(["fill", "use", "drain", "quarantine", "confirm"]))
    def step(self, lease: PageLease | None, action: str) -> None:
        if lease is None:
            return
        before = lease.state
        try:
            do(lease, action)
        except PagesInUse:
            assert lease.state is before
            return
        assert action in ALLOWED[before]
        if action == "fill":
            for page in lease.own:
                self.content.pop(int(page), None)  # overwritten
        if action == "use":
            for page, name in zip(lease.pages, lease.names, strict=False):  # type: ignore[attr-defined]
                self.content[int(page)] = name.tobytes()

    @rule(lease=leases)
    def publish(self, lease: PageLease | None) -> None:
        if lease is not None and lease.state is S.IN_USE:
            lease.publish(lease.names)  # type: ignore[attr-defined]

    @rule(lease=consumes(leases))
    def release(self, lease: PageLease | None) -> None:
        if lease is None or lease.state is S.FREE:
            return
        try:
            lease.release()
        except PagesInUse:
            assert lease.state in (S.FILLING, S.DRAINING, S.QUARANTINED)
            if lease.state is S.FILLING:
                lease.drain()
            lease.confirm()
            lease.release()
        self.alive.remove(lease)

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def every_page_is_somewhere_once(self) -> None:
        own = [int(page) for lease in self.alive for page in lease.own]
        assert len(own) == len(set(own)), "a page is two requests' own"
        held = {int(page) for lease in self.alive for page in lease.pages}
        report = self.pool.report()
        assert sum(report.pages.values()) == self.PAGES
        assert report.pages[S.FREE] + report.pages[S.CACHED] == self.PAGES - len(held) == self.pool.available
        assert sorted(row[0] for row in report.leases) == sorted(lease.owner for lease in self.alive)

    def teardown(self) -> None:
        for lease in list(getattr(self, "alive", [])):
            self.release(lease)
        if hasattr(self, "pool"):
            assert self.pool.available == self.PAGES, "a page leaked"


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40)


@pytest.mark.parametrize(
    ("state", "call"), [(S.FILLING, r"job\.finish"), (S.DRAINING, "withdraw"), (S.QUARANTINED, "fence")]
)
def test_pages_that_are_not_given_back_say_what_ends_that(state: S, call: str) -> None:
    with pytest.raises(PagesInUse, match=f"cannot be released now. Next: .*{call}"):
        lease_in(PagePool(6, 4), state).release()
