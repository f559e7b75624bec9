"""The function of multiprocessing workers; in a module so that spawn and forkserver can import it."""

import crossrail as xr


def write_to(target: xr.RegionDescriptor, imm: int) -> None:
    """Opens an engine and writes one byte that counts `imm`."""
    with xr.Engine(f"worker-{imm}") as engine:
        engine.submit_write(engine.alloc(1), target, 1, imm=imm).wait(15)
