"""A checked write whose asker is forgotten by the target before it has the answer."""

import numpy as np
import pytest

import crossrail as xr
from tests.conftest import EngineFactory
from tests.support.limits import WAIT_S, eventually


def drive(*engines: xr.Engine) -> bool:
    for engine in engines:
        engine.progress()
    return True


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_asker_that_was_forgotten_is_answered_all_the_same(open_engine: EngineFactory, transport: str) -> None:
    common = {"transport": transport, "polling": "manual", "rails": ["127.0.0.1"] if transport == "tcp" else 1}
    asker, target = open_engine("asker", **common), open_engine("target", **common)
    src, dst = asker.register(np.full(1000, 7, np.uint8)), target.register(np.zeros(1000, np.uint8))
    transfer = asker.submit_write(src, dst.descriptor, imm=1, verify=True)
    # From the count on the answer is under way, and the asker, which nobody drives any more, cannot have it.
    eventually(lambda: drive(asker, target) and target.imm_counter(1).poll() == 1, "the count")
    assert not transfer.done

    target.forget_peer(asker.address)

    eventually(lambda: drive(asker, target) and transfer.done, "the answer")
    transfer.wait(WAIT_S)
    assert target.imm_counter(1).poll() == 1
