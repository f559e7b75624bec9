"""Buckets and pairs, by their arithmetic alone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossrail as xr
from crossrail.integrations.verl.buckets import ALIGN, Piece, Plan, Table, decode, encode
from crossrail.integrations.verl.pairing import Share, senders_of, targets_of

ranks = st.integers(1, 40)


@given(st.lists(st.integers(0, 5000), max_size=30), st.integers(1, 12))
def test_every_byte_has_one_place(sizes: list[int], blocks: int) -> None:
    bucket_bytes = blocks * ALIGN
    plan, buckets = Plan(bucket_bytes), list[list[Piece]]()
    for i, size in enumerate(sizes):
        for piece in plan.place(f"w{i}", "uint8", (size,), size):
            if piece is None:
                buckets.append(plan.pieces)
                plan.clear()
    buckets.append(plan.pieces)
    for pieces in buckets:
        ends = [0, *(piece.at + piece.nbytes for piece in pieces)]
        assert all(end <= piece.at for end, piece in zip(ends, pieces, strict=False)) and ends[-1] <= bucket_bytes
        table = Table(3, 1, False, pieces)
        assert decode(encode(table), bucket_bytes) == table
    for i, size in enumerate(sizes):
        parts = [piece for pieces in buckets for piece in pieces if piece.name == f"w{i}"]
        assert [part.begin for part in parts] == [sum(p.nbytes for p in parts[:k]) for k in range(len(parts))]
        assert sum(part.nbytes for part in parts) == size and {part.total for part in parts} == {size}
        assert size > bucket_bytes or len(parts) == 1, "only what is longer than a bucket is cut"


@given(ranks, ranks)
def test_all_trainer_ranks_send_about_as_much(trainers: int, rollouts: int) -> None:
    senders = [senders_of(rollout, trainers, rollouts) for rollout in range(rollouts)]
    targets = [targets_of(trainer, trainers, rollouts) for trainer in range(trainers)]
    assert all(senders) and all(targets)
    assert all((t in of) == (r in targets[t]) for r, of in enumerate(senders) for t in range(trainers))
    loads = [sum(1 / len(senders[r]) for r in of) for of in targets]
    fewest, most = (trainers // rollouts, -(-trainers // rollouts)) if trainers >= rollouts else (1, 1)
    at_most = 1 / fewest if trainers >= rollouts else -(-rollouts // trainers)
    at_least = 1 / most if trainers >= rollouts else rollouts // trainers
    assert all(at_least - 1e-9 <= load <= at_most + 1e-9 for load in loads)


@given(st.integers(1, 40), st.integers(1, 1 << 40))
def test_shares_are_all_of_a_bucket(of: int, blocks: int) -> None:
    bounds = [Share(i, of).bounds(blocks * ALIGN, ALIGN) for i in range(of)]
    assert bounds[0][0] == 0 and bounds[-1][1] == blocks * ALIGN
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\xc1",
        encode(Table(None, 0, True, []))[:-1],
        encode(Table(None, 0, True, [Piece("w", "uint8", (4,), 0, 600, 0, 600)])),
        encode(Table(None, 0, True, [Piece("w", "uint8", (4,), 0, 4, 510, 4)])),
        encode(Table(None, 0, True, [Piece("w", "uint8", (4,), 2, 4, 0, 4)])),
        encode(Table(None, 0, True, [Piece("w", "float32", (3,), 0, 16, 0, 16)])),
        encode(Table(None, 0, True, [Piece("w", "float32", (0,), 0, 16, 0, 16)])),
    ],
)
def test_table_that_does_not_fit_is_refused(encoded: bytes) -> None:
    with pytest.raises(xr.UsageError):
        decode(encoded, 512)
