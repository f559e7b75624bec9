"""Requests with n > 1 whose choices vLLM has dealt out to data-parallel replicas, at the producer or at the decoder."""

from crossrail.integrations.instance import Instance, Worker
from tests.integrations.test_vllm_scheduler import DECODE, LAYOUT, PREFILL, SECRET, Request, loads, scheduled, side


def test_choices_that_replicas_of_a_producer_hold_are_let_go_by_who_fetches_one() -> None:
    """vLLM answers with the parameters of the choice that ends last, whichever replica has it."""
    layout = LAYOUT.to_wire()
    instances = [Instance(f"p_dp{i}", [Worker(b"address %d" % i, layout, {})]) for i in (0, 1, 2)]
    stranger = Instance("q_dp1", [Worker(b"stranger", layout, {})])
    replicas = [side(engine_id=instance.name) for instance in instances[:2]]
    told = []
    for i, replica in enumerate(replicas):
        replica.instance_known(instances[i])
        for name in (f"{i}_r", f"{i + 2}_r"):
            request = Request(name, DECODE)
            replica.new_request(request)
            replica.step(scheduled(new={name: (0, 100, [1, 2, 3, 4])}))
            told.append(replica.finished(request.ends("FINISHED_LENGTH_CAPPED", 100))[1])
    decoder = side()
    for other in (*instances, stranger):  # from requests before
        decoder.new_request(Request(f"of {other.name}", PREFILL | {"crossrail_instance": other.to_line(SECRET)}))
    decoder.step(scheduled())

    for name in ("0_d", "1_d"):
        decoder.new_request(Request(name, told[-1]))
    orders = decoder.step(scheduled())

    assert {one["transfer_id"] for one in told if one} == {"r"}
    fetched, *let_go = orders.wanted
    assert (fetched.request, fetched.transfer_id, fetched.instance) == ("0_d", "r", instances[1])
    assert {(one.transfer_id, one.instance.name) for one in let_go} == {("r", "p_dp0"), ("r", "p_dp2")}
    assert orders.releases == [one.request for one in let_go]


def test_a_replica_that_a_decoder_did_not_know_lets_go_when_it_does() -> None:
    instances = [Instance(f"p_dp{i}", [Worker(b"address %d" % i, LAYOUT.to_wire(), {})]) for i in (0, 1)]
    stranger, decoder = Instance("q_dp1", [Worker(b"stranger", LAYOUT.to_wire(), {})]), side()
    for transfer in ("r", "again"):
        params = PREFILL | {"transfer_id": transfer, "crossrail_choices": True}
        decoder.new_request(Request(f"0_{transfer}", params | {"crossrail_instance": instances[0].to_line(SECRET)}))
    assert not decoder.step(scheduled()).releases

    for i, other in enumerate((stranger, instances[1], instances[1])):
        params = PREFILL | {"transfer_id": "again", "crossrail_instance": other.to_line(SECRET)}
        decoder.new_request(Request(f"later {i}", params))

    orders = decoder.step(scheduled())
    assert orders.releases == ["0_r at p_dp1"], "what is asked for there again is not let go"
    assert [(one.transfer_id, one.instance) for one in orders.wanted if one.request in orders.releases] == [
        ("r", instances[1])
    ]


def test_a_request_with_one_choice_is_let_go_nowhere_else() -> None:
    instances = [Instance(f"p_dp{i}", [Worker(b"address %d" % i, LAYOUT.to_wire(), {})]) for i in (0, 1)]
    replica, decoder = side(engine_id="p_dp0"), side()
    replica.instance_known(instances[0])
    request = Request("r", DECODE)
    replica.new_request(request)
    replica.step(scheduled(new={"r": (0, 100, [1, 2, 3, 4])}))
    told = replica.finished(request.ends("FINISHED_LENGTH_CAPPED", 100))[1]
    decoder.new_request(Request("before", PREFILL | {"crossrail_instance": instances[1].to_line(SECRET)}))
    decoder.step(scheduled())

    decoder.new_request(Request("d", told))

    orders = decoder.step(scheduled())
    assert [one.request for one in orders.wanted] == ["d"] and orders.releases == []


def test_choices_of_one_request_in_several_replicas_are_one_fetch() -> None:
    """vLLM deals them out; the producer has the KV for one decoder, and would refuse the others."""
    replicas = [side(engine_id=f"engine_dp{i}") for i in range(2)]
    requests = {name: Request(name, PREFILL) for name in ("0_d", "1_d", "2_d", "3_d")}
    for i, request in enumerate(requests.values()):
        replicas[1 - i % 2].new_request(request)

    assert [[one.request for one in s.step(scheduled()).wanted] for s in replicas] == [[], ["0_d"]]
    computed = [replicas[1 - i % 2].matched_tokens(request, 0) for i, request in enumerate(requests.values())]
    assert computed == [(100, True), (0, False), (None, False), (0, False)]
    loads(replicas[1], requests["0_d"], [1, 2, 3, 4])
    replicas[1].reported((), {"0_d"})
    assert replicas[1].matched_tokens(requests["2_d"], 96) == (0, False)
    for i, request in enumerate(requests.values()):
        assert replicas[1 - i % 2].finished(request.ends("FINISHED_LENGTH_CAPPED", 100)) == (False, None)
    assert [(order.releases, order.wanted) for order in (s.step(scheduled()) for s in replicas)] == [([], [])] * 2
