"""Shuts trainers out of an inference rank's memory."""

from __future__ import annotations

import crossrail as xr
from crossrail.errors import CrossrailError, WaitTimeout


def fence(regions: list[xr.Region], timeout_s: float) -> None:
    """Locks peers out of all of these regions, which get new descriptors, and removes them from the list.

    Regions for which this fails stay in the list, and the first failure is raised. Once one has taken timeout_s, the
    others get no more time. Blocks; any thread.
    """
    left: list[xr.Region] = []
    first: CrossrailError | None = None
    for region in regions:
        if region.closed:  # nobody gets in
            continue
        try:
            region.revoke(0.0 if isinstance(first, WaitTimeout) else timeout_s)
            region.renew()
        except CrossrailError as error:
            left.append(region)
            first = first or error
    regions[:] = left
    if first is not None:
        raise first
