"""vLLM's cache is reset in the middle of prompts, as after an update of weights."""

from tests.integrations.test_vllm_scheduler import DECODE, Request, scheduled, side


def test_a_cache_that_is_reset_makes_stale_what_is_computed_again_and_no_more() -> None:
    """vLLM resets it also while requests run that keep their blocks: then it says that it has not done so."""
    s = side()
    for name in ("taken", "waits", "runs"):
        s.new_request(Request(name, DECODE))
    s.step(scheduled(new={"taken": (0, 64, [1, 2]), "waits": (0, 64, [3, 4]), "runs": (0, 64, [5, 6])}))
    s.step(scheduled(preempted={"waits"}))

    s.reset_cache()
    orders = s.step(scheduled(preempted={"taken"}))
    after = s.step(scheduled(preempted={"runs"}))

    assert (orders.preempted, sorted(orders.stale)) == (["taken"], ["taken", "waits"])
    assert not after.stale
