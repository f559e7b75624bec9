"""Writers that are frozen in the middle of a copy into a decoder's memory: nobody can fence them meanwhile."""

import threading

import crossrail as xr
from crossrail.kv.transfer.access import Access


class Held:
    """One of a writer's registrations, while the writer is in the middle of a copy to it."""

    def __init__(self, access: Access) -> None:
        self._access, self._region = access, access._regions[0]
        self._ended = threading.Event()
        access._regions[0] = self  # type: ignore[call-overload]

    def close(self, timeout_s: float) -> None:
        if not self._ended.wait(timeout_s):
            raise xr.WaitTimeout("somebody is in the middle of a copy")
        self._region.close(timeout_s)

    def end(self) -> None:
        self._ended.set()
