"""As many engines over verbs as one NIC is asked to bear."""

import pytest

from tests.support.process import run_script


@pytest.mark.timeout(300)
def test_verbs_256_engines_on_one_nic_are_peers_of_one() -> None:
    script = run_script(
        """
        import resource
        import crossrail as xr
        resource.setrlimit(resource.RLIMIT_NOFILE, (20_000, 20_000))  # a dozen descriptors each
        # Emulated processors take seconds to make 512 connections at once.
        hub = xr.Engine("hub", transport="verbs", rails=["rxe0"], connect_timeout_s=100)
        peers = [xr.Engine(f"p{i}", transport="verbs", rails=["rxe1"], connect_timeout_s=100) for i in range(256)]
        regions = [peer.alloc(4096) for peer in peers]
        mine = hub.alloc(256 * 4096)
        mine.array("uint16").reshape(256, 2048)[:] = [[i] for i in range(256)]
        for round in range(1, 4):
            there = [
                hub.submit_write(mine, region.descriptor, 4096, src_offset=4096 * i, imm=round)
                for i, region in enumerate(regions)
            ]
            back = [
                peer.submit_write(region, mine.descriptor, 8, dst_offset=4096 * i, imm=round)
                for i, (peer, region) in enumerate(zip(peers, regions))
            ]
            for transfer in there + back:
                transfer.wait(200)
            hub.imm_counter(round).wait(256, 100)
            for i, (peer, region) in enumerate(zip(peers, regions)):
                peer.imm_counter(round).wait(1, 100)
                assert (region.array("uint16")[4:] == i).all(), i
        print("ok")
        for engine in (hub, *peers):
            engine.close()
        """,
        timeout_s=280,
    )
    assert script.stdout == "ok\n" and script.returncode == 0, script.stderr
