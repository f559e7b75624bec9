"""What ranks read of each other's records."""

from crossrail.moe.masking.confirmations import Confirmations
from crossrail.moe.masking.paxos import Paxos
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S


def test_a_record_that_came_before_the_next_question_is_told(open_engine: EngineFactory) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(2)]
    both = [Confirmations(engine, 2, rank) for rank, engine in enumerate(engines)]
    for rank, (engine, one) in enumerate(zip(engines, both, strict=True)):
        engine.connect(engines[1 - rank].address, WAIT_S)
        one.connect(1 - rank, both[1 - rank].card())
    record = Paxos(1, 2).record
    both[1].publish(record, [])
    for _ in range(2):
        both[0].ask(1).wait(WAIT_S)
    assert both[0].fresh() == [record]
    assert both[0].fresh() == []
    for one in both:
        one.close(WAIT_S)
