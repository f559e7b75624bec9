"""Several processes that are told the same at once: answers in their order, and the first that fails is heard."""

from __future__ import annotations

import json
import time

import pytest

from crossrail.cli.child import _EXIT_GRACE_S, Child, ChildFailed, Children
from tests.moe.workloads import Workload
from tests.support.limits import WAIT_S
from tests.support.process import start_script


def test_answers_are_in_order_and_the_first_failure_is_told() -> None:
    with Children([Child("tests.moe.fleet_rank", f"rank {rank}") for rank in range(2)]) as both:
        addresses = both.each("open", [{"name": f"rank-{rank}", "transport": "shm"} for rank in range(2)])
        assert [b"rank-0" in bytes.fromhex(addresses[0]), b"rank-1" in bytes.fromhex(addresses[1])] == [True, True]

        # Rank 0 dispatches, and waits for rank 1, which does not know what to do.
        both.all("join", addresses=addresses)
        work = Workload(2, experts=4, hidden=64, top_k=2, max_tokens=4, routing="uniform", seed=1).to_json()
        common = {"work": work, "options": {}}
        with pytest.raises(ChildFailed, match=r"rank 1 .*KeyError: 'unheard of'"):
            both.each("round", [common | {"style": "whole"}, common | {"style": "unheard of"}])


def test_those_that_do_not_end_are_not_waited_for_one_after_the_other() -> None:
    """As when Ctrl-C comes while all of them import torch."""
    children = Children([Child("tests.cli.deaf_child", f"rank {rank}") for rank in range(4)])
    children.all("wait_for_ever", timeout_s=WAIT_S)
    begun = time.monotonic()
    children.close()
    assert time.monotonic() - begun < len(children) * _EXIT_GRACE_S


def test_child_whose_parent_left_in_the_middle_of_an_answer_ends_without_a_word() -> None:
    script = """
        from crossrail.cli.child import answer_calls
        answer_calls({"add": lambda a, b: a + b})
    """
    with start_script(script) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        for number, (a, b) in enumerate([(1, 2), (3, 4)]):
            call = {"number": number, "command": "add", "arguments": {"a": a, "b": b}}
            child.stdin.write(json.dumps(call) + "\n")
            child.stdin.flush()  # stays open: only the answer can tell the child
            if number == 0:
                assert json.loads(child.stdout.readline()) == {"number": 0, "result": 3}
                child.stdout.close()
        assert child.wait(WAIT_S) == 3
        assert child.stderr.read() == ""
