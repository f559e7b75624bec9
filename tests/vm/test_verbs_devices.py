"""RDMA devices that are deleted under traffic, and added again."""

import pytest

from tests.support.process import run_script

# In a process of its own: Soft-RoCE lets go of a device once nobody has it open any more.
TRAFFIC = """
    import gc, subprocess
    import crossrail as xr

    def traffic(ours, theirs, meanwhile=lambda: None, rounds=1):
        with (
            xr.Engine("here", transport="verbs", rails=ours, peer_timeout_s=100) as here,
            xr.Engine("there", transport="verbs", rails=theirs, peer_timeout_s=100) as there,
        ):
            mine, far = here.alloc(1 << 20), there.alloc(1 << 20)
            mine.array()[:] = 7
            here.submit_write(mine, far.descriptor, imm=1).wait(60)  # connected
            there_was = there.imm_counter(1)
            there_was.wait(1, 60)
            transfers = []
            for _ in range(rounds):
                transfers += [here.submit_write(mine, far.descriptor, imm=1) for _ in range(8)]
                transfers += [there.submit_write(far, mine.descriptor, imm=2) for _ in range(8)]
                meanwhile()
            for transfer in transfers:
                transfer.wait(100)
            there_was.wait(8 * rounds, 60)
            here.imm_counter(2).wait(8 * rounds, 60)
            assert there_was.poll() == here.imm_counter(2).poll() == 0
            assert (far.array() == 7).all()
            for region in (here.alloc(4096), there.alloc(4096)):  # also with rails whose device is being deleted
                region.revoke()
                region.close()
"""


@pytest.mark.timeout(300)
def test_verbs_device_deleted_under_traffic_costs_nothing_and_is_used_by_the_next_engine() -> None:
    script = run_script(
        TRAFFIC
        + """
    deleting = []

    def delete():
        if not deleting:
            deleting.append(subprocess.Popen(["rdma", "link", "del", "rxe0"]))

    traffic(["rxe0", "rxe1"], ["rxe2", "rxe3"], delete, rounds=4)
    gc.collect()
    assert deleting[0].wait(60) == 0
    try:
        xr.Engine("too early", transport="verbs", rails=["rxe0"])
    except xr.UsageError as error:
        print(error)
    subprocess.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "nic0"], check=True, timeout=20)
    traffic(["rxe0"], ["rxe2", "rxe3"])
    print("ok")
    """,
        timeout_s=280,
    )

    assert script.stdout.startswith("rails: rxe0 is not an RDMA device"), script
    assert script.stdout.endswith("ok\n"), script
