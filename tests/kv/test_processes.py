"""Prefillers in processes of their own: a whole request, and one that dies in the middle of it."""

import ast
import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

import crossrail as xr
from crossrail.kv import KvLayout, KvTarget, PageState
from tests.conftest import EngineFactory
from tests.kv.instances import CANARY, Decoder, Prefiller, assert_all_free, closing, kv_of
from tests.support.limits import WAIT_S
from tests.support.process import start_script

LAYOUT = KvLayout(layers=6, pages=64, page_tokens=8, kv_heads=4, head_dim=32, dtype="bfloat16", tp=2)
TOKENS = 200

# Lines in: a target, then "layers N" (of one step over all tokens) any number of times, then "finish". Lines out: the
# address, then one for each command.
PREFILLER = """
    import ast, asyncio, sys
    import crossrail as xr
    from crossrail.kv import KvLayout, KvTarget
    from tests.kv.instances import Prefiller

    async def main():
        layout = KvLayout.from_wire(ast.literal_eval(sys.argv[2]))
        with xr.Engine("remote prefiller", transport=sys.argv[1]) as engine:
            prefiller = Prefiller(layout, [engine])
            print(bytes(engine.address), flush=True)
            target = KvTarget.from_wire(ast.literal_eval(sys.stdin.readline()))
            job = prefiller.open(target)
            prefiller.sender.begin_step([(job, target.tokens)])
            layer = 0
            while (command := sys.stdin.readline().split())[0] == "layers":
                for _ in range(int(command[1])):
                    prefiller.compute(job, layer)
                    layer += 1
                    prefiller.sender.layer_done()
                print("ok", flush=True)
            await asyncio.wait_for(job.finish(), 20)
            job.lease.release()
            print("finished", flush=True)
            await prefiller.sender.close()

    asyncio.run(main())
"""


class RemotePrefiller:
    def __init__(self, layout: KvLayout, transport: str) -> None:
        self.process = start_script(PREFILLER, transport, repr(layout.to_wire()))
        self.address = xr.Address.from_bytes(ast.literal_eval(self.answer()))

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the prefiller ended:\n{self.errors()}"
        return line

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def dispatch(self, target: KvTarget) -> None:
        self.say(repr(target.to_wire()))

    def compute(self, layers: int) -> None:
        self.say(f"layers {layers}")
        assert self.answer() == "ok\n"

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def remote(transport: str) -> Iterator[RemotePrefiller]:
    prefiller = RemotePrefiller(replace(LAYOUT, tp=4, page_tokens=4), transport)
    yield prefiller
    prefiller.close()


async def test_a_request_between_processes(remote: RemotePrefiller, open_engine: EngineFactory, transport: str) -> None:
    decoder = Decoder(LAYOUT, [open_engine("decoder", transport=transport)])
    reception = decoder.reserve("request", TOKENS)
    remote.dispatch(reception.dispatch(replace(LAYOUT, tp=4, page_tokens=4)))

    remote.compute(1)
    remote.compute(LAYOUT.layers - 1)
    remote.say("finish")

    await reception.arrived(WAIT_S)
    assert remote.answer() == "finished\n"
    assert remote.process.wait(WAIT_S) == 0, remote.errors()
    decoder.assert_holds(reception, kv_of(LAYOUT, "request", TOKENS))


async def test_a_prefiller_killed_in_the_middle_is_replaced(
    remote: RemotePrefiller, open_engine: EngineFactory, transport: str
) -> None:
    engine = open_engine("decoder", transport=transport)
    decoder = Decoder(LAYOUT, [engine])
    reception = decoder.reserve("request", TOKENS)
    remote.dispatch(reception.dispatch(replace(LAYOUT, tp=4, page_tokens=4)))
    remote.compute(3)
    with pytest.raises(xr.WaitTimeout):
        await reception.arrived(0.1)
    remote.process.send_signal(signal.SIGKILL)

    async def ask() -> None:
        await engine.submit_send(remote.address, b"cancel request")

    await reception.withdraw(ask, WAIT_S)

    assert reception.state is PageState.RESERVED
    spare = Prefiller(LAYOUT, [open_engine("spare", transport=transport)])
    async with closing(spare):
        job = spare.open(reception.dispatch(LAYOUT))
        await asyncio.gather(spare.prefill(job, [128, TOKENS]), reception.arrived(WAIT_S))
    decoder.assert_holds(reception, spare.kv_of("request", TOKENS))
    reception.release()
    assert_all_free(decoder.pool, spare.pool)


async def test_a_frozen_prefiller_is_fenced_off_and_writes_nothing_when_it_thaws(
    remote: RemotePrefiller, open_engine: EngineFactory, transport: str
) -> None:
    decoder = Decoder(LAYOUT, [open_engine("decoder", transport=transport)])
    reception = decoder.reserve("request", TOKENS)
    target = reception.dispatch(replace(LAYOUT, tp=4, page_tokens=4), "remote")
    remote.dispatch(target)
    remote.compute(2)
    with pytest.raises(xr.WaitTimeout):
        await reception.arrived(0.1)
    remote.process.send_signal(signal.SIGSTOP)
    with pytest.raises(xr.WaitTimeout):
        await reception.withdraw(asyncio.Event().wait, 0.1)
    assert reception.state is PageState.QUARANTINED

    await decoder.receiver.fence("remote", WAIT_S)
    await reception.withdraw(asyncio.Event().wait, WAIT_S)

    for memory in decoder.ranks:
        memory.regions[0].array()[:] = CANARY
    remote.process.send_signal(signal.SIGCONT)
    remote.compute(LAYOUT.layers - 2)
    remote.say("finish")
    assert remote.process.wait(WAIT_S) != 0
    assert "RemoteRegionClosed" in remote.errors()
    decoder.assert_untouched(reception.lease.pages)
    assert decoder.ranks[0].engine.imm_counter(target.ranks[0].imm).poll() == 0
    reception.release()
    assert_all_free(decoder.pool)
