"""What ranks read of each other's records."""

from crossrail.moe.box import Box
from crossrail.moe.council import Council
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S


def test_a_record_that_came_before_the_next_question_is_told(open_engine: EngineFactory) -> None:
    engines = [open_engine(f"rank-{rank}") for rank in range(2)]
    boxes = [Box(engine, 2, rank) for rank, engine in enumerate(engines)]
    for rank, (engine, box) in enumerate(zip(engines, boxes, strict=True)):
        engine.connect(engines[1 - rank].address, WAIT_S)
        box.connect(1 - rank, boxes[1 - rank].card())
    record = Council(1, 2).record
    boxes[1].publish(record, [])
    for _ in range(2):
        boxes[0].ask(1).wait(WAIT_S)
    assert boxes[0].fresh() == [record]
    assert boxes[0].fresh() == []
    for box in boxes:
        box.close(WAIT_S)
