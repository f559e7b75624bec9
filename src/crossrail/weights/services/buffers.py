"""The memory of an inference rank that updates are written into."""

from __future__ import annotations

from collections.abc import Sequence

import crossrail as xr
from crossrail.errors import UsageError
from crossrail.weights import gpu
from crossrail.weights.inventory.memory import WeightMemory
from crossrail.weights.services.spare import ClosingSpare
from crossrail.weights.services.versions import Versions
from crossrail.weights.threads import in_thread


class Buffers:
    """One buffer, the memory itself; or two, of which the other is spare memory of the same sizes. Threads: one.

    Lifecycle: 1. made. 2. provide(), which finds the regions. 3. updates: open(), then commit() or fail().
    4. release().
    versions: which version is in which buffer; only this changes it.
    Invariant: memory.is_torn exactly while the memory itself is torn or an update goes into it, so that whoever takes
    it over knows.
    """

    def __init__(self, memory: WeightMemory, *, has_spare: bool) -> None:
        self.memory = memory
        self.has_spare = has_spare
        self.versions = self._new_versions()
        self._regions: list[list[xr.Region]] = []  # by buffer
        self._is_released = False

    async def provide(self) -> None:
        """Finds the regions, and allocates the spare ones. Not again, nor after release()."""
        if self._regions or self._is_released:
            return
        spare = await in_thread(self._alloc_spare) if self.has_spare else []
        if self._regions or self._is_released:  # another call was faster, or release() came meanwhile
            for region in spare:
                region.close()
            return
        own = list(self.memory.regions)  # the memory's own list is emptied when it is closed
        self._regions = [own, spare] if self.has_spare else [own]
        # Known only since the inventory: a receiver before this one may have been copying back until then.
        self.versions = self._new_versions()

    def release(self) -> ClosingSpare | None:
        """Lets go of all regions. Returns what remains to be done with the spare ones; None: nothing."""
        regions, self._regions, self._is_released = self._regions, [], True
        if len(regions) < 2:
            return None
        version = self.versions.version if self.versions.is_first_outdated else None
        return ClosingSpare(self.memory, regions[1], version)

    def regions(self, buffer: int) -> Sequence[xr.Region]:
        return self._regions[buffer]

    @property
    def back(self) -> Sequence[xr.Region]:
        """The regions that the next update is written into, or the current one is."""
        return self._regions[self.versions.back]

    def descriptors(self) -> list[list[bytes]]:
        """What trainers need to write: by buffer, of each region."""
        return [[bytes(region.descriptor) for region in regions] for regions in self._regions]

    def spare_descriptors(self) -> list[bytes]:
        return self.descriptors()[1] if self.has_spare else []

    def broken_why(self) -> str:
        """Why nothing can be written any more: the memory's owner has closed some of it. "": nothing was closed."""
        rank = f"inference rank {self.memory.rank}"
        for regions in self._regions:
            for index, region in enumerate(regions):
                if region.closed:
                    return (
                        f"{rank}: memory of its weights was closed (its region {index}, {region.nbytes} bytes), it "
                        "takes no more updates"
                    )
        if self.memory.closed:  # of which all regions are its owner's
            return f"{rank}: memory of its weights was closed, it takes no more updates"
        return ""

    def check(self) -> None:
        """UsageError once memory that updates need was closed."""
        if why := self.broken_why():
            raise UsageError(why)

    def open(self) -> int:
        """The buffer that an update is written into from here on."""
        buffer = self.versions.open()
        self._note_torn()
        return buffer

    def commit(self, version: int) -> None:
        """Everything has arrived."""
        self.versions.commit(version)
        self._note_torn()

    def fail(self, *, is_unwritten: bool) -> None:
        """The update has failed, and no trainer can write any more; or none ever was to: is_unwritten."""
        if is_unwritten:
            self.versions.withdraw()
        else:
            self.versions.abort()
        self._note_torn()

    def _new_versions(self) -> Versions:
        return Versions(2 if self.has_spare else 1, is_torn=self.memory.is_torn)

    def _note_torn(self) -> None:
        self.memory.is_torn = self.versions.is_first_torn

    def _alloc_spare(self) -> list[xr.Region]:
        engine = self.memory.engine
        return [gpu.alloc(engine, region.device, region.nbytes) for region in self.memory.regions]
